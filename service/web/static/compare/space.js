// What jobs got for what was set: each as a line across parallel axes and as a point, and which fields mattered.

import { card, h, setText, themed } from "../dom.js";
import { percent } from "../format.js";
import { Picture } from "./picture.js";
import {
  clipped,
  drawAxes,
  drawParallelAxes,
  drawPoint,
  drawThrough,
  inside,
  runColor,
  Scale,
  shareColor,
} from "./plot.js";
import { columnsOf } from "./results.js";

const HEIGHT = 320;
const MOST_AXES = 10;
const REACH = 24; // pixels from the pointer

/** A column's values as numbers; those of a column with others are places in `names`. */
function axisOf({ label, values, format }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length && known.every((value) => typeof value === "number")) return { label, values, format };
  const texts = values.map((value) => (value === null || value === undefined ? null : format(value)));
  const names = [...new Set(texts.filter((text) => text !== null))].sort((one, other) =>
    one.localeCompare(other, "en", { numeric: true }),
  );
  return { label, names, values: texts.map((text) => (text === null ? null : names.indexOf(text))) };
}

function scaleOf({ values, names }, from, to) {
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  if (!known.length || names) return new Scale(-0.5, Math.max(0.5, (names?.length ?? 1) - 0.5), from, to);
  return new Scale(low, high, from, to, low > 0 && high / low > 50);
}

/** The cards: `elements`. `changed` is called after `view` has. */
export function spaceCards(view, changed) {
  let comparison = { jobs: [], fields: [] };
  let columns = [];
  let pointed = { lines: null, points: null }; // the place of the job that the pointer is near
  const told = {
    lines: h("p", { class: "muted", "aria-live": "polite" }),
    points: h("p", { class: "muted", "aria-live": "polite" }),
  };
  const lines = new Picture({
    label: "Parallel coordinates",
    height: HEIGHT,
    draw: drawLines,
    over: (pen) => overLines(pen),
  });
  const points = new Picture({ label: "Scatter", height: HEIGHT, draw: drawPoints, over: (pen) => overPoints(pen) });
  const choices = { color: "Colour by", across: "Across", up: "Up" };
  const selects = Object.fromEntries(
    Object.entries(choices).map(([name, label]) => {
      const select = h("select", {
        "aria-label": label,
        class: "small",
        on: { change: () => ((view[name] = select.value), draw(), changed()) },
      });
      return [name, select];
    }),
  );
  let geometry = { lines: [], points: [] }; // of each job, where it was drawn
  const elements = [
    card(
      "Parallel coordinates",
      {
        id: "parallel",
        controls: [
          h("label", { class: "check" }, "Last axis and colour", selects.color),
          ...lines.saving(() => "compare-parallel"),
        ],
      },
      lines.element,
      told.lines,
    ),
    card(
      "Scatter",
      {
        id: "scatter",
        controls: [
          h("label", { class: "check" }, "x", selects.across),
          h("label", { class: "check" }, "y", selects.up),
          ...points.saving(() => "compare-scatter"),
        ],
      },
      points.element,
      told.points,
    ),
  ];

  /** Take a comparison, with the jobs in the order of their colours. */
  function update(found) {
    comparison = found;
    columns = columnsOf(found);
    const fields = columns.filter((column) => !column.result);
    for (const [name, select] of Object.entries(selects)) {
      const offered = name === "color" ? columns.filter((column) => column.result) : columns;
      if (offered.map(({ key }) => key).join("\n") !== Array.from(select.options, (option) => option.value).join("\n"))
        select.replaceChildren(...offered.map(({ key, label }) => h("option", { value: key }, label)));
      if (view[name]) select.value = view[name];
      if (!view[name] || !select.value)
        select.value =
          name === "across" ? (fields[0]?.key ?? "tokens") : name === "color" ? "best_validation_loss" : "final_loss";
    }
    draw();
  }

  function draw() {
    pointed = { lines: null, points: null };
    const job = (what) => `${what}, for ${comparison.jobs.length} jobs. The table has the same values.`;
    lines.element.setAttribute("aria-label", job("Parallel coordinates"));
    points.element.setAttribute("aria-label", job(`${selects.up.value} over ${selects.across.value}`));
    lines.redraw();
    points.redraw();
  }

  function column(name) {
    return columns.find(({ key }) => key === selects[name].value);
  }

  function visible() {
    const hidden = new Set(view.hide);
    return comparison.jobs.map((job, place) => place).filter((place) => !hidden.has(comparison.jobs[place].id));
  }

  function drawLines(pen, width, height) {
    const last = column("color");
    if (!last) return;
    const box = { left: 14, right: width - 14, top: 12, bottom: height - 26 };
    const most = Math.max(1, Math.min(MOST_AXES, Math.floor(width / 90) - 1));
    const shown = [...columns.filter((one) => !one.result).slice(0, most), last];
    const axes = shown.map((one, index) => ({
      ...axisOf(one),
      at: shown.length > 1 ? box.left + ((box.right - box.left) * index) / (shown.length - 1) : box.right,
    }));
    for (const axis of axes) axis.scale = scaleOf(axis, box.bottom - 6, box.top + 6);
    const end = axes.at(-1);
    geometry.lines = comparison.jobs.map((_, place) =>
      axes.filter(({ values }) => values[place] !== null).map(({ at, scale, values }) => [at, scale.at(values[place])]),
    );
    for (const place of visible()) drawThrough(pen, geometry.lines[place], colorOf(end, place));
    drawParallelAxes(pen, axes, box);
  }

  function colorOf({ values, scale }, place) {
    if (values[place] === null) return themed("--muted");
    return shareColor(Math.max(0, Math.min(1, (scale.at(values[place]) - scale.from) / (scale.to - scale.from))));
  }

  function drawPoints(pen, width, height) {
    const [across, up] = [column("across"), column("up")];
    if (!across || !up) return;
    const box = inside(width, height);
    const [x, y] = [axisOf(across), axisOf(up)];
    x.scale = scaleOf(x, box.left + 10, box.right - 10);
    y.scale = scaleOf(y, box.bottom - 10, box.top + 10);
    drawAxes(pen, box, { ...x, format: x.format ?? String }, { ...y, format: y.format ?? String });
    geometry.points = comparison.jobs.map((_, place) =>
      x.values[place] === null || y.values[place] === null
        ? null
        : [x.scale.at(x.values[place]), y.scale.at(y.values[place])],
    );
    clipped(pen, box, () => {
      for (const place of visible())
        if (geometry.points[place]) drawPoint(pen, ...geometry.points[place], runColor(place));
    });
  }

  function overLines(pen) {
    if (pointed.lines !== null) drawThrough(pen, geometry.lines[pointed.lines], themed("--text"), 3);
  }

  function overPoints(pen) {
    if (pointed.points !== null) drawPoint(pen, ...geometry.points[pointed.points], themed("--text"), 6);
  }

  function point(which, picture, away, event) {
    const bounds = picture.element.getBoundingClientRect();
    const at = [event.clientX - bounds.left, event.clientY - bounds.top];
    let [nearest, least] = [null, REACH];
    for (const place of visible()) {
      const distance = geometry[which][place] ? away(geometry[which][place], at) : Infinity;
      if (distance < least) [nearest, least] = [place, distance];
    }
    if (nearest === pointed[which]) return;
    pointed[which] = nearest;
    const shown =
      which === "points"
        ? [column("across"), column("up")]
        : [...columns.filter((one) => !one.result), column("color")];
    const values = shown.map(
      ({ label, values, format }) => `${label} ${(values[nearest] ?? null) === null ? "–" : format(values[nearest])}`,
    );
    setText(told[which], nearest === null ? "" : `${comparison.jobs[nearest].name}: ${values.join(", ")}`);
    picture.redrawOver();
  }

  lines.element.addEventListener("pointermove", (event) => point("lines", lines, fromLine, event));
  points.element.addEventListener("pointermove", (event) =>
    point("points", points, ([x, y], at) => Math.hypot(x - at[0], y - at[1]), event),
  );

  return { elements, update, draw, stop: () => (lines.stop(), points.stop()) };
}

