// How long each rank computed in each step against the median rank: a strip of cells, blue for less, orange for more.

import { card, h, onTheme, setText, themed } from "./dom.js";
import { duration, node, whole } from "./format.js";

const EXTREME = 1.6; // times the median, or one part of it, at which a colour is at its strongest
const TELLING = 1.15; // a rank that is this far from the median is named
const SHADES = 100; // of colour between the median and either extreme
const NEWEST = 50;
const GUTTER = 34;
const FOOT = 18;

/** The ratios of one step's ranks to their median. */
export function ratios(busySeconds) {
  const known = Float64Array.from(busySeconds.filter((value) => typeof value === "number")).sort();
  const middle = known.length / 2;
  const median = known.length % 2 ? known[Math.floor(middle)] : (known[middle - 1] + known[middle]) / 2;
  return busySeconds.map((value) => (typeof value === "number" && median > 0 ? value / median : null));
}

/** What is drawn of the ranks' rows; rows that were drawn before, perhaps read again since, are not sorted again. */
export function tableOf(ranks, drawn) {
  const known = new Map(drawn.map((row) => [row.step, row]));
  return ranks.map(({ step, busy_seconds: busy }) => {
    const row = known.get(step);
    const same = row?.busy.length === busy.length && busy.every((seconds, rank) => seconds === row.busy[rank]);
    return same ? row : { step, busy, ratios: ratios(busy) };
  });
}

/** The colour of a ratio, as [red, green, blue] between the theme's three. */
export function heatColor(ratio, { cool, even, hot }) {
  const strength = Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(EXTREME)));
  const end = strength < 0 ? cool : hot;
  return even.map((from, channel) => Math.round(from + (end[channel] - from) * Math.abs(strength)));
}

