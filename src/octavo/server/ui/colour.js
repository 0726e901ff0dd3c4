/** The colours of states, holders and tenants, as the style sheet and the theme have them. */

import { STATES } from "./pool.js";

/** 0xAABBGGRR, as a canvas keeps a pixel on the machines that there are. */
const pixel = (r, g, b) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function parse(hex) {
  const value = Number.parseInt(hex.slice(1), 16);
  return pixel(value >> 16, (value >> 8) & 255, value & 255);
}

export function mix(a, b, share) {
  const part = (shift) => {
    const from = (a >>> shift) & 255;
    return Math.round(from + (((b >>> shift) & 255) - from) * share) << shift;
  };
  return (part(0) | part(8) | part(16) | (255 << 24)) >>> 0;
}

export const hex = (of) => `#${[of & 255, (of >>> 8) & 255, (of >>> 16) & 255].map((v) => v.toString(16).padStart(2, "0")).join("")}`;

/** From OKLCH, in which equal lightness looks equally light. Source: bottosson.github.io/posts/oklab */
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180), b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return pixel(...linear.map((v) => {
    const clipped = Math.min(Math.max(v, 0), 1);
    return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
  }));
}

export class Palette {
  constructor() {
    this.read();
  }

  /** Take the colours from the style sheet: at the start, and when the theme changes. */
  read() {
    this.states = STATES.map((state) => parse(css(`--${state}`)));
    this.panel = parse(css("--panel"));
    this.flash = parse(css("--flash"));
    this.other = parse(css("--other"));
    this.lightness = Number(css("--hue-lightness"));
    this.hues = new Map();
  }

  /** One of many: neighbours by number are far apart on the wheel. */
  hue(number) {
    let found = this.hues.get(number);
    if (found === undefined) {
      found = oklch(this.lightness, 0.105 + 0.03 * (number % 2), (number * 137.508 + 40) % 360);
      this.hues.set(number, found);
    }
    return found;
  }
}
