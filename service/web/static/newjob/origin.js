// The text of a job that is there already, to make another of it.

import { get, jobPath } from "../api.js";
import { stringify } from "./vendor.js";

/** A job's spec as a job file for a clone, without what would be so anyway; comments say where it is from. */
export async function textOf(id, schema, signal) {
  const job = await get(jobPath(id), {}, signal);
  const lines = [`# From ${job.id}, ${job.name}.`];
  if (job.checkpoint)
    lines.push(
      "# To start at step 0 from its newest weights, add to checkpoint (or continue_from, to continue from its step):",
      `#   weights_from: ${JSON.stringify(job.checkpoint_url)}`,
    );
  return `${lines.join("\n")}\n${stringify(schema.withoutDefaults(asRequested(job)), { schema: "core", lineWidth: 120 })}`;
}

/** The spec that a clone has: with all changes of values, and without what the service or a sweep wrote. */
function asRequested({ spec, steers }) {
  const job = structuredClone(spec);
  const { training } = job;
  for (const [section, values] of Object.entries(steers.at(-1)?.steering ?? {})) Object.assign(job[section], values);
  if (training.steps !== spec.training.steps) training.tokens = null;
  if (training.tokens !== null) delete training.steps; // they follow from the tokens
  delete job.steered;
  if (job.elasticity) delete job.elasticity.resolved;
  const number = job.name.startsWith(`${job.group}-`) ? job.name.slice(`${job.group}-`.length) : job.name;
  const trial = `trial-${number}`;
  if (job.tags.includes(trial)) Object.assign(job, { group: null, tags: job.tags.filter((tag) => tag !== trial) });
  return job;
}
