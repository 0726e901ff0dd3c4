/**
 * The page map: a cell for each page of each tier, and its legend, which is also the table for those who see no map.
 *
 * A canvas has one pixel a page and is scaled up by the browser, so a change costs one pixel; only rows that changed are
 * handed over.
 */

import { hex, mix } from "./colour.js";
import { $, bdi, h, Rows, say } from "./dom.js";
import { MEANING, STACK, STATES } from "./pool.js";
import { bytes, count, holder as holderName, name, percent, span } from "./words.js";

const SMALLEST = 2, LARGEST = 18, GAP_FROM = 5; // pixels of a cell, and from where cells stand apart
const GLOW_S = 0.7;
const MOST_GLOWING = 6000; // cells that change at once beyond this many do not light up
const ASK_AFTER_MS = 160;
const SHOWN_HOLDERS = 8;
const [FREE, ACTIVE, , , IDLE] = STATES.keys();

export class PageMap {
  /** `ask(path, signal)` → JSON; `pick(holder | null)` when somebody chooses a cell. */
  constructor(pool, palette, { ask, pick }) {
    Object.assign(this, { pool, palette, ask, pick });
    this.by = "state";
    this.only = null; // (state, holder) => whether it is lit; others are dimmed
    this.pressed = null;
    this.views = [];
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.layout()).observe($("tiers"));
    for (const input of document.querySelectorAll("input[name=colour]")) {
      input.addEventListener("change", () => this.colour(input.value));
    }
  }

  // ── what is drawn ──

  /** New tiers: make their canvases. */
  rebuild() {
    this.version = this.pool.version;
    const shape = this.pool.tiers.map((tier) => `${tier.name} ${tier.size}`).join();
    if (shape !== this.shape) {
      this.shape = shape;
      this.views = this.pool.tiers.map((tier) => this.#view(tier));
      $("tiers").replaceChildren(...this.views.map((view) => view.element));
      this.rows = null;
    } else {
      this.views.forEach((view, i) => {
        view.tier = this.pool.tiers[i];
        view.hot = [];
        view.heat.fill(0);
      });
    }
    this.layout(true);
    this.legend();
  }

  #view(tier) {
    const canvas = h("canvas", { "aria-hidden": "true" });
    const cursor = h("span", { class: "cursor", hidden: true });
    const label = `${tier.name} tier, ${count(tier.size)} pages. Arrow keys go from page to page, Enter shows the holder's pages only, Escape shows all.`;
    const box = h("div", { class: "cells", tabindex: 0, role: "application", "aria-roledescription": "page map", "aria-label": label }, canvas, h("span", { class: "grid" }), cursor);
    const used = h("span", { class: "muted" });
    const title = h("h3", {}, tier.name[0].toUpperCase() + tier.name.slice(1));
    const element = h("div", { class: "tier" }, h("div", { class: "tier-head" }, title, used), box);
    const view = { tier, canvas, cursor, box, used, element, at: -1, hot: [], heat: new Float32Array(tier.size) };
    view.context = canvas.getContext("2d", { alpha: false });
    box.addEventListener("pointermove", (event) => this.#point(view, this.#cellAt(view, event)));
    box.addEventListener("pointerleave", () => this.#leave(view));
    box.addEventListener("blur", () => this.#leave(view));
    box.addEventListener("focus", () => box.matches(":focus-visible") && this.#point(view, Math.max(view.last ?? 0, 0)));
    box.addEventListener("click", (event) => this.#choose(view, this.#cellAt(view, event)));
    box.addEventListener("keydown", (event) => this.#key(view, event));
    return view;
  }

  /** Choose the size of a cell: the same on every tier, so that areas compare. */
  layout(force = false) {
    const width = $("tiers").clientWidth;
    if (!width || !this.views.length || (!force && width === this.width)) return;
    this.width = width;
    const wide = innerWidth > 2400 ? 1.8 : 1;
    const most = Math.max(Math.min(innerHeight * 0.72, 620 * wide), 260);
    let size = Math.round(LARGEST * wide);
    const high = (s) => this.views.reduce((sum, { tier }) => sum + Math.ceil(tier.size / Math.floor(width / s)) * s, 0);
    while (size > SMALLEST && high(size) > most) size--;
    if (high(size) > 2.5 * most) size = 1; // of a million pages there is no cell to point at, but a picture
    const cols = Math.floor(width / size);
    for (const view of this.views) {
      view.size = size;
      view.cols = Math.min(cols, view.tier.size);
      view.rows = Math.ceil(view.tier.size / view.cols);
      view.canvas.width = view.cols;
      view.canvas.height = view.rows;
      view.image = view.context.createImageData(view.cols, view.rows);
      view.pixels = new Uint32Array(view.image.data.buffer);
      for (const of of [view.box, view.canvas]) {
        of.style.width = `${view.cols * size}px`;
        of.style.height = `${view.rows * size}px`;
      }
      view.box.style.setProperty("--cell", `${size}px`);
      view.box.classList.toggle("apart", size >= GAP_FROM);
    }
    this.repaint();
  }

  /** Draw all cells anew, with the colours as they are now. */
  repaint() {
    for (const view of this.views) {
      if (!view.pixels) continue;
      view.pixels.fill(this.palette.panel);
      view.tier.changed = [];
      for (let i = 0; i < view.tier.size; i++) view.pixels[i] = this.#colourOf(view.tier.states[i], view.tier.holders[i]);
      view.context.putImageData(view.image, 0, 0);
    }
  }

  /** A frame: what has changed since the last one, and what still glows. `dt` in seconds. */
  draw(dt) {
    if (this.version !== this.pool.version) this.rebuild();
    for (const view of this.views) this.#drawTier(view, dt);
  }

  #drawTier(view, dt) {
    const { tier, pixels, heat } = view;
    if (!pixels || (!tier.changed.length && !view.hot.length)) return;
    const { states, holders } = tier;
    let low = tier.size, high = -1;
    let num = 0;
    for (const [first, stop] of tier.changed) num += stop - first;
    const glow = num <= MOST_GLOWING && !this.calm.matches;
    for (const [first, stop] of tier.changed) {
      low = Math.min(low, first);
      high = Math.max(high, stop - 1);
      for (let i = first; i < stop; i++) {
        pixels[i] = this.#colourOf(states[i], holders[i]);
        if (glow && !this.only) {
          if (!heat[i]) view.hot.push(i);
          heat[i] = 1;
        }
      }
    }
    tier.changed = [];
    if (view.hot.length) {
      const cooled = dt / GLOW_S;
      view.hot = view.hot.filter((i) => {
        const colour = this.#colourOf(states[i], holders[i]);
        pixels[i] = heat[i] > 0 ? mix(colour, this.palette.flash, 0.6 * heat[i] * heat[i]) : colour;
        low = Math.min(low, i);
        high = Math.max(high, i);
        const hot = heat[i] > 0;
        heat[i] = Math.max(heat[i] - cooled, 0);
        return hot;
      });
    }
    if (high < 0) return;
    const top = Math.floor(low / view.cols), bottom = Math.floor(high / view.cols);
    view.context.putImageData(view.image, 0, 0, 0, top, view.cols, bottom - top + 1);
  }

  #colourOf(state, holder) {
    const colour = this.#plain(state, holder);
    return this.only && !this.only(state, holder) ? mix(colour, this.palette.panel, 0.86) : colour;
  }

  #plain(state, holder) {
    const { palette } = this;
    if (this.by === "state" || state === FREE) return palette.states[state];
    if (this.by === "holder") {
      if (state !== ACTIVE && state !== IDLE) return palette.states[state];
      return holder ? palette.hue(holder) : palette.other;
    }
    const tenant = this.#tenant(holder);
    return tenant === undefined ? palette.other : palette.hue(tenant);
  }

  /** A number for a holder's tenant, undefined if it is not told. */
  #tenant(holder) {
    const of = this.pool.holders.get(holder);
    if (!of) return undefined;
    this.tenants ??= new Map();
    if (!this.tenants.has(of.tenant)) this.tenants.set(of.tenant, this.tenants.size + 1);
    return this.tenants.get(of.tenant);
  }

  // ── what is lit ──

  colour(by) {
    this.by = by;
    this.light(null);
    this.repaint();
    this.legend();
  }

  /** Dim all cells but those. */
  light(only, pressed = null) {
    if (only === this.only && pressed === this.pressed) return;
    this.only = only;
    this.pressed = pressed;
    this.repaint();
    this.legend();
  }

  lightHolder(id) {
    this.light(id ? (state, holder) => holder === id : null, id ? `holder ${id}` : null);
  }

  // ── the legend ──

  /** [{key, label, colour, meaning, counts by tier, only}…]: every page is in one of them. */
  groups() {
    const { pool, palette } = this;
    if (this.by === "state") {
      return STACK.map((label) => {
        const state = STATES.indexOf(label);
        const counts = pool.tiers.map((tier) => tier.counts[state]);
        return { key: label, label, colour: palette.states[state], meaning: MEANING[label], counts, only: (s) => s === state };
      });
    }
    const found = new Map();
    const group = (key, more) => {
      if (!found.has(key)) found.set(key, { key, counts: pool.tiers.map(() => 0), ...more() });
      return found.get(key);
    };
    pool.tiers.forEach((tier, t) => {
      const seen = new Map(); // state and holder as one number → pages
      for (let i = 0; i < tier.size; i++) {
        const both = tier.holders[i] * 8 + tier.states[i];
        seen.set(both, (seen.get(both) ?? 0) + 1);
      }
      for (const [both, n] of seen) this.#group(both % 8, Math.floor(both / 8), group).counts[t] += n;
    });
    const all = [...found.values()].sort((a, b) => b.rank - a.rank || b.counts[0] - a.counts[0] || sum(b.counts) - sum(a.counts));
    const own = all.filter((of) => of.rank === 2), rest = own.slice(SHOWN_HOLDERS);
    if (rest.length < 2) return all;
    const keys = new Set(rest.map((of) => of.holder));
    const others = {
      ...{ key: "rest", label: `${count(rest.length)} more`, colour: palette.other, meaning: "each in a colour of its own" },
      counts: pool.tiers.map((_, t) => rest.reduce((total, of) => total + of.counts[t], 0)),
      only: (s, id) => (s === ACTIVE || s === IDLE) && keys.has(id),
    };
    return [...own.slice(0, SHOWN_HOLDERS), others, ...all.filter((of) => of.rank !== 2)];
  }

  #group(state, id, group) {
    const { palette } = this;
    const plain = (label, rank) => () => ({ label, rank, colour: palette.states[state], meaning: MEANING[STATES[state]], only: (s) => s === state });
    if (state === FREE) return group("free", plain("free", 0));
    if (this.by === "holder") {
      if (state !== ACTIVE && state !== IDLE) {
        const label = { shared: "shared prefix", cached: "cached, no session" }[STATES[state]] ?? STATES[state];
        return group(STATES[state], plain(label, 1));
      }
      const mine = (s, of) => (s === ACTIVE || s === IDLE) && of === id;
      if (!id) return group(0, () => ({ label: "others", rank: 1.5, colour: palette.other, meaning: "another tenant's", only: mine }));
      const of = this.pool.holders.get(id);
      return group(id, () => ({ label: holderName(of, 28), rank: 2, holder: id, colour: palette.hue(id), meaning: of?.kind ?? "", only: mine }));
    }
    const tenant = this.#tenant(id);
    const same = (s, of) => s !== FREE && this.#tenant(of) === tenant;
    if (tenant === undefined) return group("others", () => ({ label: "others", rank: 1, colour: palette.other, meaning: "another tenant's, or nobody's", only: same }));
    const label = name(this.pool.holders.get(id).tenant, 28) || "all who ask";
    return group(`tenant ${tenant}`, () => ({ label, rank: 1.8, colour: palette.hue(tenant), meaning: "a tenant", only: same }));
  }

  /** Write the legend's table. */
  legend() {
    const { pool } = this;
    if (!pool.stats) return;
    if (!this.rows) {
      const heads = pool.tiers.map((tier) => h("th", { scope: "col", class: "n" }, tier.name));
      const body = h("tbody");
      const caption = h("caption", { class: "hidden" }, "Pages by what they are, on each tier");
      $("legend").replaceChildren(h("table", {}, caption, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Pages"), ...heads)), body));
      this.rows = new Rows(body, (of) => this.#legendRow(of));
    }
    this.rows.show(this.groups(), (of) => of.key);
    for (const { tier, used } of this.views) {
      const busy = tier.size - tier.counts[FREE];
      say(used, `${count(tier.size)} pages · ${bytes(tier.size * pool.about.page_bytes)} · ${percent(busy, tier.size)} used`);
    }
  }

  #legendRow(first) {
    const swatch = h("i", { class: "swatch" });
    const label = bdi("");
    const button = h("button", { type: "button", class: "quiet" }, swatch, label);
    const cells = this.pool.tiers.map(() => h("td", { class: "n" }));
    const row = h("tr", {}, h("th", { scope: "row" }, button), ...cells);
    let now = first;
    button.addEventListener("click", () => {
      const pressed = `legend ${now.key}`;
      if (this.pressed === pressed) this.light(null);
      else this.light(now.only, pressed);
    });
    const update = (of) => {
      now = of;
      say(label, of.label);
      swatch.style.background = hex(of.colour);
      row.title = of.meaning;
      button.setAttribute("aria-pressed", String(this.pressed === `legend ${of.key}`));
      of.counts.forEach((n, t) => {
        say(cells[t], count(n));
        cells[t].classList.toggle("nil", !n);
      });
    };
    return { row, update };
  }

  // ── the pointer and the keys ──

  #cellAt(view, event) {
    const box = view.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / view.size), y = Math.floor((event.clientY - box.top) / view.size);
    const i = y * view.cols + x;
    return x >= 0 && x < view.cols && y >= 0 && i < view.tier.size ? i : -1;
  }

  #key(view, event) {
    const { cols, tier } = view;
    const at = view.at >= 0 ? view.at : view.last ?? 0;
    const steps = {
      ...{ ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - cols, ArrowDown: at + cols },
      ...{ PageUp: at - 10 * cols, PageDown: at + 10 * cols, Home: 0, End: tier.size - 1 },
    };
    if (event.key in steps) {
      const to = steps[event.key];
      this.#point(view, to < 0 || to >= tier.size ? at : to, true);
    } else if (event.key === "Enter" || event.key === " ") this.#choose(view, view.at);
    else if (event.key === "Escape") {
      this.light(null);
      this.pick(null);
      this.#point(view, -1);
    } else return;
    event.preventDefault();
  }

  #choose(view, at) {
    if (at < 0) return;
    const id = view.tier.holders[at];
    const off = !id || this.pressed === `holder ${id}`;
    this.lightHolder(off ? 0 : id);
    this.pick(off ? null : this.pool.holders.get(id) ?? null);
  }

  #leave(view) {
    if (document.activeElement === view.box && view.box.matches(":focus-visible")) return;
    this.#point(view, -1);
  }

  #point(view, at, byKey = false) {
    if (at === view.at) return;
    view.at = at;
    if (at >= 0) view.last = at;
    clearTimeout(this.asking);
    this.asked?.abort();
    const tip = $("tip");
    view.cursor.hidden = tip.hidden = at < 0;
    if (at < 0) return;
    const x = (at % view.cols) * view.size, y = Math.floor(at / view.cols) * view.size;
    Object.assign(view.cursor.style, { left: `${x}px`, top: `${y}px` });
    this.#tell(view, at, null);
    const place = () => {
      const box = view.canvas.getBoundingClientRect();
      const left = Math.min(box.left + x + view.size + 12, innerWidth - tip.offsetWidth - 8);
      let top = box.top + y + view.size + 8;
      if (top + tip.offsetHeight > innerHeight - 8) top = box.top + y - tip.offsetHeight - 8;
      Object.assign(tip.style, { left: `${Math.max(left, 8)}px`, top: `${Math.max(top, 8)}px` });
    };
    if (byKey) view.cursor.scrollIntoView({ block: "nearest" });
    place();
    this.asking = setTimeout(async () => {
      const abort = (this.asked = new AbortController());
      let detail = null;
      try {
        detail = await this.ask(`cache/pages/${view.tier.name}/${at}`, abort.signal);
      } catch { /* what the feed said stays */ }
      if (abort.signal.aborted || view.at !== at) return;
      const said = this.#tell(view, at, detail);
      place();
      if (document.activeElement === view.box) say($("cell-said"), said);
    }, ASK_AFTER_MS);
  }

  /** Write what is known of a page beside it. The same as one sentence. */
  #tell(view, at, detail) {
    const { tier } = view;
    const state = STATES[tier.states[at]], of = this.pool.holders.get(tier.holders[at]);
    const head = `${tier.name} page ${count(at)}`;
    const facts = [];
    const fact = (term, text) => text && facts.push([term, text]);
    if (state !== "free") {
      fact("holder", of || state === "active" || state === "idle" ? holderName(of) : null);
      fact("tenant", of?.tenant && name(of.tenant, 24));
      const idle = detail ? detail.idle_s : of && state === "idle" ? this.pool.idle(of) : null;
      fact("idle for", idle !== null && idle !== undefined ? span(idle) : null);
    }
    if (detail) {
      fact("tokens", detail.positions && `${count(detail.positions[0])} to ${count(detail.positions[1] - 1)} of the path`);
      fact("in use by", detail.refs ? `${count(detail.refs)} ${detail.refs === 1 ? "table" : "tables"}` : null);
      const others = (detail.sessions ?? []).filter((id) => id !== of?.name);
      fact("sessions", others.length ? others.slice(0, 3).map((id) => name(id, 24)).join(", ") + (others.length > 3 ? ` and ${others.length - 3} more` : "") : null);
      fact("requests", detail.requests?.length ? detail.requests.slice(0, 2).map((id) => name(id, 24)).join(", ") : null);
      fact("other tenants", detail.others ? count(detail.others) : null);
      fact("also on", detail.elsewhere?.join(", "));
    }
    const text = detail?.text ? h("q", {}, bdi(name(detail.text.replace(/\s+/g, " "), 160))) : null;
    const swatch = h("i", { class: `swatch ${state}` });
    $("tip").replaceChildren(
      h("p", {}, swatch, h("b", {}, head), ` ${state}`),
      h("dl", {}, ...facts.flatMap(([term, value]) => [h("dt", {}, term), h("dd", {}, bdi(value))])),
      ...(text ? [text] : []),
    );
    return `${head}: ${state}${facts.map(([term, value]) => `, ${term} ${value}`).join("")}`;
  }
}

const sum = (numbers) => numbers.reduce((total, n) => total + n, 0);
