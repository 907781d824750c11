// The results of the compared jobs and the fields in which their specs differ: the values of each, and a table.

import { badge } from "../badge.js";
import { card, h, link } from "../dom.js";
import { duration, loss, short, UNKNOWN } from "../format.js";
import { runHue } from "./plot.js";
import { saveCsv } from "./save.js";

const RESULTS = [
  ["final_loss", "Loss", loss],
  ["best_validation_loss", "Best validation loss", loss],
  ["tokens_per_second", "Tokens/s", short],
  ["tokens", "Tokens", short],
  ["seconds", "Time", duration],
  ["gpu_hours", "GPU-hours", (value) => value.toFixed(2)],
];

/** The columns of a comparison: {key, label, format, result, values}, a value for each job, null where it has none. */
export function columnsOf({ jobs, fields }) {
  const results = RESULTS.map(([key, label, format]) => ({
    key,
    label,
    format,
    result: true,
    values: jobs.map((job) => job[key]),
  }));
  return [
    ...results,
    ...fields.map(({ field, values }) => ({ key: field, label: field, format: written, result: false, values })),
  ];
}

function written(value) {
  if (typeof value === "number") return String(Number.isInteger(value) ? value : Number(value.toPrecision(4)));
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** The table's card. `changed` is called after the order in `view` has. */
export function tableCard(view, changed) {
  const [head, body] = [h("tr"), h("tbody")];
  const saved = h("button", { type: "button", class: "small", title: "Save as CSV", on: { click: saveTable } }, "CSV");
  const table = h("table", { class: "plain compared" }, h("thead", {}, head), body);
  const element = card(
    "Results",
    { id: "results", controls: [saved] },
    h("div", { class: "scroll", tabindex: 0 }, table),
  );
  let comparison = { jobs: [], fields: [] };
  let columns = [];

  /** Take a comparison, with the jobs in the order of their colours. */
  function update(found) {
    comparison = found;
    columns = [
      { key: "name", label: "Job", values: found.jobs.map((job) => job.name) },
      { key: "state", label: "State", values: found.jobs.map((job) => job.state) },
      ...columnsOf(found),
    ];
    const focused = head.contains(document.activeElement) && document.activeElement.dataset.key;
    head.replaceChildren(...columns.map(heading));
    if (focused) [...head.querySelectorAll("button")].find((one) => one.dataset.key === focused)?.focus();
    const link = body.contains(document.activeElement) && document.activeElement.href;
    body.replaceChildren(...order().map(row));
    if (link) [...body.querySelectorAll("a")].find((one) => one.href === link)?.focus();
  }

  function heading({ key, label }) {
    const sorted = view.sort === key ? (view.descending ? "descending" : "ascending") : "none";
    const mark = { ascending: " ↑", descending: " ↓", none: "" }[sorted];
    return h(
      "th",
      { scope: "col", "aria-sort": sorted },
      h("button", { type: "button", class: "quiet", "data-key": key, on: { click: () => sort(key) } }, label + mark),
    );
  }

  function sort(key) {
    view.descending = view.sort === key && !view.descending;
    view.sort = key;
    update(comparison);
    changed();
  }

  /** The places of the jobs in the table's order; those without the value come last. */
  function order() {
    const places = comparison.jobs.map((_, place) => place);
    const values = columns.find((column) => column.key === view.sort)?.values;
    if (!values) return places;
    const missing = (place) => values[place] === null || values[place] === undefined;
    return places.sort((one, other) => {
      if (missing(one) || missing(other)) return missing(one) - missing(other);
      return (view.descending ? -1 : 1) * compared(values[one], values[other]);
    });
  }

  function row(place) {
    const job = comparison.jobs[place];
    const state = badge();
    state.update(job);
    const name = [
      h("i", { class: "swatch", style: { "--hue": runHue(place) } }),
      link(`/jobs/${encodeURIComponent(job.id)}`, { title: job.id }, job.name),
    ];
    const cells = columns.slice(2).map(({ format, values }) => {
      const value = values[place];
      return h(
        "td",
        { class: typeof value === "number" ? "number" : null },
        value === null || value === undefined ? UNKNOWN : format(value),
      );
    });
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, state.element, h("small", {}, job.message ?? "")), cells);
  }

  function saveTable() {
    const titles = ["id", ...columns.map(({ key }) => key)];
    saveCsv("compare.csv", [
      titles,
      ...order().map((place) => [comparison.jobs[place].id, ...columns.map(({ values }) => values[place])]),
    ]);
  }

  return { element, update };
}

function compared(one, other) {
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one).localeCompare(String(other), "en", { numeric: true });
}
