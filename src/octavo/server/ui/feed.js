/** The way to the server: the feed with its retries, and single questions. Knows the key; understands no page. */

const KEY = "octavo.key";
const SILENT_MS = 30_000; // the server says something every ten seconds
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;

export const API = new URL("../v1/", document.baseURI);

/** What the server answered in place of what was asked for. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Server {
  /** `on`: snapshot(data), delta(data), link(state, text), locked(wrong). */
  constructor(on) {
    this.on = on;
    this.key = sessionStorage.getItem(KEY) ?? "";
    this.wait = FIRST_WAIT_MS;
    this.run = 0;
  }

  /** Follow the feed, from now on and with this key if one is given. */
  open(key) {
    if (key !== undefined) {
      this.key = key;
      if (key) sessionStorage.setItem(KEY, key);
      else sessionStorage.removeItem(KEY);
    }
    clearTimeout(this.timer);
    this.abort?.abort();
    this.#follow(++this.run);
  }

  /** A question's JSON. Raises Refused. */
  async ask(path, { method = "GET", body, signal } = {}) {
    const headers = this.#headers();
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const asked = { method, headers, signal, cache: "no-store" };
    const reply = await fetch(new URL(path, API), { ...asked, body: body === undefined ? undefined : JSON.stringify(body) });
    const text = await reply.text();
    if (reply.status === 401) this.#locked();
    let value = null;
    try { value = JSON.parse(text); } catch { /* a proxy's page */ }
    if (!reply.ok) throw new Refused(reply.status, value?.error?.message ?? `the server answered ${reply.status}`);
    return value;
  }

  #headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  #locked() {
    clearTimeout(this.timer);
    this.run++;
    this.abort?.abort();
    const wrong = Boolean(this.key);
    sessionStorage.removeItem(KEY);
    this.key = "";
    this.on.link("locked", "a key is needed");
    this.on.locked(wrong);
  }

  async #follow(run) {
    this.on.link("connecting", "connecting");
    const abort = (this.abort = new AbortController());
    let watch, why = "the connection was lost";
    const awake = () => {
      clearTimeout(watch);
      watch = setTimeout(() => abort.abort(), SILENT_MS);
    };
    try {
      awake();
      const headers = { ...this.#headers(), Accept: "text/event-stream" };
      const reply = await fetch(new URL("cache/map", API), { headers, signal: abort.signal, cache: "no-store" });
      if (run !== this.run) return;
      if (reply.status === 401) return void this.#locked();
      if (!reply.ok) {
        const text = await reply.text();
        let message;
        try { message = JSON.parse(text).error.message; } catch { /* a proxy's page */ }
        throw new Refused(reply.status, message ?? `the server answered ${reply.status}`);
      }
      for await (const [event, data] of events(reply.body, awake)) {
        if (run !== this.run) return;
        if (event === "snapshot") {
          this.wait = FIRST_WAIT_MS;
          this.on.snapshot(JSON.parse(data));
          this.on.link("live", "live");
        } else if (event === "delta") this.on.delta(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof Refused) why = error.message;
      else if (!(error instanceof TypeError) && error.name !== "AbortError") console.error(error);
    } finally {
      clearTimeout(watch);
      abort.abort();
    }
    if (run !== this.run) return;
    const wait = this.wait * (0.8 + 0.4 * Math.random());
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
    this.on.link("lost", `${why}: trying again in ${Math.max(1, Math.round(wait / 1000))} s`);
    this.timer = setTimeout(() => this.#follow(run), wait);
  }
}

/** The events of a stream as [event, data]; `heard` is called for everything that comes, comments too. */
async function* events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [], event = "message", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      if (!value.includes("\n")) { // a piece of a long line
        parts.push(value);
        continue;
      }
      const lines = (parts.join("") + value).split("\n");
      parts = [lines.pop()];
      for (let line of lines) {
        if (line.endsWith("\r")) line = line.slice(0, -1);
        if (line === "") {
          if (data.length) yield [event, data.join("\n")];
          event = "message";
          data = [];
        } else if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
