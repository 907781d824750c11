// One event in a sentence.

import { bytes, duration, layout, node, small, whole, words } from "./format.js";

const SENTENCES = {
  state: (data) => `${data.state}: ${data.message}`,
  started: (data) =>
    [`${whole(data.world_size)} ranks from step ${whole(data.step)}`, data.resumed_from].filter(Boolean).join(", "),
  shape: (data) => `${layout(data)} on ${[...new Set(data.nodes)].map(node).join(", ")}`,
  interruption: (data) => `${words(data.cause)} after step ${whole(data.step)}: ${data.message}`,
  restart: restartText,
  fault: (data) => `${words(data.what)} at step ${whole(data.step)}: ${data.message}`,
  checkpoint: (data) =>
    `step ${whole(data.step)}, ${bytes(data.bytes)}; the loop stood still for ${duration(data.seconds)}`,
  evaluation: (data) =>
    [`step ${whole(data.step)}: validation loss ${small(data.loss)}`]
      .concat((data.sets ?? []).map((set) => `${set.name} ${small(set.loss)}`))
      .join(", "),
  sample: (data) =>
    `step ${whole(data.step)}: ${data.samples.map((each) => JSON.stringify(each.prompt + each.text)).join("; ")}`,
  scores: (data) =>
    `step ${whole(data.step)}: ${data.scores.map((each) => `${each.task} ${each.metric} ${small(each.value)}`).join(", ")}`,
  comparison: (data) => {
    const peak = Math.max(...data.peak_bytes);
    const planned = data.planned_bytes[data.peak_bytes.indexOf(peak)];
    const memory = `step ${whole(data.step)}: ${bytes(peak)} of ${bytes(planned)} planned`;
    return memory + (data.step_seconds === null
      ? ""
      : `, ${duration(data.step_seconds)} a step, predicted ${duration(data.predicted_step_seconds)}`);
  },
  profile: (data) =>
    `${whole(data.steps)} steps of rank ${data.rank} after step ${whole(data.step)} are in ${data.url}`,
  drill: (data) => `${words(data.kind)} of rank ${data.rank} was asked for`,
  layouts: (data) =>
    `chosen from ${whole(data.timed)} legal layouts: ${data.layouts.map((each) => `${each.layout} (${small(each.step_seconds)} s)`).join(", ")}`,
  patch: changesText,
  steered: (data) => `from step ${whole(data.step + 1)} on ${changesText(data.changes)}, by ${data.by}`,
};

/** What an event says, for people. */
export function story(event) {
  return SENTENCES[event.kind]?.(event.data) ?? value(event.data);
}

/** What a restart was for and what it has cost. */
export function restartText(restart) {
  const lost = restart.step - restart.resumed_step;
  const parts = Object.entries(restart.parts)
    .filter(([, length]) => length > 0.05)
    .map(([name, length]) => `${words(name)} ${duration(length)}`);
  return [
    `${words(restart.cause)} after step ${whole(restart.step)}: ${restart.message}.`,
    `Cost ${duration(restart.seconds)}${parts.length ? ` (${parts.join(", ")})` : ""}`,
    `and ${lost} ${lost === 1 ? "step" : "steps"} done again,`,
    `recovered from ${restart.recovered_from}.`,
  ].join(" ");
}

function changesText(changes) {
  return Object.entries(changes)
    .map(([field, change]) => `${field} from ${value(change?.from)} to ${value(change?.to)}`)
    .join(", ");
}

function value(anything) {
  return typeof anything === "string" ? anything : JSON.stringify(anything);
}
