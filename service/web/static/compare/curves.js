// The curves of the compared jobs over each other: what is drawn, the pointer's values, zooming, and the legend.

import { card, h, setText, themed } from "../dom.js";
import { duration, finite, loss, short, small, tick, whole } from "../format.js";
import { Picture } from "./picture.js";
import { clipped, drawAxes, drawCurve, drawPoint, inside, runColor, runHue, Scale } from "./plot.js";
import { saveCsv } from "./save.js";

const HEIGHT = 420;
const NEAREST = 6; // runs whose values are listed
const LEAST_DRAG = 5; // pixels
const WHEEL = 1.25;

// What is drawn, and how its values are written.
const METRICS = {
  loss: ["Loss, nats/token", loss],
  validation_loss: ["Validation loss, nats/token", loss],
  tokens_per_second: ["Tokens/s", short],
  step_seconds: ["Seconds a step", duration],
  exposed_communication_seconds: ["Seconds a step waiting for collectives", duration],
  model_flops_per_second: ["Model FLOPs/s", short],
  gradient_norm: ["Gradient norm before clipping", small],
  learning_rate: ["Learning rate", small],
};
const AXES = {
  step: ["Step", whole],
  tokens: ["Tokens", short],
  flops: ["Model FLOPs", short],
  seconds: ["Time since the start", duration],
};

/**
 * An exponential moving average of a curve's means without the bias to its first value, as a curve. It forgets by
 * `weight` with each hundredth part of the points, so that it looks the same however many there are.
 */
export function smoothed(curve, weight) {
  if (!weight) return curve;
  const each = weight ** Math.min(1, 100 / curve.mean.length);
  let [sum, share] = [0, 0];
  const mean = curve.mean.map((value) => {
    if (value === null) return null;
    sum = each * sum + (1 - each) * value;
    share = each * share + (1 - each);
    return sum / share;
  });
  return { x: curve.x, mean, min: mean, max: mean };
}

