// What the service's plan says of a job: memory of a rank by kind, and a step's time, in each layout that it may take;
// and what all steps of the fastest cost, with their checkpoints and failures.

import { call } from "./api.js";
import { card, h } from "./dom.js";
import { bytes, duration, layout, percent, short, whole } from "./format.js";

const MEMORY = ["weights", "gradients", "optimizer", "activations", "logits"];

/** The card. `read` asks for the plan of a job; `update` marks the layout that the job has now. */
export function planCard() {
  const place = h("div");
  const element = card("Plan", { id: "plan" }, place);
  let planned = null;
  let now = "";

  async function read(job) {
    try {
      planned = await call("GET", `/v1/jobs/${job.id}/plan`);
      show(job);
    } catch (problem) {
      if (problem.passing || problem.status === 401) throw problem;
      place.replaceChildren(h("p", { class: "muted" }, `There is no plan for this job: ${problem.message}`));
    }
  }

  function update(job) {
    const key = `${layout(job.shape ?? job.spec.parallelism)} ${job.state} ${measured(job) && duration(measured(job))} ${held(job)}`;
    if (planned && key !== now) show(job, (now = key));
  }

  function show(job) {
    const present = layout(job.shape ?? job.spec.parallelism);
    place.replaceChildren(...planView(planned, present, "now", measured(job), held(job)));
  }

  return { element, read, update };
}

/** A plan as elements. One layout is marked by a word; its step's `seconds` and a rank's bytes may have been measured. */
export function planView(planned, marked, mark, seconds = null, peak = null) {
  const largest = Math.max(...planned.shapes.map((one) => Math.max(one.memory.total, one.device_memory_bytes ?? 0)));
  const heads = ["Layout", "Memory of a rank", "Step", "Tokens/s", "Whole run"];
  const rows = planned.shapes.map((one, index) =>
    h(
      "tr",
      { class: layout(one) === marked ? "present" : "" },
      h(
        "th",
        { scope: "row", "data-label": heads[0] },
        layout(one),
        h(
          "small",
          {},
          [
            whole(one.world_size),
            one.world_size === 1 ? " rank" : " ranks",
            layout(one) === marked && `, ${mark}`,
            index === planned.fastest && ", fastest that fits",
          ]
            .filter(Boolean)
            .join(""),
        ),
      ),
      h(
        "td",
        { "data-label": heads[1] },
        memory(one, largest),
        layout(one) === marked && peak && h("small", {}, `measured ${bytes(peak)}`),
      ),
      h(
        "td",
        { "data-label": heads[2] },
        duration(one.step_seconds),
        layout(one) === marked && seconds && h("small", {}, `measured ${duration(seconds)}`),
      ),
      h("td", { "data-label": heads[3] }, short(one.tokens_per_second)),
      h(
        "td",
        { "data-label": heads[4] },
        duration(one.total_seconds),
        one.gpu_hours > 0 && h("small", {}, `${short(one.gpu_hours)} GPU-hours`),
      ),
    ),
  );
  return [
    h(
      "p",
      { class: "muted" },
      `${short(planned.parameters)} parameters, ${short(planned.tokens_per_step)} tokens a step, ` +
        `${short(planned.flops_per_token)} FLOPs a token.`,
    ),
    h(
      "div",
      { class: "scroll", tabindex: 0 },
      h(
        "table",
        { class: "plain stacked" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            heads.map((head) => h("th", { scope: "col" }, head)),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
    h(
      "ul",
      { class: "legend plain" },
      MEMORY.map((kind) => h("li", {}, h("i", { class: `kind-${kind}` }), h("span", {}, kind))),
    ),
    ...(planned.shapes[planned.fastest]?.words ?? []).map((line) => h("p", { class: "budget" }, line)),
    ...planned.notes.map((note) => h("p", { class: "muted" }, note)),
  ];
}

function memory(one, largest) {
  const said = MEMORY.map((kind) => `${kind} ${bytes(one.memory[kind])}`).join("\n");
  const parts = MEMORY.map((kind) =>
    h("span", { class: `kind-${kind}`, style: { "flex-grow": one.memory[kind] / largest } }),
  );
  const rest = h("span", { style: { "flex-grow": Math.max(0, 1 - one.memory.total / largest) } });
  const { memory, device_memory_bytes: device } = one;
  const of = device ? ` of ${bytes(device)} (${percent(memory.total / device)})` : "";
  const host = one.fits_host === false ? `, ${bytes(one.node_host_bytes)} of a host's ${bytes(one.node_memory_bytes)}` : "";
  const unfit = one.fits_device === false || one.fits_host === false;
  const limit = `${bytes(memory.total)}${of}${host}${unfit ? ", too much" : ""}`;
  return [
    h("div", { class: "stack", role: "img", "aria-label": said, title: said }, parts, rest),
    h("small", { class: unfit ? "too-much" : "" }, limit),
  ];
}

function measured(job) {
  if (job.state !== "RUNNING" || !job.progress) return null;
  return (ofGang(job) ? job.comparison.step_seconds : null) ?? job.progress.step_seconds;
}

/** The most that a rank of the present layout has held. */
function held(job) {
  return ofGang(job) ? Math.max(...job.comparison.peak_bytes) : null;
}

function ofGang(job) {
  return job.comparison && job.shape && layout(job.comparison) === layout(job.shape);
}
