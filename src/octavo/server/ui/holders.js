/** Who holds memory, by how much or how long idle, and what can be done about a session. */

import { $, bar, bdi, fill, h, Rows, say } from "./dom.js";
import { bytes, count, holder as holderName, name, percent, span } from "./words.js";

const SHOWN = 40;
const COLUMNS = [
  { key: "name", label: "Holder", of: (_, of) => holderName(of).toLowerCase() },
  { key: "bytes", label: "Holds", down: true, of: (pool, of) => pool.bytes(of) },
  { key: "share", label: "Pool", down: true, title: "share of the pool on the device", of: (pool, of) => pool.tiers[0]?.of(of.id) ?? 0 },
  { key: "idle", label: "Idle", down: true, of: (pool, of) => pool.idle(of) },
  { key: "found", label: "Found", down: true, title: "share of its prompts that was in the cache", of: (_, of) => (of.queried_tokens ? of.hit_tokens / of.queried_tokens : -1) },
];

export class Holders {
  /** `ask` is the server's, `light(id)` lights a holder's pages on the map. */
  constructor(pool, { ask, light }) {
    Object.assign(this, { pool, ask, light });
    this.sort = { key: "bytes", down: true };
    this.most = SHOWN;
    this.picked = null;
    this.heads = COLUMNS.map((column) => {
      const button = h("button", { type: "button", class: "quiet sort", title: column.title, click: () => this.#sortBy(column) }, column.label);
      return h("th", { scope: "col", class: column.down ? "n" : null }, button);
    });
    const body = (this.body = h("tbody"));
    const caption = h("caption", { class: "hidden" }, "Sessions and other holders of pages, with what they hold on all tiers");
    $("holders-table").replaceChildren(h("table", {}, caption, h("thead", {}, h("tr", {}, ...this.heads, h("th", { scope: "col" }, h("span", { class: "hidden" }, "Actions")))), body));
    this.rows = new Rows(body, (of) => this.#row(of));
    $("holders-find").addEventListener("input", () => this.show());
    this.#mark();
  }

  #sortBy({ key, down }) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : Boolean(down) };
    this.#mark();
    this.show(true);
  }

  #mark() {
    COLUMNS.forEach(({ key }, i) => {
      const own = key === this.sort.key;
      if (own) this.heads[i].setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else this.heads[i].removeAttribute("aria-sort");
    });
  }

  pick(id) {
    this.picked = id;
    this.show();
    if (id !== null) this.rows.kept.get(id)?.row.scrollIntoView({ block: "nearest" });
  }

  /** Write the table. Rows keep their places while somebody is about to press one of their buttons. */
  show(sorted = false) {
    const { pool, sort } = this;
    if (!pool.stats) return;
    const wanted = $("holders-find").value.trim().toLowerCase();
    const column = COLUMNS.find(({ key }) => key === sort.key);
    let found = [...pool.holders.values()].filter((of) => of.kind === "session" || pool.bytes(of) > 0);
    if (wanted) found = found.filter((of) => `${of.name} ${of.tenant}`.toLowerCase().includes(wanted));
    const keyed = found.map((of) => [column.of(pool, of), of]);
    keyed.sort(([a, x], [b, y]) => (a < b ? -1 : a > b ? 1 : y.id - x.id) * (sort.down ? -1 : 1));
    const items = keyed.slice(0, this.most).map(([, of]) => of);
    const busy = this.body.matches(":hover") || this.body.querySelector(":focus-visible") !== null;
    this.rows.show(items, (of) => of.id, busy && !sorted && !wanted);
    const more = $("holders-more");
    const left = found.length - items.length;
    if (!found.length) more.replaceChildren(wanted ? "No holder has that in its name." : "Nothing holds a page yet: sessions appear as soon as a request names one.");
    else if (left <= 0) more.replaceChildren();
    else if (!more.querySelector("button")) {
      more.replaceChildren(h("button", { type: "button", click: () => { this.most *= 4; more.replaceChildren(); this.show(true); } }, "Show more"), h("span", {}, ""));
    }
    if (left > 0) say(more.lastChild, ` ${count(left)} more hold pages`);
  }

  #row(first) {
    const { pool } = this;
    const label = bdi(""), tenant = h("small", {}), state = h("small", {});
    const button = h("button", { type: "button", class: "quiet name" }, label);
    const held = h("b", {}), lengths = bar([]), share = h("td", { class: "n" });
    const idle = h("td", { class: "n" }), hits = h("td", { class: "n" });
    const actions = h("td", { class: "do" });
    const row = h("tr", {}, h("th", { scope: "row" }, button, h("span", { class: "sub" }, state, tenant)), h("td", { class: "n held" }, held, lengths), share, idle, hits, actions);
    let now = first, pin, demote;
    button.addEventListener("click", () => {
      this.picked = this.picked === now.id ? null : now.id;
      this.light(this.picked);
      this.show();
    });
    const update = (of) => {
      now = of;
      const shown = holderName(of);
      say(label, shown);
      button.title = of.kind === "session" ? "Light its pages on the map" : shown;
      say(tenant, of.tenant ? name(of.tenant, 16) : "");
      const pinned = pool.pinned(of);
      say(state, of.running ? `${count(of.running)} running` : pinned > 0 ? `pinned for ${span(pinned)}` : "");
      state.className = of.running ? "busy" : pinned > 0 ? "pin" : "";
      const pageBytes = pool.about.page_bytes, all = pool.bytes(of);
      const [device] = pool.tiers;
      say(held, bytes(all));
      say(share, device?.of(of.id) ? percent(device.of(of.id), device.size) : "");
      const most = Math.max(this.#largest(), 1);
      lengths.parentElement.title = pool.tiers.map((tier) => `${tier.name} ${bytes(tier.of(of.id) * pageBytes)}`).join(", ");
      fill(lengths, pool.tiers.map((tier) => [tier.name, (tier.of(of.id) * pageBytes) / most]));
      say(idle, of.kind !== "session" ? "" : of.running ? "–" : span(pool.idle(of)));
      say(hits, of.kind === "session" && of.queried_tokens ? percent(of.hit_tokens, of.queried_tokens) : "");
      row.classList.toggle("picked", this.picked === of.id);
      button.setAttribute("aria-pressed", String(this.picked === of.id));
      if (of.kind === "session" && !actions.children.length) {
        const act = (verb, title) => h("button", { type: "button", title, "aria-label": `${verb} ${shown}`, click: () => this.act(verb.toLowerCase(), now) }, verb);
        pin = h("button", { type: "button", click: () => this.act(pool.pinned(now) > 0 ? "unpin" : "pin", now) }, "Pin");
        demote = act("Demote", "Its idle pages leave the device for the next tier");
        actions.append(pin, demote, act("Release", "Drop its idle pages everywhere, and forget it"));
      }
      if (pin) {
        demote.hidden = pool.tiers.length < 2;
        say(pin, pinned > 0 ? "Unpin" : "Pin");
        pin.setAttribute("aria-label", `${pin.textContent} ${shown}`);
        pin.title = pinned > 0 ? "Let its pages go when others need room" : "Its pages stay where they are for 10 minutes";
      }
    };
    return { row, update };
  }

  #largest() {
    if (this.largestAt !== this.pool.seq) {
      this.largestAt = this.pool.seq;
      this.largest = 0;
      for (const of of this.pool.holders.values()) this.largest = Math.max(this.largest, this.pool.bytes(of));
    }
    return this.largest;
  }

