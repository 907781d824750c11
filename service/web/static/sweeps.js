// The pages of sweeps: all of them, and the trials of one, with links to their jobs.

import { get } from "./api.js";
import { addressOfJobs } from "./compare/view.js";
import { h, link, setText } from "./dom.js";
import { ago, loss, words } from "./format.js";
import { every } from "./live.js";
import { operatorsTenant } from "./signin.js";

const SECONDS = 5;

/** Show all sweeps; returns what ends it. */
export function showSweeps(main) {
  const { body, note } = frame(main, "Sweeps", ["Name", "State", "Trials", "Best", "Created"]);
  return every(SECONDS, async () => {
    const { sweeps } = await get("/v1/sweeps");
    setText(note, sweeps.length ? "" : "No sweeps yet. Begin one with: boost sweep create SWEEP.YAML");
    body.replaceChildren(...sweeps.map(sweepRow));
  }).stop;
}

/** Show one sweep and its trials; returns what ends it. */
export function showSweep(main, name) {
  const { head, body, note } = frame(main, name, []);
  const path = `/v1/sweeps/${encodeURIComponent(name)}`;
  const polling = every(SECONDS, async () => {
    const [sweep, { trials }] = await Promise.all([get(path), get(`${path}/trials`)]);
    const fields = Object.keys(sweep.spec.space);
    head.replaceChildren(...["Trial", "State", sweep.spec.metric, ...fields, "Why"].map(heading));
    note.replaceChildren(`${sweep.state}: ${sweep.message}. `, link(addressOfJobs({ group: name, tenant: operatorsTenant() ?? "" }), {}, "Compare its jobs"));
    body.replaceChildren(...trials.map((trial) => trialRow(trial, fields, sweep.best)));
  });
  return polling.stop;
}

function frame(main, title, columns) {
  document.title = `${title} · BOOST`;
  const head = h("tr", {}, columns.map(heading));
  const body = h("tbody");
  const note = h("p", { class: "muted" });
  const table = h("table", { class: "plain sweeps" }, h("thead", {}, head), body);
  main.append(
    h("p", {}, link("/", {}, "← Jobs"), " ", link("/sweeps", {}, "Sweeps")),
    h("h1", {}, title),
    note,
    h("div", { class: "scroll" }, table),
  );
  return { head, body, note };
}

const heading = (name) => h("th", { scope: "col" }, name);

const jobLink = (trial) =>
  trial.job_id ? link(`/jobs/${encodeURIComponent(trial.job_id)}`, {}, `${trial.number}`) : `${trial.number}`;

function sweepRow({ name, state, trials, best, created_at: created }) {
  const counts = Object.entries(trials).map(([each, count]) => `${count} ${words(each)}`);
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, link(`/sweeps/${encodeURIComponent(name)}`, {}, name)),
    h("td", {}, h("span", { class: "badge" }, state)),
    h("td", {}, counts.join(", ")),
    h("td", {}, best && [loss(best.value), h("small", {}, "trial ", jobLink(best))]),
    h("td", {}, ago(created)),
  );
}

function trialRow(trial, fields, best) {
  return h(
    "tr",
    { class: trial.number === best?.number && "present" },
    h("th", { scope: "row" }, jobLink(trial)),
    h("td", {}, words(trial.state)),
    h("td", {}, trial.value === null ? "" : loss(trial.value)),
    fields.map((field) => h("td", {}, JSON.stringify(trial.parameters[field]))),
    h("td", {}, trial.reason),
  );
}
