/** Memory and latency on one time axis, so that what caused a delay stands above it. Draws what the pool has put down. */

import uPlot from "./uplot/uPlot.esm.js";
import { css } from "./colour.js";
import { $, h, say } from "./dom.js";
import { STACK } from "./pool.js";
import { bytes, count, quick } from "./words.js";

const DRAWN = STACK.filter((state) => state !== "free");
const GAP_S = 4; // two samples further apart than this are not joined
const AXIS = 66;
const SHORTEST_S = 60;
const FONT = "Inter, system-ui, sans-serif";
const MARKS = [
  { label: "evicted", colour: "--muted", of: (sample) => sample.evicted },
  { label: "swapped", colour: "--shared", of: (sample) => sample.swapped_out + sample.swapped_in },
  { label: "preempted", colour: "--danger", of: (sample) => sample.preemptions },
];
const LANE = 13, TOP = 14; // of the lanes of marks above the plot, and between them and it

export class Timeline {
  constructor(pool) {
    this.pool = pool;
    this.tier = null;
    this.span = 600;
    this.samples = [];
    new ResizeObserver(() => this.size()).observe($("plots"));
    for (const input of document.querySelectorAll("input[name=span]")) {
      input.addEventListener("change", () => {
        this.span = Number(input.value);
        this.draw();
      });
    }
  }

  /** The tiers are known, or others: choose the first, and offer the rest. */
  rebuild() {
    const names = this.pool.tiers.map((tier) => tier.name);
    if (names.join() === this.names) return this.draw();
    this.names = names.join();
    this.tier = names[0];
    const legend = h("legend", { class: "hidden" }, "Tier");
    const inputs = names.map((name) => {
      const input = h("input", { type: "radio", name: "timeline-tier", value: name, checked: name === this.tier, change: () => {
        this.tier = name;
        this.#make();
      } });
      return h("label", {}, input, h("span", {}, name[0].toUpperCase() + name.slice(1)));
    });
    $("timeline-tier").replaceChildren(legend, ...inputs);
    $("timeline-tier").hidden = names.length < 2;
    this.#make();
  }

  /** The theme is another: take its colours. */
  restyle() {
    if (this.names) this.#make();
  }

