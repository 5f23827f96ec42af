import { card, h, Table } from "./dom.js";
import { seconds, stateClass } from "./words.js";

const STATES = { "": "any state", queued: "queued", in_flight: "in flight", done: "done" };

export class Jobs {
  constructor(model, explain) {
    this.model = model;
    this.search = h("input", { type: "search", placeholder: "begins with (a job's id)", "aria-label": "Find jobs by the beginning of their id" });
    this.state = h("select", { "aria-label": "State" }, Object.entries(STATES).map(([state, name]) => h("option", { value: state }, name)));
    this.state.value = "in_flight";
    this.run = h("select", { "aria-label": "Run" }, h("option", { value: "" }, "all runs"));
    this.subject = h("input", { placeholder: "job, attempt, agent, policy or run", "aria-label": "Explain" });
    this.more = h("button", { type: "button", onclick: () => this.load(true) }, "More");
    this.note = h("p", { class: "quiet", role: "status" });
    this.rows = [];
    this.asked = 0;
    this.after = "";
    this.table = new Table([
      { title: "Job", text: (j) => j.id, sign: (j) => j.id,
        node: (j) => h("a", { href: `#/explain/${encodeURIComponent(j.id)}` }, j.id) },
      { title: "Run", text: (j) => j.run },
      { title: "Kind", text: (j) => j.kind },
      { title: "State", text: (j) => STATES[j.state] ?? j.state, mark: (j) => stateClass(j.state) },
      { title: "Agents", text: (j) => j.agents.join(", ") || "–" },
      { title: "Sequences", number: true, text: (j) => String(j.sequences), sort: (j) => j.sequences },
      { title: "Tries", number: true, text: (j) => String(j.attempts_made), sort: (j) => j.attempts_made },
      { title: "Age", number: true, text: (j) => seconds(j.age_s), sort: (j) => j.age_s },
    ], (j) => j.id, { caption: "Jobs" });
    this.element = card("Jobs",
      h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); this.load(false); } },
        this.search, this.state, this.run, h("button", {}, "Find")),
      h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); if (this.subject.value) explain(this.subject.value.trim()); } },
        this.subject, h("button", {}, "Explain")),
      this.note, this.table.element, this.more);
  }

  show() {
    const names = this.model.status.runs.map((run) => run.name);
    if (this.run.options.length !== names.length + 1) {
      const chosen = this.run.value;
      this.run.replaceChildren(h("option", { value: "" }, "all runs"), ...names.map((name) => h("option", { value: name }, name)));
      this.run.value = names.includes(chosen) ? chosen : "";
    }
    if (!this.asked) this.load(false);
  }

  async load(further) {
    const mine = ++this.asked;
    const query = new URLSearchParams({ prefix: this.search.value.trim(), state: this.state.value, run: this.run.value, limit: "100" });
    if (further) query.set("after", this.after);
    this.note.textContent = "Looking…";
    try {
      const page = await this.model.feed.ask(`v1/jobs?${query}`);
      if (mine !== this.asked) return;
      this.after = page.after;
      this.rows = further ? [...this.rows, ...page.jobs] : page.jobs;
      this.table.show(this.rows);
      this.more.disabled = !page.more;
      this.note.textContent = this.rows.length ? `${this.rows.length} shown${page.more ? ", there are more" : ""}` : "None found.";
    } catch (error) {
      if (mine === this.asked) this.note.textContent = error.message;
    }
  }
}

export class Explain {
  constructor(model) {
    this.model = model;
    this.asked = 0;
    this.element = h("div", { style: "display:contents" });
    this.candidates = new Table([
      { title: "Agent", text: (c) => c.agent },
      { title: "Verdict", text: (c) => c.verdict, mark: (c) => (/chosen|possible/.test(c.verdict) ? "good" : "warn") },
      { title: "Expected", number: true, text: (c) => seconds(c.cost_s), sort: (c) => c.cost_s ?? 9e9 },
      { title: "Made of", text: (c) => Object.entries(c.parts).map(([name, value]) => `${name} ${seconds(value)}`).join(" + ") || "–" },
    ], (c) => c.agent, { caption: "Scored agents" });
  }

  show() {}

  async open(subject) {
    const mine = ++this.asked;
    this.element.replaceChildren(card(`Explain ${subject}`, h("p", { class: "quiet" }, "Asking…")));
    try {
      const said = await this.model.feed.ask(`v1/explain/${encodeURIComponent(subject)}`);
      if (mine !== this.asked) return;
      this.candidates.show(said.candidates);
      this.element.replaceChildren(
        card(`${said.kind} ${said.subject}`, h("p", {}, h("span", { class: `mark ${stateClass(said.state)}` }, said.state)),
          h("ul", {}, said.reasons.map((reason) => h("li", {}, reason)))),
        ...(said.candidates.length ? [card("How placement sees the agents", this.candidates.element)] : []),
        card("History, newest first", said.history.length ? h("pre", { class: "log", tabindex: 0 }, said.history.toReversed().join("\n")) : h("p", { class: "quiet" }, "None remembered.")));
    } catch (error) {
      if (mine === this.asked) this.element.replaceChildren(card(`Explain ${subject}`, h("p", { class: "bad" }, error.message)));
    }
  }
}
