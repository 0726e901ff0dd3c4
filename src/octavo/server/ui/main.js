/** The memory view: brings the feed to its parts, and says in words what an operator would do next. */

import { Palette } from "./colour.js";
import { $, bdi, h, say, sparing } from "./dom.js";
import { Server } from "./feed.js";
import { Holders } from "./holders.js";
import { PageMap } from "./map.js";
import { Pool, STACK, STATES } from "./pool.js";
import { Requests } from "./requests.js";
import { Timeline } from "./timeline.js";
import { Tree } from "./tree.js";
import { bytes, count, holder as holderName, percent, quick, span } from "./words.js";

const WRITE_MS = 500; // tables and figures; the map follows every frame
const ADVISE_MS = 5000;
const THEME = "octavo.theme";

const pool = new Pool();
const server = new Server({ snapshot, delta, link, locked });
const ask = (path, options) => server.ask(path, options);

applyTheme(localStorage.getItem(THEME) ?? "auto");
const palette = new Palette();
const map = new PageMap(pool, palette, {
  ask: (path, signal) => server.ask(path, { signal }),
  pick: (holder) => holders.pick(holder?.id ?? null),
});
const holders = new Holders(pool, { ask, light: (id) => map.lightHolder(id) });
const requests = new Requests(pool, { ask });
const timeline = new Timeline(pool);
const tree = new Tree(pool, { ask });

// ── what comes ──

function snapshot(data) {
  pool.snapshot(data);
  say($("model"), data.model);
  document.title = `${data.model} · Octavo memory`;
  map.rebuild();
  timeline.rebuild();
  write();
  advise();
  tree.refresh();
}

function delta(data) {
  pool.delta(data);
}

function link(state, text) {
  const line = $("link");
  line.className = state;
  $("link-retry").hidden = state !== "lost";
  document.body.classList.toggle("stale", state !== "live");
  say($("link-text"), text);
  $("forget").hidden = state !== "live" || !server.key;
}

function locked(wrong) {
  say($("key-wrong"), wrong ? "The server does not know this key." : "");
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
  $("key-input").value = "";
  $("key-input").focus();
}

$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key-input").value.trim();
  if (!key) return;
  $("key-dialog").close();
  server.open(key);
});
$("forget").addEventListener("click", () => {
  sessionStorage.clear();
  location.reload();
});
$("link-retry").addEventListener("click", () => server.open());

// ── what is written ──

const READINGS = [
  ["Pool in use", () => {
    const [tier] = pool.tiers;
    return tier ? [percent(tier.size - tier.counts[0], tier.size), `${bytes((tier.size - tier.counts[0]) * pool.about.page_bytes)} of ${bytes(tier.size * pool.about.page_bytes)}`] : ["–", ""];
  }, "pool"],
  ["Running", ({ running, waiting, spared_pages }) => [count(running), waiting ? `${count(waiting)} waiting${spared_pages ? `; ${count(spared_pages)} pages kept for the running` : ""}` : "none waiting"]],
  ["First token", ({ ttft_s }) => (ttft_s ? [quick(ttft_s.p50), `p99 ${quick(ttft_s.p99)}`] : ["–", "none in 10 s"])],
  ["Between tokens", ({ itl_s }) => (itl_s ? [quick(itl_s.p50), `p99 ${quick(itl_s.p99)}`] : ["–", "none in 10 s"])],
  ["Found in the cache", ({ totals: { hit_tokens, queried_tokens } }) => [percent(hit_tokens, queried_tokens), `of ${count(queried_tokens)} prompt tokens`]],
  ["Saved by sharing", ({ saved_by_sharing_pages }) => [bytes(saved_by_sharing_pages * pool.about.page_bytes), "on the device, now"]],
  ["Pages evicted", ({ totals: { evicted, preemptions } }) => [count(evicted), preemptions === 1 ? "1 preemption" : `${count(preemptions)} preemptions`]],
];
const readings = READINGS.map(([label, of, kind]) => {
  const value = h("b", {}, "–"), more = h("small", {});
  const stack = kind ? h("span", { class: "stack", "aria-hidden": "true" }, ...STACK.map((state) => h("i", { class: state }))) : null;
  $("readings").querySelector("dl").append(h("div", { class: kind }, h("dt", {}, label), h("dd", {}, value, more, stack)));
  return { of, value, more, stack };
});

