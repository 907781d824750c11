// What is wrong with a text, as a list of which each entry leads to its line.

import { h } from "../dom.js";

/** The list; `go` takes the place in the text of one that is chosen. */
export function problemList(go) {
  const element = h("ul", { class: "problems", "aria-label": "Problems" });
  let shown = "";

  /** Show problems, given as {from, line, message}. */
  function update(problems) {
    const key = JSON.stringify(problems);
    if (key === shown) return;
    shown = key;
    element.replaceChildren(...problems.map(entry));
    element.hidden = !problems.length;
  }

  function entry({ from, line, message }) {
    const button = h("button", { type: "button", class: "small", on: { click: () => go(from) } }, `Line ${line}`);
    return h("li", {}, button, h("span", {}, message));
  }

  return { element, update };
}
