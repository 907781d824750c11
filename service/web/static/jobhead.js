// The head of a job's page: what it is, how it stands, and what can be done.

import { actionButtons } from "./actions.js";
import { badge, explanation, FINISHED } from "./badge.js";
import { addressOfJobs } from "./compare/view.js";
import { h, link, setText } from "./dom.js";
import { ago, duration, layout, loss, moment, node, percent, seconds, short, UNKNOWN, whole } from "./format.js";
import { progressBar, stepsDone } from "./jobrow.js";
import { operatorsTenant } from "./signin.js";

// Label and text of each fact; a job without it shows a dash.
const FACTS = [
  ["Step", (job) => `${whole(stepsDone(job))} of ${whole(job.spec.training.steps)}`],
  ["Left", (job) => (job.state === "RUNNING" && job.progress ? duration(job.progress.eta_seconds) : UNKNOWN)],
  ["Loss", (job) => (job.progress ? loss(job.progress.loss) : UNKNOWN)],
  [
    "Validation loss",
    (job) => (job.evaluation ? `${loss(job.evaluation.loss)} at ${whole(job.evaluation.step)}` : UNKNOWN),
  ],
  ["Tokens/s", (job) => (job.progress ? short(job.progress.tokens_per_second) : UNKNOWN)],
  ["Model FLOPs/s", (job) => (job.progress ? short(job.progress.model_flops_per_second) : UNKNOWN)],
  [
    "Waits for collectives",
    (job) =>
      job.progress?.step_seconds
        ? percent(job.progress.exposed_communication_seconds / job.progress.step_seconds)
        : UNKNOWN,
  ],
  ["Layout", (job) => layout(job.shape ?? job.spec.parallelism), "sizes of tensor, pipeline, context and data parallelism"],
  ["Restarts", (job) => whole(Object.values(job.restart_counts).reduce((sum, count) => sum + count, 0))],
  ["Checkpoint", (job) => (job.checkpoint ? `step ${whole(job.checkpoint.step)}` : UNKNOWN)],
  [
    "Spare copy",
    (job) => (spare(job) ? `step ${whole(job.spare.step)} on ${node(job.spare.node)}` : UNKNOWN),
    "A copy of the state in the memory of a node that the job does not use, from which it continues if it loses its own node.",
  ],
  ["Submitted", (job) => ago(job.submitted_at), (job) => `${moment(job.submitted_at)} by ${job.submitted_by}`],
  ["Ran", (job) => (job.started_at ? duration(seconds(job.started_at, job.finished_at)) : UNKNOWN)],
];

function spare(job) {
  return job.state === "RUNNING" && job.spare?.node;
}

/** The head; `dashboard` is where Ray's is, if that is known. `update` takes the job. */
export function jobHead(changed, open, dashboard) {
  const [name, why, origin, notes] = [
    h("h1"),
    h("p", { class: "explanation", role: "status" }),
    h("p", { class: "muted origin" }),
    h("p", { class: "notes" }),
  ];
  const state = badge();
  const bar = progressBar();
  const buttons = actionButtons(changed, open);
  const values = FACTS.map(() => h("dd"));
  const facts = h(
    "dl",
    { class: "facts" },
    FACTS.map(([label], index) => h("div", {}, h("dt", {}, label), values[index])),
  );
  const element = h(
    "header",
    { class: "job-head" },
    h("nav", { "aria-label": "Where you are" }, link("/", {}, "← Jobs")),
    h("div", { class: "job-title" }, h("div", {}, name, state.element), buttons.element),
    origin,
    notes,
    why,
    bar.element,
    facts,
  );

  function update(job) {
    const done = stepsDone(job);
    const share = FINISHED.has(job.state) ? "" : ` ${percent(done / job.spec.training.steps)}`;
    document.title = `${job.name} · ${job.state.toLowerCase()}${share} · BOOST`;
    setText(name, job.name);
    state.update(job);
    setText(why, explanation(job));
    why.classList.toggle("failed", job.state === "FAILED");
    const known = [job.id, job.tenant, `queue ${job.queue}`, `priority ${job.spec.priority}`].join(" · ");
    const actor = dashboard && job.shape?.supervisor;
    const tenant = operatorsTenant() ? job.tenant : "";
    const labels = [...(job.spec.group ? [["group", job.spec.group]] : []), ...job.spec.tags.map((tag) => ["tag", tag])];
    setText(notes, job.spec.notes);
    notes.hidden = !job.spec.notes;
    if (origin.dataset.known !== `${known} ${labels}` || origin.dataset.actor !== `${actor}`) {
      origin.dataset.known = `${known} ${labels}`;
      origin.dataset.actor = `${actor}`;
      origin.replaceChildren(
        known,
        ...(job.cloned_from
          ? [" · clone of ", link(`/jobs/${encodeURIComponent(job.cloned_from)}`, {}, job.cloned_from)]
          : []),
        ...labels.flatMap(([kind, label]) => [
          ` · ${kind} `,
          link(`/?${new URLSearchParams({ [kind]: label, ...(tenant && { tenant }) })}`, { title: `All jobs of this ${kind}` }, label),
        ]),
        ...(job.spec.group ? [" · ", link(addressOfJobs({ group: job.spec.group, tenant }), {}, "Compare the group")] : []),
        ...(actor
          ? [" · ", h("a", { href: `${dashboard}/#/actors/${encodeURIComponent(actor)}` }, "Ray dashboard")]
          : []),
      );
    }
    bar.update(done, job.spec.training.steps);
    buttons.update(job);
    FACTS.forEach(([, text, hint], index) => {
      setText(values[index], text(job));
      if (hint) values[index].title = typeof hint === "string" ? hint : hint(job);
    });
  }
  return { element, update };
}