  #make() {
    this.memory?.destroy();
    this.latency?.destroy();
    $("plots").replaceChildren();
    const cursor = { sync: { key: "octavo", setSeries: false }, drag: { x: false, y: false }, points: { size: 6 } };
    const k = (this.scale = scale());
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `${11 * k}px ${FONT}`, size: AXIS * k };
    const time = { ...axis, size: 28 * k, values: (_, ticks) => this.#times(ticks), space: 90 * k };
    const common = { legend: { show: false }, cursor, padding: [0, 8, 0, 0] };
    const key = { hooks: { setCursor: [(plot) => this.#key(plot.cursor.idx)] } };
    const seen = () => this.pool.tier(this.tier)?.size ?? 1;
    // the highest sum is drawn first, and what lies below it over it
    const stacked = DRAWN.toReversed();
    this.memory = new uPlot({
      ...common, ...key, ...this.#box(0.6),
      padding: [(LANE * MARKS.length + TOP) * k, 8, 6, 0],
      scales: { x: { range: () => this.#range() }, y: { range: () => [0, seen()] } },
      axes: [{ ...time, show: true, size: 0, values: () => [] }, { ...axis, splits: () => [0, 0.25, 0.5, 0.75, 1].map((share) => share * seen()), values: (_, ticks) => ticks.map((n) => (n ? bytes(n * this.pool.about.page_bytes) : "0")) }],
      series: [{}, ...stacked.map((state) => ({ label: state, fill: css(`--${state}`), stroke: css(`--${state}`), width: 0.5, points: { show: false } }))],
      hooks: { ...key.hooks, draw: [(plot) => this.#marks(plot)] },
    }, [[]], $("plots"));
    const line = (label, colour) => ({ label, stroke: css(colour), width: 1.6, points: { show: false }, spanGaps: false });
    this.latency = new uPlot({
      ...common, ...key, ...this.#box(0.4),
      padding: [10, 8, 0, 0],
      scales: { x: { range: () => this.#range() }, y: { distr: 3, range: (_, low, high) => decades(low, high) } },
      axes: [time, { ...axis, grid: { ...axis.grid, filter: whole }, values: (_, ticks) => whole(_, ticks).map((s) => (s ? decade(s) : "")) }],
      series: [{}, line("first token", "--first"), line("between tokens", "--between")],
      hooks: { ...key.hooks, draw: [(plot) => this.#preempted(plot)] },
    }, [[]], $("plots"));
    this.draw();
  }

  #box(share) {
    const width = Math.max($("plots").clientWidth, 200);
    const high = innerWidth > 2400 ? 560 : 340;
    return { width, height: Math.round(high * share) };
  }

  size() {
    if (this.names && this.scale !== scale()) return this.#make();
    this.memory?.setSize(this.#box(0.6));
    this.latency?.setSize(this.#box(0.4));
  }

  #range() {
    const end = this.pool.now, first = this.pool.history[0]?.time ?? end;
    return [Math.max(end - this.span, Math.min(first, end - SHORTEST_S)), end]; // no empty hours before the server's start
  }

  /** Take the samples as they are now. */
  draw() {
    if (!this.memory || !this.pool.stats) return;
    const [start] = this.#range();
    const samples = (this.samples = []);
    let before = null;
    for (const sample of this.pool.history) {
      if (sample.time >= start - GAP_S) {
        if (before && sample.time - before.time > GAP_S) samples.push({ time: before.time + 1, gap: true });
        samples.push(sample);
      }
      before = sample;
    }
    const times = samples.map((sample) => sample.time);
    const sums = samples.map((sample) => (sample[this.tier]?.free === undefined ? null : 0));
    const stack = DRAWN.map((state) => samples.map((sample, i) => {
      if (sums[i] === null) return null;
      sums[i] += sample[this.tier][state];
      return sums[i];
    }));
    this.memory.setData([times, ...stack.toReversed()]);
    const positive = (s) => (s > 0 ? s : null);
    this.latency.setData([times, samples.map((of) => positive(of.ttft_s)), samples.map((of) => positive(of.itl_s))]);
    this.#key(this.memory.cursor.idx);
  }

  /** Times of day, but none where the edge would cut it. */
  #times(ticks) {
    const [start, end] = this.#range(), long = end - start;
    return ticks.map((tick) => (tick > end - 0.06 * long ? "" : clock(tick, long < 240)));
  }

  // ── marks ──

  #marks(plot) {
    const { ctx } = plot;
    const ratio = devicePixelRatio * this.scale;
    const { left, top, width } = plot.bbox;
    ctx.save();
    ctx.font = `${10 * ratio}px ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    const [start, end] = this.#range();
    const wide = Math.max((width / (end - start)) * 0.8, 1.5 * ratio);
    MARKS.forEach(({ label, colour, of }, lane) => {
      const bottom = top - (TOP + LANE * (MARKS.length - 1 - lane)) * ratio;
      ctx.fillStyle = css("--muted");
      ctx.fillText(label, left - 8 * ratio, bottom - (LANE / 2 - 2) * ratio);
      ctx.fillStyle = css("--line");
      ctx.fillRect(left, bottom, width, ratio);
      ctx.fillStyle = css(colour);
      for (const sample of this.samples) {
        const n = sample.gap ? 0 : of(sample);
        const x = plot.valToPos(sample.time, "x", true);
        if (!n || x < left) continue;
        const high = Math.min(3 + 2.2 * Math.log2(n), LANE - 3) * ratio;
        ctx.fillRect(x - wide, bottom - high, wide, high);
      }
    });
    ctx.restore();
    this.#preempted(plot);
  }

  /** A line through both plots where a request had to give way. */
  #preempted(plot) {
    const { ctx } = plot;
    const { left, top, height } = plot.bbox;
    ctx.save();
    ctx.fillStyle = css("--danger");
    ctx.globalAlpha = 0.3;
    for (const sample of this.samples) {
      if (!sample.preemptions) continue;
      const x = plot.valToPos(sample.time, "x", true);
      if (x >= left) ctx.fillRect(x, top, devicePixelRatio, height);
    }
    ctx.restore();
  }

  // ── the key, with the values under the pointer or else the last ──

  #key(at) {
    if (!this.keys) {
      const entry = (label, kind) => {
        const value = h("b", {});
        return [h("span", {}, h("i", { class: `swatch ${kind}` }), ` ${label} `, value), value];
      };
      const states = DRAWN.map((state) => entry(state, state));
      const times = [entry("first token", "first"), entry("between tokens", "between")];
      this.when = h("time", {});
      $("timeline-key").replaceChildren(this.when, ...[...states, ...times].map(([element]) => element));
      this.keys = [...states, ...times].map(([, value]) => value);
    }
    const last = this.samples.length - 1;
    const sample = this.samples[at ?? last];
    say(this.when, sample && at !== null && at !== undefined ? clock(sample.time, true) : "now");
    const of = sample?.[this.tier];
    DRAWN.forEach((state, i) => say(this.keys[i], of?.[state] === undefined ? "–" : count(of[state])));
    say(this.keys[DRAWN.length], sample?.ttft_s ? quick(sample.ttft_s) : "–");
    say(this.keys[DRAWN.length + 1], sample?.itl_s ? quick(sample.itl_s) : "–");
  }
}

/** How much larger than usual texts are here. */
const scale = () => Number.parseFloat(getComputedStyle(document.documentElement).fontSize) / 14;

/** A decade at least, with whole ones at the ends. */
function decades(low, high) {
  if (!(low > 0) || !(high > 0)) return [0.01, 1];
  const first = 10 ** Math.floor(Math.log10(low) + 1e-9), last = 10 ** Math.ceil(Math.log10(high) - 1e-9);
  return [first, Math.max(last, first * 10)];
}

/** Ticks that are powers of ten; null for the rest. */
const whole = (_, ticks) => ticks.map((s) => (s && Math.abs(Math.log10(s) - Math.round(Math.log10(s))) < 1e-6 ? s : null));

const decade = (s) => (s >= 0.999 ? `${Math.round(s)} s` : s >= 0.000999 ? `${Math.round(s * 1e3)} ms` : `${Math.round(s * 1e6)} µs`);

function clock(time, seconds = true) {
  return new Date(time * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined });
}
