// What can be done to a job, each asked about before it is done.

import { call, idempotencyKey, jobPath } from "./api.js";
import { FINISHED } from "./badge.js";
import { ask, field } from "./dialog.js";
import { h, link } from "./dom.js";
import { whole } from "./format.js";
import { mayChange } from "./signin.js";

const ACTIONS = [
  {
    verb: "pause",
    label: "Pause",
    title: "Pause this job?",
    text: "Its gang finishes its step, saves, and gives its room to others. Resume it whenever you like.",
    fits: (job) => !FINISHED.has(job.state) && job.state !== "PAUSED" && !job.pause_requested && !job.cancel_requested,
  },
  {
    verb: "resume",
    label: "Resume",
    title: "Resume this job?",
    text: "It is queued, and continues where it was when there is room.",
    fits: (job) => job.state === "PAUSED" || (!FINISHED.has(job.state) && job.pause_requested),
  },
  {
    verb: "retry",
    label: "Retry",
    title: "Try this job again?",
    text: "It is queued again, and continues from its newest checkpoint.",
    fits: (job) => job.state === "FAILED" || job.state === "CANCELLED",
  },
  {
    verb: "cancel",
    label: "Cancel",
    title: "Cancel this job?",
    danger: true,
    text: "Its workers end within seconds. What came after its newest checkpoint is lost.",
    fits: (job) => !FINISHED.has(job.state) && !job.cancel_requested,
  },
];

/** The buttons. `changed` takes the job as it is after something was done; `open` shows another page. */
export function actionButtons(changed, open) {
  const element = h("div", { class: "actions", role: "group", "aria-label": "Actions" });
  let shown = "";

  /** Offer what fits the job as it is. */
  function update(job) {
    const fitting = ACTIONS.filter((action) => action.fits(job));
    const key = [job.version, mayChange(), ...fitting.map((action) => action.verb)].join();
    if (key === shown) return;
    shown = key;
    const focused = element.contains(document.activeElement) && document.activeElement.textContent;
    element.replaceChildren(
      ...fitting.map((action) => button(action.label, action.danger, () => act(action, job))),
      button("Describe", false, () => describe(job)),
      button("Clone", false, () => clone(job)),
    );
    if (focused) [...element.children].find((one) => one.textContent === focused)?.focus();
  }

  function button(label, danger, click) {
    const disabled = !mayChange();
    return h(
      "button",
      {
        type: "button",
        class: danger ? "danger" : "",
        disabled,
        title: disabled ? "Your key may only read" : null,
        on: { click },
      },
      label,
    );
  }

  async function act({ verb, label, title, text, danger }, job) {
    const record = await ask({
      title,
      text: `${job.name}. ${text}`,
      action: label,
      danger,
      act: () => call("POST", jobPath(job.id, verb)),
    });
    if (record) changed(record);
  }

  async function describe(job) {
    const { group, tags, notes } = job.spec;
    const [groupField, tagsField] = [group ?? "", tags.join(" ")].map((value) => h("input", { type: "text", value }));
    const notesField = h("textarea", { maxlength: 4000 }, notes);
    const record = await ask({
      title: "Describe this job",
      action: "Save",
      fields: [
        field("Group", groupField, "The runs that it belongs with."),
        field("Tags", tagsField, "With blanks between them."),
        field("Notes", notesField),
      ],
      act: () => {
        const now = { group: groupField.value.trim(), tags: tagsField.value.split(/\s+/).filter(Boolean), notes: notesField.value };
        const before = { group: group ?? "", tags, notes };
        const changed = Object.entries(now).filter(([name, value]) => `${value}` !== `${before[name]}`);
        return changed.length ? call("PATCH", jobPath(job.id), { body: Object.fromEntries(changed) }) : null;
      },
    });
    if (record) changed(record);
  }

  async function clone(job) {
    const name = h("input", { type: "text", value: job.name, required: true, maxlength: 100 });
    const changes = h("textarea", { spellcheck: "false" }, "{}");
    const start = startChoice(job.checkpoint);
    const key = idempotencyKey();
    const record = await ask({
      title: "Clone this job",
      action: "Submit the clone",
      fields: [
        field("Name", name),
        field(
          "Changes to its spec",
          changes,
          'A JSON merge patch, for example {"optimizer": {"learning_rate": 0.001}}',
        ),
        field("Start", start, job.checkpoint ? null : "The job has no checkpoint yet."),
        link(
          `/new?from=${encodeURIComponent(job.id)}`,
          { on: { click: (event) => event.currentTarget.closest("dialog").close() } },
          "Edit its whole spec instead",
        ),
      ],
      act: () =>
        call("POST", jobPath(job.id, "clone"), {
          body: { changes: { ...patch(changes.value), name: name.value }, ...(start.value && { [start.value]: true }) },
          headers: { "Idempotency-Key": key },
        }),
    });
    if (record) open(`/jobs/${encodeURIComponent(record.id)}`);
  }

  return { element, update };
}

/** Where a clone starts; each value is the field of the request that says so. */
function startChoice(checkpoint) {
  const choices = [["", "As its spec says"]];
  if (checkpoint)
    choices.push(
      ["from_checkpoint", `Continue from step ${whole(checkpoint.step)}: with the optimizer, to more steps`],
      ["from_weights", `Start from the weights of step ${whole(checkpoint.step)}: at step 0`],
    );
  return h("select", {}, ...choices.map(([value, label]) => h("option", { value }, label)));
}

function patch(text) {
  let changes;
  try {
    changes = JSON.parse(text || "{}");
  } catch (problem) {
    throw new Error(`The changes are not JSON: ${problem.message}`);
  }
  if (typeof changes !== "object" || changes === null || Array.isArray(changes))
    throw new Error('The changes must be a JSON object, such as {"priority": 5}.');
  return changes;
}