  /** Pin, unpin, demote or release a session, after a question where it cannot be undone. What came of it is said below. */
  async act(action, of) {
    const shown = holderName(of, 40);
    if (of.name === "." || of.name === "..") return this.#said(`A browser cannot name the session “${of.name}”: use curl with its dots written as %2E.`, true);
    if (action === "release" && !(await sure(shown, this.pool.bytes(of)))) return;
    const query = this.pool.about.admin && of.tenant ? `?tenant=${encodeURIComponent(of.tenant)}` : "";
    const path = `sessions/${encodeURIComponent(of.name)}/${action === "unpin" ? "pin" : action}${query}`;
    const body = { pin: {}, unpin: { ttl_s: 0 } }[action];
    try {
      const now = await this.ask(path, { method: "POST", body });
      of.pinned_s = action === "release" ? 0 : now.pinned_s;
      of.at = this.pool.now;
      const total = now.bytes.device + now.bytes.host + now.bytes.disk;
      this.#said({
        pin: () => `${shown} is pinned for ${span(now.pinned_s)}.`,
        unpin: () => `${shown} is not pinned any more.`,
        demote: () => `${shown} leaves the device: ${bytes(now.bytes.device)} are still there.`,
        release: () => `${shown} is released; it held ${bytes(total)}.`,
      }[action]());
    } catch (error) {
      this.#said(`${shown}: ${error.message}`, true);
    }
  }

  #said(text, wrong = false) {
    const line = $("holders-said");
    line.classList.toggle("wrong", wrong);
    say(line, text);
  }
}

/** Ask before a release. */
function sure(shown, size) {
  const dialog = $("sure-dialog");
  say($("sure-title"), `Release ${shown}?`);
  say($("sure-text"), `Up to ${bytes(size)} are dropped on every tier, and the session is forgotten. Its next request computes its whole prompt again. Pages that others share stay.`);
  return new Promise((resolve) => {
    dialog.returnValue = "";
    $("sure-yes").onclick = () => dialog.close("yes");
    $("sure-no").onclick = () => dialog.close("");
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
    $("sure-no").focus();
  });
}
