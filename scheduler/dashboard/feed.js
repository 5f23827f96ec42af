// What the gateway says. One stream of server-sent events, read with fetch so that the token goes
// in a header and stays out of addresses and logs; it begins again by itself, with back-off, and
// from the last event that came.

const KEPT = "farflow-token";
const FIRST_RETRY_MS = 500, LAST_RETRY_MS = 15000, SILENT_MS = 45000;

export class Denied extends Error {}

export class Feed {
  constructor() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      sessionStorage.setItem(KEPT, given);
      history.replaceState(null, "", location.pathname + location.search);
    }
    this.token = sessionStorage.getItem(KEPT) ?? "";
    this.after = null;
  }

  use(token) {
    this.token = token.trim();
    sessionStorage.setItem(KEPT, this.token);
  }

  async ask(path, { method = "GET", body, signal } = {}) {
    const answer = await fetch(path, {
      method, signal, cache: "no-store",
      headers: {
        Authorization: `Bearer ${this.token}`,
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (answer.status === 401) throw new Denied("the token is not (or no longer) valid");
    const said = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(said.message ?? `${answer.status} ${answer.statusText}`);
    return said;
  }

  // Calls hear(kind, data, id) for every event until the page goes; tell(problem or "") about the
  // connection. Returns only when the token is refused.
  async follow(hear, tell) {
    let retry = FIRST_RETRY_MS;
    for (;;) {
      try {
        await this.read((kind, data, id) => {
          retry = FIRST_RETRY_MS;
          tell(kind === "unreachable" ? `The scheduler does not answer (${data.message})` : "");
          hear(kind, data, id);
        });
        tell("The scheduler closed the stream; asking again");
      } catch (error) {
        if (error instanceof Denied) throw error;
        tell(`Not connected (${error.message}); asking again`);
      }
      await new Promise((done) => setTimeout(done, retry * (0.75 + Math.random() / 2)));
      retry = Math.min(LAST_RETRY_MS, 2 * retry);
    }
  }

  async read(hear) {
    const stop = new AbortController();
    let silent = setTimeout(() => stop.abort(), SILENT_MS);
    try {
      const answer = await fetch("v1/events", {
        signal: stop.signal, cache: "no-store",
        headers: {
          Authorization: `Bearer ${this.token}`, Accept: "text/event-stream",
          ...(this.after === null ? {} : { "Last-Event-ID": String(this.after) }),
        },
      });
      if (answer.status === 401) throw new Denied("the token is not (or no longer) valid");
      if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
      const text = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let kept = "";
      for (;;) {
        const { value, done } = await text.read();
        if (done) return;
        clearTimeout(silent);
        silent = setTimeout(() => stop.abort(), SILENT_MS);
        const parts = (kept + value).split("\n\n");
        kept = parts.pop();
        for (const part of parts) this.event(part, hear);
      }
    } finally {
      clearTimeout(silent);
      stop.abort();
    }
  }

  event(text, hear) {
    let kind = "message", id = null;
    const data = [];
    for (const line of text.split("\n")) {
      const at = line.indexOf(":");
      if (at <= 0) continue;
      const value = line.slice(at + 1).replace(/^ /, "");
      const field = line.slice(0, at);
      if (field === "event") kind = value;
      else if (field === "id") id = value;
      else if (field === "data") data.push(value);
    }
    if (id !== null && /^\d+$/.test(id)) this.after = Number(id);
    if (data.length) hear(kind, JSON.parse(data.join("\n")), id);
  }
}
