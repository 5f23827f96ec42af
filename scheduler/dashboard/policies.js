import { card, h } from "./dom.js";
import { bars, curves } from "./charts.js";
import { bytes, percent, seconds, short } from "./words.js";

const MAX_LAG_BARS = 16;

export class Policies {
  constructor(model) {
    this.model = model;
    this.signs = new Map();
    this.none = card("Policies", h("p", {}, "No run yet."));
    this.element = h("div", { style: "display:contents" }, this.none);
  }

  show() {
    const wanted = [];
    for (const run of this.model.status.runs) {
      for (const policy of run.policies) wanted.push([run, policy]);
    }
    const names = new Set(wanted.map(([, policy]) => policy.policy));
    for (const [name, kept] of this.signs) if (!names.has(name)) { kept.card.remove(); this.signs.delete(name); }
    for (const [run, policy] of wanted) this.one(run, policy);
    this.none.hidden = wanted.length > 0;
  }

  one(run, policy) {
    const { steps, evaluations } = this.model.curves.get(policy.policy) ?? { steps: [], evaluations: [] };
    const sign = JSON.stringify([policy, run.state, steps.length, steps[0]?.step]);
    const kept = this.signs.get(policy.policy);
    if (kept?.sign === sign) return;
    // Storing a version may take longer than a step: then the newest that is stored.
    const delta = policy.last_step?.delta_bytes ? policy.last_step : policy;
    const facts = [
      `trainer ${policy.trainer}`, `step ${policy.step} of ${policy.steps}`, `version ${policy.head_version}`,
      `checkpoint at step ${policy.checkpoint_step}`, `${policy.buffered_groups} groups buffered`,
      ...(policy.replay_groups ? [`${policy.replay_groups} to train on again`] : []),
      ...(delta.delta_bytes ? [`delta ${bytes(delta.delta_bytes)} of ${bytes(delta.full_bytes)}`] : []),
      ...(run.turnaround_p50_s ? [`turnaround p50 ${seconds(run.turnaround_p50_s)}, p95 ${seconds(run.turnaround_p95_s)}`] : []),
    ];
    const names = [...new Set(evaluations.map((e) => e.name))];
    const lags = new Map();
    for (const step of steps) {
      const lag = Math.min(MAX_LAG_BARS, Math.round(step.policy_lag_mean));
      lags.set(lag, (lags.get(lag) ?? 0) + 1);
    }
    const total = steps.reduce((sum, step) => sum + step.busy_s + step.waiting_s, 0);
    const busy = steps.reduce((sum, step) => sum + step.busy_s, 0);
    const column = (name) => steps.map((step) => [step.step, step[name]]);
    const made = card(`${run.name} / ${short(policy.policy)}`,
      h("p", { class: "quiet" }, facts.join(" · ")),
      h("div", { class: "two" },
        h("div", {}, h("h3", {}, "Reward of trained groups"), curves("Mean reward by step", [{ name: "reward", points: column("reward_mean") }])),
        h("div", {}, h("h3", {}, "Held-out accuracy"), curves("Accuracy by version", names.map((name) => ({
          name, dots: true, points: evaluations.filter((e) => e.done && e.name === name).map((e) => [e.version, e.accuracy]),
        })), { xName: "version" })),
        h("div", {}, h("h3", {}, "Policy lag"), bars("Steps by their mean lag",
          [...lags].sort((a, b) => a[0] - b[0]).map(([lag, n]) => [lag === MAX_LAG_BARS ? `≥ ${lag}` : String(lag), n]))),
        h("div", {}, h("h3", {}, `Where a step's time goes${total ? `: ${percent(busy / total)} training` : ""}`),
          curves("Seconds by step", [{ name: "training", points: column("busy_s") }, { name: "waiting for groups", points: column("waiting_s") }], { floor: 0 }))));
    if (kept) kept.card.replaceWith(made);
    else this.element.append(made);
    this.signs.set(policy.policy, { sign, card: made });
  }
}