/** How far a point is from a line through others, straight up or down. */
function fromLine(through, [x, y]) {
  for (let index = 1; index < through.length; index += 1) {
    const [[left, from], [right, to]] = [through[index - 1], through[index]];
    if (x >= left && x <= right) return Math.abs(from + ((to - from) * (x - left)) / (right - left) - y);
  }
  return Infinity;
}

/** The card of how much each field of a sweep mattered for its result. `update` takes the sweep, or null. */
export function importanceCard() {
  const [about, list] = [h("p", { class: "muted" }), h("dl", { class: "importance" })];
  const element = card("Importance", { id: "importance" }, about, list);
  element.hidden = true;
  function update(sweep) {
    const shares = sweep?.importance;
    const sorted = Object.entries(shares ?? {}).sort(([, one], [, other]) => other - one);
    element.hidden = !sorted.length;
    if (!sorted.length) return;
    const what = "How much of the differences between the sweep's results each field explains";
    setText(about, `${what}, over ${sweep.trials.COMPLETE} completed trials.`);
    list.replaceChildren(
      ...sorted.map(([path, share]) => {
        const bar = h("span", { style: { width: `${100 * Math.max(0, Math.min(1, share))}%` } });
        return h(
          "div",
          {},
          h("dt", {}, path),
          h("dd", {}, h("div", { class: "progress", "aria-hidden": "true" }, bar), percent(share)),
        );
      }),
    );
  }
  return { element, update };
}
