// The text of a job that is there already, to make another of it.

import { get, jobPath } from "../api.js";
import { stringify } from "./vendor.js";

/** A job's spec as a job file, without what would be so anyway; comments say where it is from. */
export async function textOf(id, schema, signal) {
  const job = await get(jobPath(id), {}, signal);
  const lines = [`# From ${job.id}, ${job.name}.`];
  if (job.checkpoint)
    lines.push(
      "# To start at step 0 from its newest weights, add to checkpoint (or continue_from, to continue from its step):",
      `#   weights_from: ${JSON.stringify(job.checkpoint_url)}`,
    );
  return `${lines.join("\n")}\n${stringify(schema.withoutDefaults(job.spec), { schema: "core", lineWidth: 120 })}`;
}
