// Drawings on a canvas, or by the same calls as SVG: axes, curves, points, and lines across parallel axes.

import { themed } from "../dom.js";

const FONT = "12px system-ui, sans-serif";
const MARGIN = { left: 62, right: 14, top: 10, bottom: 38 };
const LEAST_RANGE = 3; // pixels between the least and the most of a point from which the curve shows both

/** Pixels for values from `low` to `high`; `from` and `to` are their pixels. */
export class Scale {
  constructor(low, high, from, to, logarithmic = false) {
    const change = logarithmic ? Math.log10 : (value) => value;
    if (low === high) [low, high] = logarithmic ? [low / 2, high * 2] : [low - 1, high + 1];
    Object.assign(this, { low, high, from, to, logarithmic, change });
    this.begin = change(low);
    this.perUnit = (to - from) / (change(high) - this.begin);
  }

  /** The pixel of a value; not a number where a logarithmic scale has none. */
  at(value) {
    return this.from + (this.change(value) - this.begin) * this.perUnit;
  }

  /** The value at a pixel. */
  value(pixel) {
    const value = this.begin + (pixel - this.from) / this.perUnit;
    return this.logarithmic ? 10 ** value : value;
  }

  /** Round values, about this many. */
  ticks(count) {
    if (this.logarithmic && this.high / this.low >= 10) {
      const decades = Math.log10(this.high / this.low);
      const between = decades > count ? [1] : decades > count / 3 ? [1, 3] : [1, 2, 5];
      const all = [];
      for (let power = Math.floor(Math.log10(this.low)); 10 ** power <= this.high; power += Math.ceil(decades / count))
        all.push(...between.map((times) => times * 10 ** power));
      return all.filter((value) => value >= this.low && value <= this.high);
    }
    const rough = (this.high - this.low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
    const first = Math.ceil(this.low / step);
    const number = Math.floor(this.high / step) - first + 1;
    return Array.from({ length: Math.max(0, number) }, (_, index) => Number(((first + index) * step).toPrecision(12)));
  }
}

/** The part of a drawing within its axes. */
export function inside(width, height) {
  return { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
}

/** The hue of one of many runs: neighbours are as far apart as can be. */
export function runHue(index) {
  return Math.round((215 + index * 137.508) % 360);
}

/** The colour of one of many runs, in light or dark. */
export function runColor(index) {
  return `hsl(${runHue(index)}, ${themed("--run").replace(" ", ", ")})`; // as programs that read SVG know it
}

/** The colour of a share between 0 and 1, from the theme's cool one to its hot one. */
export function shareColor(share) {
  const [cool, hot] = ["--cool", "--hot"].map((name) => rgb(themed(name)));
  return `rgb(${cool.map((from, channel) => Math.round(from + (hot[channel] - from) * share)).join(", ")})`;
}

/** Clear a drawing, with the background of the page's cards. */
export function drawBackground(pen, width, height) {
  pen.fillStyle = themed("--card");
  pen.fillRect(0, 0, width, height);
}

/** Axes with their labels; `x` and `y` are {scale, label, format}, or have `names` instead of numbers. */
export function drawAxes(pen, box, x, y) {
  pen.font = FONT;
  pen.lineWidth = 1;
  const [grid, text] = [themed("--grid"), themed("--muted")];
  const ticks = (axis, count) => (axis.names ? axis.names.map((_, index) => index) : axis.scale.ticks(count));
  const written = (axis, value) => (axis.names ? short(axis.names[value], 10) : axis.format(value));
  pen.textAlign = "center";
  pen.textBaseline = "top";
  let free = -Infinity;
  for (const value of ticks(x, Math.max(3, Math.round((box.right - box.left) / 90)))) {
    const at = x.scale.at(value);
    line(pen, grid, at, box.top, at, box.bottom);
    pen.fillStyle = text;
    if (at < free) continue;
    pen.fillText(written(x, value), at, box.bottom + 5);
    free = at + 56;
  }
  pen.fillText(x.label, (box.left + box.right) / 2, box.bottom + 21);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of ticks(y, 6)) {
    const at = y.scale.at(value);
    line(pen, grid, box.left, at, box.right, at);
    pen.fillStyle = text;
    pen.fillText(written(y, value), box.left - 6, at);
  }
}

/**
 * A curve of points {x, mean, min, max} as lists: a line through the means, which a point without a value ends, and a
 * vertical one where a point's least and most are apart. Two paths are drawn several times as fast as one with both.
 */
export function drawCurve(pen, { x, mean, min, max }, across, up, color, width = 1) {
  pen.strokeStyle = color;
  pen.lineWidth = width;
  const ranges = [];
  let begun = false;
  pen.beginPath();
  // From the last point before the shown part to the first after it.
  const first = Math.max(0, x.findIndex((each) => each >= across.low) - 1);
  const after = x.findIndex((each) => each > across.high);
  for (let index = first; index <= (after < 0 ? x.length - 1 : after); index += 1) {
    const [at, middle] = [across.at(x[index]), mean[index] === null ? NaN : up.at(mean[index])];
    if (!Number.isFinite(at) || !Number.isFinite(middle)) {
      begun = false;
      continue;
    }
    if (begun) pen.lineTo(at, middle);
    else pen.moveTo(at, middle);
    if (!begun && (mean[index + 1] ?? null) === null) pen.lineTo(at + 1.5, middle); // alone
    begun = true;
    const low = up.at(min[index]);
    const ends = [up.at(max[index]), Number.isFinite(low) ? low : middle]; // 0 is nowhere on a logarithmic axis
    if (ends[1] - ends[0] >= LEAST_RANGE) ranges.push([at, ...ends]);
  }
  pen.stroke();
  if (!ranges.length) return;
  pen.beginPath();
  for (const [at, from, to] of ranges) {
    pen.moveTo(at, from);
    pen.lineTo(at, to);
  }
  pen.stroke();
}

/** A point. */
export function drawPoint(pen, x, y, color, radius = 4) {
  pen.fillStyle = color;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

/** Vertical axes side by side: {at, label, scale, format} or with `names`. */
export function drawParallelAxes(pen, axes, box) {
  pen.font = FONT;
  pen.lineWidth = 1;
  const room = axes.length > 1 ? axes[1].at - axes[0].at : box.right - box.left;
  const fits = Math.max(4, Math.floor(room / 7));
  axes.forEach((axis, index) => {
    line(pen, themed("--muted"), axis.at, box.top, axis.at, box.bottom);
    const last = index === axes.length - 1;
    pen.textAlign = last ? "right" : index ? "center" : "left";
    pen.textBaseline = "top";
    pen.fillStyle = themed("--text");
    pen.fillText(short(axis.label, index % axes.length ? fits : fits + 4, true), axis.at, box.bottom + 6);
    pen.textAlign = last ? "right" : "left";
    pen.textBaseline = "middle";
    pen.fillStyle = themed("--muted");
    const values = axis.names ? axis.names.map((_, place) => place).slice(0, 12) : axis.scale.ticks(5);
    for (const value of values) {
      const text = axis.names ? short(axis.names[value], fits) : axis.format(value);
      pen.fillText(text, axis.at + (last ? -5 : 5), axis.scale.at(value));
    }
  });
}

/** A line through points [x, y]. */
export function drawThrough(pen, points, color, width = 1) {
  pen.strokeStyle = color;
  pen.lineWidth = width;
  pen.beginPath();
  points.forEach(([x, y], index) => (index ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.stroke();
}

/** Have what `draw` draws only show within a box. */
export function clipped(pen, box, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  pen.clip();
  draw();
  pen.restore();
}

/** A pen as that of a canvas, as far as drawings here use one, whose `text` is SVG. */
export class SvgPen {
  fillStyle = "";
  strokeStyle = "";
  lineWidth = 1;
  textAlign = "left";
  textBaseline = "middle";
  #path = "";
  #parts = [];
  #clips = 0;

  constructor(width, height) {
    Object.assign(this, { width, height });
  }

  get text() {
    const size = `width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${this.#parts.join("\n")}</svg>\n`;
  }

  beginPath() {
    this.#path = "";
  }

  moveTo(x, y) {
    this.#path += `M${round(x)} ${round(y)}`;
  }

  lineTo(x, y) {
    this.#path += `L${round(x)} ${round(y)}`;
  }

  arc(x, y, radius) {
    const [left, turn] = [round(x - radius), `${radius} ${radius} 0 1 0`];
    this.#path += `M${left} ${round(y)}a${turn} ${2 * radius} 0a${turn} ${-2 * radius} 0`;
  }

  rect(x, y, width, height) {
    this.#path += `M${x} ${y}h${width}v${height}h${-width}z`;
  }

  stroke() {
    const look = `fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}"`;
    this.#parts.push(`<path ${look} d="${this.#path}"/>`);
  }

  fill() {
    this.#parts.push(`<path fill="${this.fillStyle}" d="${this.#path}"/>`);
  }

  fillRect(x, y, width, height) {
    this.#parts.push(`<rect x="${x}" y="${y}" width="${width}" height="${height}" fill="${this.fillStyle}"/>`);
  }

  fillText(text, x, y) {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    const down = { top: 10, middle: 4 }[this.textBaseline];
    const place = `x="${round(x)}" y="${round(y + down)}" text-anchor="${anchor}"`;
    this.#parts.push(
      `<text ${place} font-size="12" font-family="system-ui, sans-serif" fill="${this.fillStyle}">${escaped(text)}</text>`,
    );
  }

  save() {}

  clip() {
    this.#clips += 1;
    this.#parts.push(
      `<clipPath id="clip${this.#clips}"><path d="${this.#path}"/></clipPath><g clip-path="url(#clip${this.#clips})">`,
    );
  }

  restore() {
    this.#parts.push("</g>");
  }
}

function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  // One character that XML does not allow, such as a control character, makes the whole drawing unreadable.
  return String(text)
    .replace(/[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "\ufffd")
    .replace(/[&<>"]/g, (character) => names[character]);
}

function round(value) {
  return Math.round(value * 10) / 10;
}

function line(pen, color, fromX, fromY, toX, toY) {
  drawThrough(
    pen,
    [
      [fromX, fromY],
      [toX, toY],
    ],
    color,
  );
}

/** The beginning or the end of a text, cut to a maximum number of characters. */
function short(text, most, end = false) {
  const all = String(text);
  if (all.length <= most) return all;
  return end ? `…${all.slice(1 - most)}` : `${all.slice(0, most - 1)}…`;
}

function rgb(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}
