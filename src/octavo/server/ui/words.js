/** Numbers, times and names as people read them. */

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));

/** Bytes, in the powers of 1024 that the server's flags take. */
export function bytes(n) {
  if (n < 1024) return `${Math.round(n)} B`;
  let unit = -1;
  while (n >= 1023.5 && unit < 4) { n /= 1024; unit++; }
  return `${n < 9.95 ? n.toFixed(1) : count(n)} ${"KMGTP"[unit]}iB`;
}

export function percent(part, of) {
  if (!of) return "–";
  const value = (100 * part) / of;
  if (value > 0 && value < 1) return "< 1 %";
  if (value > 99 && value < 100) return "> 99 %";
  return `${Math.round(value)} %`;
}

/** How long something lasted: 0.8 s, 42 s, 12 min, 2 h 5 min, 3 d. */
export function span(s) {
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 99.5) return `${Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60), rest = minutes % 60;
  if (hours < 10) return rest ? `${hours} h ${rest} min` : `${hours} h`;
  return hours < 48 ? `${Math.round(minutes / 60)} h` : `${Math.round(hours / 24)} d`;
}

/** How quick something was: 850 µs, 21 ms, 1.24 s. */
export function quick(s) {
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.9995) return `${s < 0.00995 ? (s * 1e3).toFixed(1) : Math.round(s * 1e3)} ms`;
  return s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : span(s);
}

/** A name that a client chose: what cannot be seen or turns the text around becomes visible, and it is cut. */
export function name(text, most = 64) {
  const seen = String(text).slice(0, 4 * most + 8)
    .replace(/(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Cs}\u2028\u2029\u115f\u1160\u3164\uffa0]/gu, "\ufffd")
    .replace(/(\p{M}{4})\p{M}+/gu, "$1");
  const points = Array.from(seen);
  return points.length > most ? `${points.slice(0, most - 1).join("")}…` : points.join("");
}

/** A holder in one or two words. */
export function holder(of, most = 64) {
  if (!of) return "another tenant's, or nobody's";
  if (of.kind === "prefix") return "cached prefixes";
  if (of.kind === "shared") return "shared by sessions";
  return name(of.name, most) || (of.kind === "request" ? "a request" : "a session");
}
