// Curves over steps, drawn by uPlot. Charts of a page share their range of steps and their cursor.

import { h, onTheme, themed } from "./dom.js";
import { short, tick, whole } from "./format.js";
import uPlot from "./vendor/uplot-1.6.32/uPlot.esm.js";

const HEIGHT = 230;
const FONT = "12px system-ui, sans-serif";

/**
 * A chart.
 *
 * `series` lists {label, color (a CSS property), dots, band: [upper, lower]}; `format` writes its values; `zoomed` is
 * called with the steps between which somebody wants to look, or null for all. `set` takes the aligned columns (steps
 * first), the range and the marks, each with its step and colour; `logarithmic` may be set before.
 */
export class Chart {
  logarithmic = false;
  #plot = null;
  #columns = [[]];
  #range = null;
  #marks = [];

  constructor({ label, series, format = short, zoomed }) {
    Object.assign(this, { label, series, format, zoomed });
    this.element = h("div", { class: "chart", role: "img", "aria-label": label });
    this.#resized = new ResizeObserver(() => this.#fit());
    this.#resized.observe(this.element);
    this.#unthemed = onTheme(() => this.redraw());
  }

  #resized;
  #unthemed;

  set(columns, range, marks) {
    this.#columns = columns;
    this.#range = range;
    this.#marks = marks;
    if (!this.#plot) return this.#fit();
    this.#plot.setData(columns);
    this.#say();
    return undefined;
  }

  /** Draw all anew, as after a change of colours or of the scale. */
  redraw() {
    this.#plot?.destroy();
    this.#plot = null;
    this.#fit();
  }

  stop() {
    this.#resized.disconnect();
    this.#unthemed();
    this.#plot?.destroy();
  }

  #fit() {
    const width = this.element.clientWidth;
    if (!width) return;
    if (this.#plot) {
      if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT });
      return;
    }
    this.#plot = new uPlot(this.#options(width), this.#columns, this.element);
    this.#say();
  }

  /** Show the newest values in the legend while the cursor is elsewhere, and say them to screen readers. */
  #say() {
    const [steps, values] = this.#columns;
    let last = (values ?? []).length - 1;
    while (last > 0 && (values[last] === null || values[last] === undefined)) last -= 1;
    if (last < 0) return;
    this.element.setAttribute(
      "aria-label",
      `${this.label}: ${this.format(values[last])} at step ${whole(steps[last])}`,
    );
    if (this.#plot.cursor.idx === null || this.#plot.cursor.left < 0) this.#plot.setLegend({ idx: last });
  }

  #options(width) {
    const stroke = themed("--muted");
    const grid = { stroke: themed("--grid"), width: 1 };
    const axis = { stroke, grid, ticks: grid, font: FONT };
    return {
      width,
      height: HEIGHT,
      scales: {
        x: { time: false, range: (_, low, high) => this.#span(low, high) },
        y: { distr: this.logarithmic ? 3 : 1 },
      },
      axes: [
        { ...axis, values: (_, splits) => splits.map((step) => (Number.isInteger(step) ? tick(step) : "")) },
        { ...axis, size: 56, values: (_, splits) => splits.map((value) => (value === null ? "" : tick(value))) },
      ],
      series: [{ label: "Step", value: (_, step) => whole(step) }, ...this.series.map((one) => this.#line(one))],
      legend: { markers: { width: 0, fill: (_, index) => this.#stroke(this.series[index - 1]) } },
      bands: this.series.filter((one) => one.band).map((one) => ({ series: one.band, fill: themed("--band") })),
      cursor: {
        sync: { key: "steps" },
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => this.zoomed(null) },
      },
      hooks: {
        setSelect: [(plot) => this.#select(plot)],
        draw: [(plot) => this.#drawMarks(plot)],
        setCursor: [() => this.#plot && this.#say()],
      },
    };
  }

  #line({ label, color, dots, band, hidden }) {
    const stroke = this.#stroke({ color, hidden });
    const value = (_, number) => (number === null || number === undefined ? "–" : this.format(number));
    const points = dots ? { show: true, size: 7, fill: stroke, stroke } : { show: false };
    return {
      label,
      stroke,
      width: 1.6,
      points,
      value,
      paths: dots ? () => null : undefined,
      class: hidden || band ? "unlisted" : undefined,
    };
  }

  #stroke(one) {
    return !one || one.hidden ? "transparent" : themed(one.color);
  }

  #span(low, high) {
    if (this.#range) return this.#range;
    if (low === null || low === undefined) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [left, left + width].map((at) => Math.round(plot.posToVal(at, "x")));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (range[1] > range[0]) this.zoomed(range);
  }

  #drawMarks(plot) {
    const { ctx: pen, bbox } = plot;
    pen.save();
    pen.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const { step, color } of this.#marks) {
      pen.strokeStyle = themed(color);
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      pen.beginPath();
      pen.moveTo(x, bbox.top);
      pen.lineTo(x, bbox.top + bbox.height);
      pen.stroke();
    }
    pen.restore();
  }
}

/** Several lists of points by step in the columns that a chart takes. */
export function aligned(tables) {
  return uPlot.join(tables);
}
