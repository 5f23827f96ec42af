// Small charts as SVG: curves over steps and histograms. Each has a description for those who do
// not see it.

import { h } from "./dom.js";

const WIDTH = 560, HEIGHT = 200, LEFT = 46, BOTTOM = 24, TOP = 8, RIGHT = 8;
const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];

export const colour = (index) => `var(${COLOURS[index % COLOURS.length]})`;

function ticks(low, high, most) {
  const raw = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(at);
  return found;
}

const label = (value) => Math.abs(value) >= 10000 ? value.toExponential(0)
  : String(Number(value.toPrecision(3)));

function frame(description, x, y, { low, high, left, right }) {
  const lines = [];
  for (const at of ticks(low, high, 4)) {
    lines.push(h("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      h("text", { x: LEFT - 5, y: y(at) + 4, "text-anchor": "end" }, label(at)));
  }
  for (const at of ticks(left, right, 6)) {
    lines.push(h("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, label(at)));
  }
  return h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": description },
    h("title", {}, description), ...lines);
}

// series: [{name, points: [[x, y]...], dots}]; returns an element with its legend.
export function curves(description, series, { xName = "step", floor = null } = {}) {
  const points = series.flatMap((one) => one.points).filter((p) => Number.isFinite(p[1]));
  if (!points.length) return h("p", { class: "quiet" }, `${description}: nothing yet`);
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const left = Math.min(...xs), right = Math.max(...xs, left + 1);
  let low = floor ?? Math.min(...ys), high = Math.max(...ys);
  if (high - low < 1e-9) { high += 0.5; low -= floor === null ? 0.5 : 0; }
  const x = (at) => LEFT + (at - left) / (right - left) * (WIDTH - LEFT - RIGHT);
  const y = (at) => HEIGHT - BOTTOM - (at - low) / (high - low) * (HEIGHT - BOTTOM - TOP);
  const last = series.map((one) => `${one.name} ${label(one.points.at(-1)?.[1] ?? NaN)}`).join(", ");
  const svg = frame(`${description}; last: ${last}`, x, y, { low, high, left, right });
  series.forEach((one, index) => {
    const found = one.points.filter((p) => Number.isFinite(p[1]));
    svg.append(h("polyline", {
      class: "curve", stroke: colour(index),
      points: found.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" "),
    }));
    if (one.dots || found.length === 1) {
      for (const p of found) {
        svg.append(h("circle", { cx: x(p[0]), cy: y(p[1]), r: 3, fill: colour(index) },
          h("title", {}, `${one.name}: ${label(p[1])} at ${p[0]}`)));
      }
    }
  });
  return h("div", {}, svg, legend(series.map((one) => one.name), `by ${xName}`));
}

function legend(names, more) {
  return h("div", { class: "legend" }, names.map((name, index) => h(
    "span", {}, h("i", { style: `background:${colour(index)}` }), name)), h("span", {}, more));
}

// bars: [[label, count]...]
export function bars(description, entries) {
  if (!entries.length) return h("p", { class: "quiet" }, `${description}: nothing yet`);
  const high = Math.max(...entries.map((entry) => entry[1]), 1e-9);
  const width = (WIDTH - LEFT - RIGHT) / entries.length;
  const y = (at) => HEIGHT - BOTTOM - at / high * (HEIGHT - BOTTOM - TOP);
  const said = `${description}: ${entries.map(([name, value]) => `${name}: ${label(value)}`).join(", ")}`;
  const svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": said },
    h("title", {}, said));
  for (const at of ticks(0, high, 4)) {
    svg.append(h("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      h("text", { x: LEFT - 5, y: y(at) + 4, "text-anchor": "end" }, label(at)));
  }
  entries.forEach(([name, value], index) => {
    const at = LEFT + index * width;
    svg.append(
      h("rect", { x: at + width * 0.1, width: width * 0.8, y: y(value), height: HEIGHT - BOTTOM - y(value), fill: colour(0) },
        h("title", {}, `${name}: ${label(value)}`)),
      h("text", { x: at + width / 2, y: HEIGHT - 6, "text-anchor": "middle" }, name));
  });
  return svg;
}
