// A job's curves: which there are, what of them is looked at, and the legend of marks.

import { aligned, Chart } from "./charts.js";
import { card, h, setText } from "./dom.js";
import { duration, finite, loss, short, small, whole } from "./format.js";

const LAST = [1000, 100];
const OF_SETS = ["--productive", "--restart", "--data_stall", "--compile", "--paused", "--recomputed", "--hot", "--muted"];

/**
 * The cards of curves. `sets` has the names of the sets that are validated on; `zoomed` is called when another range of
 * steps is wanted.
 */
export function curveCards(course, sets, zoomed) {
  let restarts = [];
  let changes = [];
  let following = 0; // so many steps up to the newest, if not 0
  const zoom = (range, last = 0) => {
    following = last;
    course.range = range;
    zoomed();
  };
  const one = (label, series, format) => new Chart({ label, series, format, zoomed: (range) => zoom(range) });
  const charts = {
    loss: one(
      "Loss",
      [
        { label: "Training", color: "--curve" },
        { label: "Least", color: "--curve", hidden: true },
        { label: "Most", color: "--curve", hidden: true, band: [3, 2] },
        { label: "Validation", color: "--second", dots: true },
        ...sets.map((name, index) => ({ label: name, color: OF_SETS[index % OF_SETS.length], dots: true })),
      ],
      loss,
    ),
    throughput: one("Tokens a second", [{ label: "Tokens/s", color: "--succeeded" }], short),
    seconds: one(
      "Seconds a step",
      [
        { label: "Step", color: "--curve" },
        { label: "Waiting for collectives", color: "--second" },
      ],
      (value) => duration(value),
    ),
    norm: one("Gradient norm", [{ label: "Before clipping", color: "--curve" }], small),
    rate: one("Learning rate", [{ label: "Learning rate", color: "--curve" }], small),
  };
  const more = h(
    "details",
    { class: "card more-curves" },
    h("summary", {}, "More curves: step time, gradient norm, learning rate"),
    h(
      "div",
      { class: "curve-grid" },
      ["seconds", "norm", "rate"].map((name) =>
        h("figure", {}, h("figcaption", {}, charts[name].label), charts[name].element),
      ),
    ),
  );
  const logarithmic = h("input", {
    type: "checkbox",
    on: {
      change: () => {
        charts.loss.logarithmic = logarithmic.checked;
        charts.loss.redraw();
      },
    },
  });
  const range = h(
    "select",
    { "aria-label": "Steps shown", class: "small", on: { change: () => choose(range.value) } },
    h("option", { value: "all" }, "All steps"),
    LAST.map((count) => h("option", { value: count }, `Last ${whole(count)} steps`)),
    h("option", { value: "zoom", hidden: true }, "Zoomed in"),
  );
  const note = h("p", { class: "muted" });
  const element = h(
    "div",
    { class: "curves" },
    card(
      "Loss",
      { id: "loss", controls: [h("label", { class: "check" }, logarithmic, "Logarithmic"), range] },
      charts.loss.element,
      note,
    ),
    card(
      "Throughput",
      { id: "throughput" },
      charts.throughput.element,
      h("p", { class: "muted" }, "Drag over a stretch to look at it closely, double-click to see all."),
    ),
    more,
  );

  function choose(value) {
    if (value === "all") return zoom(null);
    return zoom(lastSteps(Number(value)), Number(value));
  }

  function lastSteps(count) {
    const newest = course.samples.at(-1)?.step ?? count;
    return [Math.max(0, newest - count), newest];
  }

  /** Draw the course; `restarted` lists the steps at which training went on, `steered` those of changed values. */
  function update(restarted = restarts, steered = changes) {
    restarts = restarted;
    changes = steered;
    const newest = course.samples.at(-1)?.step;
    element.hidden = newest === undefined && !course.range;
    if (following && newest > course.range[1]) course.range = lastSteps(following);
    range.value = course.range ? following || "zoom" : "all";
    const steps = course.samples.map((sample) => sample.step);
    const column = (name) => course.samples.map((sample) => finite(sample[name]));
    const inRange = course.evaluations.filter(
      ({ step }) => !course.range || (step >= course.range[0] && step <= course.range[1]),
    );
    const trained = [steps, column("loss"), column("loss_min"), column("loss_max")];
    const ofSet = (name) => inRange.map((one) => finite(one.sets.find((set) => set.name === name)?.loss));
    const evaluated = [inRange.map(({ step }) => step), inRange.map((one) => finite(one.loss)), ...sets.map(ofSet)];
    const none = evaluated.slice(1).map(() => steps.map(() => null));
    draw("loss", evaluated[0].length ? aligned([trained, evaluated]) : [...trained, ...none]);
    draw("throughput", [steps, column("tokens_per_second")]);
    draw("seconds", [steps, column("step_seconds"), column("exposed_communication_seconds")]);
    draw("norm", [steps, column("gradient_norm")]);
    draw("rate", [steps, column("learning_rate")]);
    setText(
      note,
      [
        course.bucketSteps > 1 &&
          `A point is the mean of ${whole(course.bucketSteps)} steps, the band their least and most.`,
        restarts.length && "Dashed: training went on after an interruption.",
        changes.length && `Dashed in violet: steered after step ${changes.map(whole).join(", ")}.`,
      ]
        .filter(Boolean)
        .join(" "),
    );
  }

  function draw(name, columns) {
    const colored = (steps, color) => steps.map((step) => ({ step, color }));
    const marks = [...colored(restarts, "--recomputed"), ...colored(changes, "--paused")];
    charts[name].set(columns, course.range, marks);
  }

  return { element, update, stop: () => Object.values(charts).forEach((chart) => chart.stop()) };
}
