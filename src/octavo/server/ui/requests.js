/** Requests that run and wait, and why one of them took its time. */

import { $, bar, bdi, fill, h, Rows, say } from "./dom.js";
import { count, name, percent, quick, span } from "./words.js";

const SHOWN = 30, TOLD = 200; // rows here, and requests that the feed tells of
const PHASES = { waiting: "waiting", loading: "loading pages", prefilling: "reading the prompt", decoding: "answering", parked: "swapped out" };

export class Requests {
  constructor(pool, { ask }) {
    Object.assign(this, { pool, ask });
    const heads = [["Request"], ["Phase"], ["Prompt", "cached, then computed, of the prompt's tokens"], ["Answer", "generated tokens of at most so many"], ["Pages", "pages that it holds", true], ["Age", "since it arrived", true]];
    const body = h("tbody");
    const caption = h("caption", { class: "hidden" }, "Running requests, then waiting ones in their order");
    $("requests-table").replaceChildren(h("table", {}, caption, h("thead", {}, h("tr", {}, ...heads.map(([label, title, right]) => h("th", { scope: "col", title, class: right && "n" }, label)))), body));
    this.rows = new Rows(body, (of) => this.#row(of));
    $("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = event.target.elements.id.value.trim();
      if (id) this.explain(id);
    });
    $("explain-close").addEventListener("click", () => $("explain-dialog").close());
  }

  show() {
    const { pool } = this;
    if (!pool.stats) return;
    const items = pool.requests.slice(0, SHOWN);
    this.rows.show(items, (of) => of.id);
    const left = Math.max(pool.requests.length, pool.requests.length < TOLD ? 0 : pool.numRequests) - items.length;
    say($("requests-more"), !items.length ? "Nothing runs and nothing waits." : left ? `${count(left)} more run or wait` : "");
  }

  #row(first) {
    const { pool } = this;
    const label = bdi(short(first.id), name(first.id, 120)), session = h("small", {});
    const button = h("button", { type: "button", class: "quiet name", "aria-label": `Explain request ${name(first.id, 40)}`, click: () => this.explain(first.id) }, label);
    const phase = h("span", { class: "phase" }), trouble = h("small", { class: "wrong" });
    const prompt = h("small", {}), promptBar = bar([]), answer = h("small", {}), answerBar = bar([]);
    const pages = h("td", { class: "n" }), age = h("td", { class: "n" });
    const row = h("tr", {}, h("th", { scope: "row" }, button, h("span", { class: "sub" }, session)), h("td", {}, phase, " ", trouble), h("td", { class: "progress" }, prompt, promptBar), h("td", { class: "progress" }, answer, answerBar), pages, age);
    const update = (of) => {
      say(session, of.session ? name(of.session, 32) : "");
      say(phase, PHASES[of.phase] ?? of.phase);
      phase.className = `phase ${of.phase}`;
      say(trouble, of.preemptions ? `preempted ${of.preemptions === 1 ? "once" : `${of.preemptions} times`}` : "");
      const all = of.prompt_tokens || 1;
      const cached = Math.min(of.cached_tokens, all);
      const computed = Math.min(Math.max(of.computed_tokens, cached), all);
      say(prompt, `${count(computed)} of ${count(of.prompt_tokens)}`);
      promptBar.title = `${percent(cached, all)} found in the cache`;
      fill(promptBar, [["cached-part", cached / all], ["computed-part", (computed - cached) / all]]);
      say(answer, of.max_tokens ? `${count(of.generated_tokens)} of ${count(of.max_tokens)}` : count(of.generated_tokens));
      fill(answerBar, [["answer-part", of.max_tokens ? of.generated_tokens / of.max_tokens : 0]]);
      say(pages, count(of.pages));
      say(age, span(of.age_s + Math.max(pool.now - pool.requestsAt, 0)));
    };
    return { row, update };
  }

  /** Open the dialog that says where a request's time went. */
  async explain(id) {
    const dialog = $("explain-dialog"), body = $("explain-body");
    body.replaceChildren(h("p", { class: "muted" }, "Asking the server …"));
    if (!dialog.open) dialog.showModal();
    try {
      const of = await this.ask(`requests/${encodeURIComponent(id)}/explain`);
      body.replaceChildren(...explanation(of));
    } catch (error) {
      body.replaceChildren(h("p", { class: "id" }, bdi(name(id, 80))), h("p", { class: "wrong", role: "alert" }, error.message));
    }
  }
}

/** The end of an id, which tells it from others. */
function short(id) {
  const shown = name(id, 300);
  return shown.length > 14 ? `…${shown.slice(-8)}` : shown;
}

function explanation(of) {
  const tiers = Object.entries(of.cached.by_tier).filter(([, n]) => n);
  const cached = [...tiers.map(([tier, n]) => [tier, `found on the ${tier}`, n]), ["copied", "copied from a part of a page", of.cached.copied]];
  const missed = Math.max(of.prompt_tokens - of.cached.tokens, 0);
  const parts = [...cached, ["computed", "computed", missed]].filter(([, , n]) => n);
  const times = [["queued", "waiting"], ["copying", "loading pages"], ["prefilling", "reading the prompt"], ["decoding", "answering"]]
    .map(([key, label]) => [key, label, of.times_s[key] ?? 0]);
  const total = of.times_s.total || times.reduce((sum, [, , s]) => sum + s, 0) || 1;
  const list = (title, items, show, all) => [
    h("h3", {}, title),
    bar(items.map(([kind, , n]) => [`${kind}-part`, n / all])),
    h("ul", { class: "parts" }, ...items.map(([kind, label, n]) => h("li", {}, h("i", { class: `swatch ${kind}-part` }), ` ${label} `, h("b", {}, show(n))))),
  ];
  const where = [of.session ? ["in session ", bdi(name(of.session, 60)), ", "] : [], [of.finished ? `finished (${of.finished})` : PHASES[of.phase] ?? of.phase ?? ""]].flat();
  const found = [
    h("p", { class: "id" }, bdi(name(of.id, 80)), h("br"), h("span", { class: "muted" }, ...where)),
    h("p", { class: "lead" }, of.text ?? ""),
    ...list(`Prompt: ${count(of.prompt_tokens)} tokens on ${count(of.num_pages)} pages`, parts, count, of.prompt_tokens || 1),
  ];
  if (of.missed?.length) {
    const rows = of.missed.map((miss) => h("tr", {}, h("th", { scope: "row", class: "n" }, `${count(miss.tokens[0])}–${count(miss.tokens[1] - 1)}`), h("td", { class: "phase-name" }, miss.reason.replaceAll("_", " ")), h("td", {}, bdi(miss.text), miss.evicted ? ` (${span(miss.evicted.ago_s)} ago)` : "")));
    const heads = ["Tokens", "Reason", "What it means"].map((label) => h("th", { scope: "col" }, label));
    found.push(h("div", { class: "scroll" }, h("table", {}, h("caption", {}, "Not taken from the cache"), h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows))));
  }
  found.push(...list(`Time: ${quick(of.times_s.total ?? 0)}`, times.filter(([, , s]) => s > 0), quick, total));
  if (of.preemptions?.length) {
    const items = of.preemptions.map((gave) => h("li", {}, `after ${quick(gave.at_s)}`, gave.by ? " for " : "", gave.by ? bdi(name(gave.by, 40)) : "", `: ${count(gave.lost_tokens)} tokens computed again, ${quick(gave.cost_s ?? 0)}`));
    found.push(h("h3", {}, "Preemptions"), h("ul", {}, ...items));
  }
  return found;
}
