// What checkpoints scored on tasks, newest first.

import { card, h } from "./dom.js";
import { small, UNKNOWN, whole } from "./format.js";

const COLUMNS = ["Step", "Task", "Metric", "Value", "± standard error", "Documents", "By"];

/** The card. `take` takes the data of an event of scores; `update` draws what has come. */
export function scoresCard() {
  const body = h("tbody");
  const head = h(
    "tr",
    {},
    COLUMNS.map((name) => h("th", { scope: "col" }, name)),
  );
  const table = h("table", { class: "plain stacked" }, h("thead", {}, head), body);
  const element = card("Scores on tasks", { id: "scores" }, h("div", { class: "scroll", tabindex: 0 }, table));
  element.hidden = true;

  function take(data) {
    element.hidden = false;
    body.prepend(...data.scores.map((score) => row(data, score)));
  }
  return { element, take };
}

function row(evaluation, score) {
  const number = (value) => (value === null ? UNKNOWN : small(value));
  const by = [evaluation.evaluated_by, score.version && `task version ${score.version}`].filter(Boolean).join(", ");
  const cells = [whole(evaluation.step), score.task, score.metric, number(score.value), number(score.stderr)];
  return h(
    "tr",
    { title: `Questions ${score.task_hash}` },
    [...cells, whole(score.samples), by].map((text, index) => h("td", { "data-label": COLUMNS[index] }, text)),
  );
}
