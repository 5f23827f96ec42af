import { card, h } from "./dom.js";
import { roundTripColour } from "./map.js";
import { seconds, short } from "./words.js";

const MAX_AGENTS = 200;

// For each policy, how long after it was stored each agent served each of the last versions.
export class Weights {
  constructor(model) {
    this.model = model;
    this.live = true;
    this.sign = "";
    this.element = h("div", { style: "display:contents" });
  }

  show() {
    const { status, weights, heads } = this.model;
    const sign = JSON.stringify([...weights].map(([p, v]) => [p, [...v].map(([n, e]) => [n, e.stored_s, e.served.size])]))
      + status.agents.length;
    if (sign === this.sign) return;
    this.sign = sign;
    const cards = [...weights].map(([policy, known]) => {
      const versions = [...known.keys()].sort((a, b) => b - a);
      const agents = status.agents.filter((a) => policy in a.versions && a.state !== "gone");
      const head = h("tr", {}, h("th", { scope: "col" }, "Agent"), h("th", { scope: "col" }, "Serves"),
        ...versions.map((v) => h("th", { scope: "col", class: "number" }, `v${v}`)));
      const rows = agents.slice(0, MAX_AGENTS).map((agent) => h("tr", {}, h("th", { scope: "row" }, agent.name),
        h("td", {}, `v${agent.versions[policy]}`),
        ...versions.map((version) => {
          const { stored_s, served } = known.get(version);
          const at = served.get(agent.name);
          if (at === undefined) return h("td", { class: "quiet" }, agent.versions[policy] > version ? "skipped" : "–");
          if (stored_s === null) return h("td", {}, "✓");
          const after = Math.max(0, at - stored_s);
          return h("td", { style: `color:${roundTripColour(after / 10)}` }, seconds(after));
        })));
      return card(`${policy}: version ${heads[policy] ?? "–"}`,
        h("p", { class: "quiet" }, "Seconds from a version being durable in the store to the agent generating with it, for versions seen since this page was opened."),
        h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Propagation of ${short(policy)}` },
          h("table", { class: "matrix" }, h("thead", {}, head), h("tbody", {}, ...rows))),
        agents.length > MAX_AGENTS ? h("p", { class: "quiet" }, `${agents.length - MAX_AGENTS} more agents are not shown.`) : null);
    });
    this.element.replaceChildren(...(cards.length ? cards
      : [card("Weight versions", h("p", { class: "quiet" }, "No version was stored or served since this page was opened."))]));
  }
}
