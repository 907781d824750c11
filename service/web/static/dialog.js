// Questions to people, in the browser's own modal dialog.

import { h } from "./dom.js";

/**
 * Ask before something is done. Resolves to null when it is left, else to what `read` makes of the form.
 *
 * `problem` of the returned `submit` keeps the dialog open: pass `act`, which is awaited and may throw.
 */
export function ask({ title, text, action, danger = false, fields = [], act }) {
  return new Promise((resolve) => {
    const refusal = h("p", { class: "refusal", role: "alert" });
    const confirm = h("button", { class: danger ? "danger" : "primary", type: "submit" }, action);
    const leave = h("button", { type: "button", autofocus: true, on: { click: () => dialog.close() } }, "Back");
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "dialog-title" }, title),
      text && h("p", {}, text),
      fields,
      refusal,
      h("div", { class: "dialog-actions" }, leave, confirm),
    );
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    let result = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      confirm.disabled = true;
      try {
        result = await act();
        dialog.close();
      } catch (problem) {
        refusal.textContent = [
          problem.message,
          ...(problem.errors ?? []).map((error) => `${error.field}: ${error.message}`),
        ].join("\n");
        confirm.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** A labelled field of a form. */
export function field(label, input, hint) {
  return h("label", { class: "field" }, h("span", {}, label), input, hint && h("small", {}, hint));
}
