// A job's state, and in a few words why it is in it.

import { h, setClass, setText } from "./dom.js";
import { moment } from "./format.js";

export const STATES = ["QUEUED", "SCHEDULING", "RUNNING", "PAUSED", "SUCCEEDED", "FAILED", "CANCELLED"];
export const FINISHED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

/** A badge of a state. `update` takes a job. */
export function badge() {
  const element = h("span", { class: "badge" });
  function update(job) {
    setText(element, job.state);
    setClass(element, `badge state-${job.state.toLowerCase()}`);
  }
  return { element, update };
}

/** Why a job is in its state or what it waits for, for people. */
export function explanation(job) {
  if (!FINISHED.has(job.state)) {
    if (job.cancel_requested) return "is being cancelled";
    if (job.pause_requested && job.state !== "PAUSED") return "finishes its step, then pauses";
  }
  if (job.last_seen) return `As last seen ${moment(job.last_seen)}: ${job.message}; ${job.waiting_for}`;
  return job.waiting_for || job.message;
}
