// The page: what is shown where, access, theme and the one place that asks the gateway for changes.

import { h, keyed, setText } from "./dom.js";
import { Agents } from "./agents.js";
import { Denied, Feed } from "./feed.js";
import { Events } from "./events.js";
import { Explain, Jobs } from "./jobs.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";
import { Policies } from "./policies.js";
import { Weights } from "./weights.js";

const THEMES = ["", "light", "dark"];
const NOTICE_MS = 20000, MEASURED = 1000;
const find = (id) => document.getElementById(id);

const feed = new Feed();
const model = new Model(feed);
const explain = (subject) => { location.hash = `#/explain/${encodeURIComponent(subject)}`; };
const pages = {
  overview: ["Overview", new Overview(model)],
  agents: ["Agents", new Agents(model, act, explain)],
  policies: ["Policies", new Policies(model)],
  weights: ["Weights", new Weights(model)],
  jobs: ["Jobs", new Jobs(model, explain)],
  events: ["Events", new Events(model)],
  explain: ["Explain", new Explain(model)],
};
let current = null, waiting = false, noticed = 0, drawn = 0;

const links = Object.fromEntries(Object.entries(pages).filter(([name]) => name !== "explain")
  .map(([name, [title]]) => [name, h("a", { href: `#/${name}` }, title)]));
find("pages").append(...Object.values(links));

function route() {
  const [, name, subject] = /^#\/([a-z]+)(?:\/(.*))?$/.exec(location.hash) ?? [null, "overview", ""];
  const [title, page] = pages[name] ?? pages.overview;
  document.title = `${title} · farflow`;
  for (const [each, link] of Object.entries(links)) {
    if (each === name || (name === "explain" && each === "jobs")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!model.status) return;
  if (page !== current) find("main").replaceChildren(page.element);
  current = page;
  if (name === "explain") page.open(decoded(subject ?? ""));
  draw();
}

function decoded(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

// At most once a frame, however much arrives.
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (!current) return;
    const begun = performance.now();
    current.show();
    alerts();
    if (drawn++ % MEASURED === 0) performance.clearMeasures("farflow:draw");
    performance.measure("farflow:draw", { start: begun, end: performance.now() });
  });
}

function alerts() {
  const { status } = model;
  const lines = [
    ...status.alerts.map((alert) => `${alert.code} ${alert.subject}: ${alert.message}`),
    ...status.agents.filter((a) => a.quarantined).map((a) => `agent ${a.name} is quarantined: ${a.quarantined}`),
  ];
  const shown = lines.slice(0, 6);
  if (lines.length > 6) shown.push(`and ${lines.length - 6} more`);
  keyed(find("alerts"), shown, (line) => line, (line) => h("p", {}, line), () => {});
}

async function act(agent, order) {
  const dialog = find("confirm");
  setText(find("confirm-title"), `${order} ${agent}?`);
  setText(find("confirm-text"), {
    drain: "It finishes what it has, hands back the rest and leaves.",
    cordon: "It keeps what it has and gets no more work.",
    uncordon: "It gets work again.",
    release: "It leaves quarantine and gets work again.",
  }[order]);
  find("reason").value = "";
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  if (dialog.returnValue !== "yes") return;
  try {
    await feed.ask(`v1/agents/${encodeURIComponent(agent)}/${order}`, { method: "POST", body: { reason: find("reason").value } });
    notice(`${order} ${agent}: done`);
  } catch (error) {
    notice(`${order} ${agent}: ${error.message}`, true);
  }
}

// What became of an order stays for a while, whatever the connection says meanwhile.
function notice(text, bad = false) {
  const line = find("notice");
  setText(line, text);
  line.classList.toggle("bad", bad);
  clearTimeout(noticed);
  noticed = setTimeout(() => setText(line, ""), NOTICE_MS);
}

function connection(text, off = false) {
  const line = find("connection");
  setText(line, text);
  line.classList.toggle("off", off);
}

async function access(problem) {
  const dialog = find("access");
  setText(find("access-problem"), problem);
  if (!dialog.open) dialog.showModal();
  await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  feed.use(find("token").value);
}

function theme() {
  const chosen = localStorage.getItem("farflow-theme") ?? "";
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  setText(find("theme"), `Theme: ${chosen || "system"}`);
}

find("theme").addEventListener("click", () => {
  const at = THEMES.indexOf(localStorage.getItem("farflow-theme") ?? "");
  localStorage.setItem("farflow-theme", THEMES[(at + 1) % THEMES.length]);
  theme();
});
// Not as a place in the page, which would be another page to `route`.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  find("main").focus();
});
addEventListener("hashchange", () => {
  if (new URLSearchParams(location.hash.slice(1)).has("token")) location.reload();
  else route();
});
theme();

let problem = "";
for (;;) {
  if (!feed.token || problem) await access(problem);
  try {
    model.about = await feed.ask("v1/about");
    await feed.follow((kind, data) => {
      const first = !model.status;
      model.hear(kind, data);
      if (first && model.status) route();
      else if (kind !== "transition" || current?.live) draw();
    }, (text) => connection(text, Boolean(text)));
  } catch (error) {
    if (!(error instanceof Denied)) {
      connection(`Not connected (${error.message}); asking again`, true);
      await new Promise((done) => setTimeout(done, 2000));
      problem = "";
      continue;
    }
    problem = error.message;
  }
}