/** The card. `update` takes the ranks' rows {step, busy_seconds} and the node of each rank. */
export function heatCard() {
  const canvas = h("canvas", { class: "heat", tabindex: 0, role: "img" });
  const lead = h("p", { class: "lead" });
  const readout = h("p", { class: "muted", "aria-live": "polite" });
  const scale = h(
    "p",
    { class: "heat-scale" },
    h("span", {}, `${(1 / EXTREME).toFixed(1)} ×`),
    h("i"),
    h("span", {}, `${EXTREME} × the median rank`),
  );
  const element = card("Ranks", { id: "ranks", controls: [scale] }, lead, canvas, readout);
  let table = [];
  let nodes = [];
  let cursor = null;
  const geometry = { left: GUTTER, width: 0, height: 0, rows: 0 };

  function update(ranks, placed) {
    table = tableOf(ranks, table);
    nodes = placed ?? [];
    element.hidden = !table.length;
    setText(lead, slowest(table, nodes));
    canvas.setAttribute(
      "aria-label",
      `Time that each rank computed, by step. ${lead.textContent} Arrow keys move over the cells.`,
    );
    draw();
  }

  function draw() {
    const width = canvas.clientWidth;
    if (!width || !table.length) return;
    const rows = Math.max(...table.map((row) => row.ratios.length));
    const cell = Math.max(2, Math.min(20, Math.floor(300 / rows)));
    Object.assign(geometry, { width: width - GUTTER, height: rows * cell, rows });
    const density = devicePixelRatio || 1;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round((rows * cell + FOOT) * density);
    canvas.style.setProperty("height", `${rows * cell + FOOT}px`);
    const pen = canvas.getContext("2d");
    pen.scale(density, density);
    const colors = { cool: rgb(themed("--cool")), even: rgb(themed("--even")), hot: rgb(themed("--hot")) };
    const step = geometry.width / table.length;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(picture(rows, colors), GUTTER, 0, geometry.width, geometry.height);
    for (let rank = 1; cell > 6 && rank <= rows; rank += 1) {
      pen.clearRect(GUTTER, rank * cell - 1, geometry.width, 1); // between ranks
    }
    labels(pen, cell, step);
  }

  /** A pixel for each rank and step, which is scaled afterwards: a gang may have a thousand ranks. */
  function picture(rows, colors) {
    const pixels = new OffscreenCanvas(table.length, rows);
    const pen = pixels.getContext("2d");
    const image = pen.createImageData(table.length, rows);
    const shades = Array.from({ length: 2 * SHADES + 1 }, (_, shade) =>
      heatColor(EXTREME ** (shade / SHADES - 1), colors),
    );
    const perShade = SHADES / Math.log(EXTREME);
    table.forEach((row, column) =>
      row.ratios.forEach((ratio, rank) => {
        if (ratio === null) return;
        const shade = SHADES + Math.round(Math.log(ratio) * perShade);
        const color = shades[Math.max(0, Math.min(2 * SHADES, shade))];
        const at = 4 * (rank * table.length + column);
        image.data[at] = color[0];
        image.data[at + 1] = color[1];
        image.data[at + 2] = color[2];
        image.data[at + 3] = 255;
      }),
    );
    pen.putImageData(image, 0, 0);
    return pixels;
  }

  function labels(pen, cell, step) {
    pen.fillStyle = themed("--muted");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const every = Math.ceil(14 / cell);
    for (let rank = 0; rank < geometry.rows; rank += every)
      pen.fillText(String(rank), GUTTER - 6, rank * cell + cell / 2);
    const steps = [0, Math.floor(table.length / 2), table.length - 1];
    [...new Set(steps)].forEach((column, index, all) => {
      pen.textAlign = index === 0 ? "left" : index === all.length - 1 ? "right" : "center";
      pen.fillText(
        `step ${whole(table[column].step)}`,
        GUTTER + (column + (pen.textAlign === "right" ? 1 : 0)) * step,
        geometry.height + FOOT / 2 + 1,
      );
    });
  }

  function point(column, rank) {
    const row = table[Math.max(0, Math.min(table.length - 1, column))];
    if (!row || row.ratios[rank] === null || row.ratios[rank] === undefined) return setText(readout, "");
    const where = nodes[rank] ? ` on ${node(nodes[rank])}` : "";
    return setText(
      readout,
      `Rank ${rank}${where}, step ${whole(row.step)}: ${duration(row.busy[rank])}, ` +
        `${row.ratios[rank].toFixed(2)} × the median rank`,
    );
  }

  canvas.addEventListener("pointermove", (event) => {
    const column = Math.floor(((event.offsetX - GUTTER) / geometry.width) * table.length);
    point(column, Math.floor((event.offsetY / geometry.height) * geometry.rows));
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    cursor ??= [table.length - 1 - move[0], -move[1]];
    cursor = [within(cursor[0] + move[0], table.length), within(cursor[1] + move[1], geometry.rows)];
    point(...cursor);
  });
  const resized = new ResizeObserver(draw);
  resized.observe(canvas);
  const unthemed = onTheme(draw);
  return { element, update, stop: () => (resized.disconnect(), unthemed()) };
}

function slowest(table, nodes) {
  const recent = table.slice(-NEWEST).filter((row) => row.ratios.length === table.at(-1)?.ratios.length);
  if (!recent.length) return "";
  const means = recent[0].ratios.map(
    (_, rank) => recent.reduce((sum, row) => sum + (row.ratios[rank] ?? 1), 0) / recent.length,
  );
  const most = Math.max(...means);
  const rank = means.indexOf(most);
  if (means.length === 1) return "There is one rank alone, and none to compare it with.";
  if (most < TELLING) return `All ${means.length} ranks take about as long as each other.`;
  const where = nodes[rank] ? ` on ${node(nodes[rank])}` : "";
  return `Rank ${rank}${where} computes ${most.toFixed(2)} times as long as the median rank; the others wait for it.`;
}

function rgb(hex) {
  return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

function within(index, length) {
  return Math.max(0, Math.min(length - 1, index));
}
