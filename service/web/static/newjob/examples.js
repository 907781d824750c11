// The service's examples of job files: as a list to begin with, and as a menu.

import { h } from "../dom.js";

/** The list; `choose` takes the one that is chosen. */
export function exampleList(examples, choose) {
  const entry = (example) =>
    h(
      "li",
      {},
      h("button", { type: "button", on: { click: () => choose(example) } }, example.name),
      h("p", { class: "muted" }, example.description),
    );
  return h("ul", { class: "examples" }, examples.map(entry));
}

/** The menu. */
export function exampleMenu(examples, choose) {
  const menu = h(
    "select",
    { "aria-label": "Examples" },
    h("option", { value: "" }, "Examples…"),
    examples.map(({ name }) => h("option", { value: name }, name)),
  );
  menu.addEventListener("change", () => {
    const chosen = examples.find(({ name }) => name === menu.value);
    menu.value = "";
    if (chosen) choose(chosen);
  });
  return menu;
}
