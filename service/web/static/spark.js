// Curves the size of a word.

import { svg } from "./dom.js";
import { finite } from "./format.js";

const WIDTH = 96;
const HEIGHT = 26;
const EDGE = 2;

/** A curve without axes; `label` says what of. `update` takes its values. */
export function sparkline(label) {
  const path = svg("path", { fill: "none", "vector-effect": "non-scaling-stroke" });
  const title = svg("title");
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" },
    title,
    path,
  );
  function update(values) {
    const known = values.filter((value) => finite(value) !== null);
    element.toggleAttribute("hidden", known.length < 2);
    path.setAttribute("d", known.length > 1 ? line(known) : "");
    title.textContent =
      known.length > 1
        ? `${label}: from ${known[0].toPrecision(4)} to ${known.at(-1).toPrecision(4)}`
        : `${label}: none yet`;
  }
  return { element, update };
}

function line(values) {
  const low = Math.min(...values);
  const range = Math.max(...values) - low || 1;
  const x = (index) => ((WIDTH * index) / (values.length - 1)).toFixed(1);
  const y = (value) => (HEIGHT - EDGE - ((HEIGHT - 2 * EDGE) * (value - low)) / range).toFixed(1);
  return `M${values.map((value, index) => `${x(index)},${y(value)}`).join("L")}`;
}
