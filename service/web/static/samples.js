// What the model made of the job's prompts, newest first, as text and never as markup.

import { card, h } from "./dom.js";
import { whole } from "./format.js";

/** The card. `take` takes the data of a sample event; `update` draws what has come. */
export function samplesCard() {
  const byStep = new Map(); // a step that is done again takes the place of the one before
  const list = h("dl", { class: "samples" });
  const chosen = h("select", { "aria-label": "Step of the samples", class: "small", on: { change: show } });
  const element = card("Samples", { id: "samples", controls: [chosen] }, list);
  element.hidden = true;
  let changed = false;

  function take(data) {
    byStep.set(data.step, data.samples);
    changed = true;
  }

  function update() {
    if (!changed) return;
    changed = false;
    const steps = [...byStep.keys()].sort((one, other) => other - one);
    const follows = chosen.selectedIndex <= 0; // the newest, as it comes
    const wanted = chosen.value;
    chosen.replaceChildren(...steps.map((step) => h("option", { value: step }, `Step ${whole(step)}`)));
    chosen.value = follows ? String(steps[0]) : wanted;
    element.hidden = false;
    show();
  }

  function show() {
    const rows = byStep.get(Number(chosen.value)) ?? [];
    list.replaceChildren(...rows.map(({ prompt, text }) => h("div", {}, h("dt", {}, prompt), h("dd", {}, text))));
  }
  return { element, take, update };
}
