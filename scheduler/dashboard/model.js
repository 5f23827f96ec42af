// What the page knows: the last status, curves by policy, when versions were stored and served, and
// the last events. Everything is bounded.

const MAX_EVENTS = 5000, MAX_VERSIONS = 8, MAX_POINTS = 1000;

export class Model {
  constructor(feed) {
    this.feed = feed;
    this.status = null;
    this.about = {};
    this.heads = {};
    this.curves = new Map();   // policy -> {steps: [StepStatus], evaluations: [...]}
    this.weights = new Map();  // policy -> Map(version -> {stored_s, served: Map(agent -> at_s)})
    this.events = [];
    this.missed = 0;
    this.rates = new Map();    // agent -> tokens per second between the last two statuses
    this.counted = new Map();
  }

  hear(kind, data) {
    if (kind === "status") this.take(data);
    else if (kind === "transition") this.note(data);
    else if (kind === "missed") this.missed += data.missed ?? 0;
  }

  take(status) {
    const now = performance.now() / 1000;
    this.status = status;
    for (const agent of status.agents) {
      const before = this.counted.get(agent.name);
      if (!before || now - before.at > 2) {
        if (before && agent.tokens_generated >= before.tokens) {
          this.rates.set(agent.name, (agent.tokens_generated - before.tokens) / (now - before.at));
        }
        this.counted.set(agent.name, { at: now, tokens: agent.tokens_generated });
      }
    }
    this.heads = {};
    for (const run of status.runs) {
      for (const policy of run.policies) {
        this.heads[policy.policy] = policy.head_version;
        this.extend(run.name, policy);
      }
    }
  }

  extend(run, policy) {
    const curve = this.curves.get(policy.policy);
    if (!curve) {
      this.curves.set(policy.policy, { steps: [], evaluations: policy.evaluations });
      if (policy.step) this.load(run);
      return;
    }
    curve.evaluations = policy.evaluations;
    const last = policy.last_step;
    const known = curve.steps.at(-1);
    if (last && (!known || last.step !== known.step)) {
      // A trainer that went back to a checkpoint draws its curve anew from there.
      while (curve.steps.length && curve.steps.at(-1).step >= last.step) curve.steps.pop();
      curve.steps.push(last);
      if (curve.steps.length > MAX_POINTS) curve.steps.splice(0, curve.steps.length - MAX_POINTS);
    }
  }

  async load(run) {
    try {
      const { steps } = await this.feed.ask(`v1/runs/${encodeURIComponent(run)}/history`);
      for (const [policy, curve] of this.curves) {
        const own = steps.filter((step) => step.policy === policy);
        const from = own.at(-1)?.step ?? -1;
        if (own.length) curve.steps = [...own, ...curve.steps.filter((step) => step.step > from)];
      }
    } catch { /* curves begin now */ }
  }

  note(transition) {
    this.events.push(transition);
    if (this.events.length > MAX_EVENTS) this.events.splice(0, this.events.length - MAX_EVENTS);
    const { what, subject, facts, at_s } = transition;
    if (what === "version stored") {
      this.version(subject, Number(facts.version)).stored_s ??= at_s;
    } else if (what === "serving") {
      const served = this.version(facts.policy, Number(facts.version)).served;
      if (!served.has(subject)) served.set(subject, at_s);
    }
  }

  version(policy, number) {
    if (!this.weights.has(policy)) this.weights.set(policy, new Map());
    const known = this.weights.get(policy);
    if (!known.has(number)) {
      known.set(number, { stored_s: null, served: new Map() });
      while (known.size > MAX_VERSIONS) known.delete(Math.min(...known.keys()));
    }
    return known.get(number) ?? { stored_s: null, served: new Map() };
  }

  tokens(agent) {
    return this.rates.get(agent.name) ?? (agent.rate_tokens_s ?? 0) * agent.running_sequences;
  }
}
