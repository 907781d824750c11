// A job's checkpoints: what there is, what is damaged, which must stay, and deleting those that need not.

import { call, get, jobPath } from "./api.js";
import { ask } from "./dialog.js";
import { card, h, setText, time } from "./dom.js";
import { bytes, layout, moment, whole } from "./format.js";
import { notify } from "./notices.js";
import { mayChange } from "./signin.js";

const FIRST = 6; // shown until all are wanted

/** The card. `read` asks for the list anew. */
export function checkpointCard(id) {
  const body = h("tbody");
  const summary = h("p", { class: "muted" });
  const columns = ["Step", "Saved", "Size", "Layout", "Samples", ""];
  const table = h(
    "table",
    { class: "plain stacked" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        columns.map((name) => h("th", { scope: "col" }, name)),
      ),
    ),
    body,
  );
  const all = h("button", {
    type: "button",
    class: "small",
    on: {
      click: () => {
        shortened = !shortened;
        show();
      },
    },
  });
  let shortened = true;
  let listed = [];
  const element = card(
    "Checkpoints",
    { id: "checkpoints", controls: [summary] },
    h("div", { class: "scroll", tabindex: 0 }, table),
    all,
  );

  async function read(signal) {
    const found = await get(jobPath(id, "checkpoints"), {}, signal);
    listed = [...found.checkpoints, ...found.damaged].sort((one, other) => other.step - one.step);
    show();
  }

  function show() {
    table.hidden = !listed.length;
    all.hidden = listed.length <= FIRST;
    setText(all, shortened ? `Show all ${whole(listed.length)}` : "Show the newest");
    const size = listed.reduce((sum, one) => sum + (one.bytes ?? 0), 0);
    setText(summary, listed.length ? `${whole(listed.length)} with ${bytes(size)}` : "None yet.");
    body.replaceChildren(...listed.slice(0, shortened ? FIRST : listed.length).map(row));
  }

  function row(one) {
    const pin = h(
      "button",
      {
        type: "button",
        class: "small",
        "aria-pressed": String(one.pinned),
        disabled: !mayChange() || (one.damage && !one.pinned),
        on: {
          click: () => done(() => call(one.pinned ? "DELETE" : "PUT", jobPath(id, "checkpoints", one.step, "pin"))),
        },
      },
      one.pinned ? "Unpin" : "Pin",
    );
    const remove = h(
      "button",
      {
        type: "button",
        class: "small danger",
        disabled: one.pinned || !mayChange(),
        title: one.pinned ? "Unpin it first" : null,
        on: {
          click: () =>
            ask({
              title: `Delete the checkpoint of step ${whole(one.step)}?`,
              text: `${one.damage ? "Damaged" : bytes(one.bytes)} at ${one.url}. It cannot be brought back.`,
              action: "Delete",
              danger: true,
              act: async () => {
                await call("DELETE", jobPath(id, "checkpoints", one.step));
                await read();
              },
            }),
        },
      },
      "Delete",
    );
    const badges = [
      one.pinned && h("span", { class: "badge state-succeeded" }, "pinned"),
      one.damage && h("span", { class: "badge state-failed" }, "damaged"),
    ];
    const step = h("td", { "data-label": columns[0] }, h("span", {}, whole(one.step), badges));
    const facts = [time(one.saved_at, moment(one.saved_at)), bytes(one.bytes), layout(one), whole(one.samples)];
    const middle = one.damage
      ? h("td", { colspan: facts.length, "data-label": "Damage" }, one.damage)
      : facts.map((content, index) => h("td", { "data-label": columns[index + 1] }, content));
    const controls = h("td", { "data-label": "" }, h("span", { class: "controls" }, pin, remove));
    return h("tr", { title: one.url }, step, middle, controls);
  }

  async function done(act) {
    await act().catch(notify);
    await read().catch(notify); // in any case: a damaged checkpoint is unpinned, and then refused
  }

  return { element, read };
}
