// What a job's seconds went into, as a bar.

import { card, h } from "./dom.js";
import { duration, percent, seconds } from "./format.js";

export const KINDS = [
  ["productive", "Productive", "steps and evaluations"],
  ["recomputed", "Recomputed", "steps done before, or cut short by a fault"],
  ["checkpoint", "Checkpoints", "the loop stood still for checkpoints and copies"],
  ["restart", "Starting", "to start, and to start again after interruptions"],
  ["waiting", "Waiting", "queued, waiting for room, or paused"],
  ["data_stall", "Data", "steps waited for their batch"],
  ["compile", "Compiling", "first steps after a start, beyond what the second took"],
];

// What goes on while nothing is booked, as in the service's own ledger.
const IDLE = { waiting: "waiting", starting: "restart", interrupted: "restart" };

/** Seconds of each kind up to now, and their sum. */
export function upToNow(goodput) {
  const spent = Object.fromEntries(KINDS.map(([kind]) => [kind, goodput[kind]]));
  const kind = IDLE[goodput.phase];
  if (kind) spent[kind] += Math.max(0, seconds(goodput.booked_until));
  const total = Object.values(spent).reduce((sum, part) => sum + part, 0);
  return { spent, total };
}

/** A bar of the kinds. `update` takes a job's goodput. */
export function goodputBar() {
  const parts = KINDS.map(([kind]) => h("span", { class: `kind-${kind}` }));
  const element = h("div", { class: "stack", role: "img" }, parts);
  function update(goodput) {
    const { spent, total } = upToNow(goodput);
    KINDS.forEach(([kind], index) => {
      parts[index].classList.toggle("none", !spent[kind]);
      parts[index].style.setProperty("flex-grow", spent[kind]);
    });
    const said = KINDS.filter(([kind]) => spent[kind] > 0).map(
      ([kind, name]) => `${name} ${percent(spent[kind] / total)}`,
    );
    element.setAttribute("aria-label", said.join(", ") || "nothing yet");
    element.title = said.join("\n");
    return { spent, total };
  }
  return { element, update };
}

/** The bar with its legend. */
export function goodputCard() {
  const bar = goodputBar();
  const legend = h("ul", { class: "legend" });
  const lead = h("p", { class: "lead" });
  function update(job) {
    const { spent, total } = bar.update(job.goodput);
    lead.replaceChildren(
      h("strong", {}, percent(total ? spent.productive / total : 0)),
      ` of ${duration(total)} productive`,
    );
    legend.replaceChildren(
      ...KINDS.map(([kind, name, meaning]) =>
        h(
          "li",
          { title: meaning, class: spent[kind] ? "" : "none" },
          h("i", { class: `kind-${kind}` }),
          h("span", {}, name),
          h("b", {}, duration(spent[kind])),
          h("small", {}, percent(total ? spent[kind] / total : 0)),
        ),
      ),
    );
  }
  return { element: card("Where the time went", { id: "goodput" }, lead, bar.element, legend), update };
}
