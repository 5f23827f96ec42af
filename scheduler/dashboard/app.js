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
let current = null, waiting = false;

const links = Object.fromEntries(Object.entries(pages).filter(([name]) => name !== "explain")
  .map(([name, [title]]) => [name, h("a", { href: `#/${name}` }, title)]));
find("pages").append(...Object.values(links));

function route() {
  const [, name, subject] = /^#\/([a-z]+)(?:\/(.*))?$/.exec(location.hash) ?? [null, "overview", ""];
  const [title, page] = pages[name] ?? pages.overview;
  const moved = page !== current;
  current = page;
  document.title = `${title} · farflow`;
  for (const [each, link] of Object.entries(links)) {
    if (each === name || (name === "explain" && each === "jobs")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!model.status) return;
  if (moved) find("main").replaceChildren(page.element);
  if (name === "explain") page.open(decodeURIComponent(subject ?? ""));
  draw();
}

// At most once a frame, however much arrives.
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (!model.status) return;
    const begun = performance.now();
    current.show();
    alerts();
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
    connection(`${order} ${agent}: done`);
  } catch (error) {
    connection(`${order} ${agent}: ${error.message}`, true);
  }
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
addEventListener("hashchange", route);
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
      else draw();
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
