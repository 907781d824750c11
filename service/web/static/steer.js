// What can be done to a job while it trains: change its hyperparameters, give it another size, break something, trace
// steps, export its model.

import { call, idempotencyKey, jobPath } from "./api.js";
import { FINISHED } from "./badge.js";
import { ask, field } from "./dialog.js";
import { card, h, setText } from "./dom.js";
import { whole } from "./format.js";
import { mayChange } from "./signin.js";

const DRILLS = {
  kill_rank: "The rank's process is killed.",
  hang_rank: "The rank is stopped and never resumes.",
  drop_node: "All of the job's processes on the rank's node are killed, and the job stays off it for some seconds.",
  delay_rank: "The rank is late in each of some steps, by some seconds.",
  fill_store: "Checkpoints cannot be written for some seconds.",
};

// Each has a label, what it does, which jobs it is for, and a form: its fields, and how to send what they have. `done`
// says what then happens.
const FORMS = [
  {
    label: "Change",
    text: "From the next step on, on all ranks. boost steer changes schedule, warm-up and sampling, too.",
    fits: (job) => !FINISHED.has(job.state) && !job.cancel_requested,
    done: "The change is requested; the curves show from which step it holds.",
    form({ id, spec }) {
      const settings = [
        ["Learning rate", "optimizer", "learning_rate", 0],
        ["Steps in all", "training", "steps", 1],
        ["Steps between evaluations", "training", "evaluate_every_steps", 1],
        ["Steps between checkpoints", "checkpoint", "every_steps", 1],
      ].map(([name, section, key, min]) => ({ name, section, key, input: number(spec[section][key] ?? "", min, false) }));
      settings[0].input.step = "any";
      return {
        fields: settings.map(({ name, input }) => field(name, input)),
        send: () => {
          const body = {};
          for (const { section, key, input } of settings) {
            if (input.value !== input.defaultValue) (body[section] ??= {})[key] = input.value ? Number(input.value) : null;
          }
          return call("PATCH", jobPath(id), { body });
        },
      };
    },
  },
  {
    label: "Scale",
    text: "More or fewer workers, within these limits, as there is room. Training goes on from the same step.",
    fits: (job) => !FINISHED.has(job.state) && !job.cancel_requested,
    done: "The limits are changed; the gang is resized to fit.",
    form(job) {
      const [what, unit] = job.spec.elasticity?.gpus ? ["gpus", "GPUs"] : ["data_parallel_size", "replicas"];
      const own = job.spec.parallelism.data_parallel_size;
      const now = job.spec.elasticity?.[what] ?? { min: own, max: own };
      const [min, max] = [now.min, now.max].map((value) => number(value, 1));
      return {
        fields: [field(`At least, ${unit}`, min), field(`At most, ${unit}`, max)],
        send: () =>
          call("PATCH", jobPath(job.id), { body: { [what]: { min: Number(min.value), max: Number(max.value) } } }),
      };
    },
  },
  {
    label: "Drill",
    text: "Inject one fault, to see the job recover. Steps since its newest copy are done again.",
    danger: true,
    fits: (job) => job.state === "RUNNING",
    done: "The drill is requested; the timeline shows how the job recovers.",
    form(job) {
      const explained = h("small");
      const kind = h(
        "select",
        {},
        Object.keys(DRILLS).map((value) => h("option", { value }, value.replaceAll("_", " "))),
      );
      const [rank, step, steps, seconds] = [number(0, 0), number("", 0, false), number(10, 1), number(10, 0)];
      seconds.step = "any";
      const late = field("Steps", steps);
      const lasting = field("Seconds", seconds);
      const explain = () => {
        setText(explained, DRILLS[kind.value]);
        late.hidden = kind.value !== "delay_rank";
        lasting.hidden = !["delay_rank", "drop_node", "fill_store"].includes(kind.value);
      };
      kind.addEventListener("change", explain);
      explain();
      const key = idempotencyKey();
      return {
        fields: [
          h("label", { class: "field" }, h("span", {}, "Fault"), kind, explained),
          field("Rank", rank),
          field("After step", step, "Empty: now."),
          late,
          lasting,
        ],
        send: () => {
          const body = {
            kind: kind.value,
            rank: Number(rank.value),
            steps: Number(steps.value),
            seconds: Number(seconds.value),
            at_step: step.value === "" ? null : Number(step.value),
          };
          return call("POST", jobPath(job.id, "drills"), { body, headers: { "Idempotency-Key": key } });
        },
      };
    },
  },
  {
    label: "Profile",
    text: "Trace some steps of some ranks. Each rank's trace is stored next to the checkpoints; the timeline says where.",
    fits: (job) => job.state === "RUNNING",
    done: "The trace is requested; the timeline shows where it is stored.",
    form(job) {
      const [steps, ranks] = [number(3, 1), h("input", { type: "text", value: "0", required: true })];
      const key = idempotencyKey();
      return {
        fields: [field("Steps", steps), field("Ranks", ranks, "With blanks between them.")],
        send: () => {
          const body = { steps: Number(steps.value), ranks: ranks.value.trim().split(/\s+/).map(Number) };
          return call("POST", jobPath(job.id, "profiles"), { body, headers: { "Idempotency-Key": key } });
        },
      };
    },
  },
];

/** The card. `changed` takes the job as it is after something was done; `update` takes the job. */
export function steerCard(changed) {
  const buttons = h("div", { class: "actions", role: "group", "aria-label": "Steer" });
  const told = h("p", { class: "muted", role: "status" });
  const element = card("Steer", { id: "steer" }, buttons, told);
  let shown = "";

  function update(job) {
    const fitting = FORMS.filter((one) => one.fits(job));
    element.hidden = !fitting.length && !job.checkpoint;
    const key = [job.version, mayChange()].join();
    if (key === shown) return;
    shown = key;
    const focused = buttons.contains(document.activeElement) && document.activeElement.textContent;
    const [disabled, title] = mayChange() ? [false, null] : [true, "Your key may only read"];
    buttons.replaceChildren(
      ...fitting.map((one) =>
        h(
          "button",
          { type: "button", class: one.danger ? "danger" : "", disabled, title, on: { click: () => act(one, job) } },
          one.label,
        ),
      ),
      ...(job.checkpoint ? [h("button", { type: "button", on: { click: () => exported(job) } }, "Export")] : []),
    );
    if (focused) [...buttons.children].find((one) => one.textContent === focused)?.focus();
  }

  async function act({ label, text, danger, done, form }, job) {
    const { fields, send } = form(job);
    const record = await ask({ title: `${label}: ${job.name}`, text, action: label, danger, fields, act: send });
    if (!record) return;
    setText(told, done);
    changed(record);
  }

  return { element, update };
}

/** How to export: the files are written where the command runs, which reads the checkpoint from its store. */
function exported(job) {
  const command = `boost export ${job.id} my-model --step ${job.checkpoint.step}`;
  return ask({
    title: `Export: ${job.name}`,
    text: `The model of step ${whole(job.checkpoint.step)} as transformers loads it, into a folder or an s3:// URL, by the command line:`,
    fields: [h("pre", { tabindex: 0 }, command)],
    action: "Copy",
    async act() {
      if (!navigator.clipboard) throw new Error("Over plain HTTP the browser does not copy; select the text instead.");
      await navigator.clipboard.writeText(command);
    },
  });
}

function number(value, min, required = true) {
  return h("input", { type: "number", value, min, required });
}
