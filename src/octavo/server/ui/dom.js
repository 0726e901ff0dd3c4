/** Elements. Texts are always text nodes, so that no name can be markup. */

/** An element: h("td", {class: "n"}, "text", child). Functions are listeners, `null` children are left out. */
export function h(tag, of = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(of)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Set a text only where it differs: an unchanged one is neither laid out nor read aloud again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A client's name, which may run from right to left, apart from what stands around it. */
export const bdi = (text, title) => h("bdi", title && title !== text ? { title } : {}, text);

/** A bar of parts: [[class, share of 1]…]; it is an ornament of the figure that stands beside it. */
export function bar(parts) {
  const element = h("span", { class: "bar", "aria-hidden": "true" });
  fill(element, parts);
  return element;
}

export function fill(element, parts) {
  while (element.children.length > parts.length) element.lastChild.remove();
  parts.forEach(([kind, share], i) => {
    const part = element.children[i] ?? element.appendChild(document.createElement("i"));
    if (part.className !== kind) part.className = kind;
    const width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
    if (part.style.width !== width) part.style.width = width;
  });
}

/** Work that takes a tenth of the time at most: called again too soon after a long run, it does nothing. */
export function sparing(work) {
  let due = 0;
  return () => {
    const began = performance.now();
    if (began < due) return;
    work();
    const ended = performance.now();
    due = ended + 9 * (ended - began);
  };
}

/** A table's body whose rows are kept by key: a button keeps its focus while figures change around it. */
export class Rows {
  constructor(body, make) {
    this.body = body;
    this.make = make; // (key) => {row, update(item)}
    this.kept = new Map();
  }

  /** Show the items in order; while `still`, rows that are there keep their places. */
  show(items, keyOf, still = false) {
    const seen = new Set();
    for (const item of items) {
      const key = keyOf(item);
      seen.add(key);
      let entry = this.kept.get(key);
      if (!entry) {
        entry = this.make(item);
        this.kept.set(key, entry);
        if (still) this.body.append(entry.row);
      }
      entry.update(item);
    }
    for (const [key, entry] of this.kept) {
      if (!seen.has(key)) {
        entry.row.remove();
        this.kept.delete(key);
      }
    }
    if (still) return;
    let at = this.body.firstElementChild;
    for (const item of items) {
      const { row } = this.kept.get(keyOf(item));
      if (row === at) at = at.nextElementSibling;
      else this.body.insertBefore(row, at);
    }
  }
}
