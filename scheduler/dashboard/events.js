import { card, h } from "./dom.js";
import { timeOfDay } from "./words.js";

const SHOWN = 300;

export class Events {
  constructor(model) {
    this.model = model;
    this.live = true;  // redrawn with every event, not only with the status
    this.paused = false;
    this.filter = h("input", { type: "search", placeholder: "text to look for", "aria-label": "Filter events", oninput: () => this.draw() });
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.toggle() }, "Pause");
    this.note = h("span", { class: "quiet" });
    this.list = h("ul", { class: "log", tabindex: 0, "aria-label": "Events, newest first" });
    this.element = card("Events", h("p", { class: "row" }, this.filter, this.pause, this.note), this.list);
    this.last = -1;
  }

  toggle() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    this.pause.textContent = this.paused ? "Go on" : "Pause";
    if (!this.paused) this.draw();
  }

  show() {
    const newest = this.model.events.at(-1)?.number ?? -1;
    if (this.paused || newest === this.last) return;
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.toLowerCase();
    this.last = this.model.events.at(-1)?.number ?? -1;
    const lines = [];
    for (let at = this.model.events.length - 1; at >= 0 && lines.length < SHOWN; at -= 1) {
      const { number, at_s, wall_s, subject, what, facts } = this.model.events[at];
      const text = `${wall_s ? timeOfDay(wall_s) : at_s.toFixed(3)} ${subject} ${what} ${Object.entries(facts ?? {}).map(([k, v]) => `${k}=${v}`).join(" ")}`;
      if (!wanted || text.toLowerCase().includes(wanted)) lines.push(h("li", { "data-number": number }, text));
    }
    this.list.replaceChildren(...lines);
    this.note.textContent = this.model.missed ? `${this.model.missed} events were too many to be sent` : "";
  }
}