const parts = [() => map.legend(), () => holders.show(), () => requests.show()].map(sparing);

function write() {
  if (!pool.stats) return;
  for (const { of, value, more, stack } of readings) {
    const [figure, rest] = of(pool.stats);
    say(value, figure);
    say(more, rest);
    const [tier] = pool.tiers;
    if (stack && tier) STACK.forEach((state, i) => (stack.children[i].style.flexGrow = tier.counts[STATES.indexOf(state)] / tier.size));
  }
  for (const part of parts) part();
}

// ── advice ──

let advised = "", idleFor = null;

/** Name the largest idle holder and what to do about it. What is read aloud changes only when the matter does. */
function advise() {
  const [device] = pool.tiers;
  if (!device) return;
  const found = pool.largestIdle();
  const short = pool.stats.waiting > 0 || device.counts[0] < device.size / 20;
  const [, below] = pool.tiers;
  const lower = below?.name, full = below?.counts[0] === 0;
  const pinned = found && pool.pinned(found.holder) > 0;
  const key = [found?.holder.id, found && percent(found.share, 1), short, lower, full, pinned].join();
  if (found && idleFor) say(idleFor, span(pool.idle(found.holder)));
  if (key === advised) return;
  advised = key;
  const text = $("advice-text"), actions = $("advice-actions");
  $("advice").classList.toggle("calm", !found || !short);
  const subject = found ? `${found.holder.id} ${pinned} ${lower}` : "";
  if (!found) {
    text.replaceChildren(short ? "The pool is nearly full, but no idle session holds much of it: what is cached gives way by itself, the rest is at work." : "No idle session holds more than a fiftieth of the pool.");
  } else {
    const away = `demote it to ${{ host: "host memory", disk: "disk" }[lower] ?? lower}${full ? ", which is full: what lay there longest goes" : ""}`;
    const remedy = [pinned ? "unpin it to let it go" : lower ? away : "", "release it"].filter(Boolean);
    idleFor = h("span", { "aria-live": "off" }, span(pool.idle(found.holder)));
    text.replaceChildren(
      "Session ", h("strong", {}, bdi(holderName(found.holder, 48))),
      ` holds ${percent(found.share, 1)} of the pool (${bytes(found.pages * pool.about.page_bytes)}) and has been idle for `, idleFor,
      short ? ": " : ". There is room; if it runs short, ",
      `${remedy.join(", or ")}.`,
    );
  }
  if (actions.dataset.subject === subject) return;
  actions.dataset.subject = subject;
  const act = (label, action) => h("button", { type: "button", click: () => holders.act(action, found.holder) }, label);
  actions.replaceChildren(...(found ? [
    h("button", { type: "button", click: () => { map.lightHolder(found.holder.id); holders.pick(found.holder.id); } }, "Show it"),
    pinned ? act("Unpin", "unpin") : "",
    lower ? act("Demote", "demote") : "",
    act("Release", "release"),
  ] : []).filter(Boolean));
}

// ── the theme ──

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const input = document.querySelector(`input[name=theme][value="${CSS.escape(theme)}"]`);
  if (input) input.checked = true;
}

function restyle() {
  palette.read();
  map.repaint();
  map.legend();
  timeline.restyle();
}

for (const input of document.querySelectorAll("input[name=theme]")) {
  input.addEventListener("change", () => {
    localStorage.setItem(THEME, input.value);
    applyTheme(input.value);
    restyle();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);

// ── the clock ──

let last = performance.now(), written = 0, thought = 0;

function frame(now) {
  map.draw(Math.min((now - last) / 1000, 0.1));
  last = now;
  if (now - written >= WRITE_MS) {
    written = now;
    if (pool.sample()) timeline.draw();
    write();
  }
  if (now - thought >= ADVISE_MS) {
    thought = now;
    if (pool.stats) advise();
  }
  requestAnimationFrame(frame);
}

requestAnimationFrame(frame);
document.addEventListener("visibilitychange", () => document.hidden || pool.stats && timeline.draw());
setInterval(() => document.hidden && pool.sample(), 1000); // what happens behind other tabs is put down too
window.octavo = { pool, map }; // for the console
server.open();
