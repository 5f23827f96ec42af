// Numbers and states as people read them.

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000) return unit === "B" ? `${Math.round(count)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} TB`;
}

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${Math.round(value / 86400)} d`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1e6 ? `${(value / 1e6).toFixed(2)} M` : Math.round(value).toLocaleString("en");
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;
export const short = (policy) => policy.slice(policy.indexOf("/") + 1);

export function agentState(agent) {
  const marks = [agent.state];
  if (agent.cordoned && agent.state !== "cordoned") marks.push("cordoned");
  if (agent.quarantined && agent.state !== "quarantined") marks.push("quarantined");
  return marks.join(", ");
}

export function stateClass(state) {
  if (/quarantined|lost|refused|dead|failed|rejected/.test(state)) return "bad";
  if (/suspect|draining|cordoned|paused|gone|absent|expired|waiting/.test(state)) return "warn";
  return "good";
}

// Tokens per second of the whole agent, from the learnt rate of one sequence.
export const tokenRate = (agent) => (agent.rate_tokens_s ?? 0) * agent.running_sequences;

// By how many versions an agent is behind, over its policies; null when it serves none.
export function behind(agent, heads) {
  let most = null;
  for (const [policy, version] of Object.entries(agent.versions)) {
    if (heads[policy] === undefined) continue;
    most = Math.max(most ?? 0, heads[policy] - version);
  }
  return most;
}

export const site = (agent) => agent.labels?.site ?? agent.labels?.region ?? "";

// As `farflow events` shows it: here, over 24 hours.
export function timeOfDay(wall_s) {
  const at = new Date(1000 * wall_s);
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map((n) => String(n).padStart(2, "0")).join(":");
}
