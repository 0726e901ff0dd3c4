/** The tree of prefixes that are shared: asked for while it is open. */

import { $, bar, bdi, h, say } from "./dom.js";
import { bytes, count, name } from "./words.js";

const EVERY_MS = 5000;

export class Tree {
  constructor(pool, { ask }) {
    Object.assign(this, { pool, ask });
    $("tree").addEventListener("toggle", () => {
      clearTimeout(this.timer);
      if ($("tree").open) this.refresh();
    });
  }

  async refresh() {
    clearTimeout(this.timer);
    if (!$("tree").open) return;
    if (!document.hidden && this.pool.stats) {
      try {
        this.#show(await this.ask("cache/tree?limit=200"));
      } catch (error) {
        say($("tree-more"), error.message);
      }
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), EVERY_MS);
  }

  #show(tree) {
    const size = this.pool.about.page_bytes;
    say($("tree-sum"), tree.saved_pages ? `sharing saves ${bytes(tree.saved_bytes)} now` : "nothing is shared now");
    const depths = new Map();
    const most = Math.max(...tree.nodes.map((node) => node.pages), 1);
    const rows = tree.nodes.map((node) => {
      const depth = node.parent === null ? 0 : (depths.get(node.parent) ?? 0) + 1;
      depths.set(node.id, depth);
      const label = node.text ? h("q", {}, bdi(name(node.text.replace(/\s+/g, " "), 80)), node.num_tokens > this.pool.about.page_tokens ? " …" : "") : `tokens ${count(node.start)} to ${count(node.start + node.num_tokens - 1)}`;
      const head = h("th", { scope: "row" }, h("span", { class: "hidden" }, `level ${depth + 1}: `), label, node.tenant ? h("small", {}, ` ${name(node.tenant, 16)}`) : "");
      head.style.paddingInlineStart = `calc(.5rem + ${Math.min(depth, 12)} * var(--step))`;
      if (depth) head.classList.add("under");
      const where = Object.entries(node.tiers).filter(([, n]) => n);
      return h("tr", {}, head,
        h("td", { class: "n" }, count(node.num_tokens)),
        h("td", { class: "n held", title: where.map(([tier, n]) => `${tier} ${count(n)}`).join(", ") }, count(node.pages), bar(where.map(([tier, n]) => [tier, n / most]))),
        h("td", { class: "n" }, count(node.sessions)),
        h("td", { class: "n" }, count(node.requests)),
        h("td", { class: "n" }, node.saved_pages ? bytes(node.saved_pages * size) : "–"),
        h("td", { class: "n" }, node.branches ? `+ ${count(node.branches)}` : ""));
    });
    const heads = [["Prefix"], ["Tokens", true], ["Pages", true], ["Sessions", true], ["Requests", true], ["Saves", true], ["Not shown", true]];
    $("tree-table").replaceChildren(h("table", {}, h("caption", { class: "hidden" }, "Prefixes that several have in common, with what hangs below each"), h("thead", {}, h("tr", {}, ...heads.map(([text, right]) => h("th", { scope: "col", class: right && "n" }, text)))), h("tbody", {}, ...rows)));
    say($("tree-more"), !rows.length ? "No two requests or sessions have a page in common." : tree.num_left_out ? `${count(tree.num_left_out)} more are not listed` : "");
  }
}
