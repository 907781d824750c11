// What people are told beside what they look at: problems, and whether the service can be reached.

import { h, setText } from "./dom.js";

const SHOWN_MS = 12_000;

/** Tell of a problem, with the fields at fault if it names some. */
export function notify(problem) {
  const fields = (problem.errors ?? []).map((error) => h("li", {}, h("code", {}, error.field), ` ${error.message}`));
  const close = h(
    "button",
    { class: "quiet", type: "button", "aria-label": "Dismiss", on: { click: () => notice.remove() } },
    "×",
  );
  const text = h("div", {}, h("p", {}, problem.message), fields.length > 0 && h("ul", {}, fields));
  const notice = h("div", { class: "notice" }, text, close);
  document.getElementById("notices").append(notice);
  setTimeout(() => notice.remove(), SHOWN_MS);
}

/** Say in the page's head that the service cannot be reached, or with null that it can. */
export function connection(problem) {
  setText(document.getElementById("connection"), problem ? `No connection: ${problem.message}` : "");
}
