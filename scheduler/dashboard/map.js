// Where agents are: sites on a world map, each linked with the scheduler by a line whose colour is
// the round trip and whose width the rate that was measured.

import { h, keyed, setText } from "./dom.js";
import { bytes, seconds, site, tokenRate } from "./words.js";
import { COASTS, PLACES } from "./geography.js";

const WIDTH = 960, HEIGHT = 430, TOP_LATITUDE = 78, LOW_LATITUDE = -56;
const NEAR_S = 0.04, FAR_S = 0.3;

const x = (longitude) => (longitude + 180) / 360 * WIDTH;
const y = (latitude) => (TOP_LATITUDE - latitude) / (TOP_LATITUDE - LOW_LATITUDE) * HEIGHT;

// From green over yellow to red, over the logarithm of the round trip.
export function roundTripColour(rtt_s) {
  if (rtt_s === null || rtt_s === undefined) return "var(--quiet)";
  const share = Math.log(Math.max(rtt_s, 0.001) / NEAR_S) / Math.log(FAR_S / NEAR_S);
  return `hsl(${Math.round(130 - 130 * Math.min(1, Math.max(0, share)))} 65% 42%)`;
}

function place(agent) {
  const { latitude, longitude } = agent.labels ?? {};
  if (latitude !== undefined && longitude !== undefined
      && Number.isFinite(Number(latitude)) && Number.isFinite(Number(longitude))) {
    return [Number(latitude), Number(longitude)];
  }
  return PLACES[site(agent)] ?? null;
}

export class WorldMap {
  constructor() {
    const land = COASTS.map((ring) => {
      let path = "";
      for (let at = 0; at < ring.length; at += 2) {
        path += `${at ? "L" : "M"}${x(ring[at]).toFixed(1)} ${y(ring[at + 1]).toFixed(1)}`;
      }
      return `${path}Z`;
    }).join("");
    this.links = h("g");
    this.sites = h("g");
    this.svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "Map of sites" },
      h("rect", { class: "sea", width: WIDTH, height: HEIGHT, rx: 8 }),
      h("path", { class: "land", d: land }), this.links, this.sites);
    this.elsewhere = h("p", { class: "quiet" });
    this.element = h("div", {}, this.svg, h("div", { class: "legend" },
      ...[0.04, 0.1, 0.3].map((rtt) => h("span", {},
        h("i", { style: `background:${roundTripColour(rtt)}` }), `${seconds(rtt)} round trip`)),
      h("span", {}, "wider line: more bytes/s")), this.elsewhere);
  }

  // Returns how many sites there are.
  show(agents, home) {
    const found = new Map();
    const nowhere = [];
    for (const agent of agents) {
      if (agent.state === "gone") continue;
      const at = place(agent);
      if (!at) { nowhere.push(agent.name); continue; }
      const key = at.join(",");
      if (!found.has(key)) found.set(key, { key, at, name: site(agent), agents: [] });
      found.get(key).agents.push(agent);
    }
    const sites = [...found.values()].map((one) => {
      const trips = one.agents.map((agent) => agent.rtt_s).filter((each) => each !== null);
      const rates = one.agents.map((agent) => agent.down_bytes_s ?? 0);
      return {
        ...one, rtt_s: trips.length ? Math.min(...trips) : null, rate: Math.max(...rates),
        slots: one.agents.reduce((sum, agent) => sum + agent.slots, 0),
        tokens: one.agents.reduce((sum, agent) => sum + tokenRate(agent), 0),
        well: one.agents.some((agent) => agent.state === "ready"),
      };
    });
    const centre = PLACES[home];
    keyed(this.links, centre ? sites : [], (one) => one.key, () => h("line", {}), (line, one) => {
      const wide = one.rate ? Math.min(6, Math.max(1, Math.log10(one.rate) - 4)) : 1;
      for (const [name, value] of Object.entries({
        x1: x(centre[1]), y1: y(centre[0]), x2: x(one.at[1]), y2: y(one.at[0]),
        stroke: roundTripColour(one.rtt_s), "stroke-width": wide, opacity: one.well ? 0.85 : 0.3,
      })) line.setAttribute(name, value);
    });
    const shown = centre ? [...sites, { key: "home", at: centre, home: true }] : sites;
    keyed(this.sites, shown, (one) => one.key, () => h("g", {}, h("circle"), h("text"), h("title")),
      (mark, one) => {
        const [circle, text, title] = mark.children;
        circle.setAttribute("cx", x(one.at[1]));
        circle.setAttribute("cy", y(one.at[0]));
        circle.setAttribute("r", one.home ? 5 : Math.min(14, 4 + Math.sqrt(one.slots) / 2));
        circle.setAttribute("fill", one.home ? "var(--accent)" : one.well ? roundTripColour(one.rtt_s) : "var(--bad)");
        text.setAttribute("x", x(one.at[1]) + 10);
        text.setAttribute("y", y(one.at[0]) + (one.home ? -8 : 4));
        setText(text, one.home ? "scheduler" : one.name);
        setText(title, one.home ? `scheduler in ${home}`
          : `${one.name}: ${one.agents.map((agent) => agent.name).join(", ")}; round trip ${seconds(one.rtt_s)}, `
          + `${bytes(one.rate)}/s, ${one.slots} slots, ${Math.round(one.tokens)} tokens/s`);
      });
    setText(this.elsewhere, nowhere.length
      ? `Not on the map (no known label site, or latitude and longitude): ${nowhere.slice(0, 20).join(", ")}`
        + (nowhere.length > 20 ? ` and ${nowhere.length - 20} more` : "") : "");
    return sites.length;
  }
}
