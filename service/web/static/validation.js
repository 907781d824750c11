// The newest evaluation: each text's loss, perplexity and bits per byte.

import { card, h, setText } from "./dom.js";
import { loss, perplexity, UNKNOWN, whole } from "./format.js";

const COLUMNS = ["Text", "Loss, nats/token", "Perplexity", "Bits/byte"];

/** The card. `update` takes the job. */
export function validationCard() {
  const body = h("tbody");
  const when = h("p", { class: "muted" });
  const head = h(
    "tr",
    {},
    COLUMNS.map((name) => h("th", { scope: "col" }, name)),
  );
  const table = h("table", { class: "plain stacked" }, h("thead", {}, head), body);
  const element = card("Validation loss", { id: "validation", controls: [when] }, h("div", { class: "scroll" }, table));

  function update({ evaluation }) {
    element.hidden = !evaluation;
    if (!evaluation) return;
    setText(when, `at step ${whole(evaluation.step)}`);
    body.replaceChildren(...[{ ...evaluation, name: "Validation part of the sources" }, ...evaluation.sets].map(row));
  }
  return { element, update };
}

function row(one) {
  const bits = one.bits_per_byte === null ? UNKNOWN : loss(one.bits_per_byte);
  const cells = [loss(one.loss), perplexity(one.loss), bits];
  return h(
    "tr",
    {},
    h("th", { scope: "row", "data-label": COLUMNS[0] }, one.name),
    cells.map((text, index) => h("td", { "data-label": COLUMNS[index + 1] }, text)),
  );
}
