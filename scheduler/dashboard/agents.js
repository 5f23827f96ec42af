import { card, h, keyed, setText, Table } from "./dom.js";
import { agentState, behind, bytes, count, seconds, short, site, stateClass } from "./words.js";

export class Agents {
  constructor(model, act, explain) {
    this.model = model;
    this.filter = h("input", { type: "search", placeholder: "name, state, site, hardware", "aria-label": "Find agents",
      oninput: () => this.show() });
    const actions = (agent) => h("span", { class: "row actions" },
      h("button", { type: "button", onclick: () => explain(agent.name) }, "Explain"),
      ...(agent.cordoned ? ["uncordon"] : ["cordon"]).concat("drain", agent.quarantined ? ["release"] : [])
        .map((order) => h("button", { type: "button", onclick: () => act(agent.name, order) },
          order[0].toUpperCase() + order.slice(1))));
    this.table = new Table([
      { title: "Agent", text: (a) => a.name },
      { title: "State", text: agentState, mark: (a) => stateClass(agentState(a)) },
      { title: "Site", text: (a) => site(a) || "–" },
      { title: "Hardware", text: (a) => a.hardware.slice(0, 24) || "–" },
      { title: "Behind", number: true, text: (a) => { const n = behind(a, model.heads); return n === null ? "–" : String(n); },
        sort: (a) => behind(a, model.heads) ?? -1 },
      { title: "Slots", number: true, text: (a) => `${a.running_sequences}/${a.slots}`, sort: (a) => a.slots },
      { title: "Leases", number: true, text: (a) => count(a.leases), sort: (a) => a.leases },
      { title: "Tokens/s", number: true, text: (a) => count(model.tokens(a)), sort: (a) => model.tokens(a) },
      { title: "Round trip", number: true, text: (a) => seconds(a.rtt_s), sort: (a) => a.rtt_s ?? 9e9 },
      { title: "Up", number: true, text: (a) => bytes(a.bytes_up), sort: (a) => a.bytes_up },
      { title: "Down", number: true, text: (a) => bytes(a.bytes_down), sort: (a) => a.bytes_down },
      { title: "Groups", number: true, text: (a) => count(a.groups_done), sort: (a) => a.groups_done },
      { title: "Failed", number: true, text: (a) => count(a.attempts_failed), sort: (a) => a.attempts_failed },
      { title: "USD/h", number: true, text: (a) => (a.price_usd_hour ? a.price_usd_hour.toFixed(2) : "–"), sort: (a) => a.price_usd_hour },
      { title: "Versions", text: (a) => Object.entries(a.versions).map(([p, v]) => `${short(p)} v${v}`).join(", ") || "–" },
      { title: "", text: () => "", node: actions, sign: (a) => `${a.cordoned}${Boolean(a.quarantined)}` },
    ], (a) => a.name, { caption: "Agents" });
    this.evidence = h("div");
    this.element = card("Agents", h("p", { class: "row" }, this.filter), this.table.element, this.evidence);
  }

  show() {
    const wanted = this.filter.value.toLowerCase();
    const agents = this.model.status.agents.filter((a) => !wanted
      || [a.name, agentState(a), site(a), a.hardware].join(" ").toLowerCase().includes(wanted));
    this.table.show(agents);
    keyed(this.evidence, agents.filter((a) => a.quarantined), (a) => a.name,
      () => h("div", {}, h("h3"), h("pre")), (element, a) => {
        setText(element.firstChild, `${a.name} is quarantined: ${a.quarantined}`);
        setText(element.lastChild, a.evidence.join("\n"));
      });
  }
}
