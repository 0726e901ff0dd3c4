/** The pool as the feed tells it: every page's state and holder, counted as they change. Draws nothing. */

export const STATES = ["free", "active", "shared", "pinned", "idle", "cached", "moving"];
/** In the order of a stack: what works below, what rests above it, then what is free. */
export const STACK = ["moving", "active", "shared", "pinned", "idle", "cached", "free"];
export const MEANING = {
  active: "a running request uses it",
  shared: "two or more requests or sessions use it",
  pinned: "held by a pin",
  idle: "of one session that is not running",
  cached: "findable, of no session",
  moving: "a copy is under way",
  free: "holds nothing",
};

const KEPT_S = 3600;
const MOST_CHANGED = 20_000;

export class Tier {
  constructor({ name, num_pages, runs }) {
    this.name = name;
    this.size = num_pages;
    this.states = new Uint8Array(num_pages);
    this.holders = new Uint32Array(num_pages);
    this.counts = new Array(STATES.length).fill(0);
    this.counts[0] = num_pages;
    this.held = new Map([[0, num_pages]]);
    this.changed = []; // runs [first, stop) since the map last drew
    this.apply(runs);
  }

  apply(runs) {
    const { states, holders, counts, held, size } = this;
    for (const [first, count, state, holder] of runs) {
      const stop = Math.min(first + count, size);
      for (let i = first; i < stop; ) {
        const oldState = states[i], oldHolder = holders[i];
        let end = i + 1;
        while (end < stop && states[end] === oldState && holders[end] === oldHolder) end++;
        const n = end - i;
        counts[oldState] -= n;
        counts[state] += n;
        if (oldHolder !== holder) {
          held.set(oldHolder, held.get(oldHolder) - n);
          held.set(holder, (held.get(holder) ?? 0) + n);
        }
        i = end;
      }
      states.fill(state, first, stop);
      holders.fill(holder, first, stop);
      this.changed.push([first, stop]);
    }
    if (this.changed.length > MOST_CHANGED) this.changed = [[0, size]]; // a tab that is not seen draws nothing
  }

  of(holder) {
    return this.held.get(holder) ?? 0;
  }
}

export class Pool {
  constructor() {
    this.tiers = [];
    this.holders = new Map();
    this.requests = [];
    this.history = [];
    this.stats = null;
    this.version = 0; // of the tiers: a snapshot makes new ones
  }

  snapshot(data) {
    this.about = data;
    this.tiers = data.tiers.map((tier) => new Tier(tier));
    this.holders = new Map();
    this.version++;
    const before = this.history.filter((sample) => !data.history.length || sample.time < data.history[0].time);
    this.history = [...before, ...data.history];
    this.base = null;
    this.#take(data);
  }

  delta(data) {
    for (const { name, runs } of data.tiers) this.tier(name)?.apply(runs);
    for (const id of data.gone ?? []) {
      this.holders.delete(id);
      for (const tier of this.tiers) if (!tier.of(id)) tier.held.delete(id);
    }
    this.#take(data);
  }

  #take(data) {
    const now = performance.now() / 1000;
    this.seq = data.seq;
    this.offset = data.time - now;
    for (const holder of data.holders) this.holders.set(holder.id, { ...holder, at: data.time });
    this.stats = data.stats;
    if (data.requests) {
      this.requests = data.requests;
      this.requestsAt = data.time;
    }
    this.numRequests = data.num_requests;
    this.base ??= { time: this.history.at(-1)?.time ?? data.time, totals: { ...data.stats.totals } };
  }

  /** The server's clock. */
  get now() {
    return performance.now() / 1000 + this.offset;
  }

  tier(name) {
    return this.tiers.find((tier) => tier.name === name);
  }

  idle(holder) {
    return holder.running ? 0 : holder.idle_s + Math.max(this.now - holder.at, 0);
  }

  pinned(holder) {
    return Math.max(holder.pinned_s - Math.max(this.now - holder.at, 0), 0);
  }

  bytes(holder) {
    return this.tiers.reduce((sum, tier) => sum + tier.of(holder.id), 0) * this.about.page_bytes;
  }

  /** Put down how it stands, at most once a second. Whether it did. */
  sample() {
    const { now, base } = this;
    if (!this.stats || now - base.time < 1) return false;
    const { totals, ttft_s, itl_s, running, waiting } = this.stats;
    const sample = { time: now, ttft_s: ttft_s?.p50 ?? null, itl_s: itl_s?.p50 ?? null, running, waiting };
    for (const tier of this.tiers) {
      sample[tier.name] = Object.fromEntries(STATES.map((state, i) => [state, tier.counts[i]]));
    }
    for (const name of ["evicted", "swapped_out", "swapped_in", "preemptions"]) {
      sample[name] = Math.max(totals[name] - base.totals[name], 0);
    }
    this.base = { time: now, totals: { ...totals } };
    this.history.push(sample);
    const first = this.history.findIndex((old) => old.time >= now - KEPT_S);
    if (first > 0) this.history.splice(0, first);
    return true;
  }

  /**
   * The idle session that holds most of the tier that is short of room, if any is worth a word:
   * {holder, tier, pages, share}.
   */
  largestIdle() {
    const tier = this.tiers[0];
    if (!tier?.size) return null;
    let best = null;
    for (const holder of this.holders.values()) {
      if (holder.kind !== "session" || holder.running || this.idle(holder) < 5) continue;
      const pages = tier.of(holder.id);
      if (pages > (best?.pages ?? 0)) best = { holder, tier, pages, share: pages / tier.size };
    }
    return best && best.share >= 0.02 ? best : null;
  }
}
