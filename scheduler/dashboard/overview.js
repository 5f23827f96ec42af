import { card, h, keyed, setText } from "./dom.js";
import { WorldMap } from "./map.js";
import { count, percent, seconds, short } from "./words.js";

const CAUSES = {
  generation: "generation sets the pace", links: "links set the pace",
  training: "training sets the pace", staleness: "the lag bound sets the pace",
};

export class Overview {
  constructor(model) {
    this.model = model;
    this.tiles = h("div", { class: "tiles" });
    this.map = new WorldMap();
    this.runs = h("div");
    this.demand = h("div");
    this.noRun = h("p", { class: "quiet" });
    this.noDemand = h("p", { class: "quiet" });
    this.sites = card("Sites", this.map.element);
    this.element = h("div", { style: "display:contents" },
      h("section", { class: "card", "aria-label": "In short" }, this.tiles),
      h("div", { class: "two" }, card("Runs", this.noRun, this.runs), card("What would help", this.noDemand, this.demand)),
      this.sites);
  }

  show() {
    const { status } = this.model;
    const here = status.agents.filter((agent) => agent.state !== "gone");
    const ready = here.filter((agent) => agent.state === "ready").length;
    const rows = status.runs.flatMap((run) => run.accounting.filter((row) => row.kind === "train"));
    const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
    const done = sum("trained") + sum("expired") + sum("filtered");
    const tiles = [
      ["agents ready", `${ready} / ${here.length}`],
      ["slots in use", `${here.reduce((n, a) => n + a.running_sequences, 0)} / ${here.reduce((n, a) => n + a.slots, 0)}`],
      ["tokens/s", count(here.reduce((n, a) => n + this.model.tokens(a), 0))],
      ["runs", count(status.runs.filter((run) => run.state !== "finished").length)],
      ["groups queued", count(sum("queued"))],
      ["groups trained", count(sum("trained"))],
      ["groups expired", done ? percent(sum("expired") / done) : "–"],
      ["up for", seconds(status.uptime_s)],
    ];
    keyed(this.tiles, tiles, (tile) => tile[0], (tile) => h("div", { class: "tile" }, h("b"), h("span", {}, tile[0])),
      (element, tile) => setText(element.firstChild, tile[1]));
    // Without a place of any agent it would be an empty world.
    this.sites.hidden = !this.map.show(status.agents, this.model.about.site);
    keyed(this.runs, status.runs, (run) => run.name, () => h("p"), (line, run) => {
      const steps = run.policies.map((p) => `${short(p.policy)} ${p.step}/${p.steps}`).join(", ");
      const cost = run.cost_usd ? ` · ${run.cost_usd.toFixed(2)} USD` : "";
      const letters = run.dead_letters ? ` · ${run.dead_letters} dead letters` : "";
      setText(line, `${run.name} · ${run.state}${run.reason ? ` (${run.reason})` : ""} · ${steps}${cost}${letters}`);
    });
    setText(this.noRun, status.runs.length ? "" : "No run yet: farflow run submit FILE");
    keyed(this.demand, status.demand, (one) => one.run, () => h("p"), (line, one) => setText(line,
      one.more_slots
        ? `${one.run}: ${one.more_slots} more slots (${one.hardware || "any hardware"}) would raise `
          + `${one.steps_hour.toFixed(1)} steps/hour to ${one.steps_hour_with.toFixed(1)}: ${one.reason}`
        : `${one.run}: more slots would not help`
          + `${CAUSES[one.binds] ? `, ${CAUSES[one.binds]}` : ""}: ${one.reason}`));
    setText(this.noDemand, status.demand.length ? "" : "No trainer wants work.");
  }
}