/** The card. `changed` is called after `view` has, and says whether other data is needed. */
export function curvesCard(view, changed) {
  let runs = []; // {id, name, color, curve, line}, those that are hidden included
  let scales = null;
  let pointer = null; // where the pointer is, in pixels
  let dragged = null; // where it went down
  let marked = null; // the run that is drawn thicker
  const picture = new Picture({ label: "Curves", height: HEIGHT, draw, over });
  const readout = h("ul", { class: "readout", "aria-live": "polite" });
  const legend = h("ul", { class: "runs", "aria-label": "Runs" });
  const metric = chosen(
    "Value",
    "metric",
    Object.entries(METRICS).map(([value, [label]]) => [value, label]),
  );
  const axis = chosen(
    "Over",
    "axis",
    Object.entries(AXES).map(([value, [label]]) => [value, label]),
  );
  const smooth = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: view.smooth,
    "aria-label": "Smoothing",
    on: { input: () => set({ smooth: Number(smooth.value) }, false) },
  });
  const flags = [
    ["logx", "Logarithmic x"],
    ["logy", "Logarithmic y"],
  ].map(([name, label]) => {
    const input = h("input", {
      type: "checkbox",
      checked: view[name],
      on: { change: () => set({ [name]: input.checked }, false) },
    });
    return h("label", { class: "check" }, input, label);
  });
  const all = h("button", { type: "button", class: "small", on: { click: () => zoom(null, null) } }, "Whole course");
  const element = card(
    "Curves",
    {
      id: "curves",
      controls: [...picture.saving(() => `compare-${view.metric}`), button("CSV", "Save as CSV", saveCurves)],
    },
    h("div", { class: "fields" }, metric, axis, h("label", { class: "check" }, "Smoothing", smooth), flags, all),
    picture.element,
    h(
      "p",
      { class: "muted" },
      "Drag over a stretch to look at it closely, double-click to see all. Keys: arrows, + and −, 0.",
    ),
    readout,
    h(
      "div",
      { class: "controls" },
      button("Show all", null, () => hide([])),
      button("Hide all", null, () => hide(runs.map((run) => run.id))),
    ),
    legend,
  );

  function chosen(label, name, choices) {
    const select = h("select", {
      "aria-label": label,
      on: { change: () => set({ [name]: select.value, low: null, high: null }, true) },
    });
    select.append(...choices.map(([value, text]) => h("option", { value }, text)));
    return select;
  }

  function button(label, title, click) {
    return h("button", { type: "button", class: "small", title, on: { click } }, label);
  }

  function set(change, anew) {
    Object.assign(view, change);
    prepare();
    changed(anew);
  }

  function hide(ids) {
    view.hide = ids;
    mark(null);
    set({}, false);
  }

  function zoom(low, high) {
    set({ low, high }, true);
  }

  /** Take the jobs, in the order of their colours, and the curves by their id. */
  function update(jobs, curves) {
    const sets = [...new Set(jobs.flatMap((job) => job.validation_sets))].map((name) => `validation_loss/${name}`);
    const known = new Set(Array.from(metric.options, (option) => option.value));
    for (const value of [...sets, view.metric]) {
      if (known.has(value)) continue;
      known.add(value);
      metric.append(h("option", { value }, `Validation loss: ${value.replace(/^validation_loss\//, "")}`));
    }
    runs = jobs.map((job, index) => ({ id: job.id, name: job.name, index, curve: curves.get(job.id) ?? EMPTY }));
    prepare();
  }

  /** Make the lines from the curves, then the legend, and draw both. */
  function prepare() {
    metric.value = view.metric;
    axis.value = view.axis;
    all.hidden = view.low === null && view.high === null;
    for (const run of runs) run.line = smoothed(run.curve, view.smooth);
    const hidden = new Set(view.hide);
    if (
      legend.children.length !== runs.length ||
      runs.some((run, index) => legend.children[index].dataset.id !== run.id)
    )
      legend.replaceChildren(...runs.map(entry));
    runs.forEach((run, index) => {
      const item = legend.children[index].firstElementChild;
      const pressed = String(!hidden.has(run.id));
      if (item.getAttribute("aria-pressed") !== pressed) item.setAttribute("aria-pressed", pressed);
      setText(item.lastElementChild, run.name);
    });
    const drawn = shown().filter((run) => run.curve.x.length).length;
    picture.element.setAttribute(
      "aria-label",
      `${labels().y[0]} by ${labels().x[0].toLowerCase()}: curves of ${drawn} jobs`,
    );
    picture.redraw();
  }

  function entry(run) {
    const over = {
      pointerenter: () => mark(run.id),
      pointerleave: () => mark(null),
      focus: () => mark(run.id),
      blur: () => mark(null),
    };
    const toggle = () =>
      hide(view.hide.includes(run.id) ? view.hide.filter((id) => id !== run.id) : [...view.hide, run.id]);
    return h(
      "li",
      { "data-id": run.id },
      h(
        "button",
        { type: "button", class: "run", title: run.id, on: { click: toggle, ...over } },
        swatch(run),
        h("span"),
      ),
    );
  }

  function swatch({ index }) {
    return h("i", { style: { "--hue": runHue(index) } });
  }

  function mark(id) {
    marked = id;
    picture.redrawOver();
  }

  function shown() {
    const hidden = new Set(view.hide);
    return runs.filter((run) => !hidden.has(run.id));
  }

  function labels() {
    const [, format] = METRICS[view.metric] ?? METRICS.validation_loss;
    return { x: AXES[view.axis] ?? AXES.step, y: [metric.selectedOptions[0]?.textContent ?? view.metric, format] };
  }

  /** The range of what is shown of x and y: where there is a value, and above 0 on a logarithmic axis. */
  function ranges() {
    let [low, high, least, most] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { line } of shown()) {
      for (let index = 0; index < line.x.length; index += 1) {
        const x = line.x[index];
        if (line.mean[index] === null || (view.logx && x <= 0)) continue;
        if ((view.low !== null && x < view.low) || (view.high !== null && x > view.high)) continue;
        if (x < low) low = x;
        if (x > high) high = x;
        const [under, over] =
          view.logy && line.min[index] <= 0 ? [line.mean[index], line.max[index]] : [line.min[index], line.max[index]];
        if ((!view.logy || under > 0) && under < least) least = under;
        if (over > most) most = over;
      }
    }
    const none = low > high || least > most;
    return { x: none ? [1, 2] : [view.low ?? low, view.high ?? high], y: none ? [1, 2] : [least, most] };
  }

  function draw(pen, width, height) {
    const box = inside(width, height);
    const { x, y } = ranges();
    const logx = view.logx && x[0] > 0;
    const room = view.logy && y[0] > 0 ? [y[0], y[1]] : [y[0] - 0.03 * (y[1] - y[0]), y[1] + 0.03 * (y[1] - y[0])];
    scales = {
      box,
      x: new Scale(...x, box.left, box.right, logx),
      y: new Scale(...room, box.bottom, box.top, view.logy && y[0] > 0),
    };
    const said = labels();
    const format = view.axis === "seconds" ? duration : tick;
    drawAxes(
      pen,
      box,
      { scale: scales.x, label: said.x[0], format },
      { scale: scales.y, label: said.y[0], format: tick },
    );
    clipped(pen, box, () => {
      for (const run of shown()) drawCurve(pen, run.line, scales.x, scales.y, runColor(run.index));
    });
  }

  function over(pen) {
    if (!scales) return;
    const { box } = scales;
    if (dragged !== null && pointer) {
      pen.fillStyle = themed("--band");
      pen.fillRect(Math.min(dragged, pointer.x), box.top, Math.abs(pointer.x - dragged), box.bottom - box.top);
    }
    const nearest = pointer ? near() : [];
    const thick = marked ?? nearest[0]?.run.id;
    const run = shown().find(({ id }) => id === thick);
    if (run) clipped(pen, box, () => drawCurve(pen, run.line, scales.x, scales.y, runColor(run.index), 3));
    if (pointer) {
      pen.fillStyle = themed("--muted");
      pen.fillRect(pointer.x, box.top, 1, box.bottom - box.top);
    }
    for (const one of nearest) drawPoint(pen, one.x, one.y, runColor(one.run.index));
    tell(nearest);
  }

  /** The runs with a value near the pointer, the nearest first: of each the point nearest to its x. */
  function near() {
    const at = scales.x.value(pointer.x);
    const found = [];
    for (const run of shown()) {
      const { x, mean } = run.line;
      let [low, high] = [0, x.length - 1];
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (x[middle] <= at) low = middle;
        else high = middle;
      }
      const index = high >= 0 && Math.abs(x[high] - at) < Math.abs(x[low] - at) ? high : low;
      if (finite(mean[index]) === null) continue;
      const [px, py] = [scales.x.at(x[index]), scales.y.at(mean[index])];
      if (Math.abs(px - pointer.x) > 40 || !Number.isFinite(py)) continue;
      found.push({ run, index, x: px, y: py, away: Math.abs(py - pointer.y) });
    }
    return found.sort((one, other) => one.away - other.away).slice(0, NEAREST);
  }

  function tell(nearest) {
    const { x, y } = labels();
    readout.replaceChildren(
      ...nearest.map(({ run, index }) => {
        const { mean, min, max } = run.line;
        const range = min[index] < max[index] ? ` (${y[1](min[index])} to ${y[1](max[index])})` : "";
        return h(
          "li",
          {},
          swatch(run),
          h("b", {}, run.name),
          ` ${x[0].toLowerCase()} ${x[1](run.line.x[index])}: ${y[1](mean[index])}${range}`,
        );
      }),
    );
  }

  function place(event) {
    const bounds = picture.element.getBoundingClientRect();
    const { box } = scales;
    const x = Math.max(box.left, Math.min(box.right, event.clientX - bounds.left));
    return { x, y: event.clientY - bounds.top };
  }

  function nearer(times, around) {
    const { x } = scales;
    const [from, to] = [x.from, x.to].map((edge) => around + (edge - around) / times);
    zoom(Math.max(0, x.value(from)), x.value(to));
  }

  const { element: area } = picture;
  area.addEventListener("pointermove", (event) => {
    if (!scales) return;
    pointer = place(event);
    picture.redrawOver();
  });
  area.addEventListener("pointerleave", () => {
    pointer = dragged = null;
    picture.redrawOver();
  });
  area.addEventListener("pointerdown", (event) => {
    if (!scales || event.button !== 0 || event.pointerType === "touch") return;
    dragged = place(event).x;
    area.setPointerCapture(event.pointerId);
  });
  area.addEventListener("pointerup", (event) => {
    if (dragged === null) return;
    const edges = [dragged, place(event).x].sort((one, other) => one - other);
    dragged = null;
    if (edges[1] - edges[0] >= LEAST_DRAG) zoom(...edges.map((edge) => scales.x.value(edge)));
    else picture.redrawOver();
  });
  area.addEventListener("dblclick", () => zoom(null, null));
  area.addEventListener("wheel", (event) => {
    if (!scales || !event.ctrlKey) return; // without it, the page scrolls; a pinch has it
    event.preventDefault();
    nearer(event.deltaY < 0 ? WHEEL : 1 / WHEEL, place(event).x);
  });
  area.addEventListener("keydown", (event) => {
    if (!scales || event.ctrlKey || event.metaKey || event.altKey) return;
    const { box } = scales;
    const middle = (box.left + box.right) / 2;
    const move = { ArrowLeft: [-8, 0], ArrowRight: [8, 0], ArrowUp: [0, -8], ArrowDown: [0, 8] }[event.key];
    if (move) {
      pointer ??= { x: middle, y: (box.top + box.bottom) / 2 };
      pointer = { x: Math.max(box.left, Math.min(box.right, pointer.x + move[0])), y: pointer.y + move[1] };
      picture.redrawOver();
    } else if (event.key === "+" || event.key === "-") nearer(event.key === "+" ? 2 : 0.5, pointer?.x ?? middle);
    else if (event.key === "0") zoom(null, null);
    else return;
    event.preventDefault();
  });

  function saveCurves() {
    const rows = shown().flatMap(({ id, name, curve }) =>
      curve.x.map((x, index) => [id, name, x, curve.mean[index], curve.min[index], curve.max[index]]),
    );
    saveCsv(`compare-${view.metric}.csv`, [
      ["id", "name", view.axis, `${view.metric}_mean`, `${view.metric}_min`, `${view.metric}_max`],
      ...rows,
    ]);
  }

  return { element, update, stop: picture.stop.bind(picture) };
}

const EMPTY = { x: [], mean: [], min: [], max: [] };
