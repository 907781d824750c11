// A job's life as stretches of time, made of its events.

/** The kinds of events that a timeline is made of. */
export const TIMELINE_KINDS = [
  "state",
  "started",
  "shape",
  "interruption",
  "restart",
  "fault",
  "checkpoint",
  "profile",
  "patch",
  "drill",
  "steered",
];

const OF_STATE = { QUEUED: "queued", PAUSED: "paused", SUCCEEDED: "ended", FAILED: "ended", CANCELLED: "ended" };
const OF_REASON = {
  HEAD_OF_QUEUE: "waiting",
  WAITING_FOR_RESOURCES: "waiting", // also a gang that has lost its workers
  GANG_STARTING: "starting",
  GANG_STARTED: "running",
  GANG_RECOVERING: "recovering",
  WAITING_FOR_STORE: "running",
};
const UNSTARTED = new Set(["queued", "waiting", "starting"]);

/** Stretches {phase, shape, from, to}, in milliseconds; the last goes to `now` unless the job has ended. */
export function stretches(events, now) {
  const found = [];
  let phase = "queued";
  let shape = null;
  for (const event of events) {
    if (event.kind === "shape") shape = event.data;
    phase = following(phase, event) ?? phase;
    const at = Date.parse(event.time);
    const running = phase === "running" ? shape : null;
    const last = found.at(-1);
    if (last && last.phase === phase && same(last.shape, running)) continue;
    if (last) last.to = Math.max(last.from, at);
    found.push({ phase, shape: running, from: last ? last.to : at, to: null });
  }
  const last = found.at(-1);
  if (last) last.to = Math.max(last.from, now);
  return found.filter((stretch) => stretch.phase !== "ended");
}

/** Times at which training went on after an interruption, each with when and for what it had stopped. */
export function restarts(events) {
  const found = [];
  let stopped = null;
  for (const event of events) {
    if (event.kind === "interruption") stopped = event;
    if (event.kind === "restart") {
      found.push({ at: Date.parse(stopped?.time ?? event.time), until: Date.parse(event.time), ...event.data });
      stopped = null;
    }
  }
  return found;
}

/** Ranks of a layout. */
export function ranks(layout) {
  const { tensor_parallel_size: tp, pipeline_parallel_size: pp, data_parallel_size: dp } = layout;
  return tp * pp * dp * (layout.context_parallel_size ?? 1);
}

function following(phase, { kind, data }) {
  switch (kind) {
    case "state":
      return OF_STATE[data.state] ?? OF_REASON[data.reason];
    case "shape": // reports may come before the change of state that they cause
      return UNSTARTED.has(phase) ? "starting" : phase;
    case "started":
      return UNSTARTED.has(phase) ? "running" : phase;
    case "interruption":
      return "recovering";
    case "restart":
      return "running";
    default:
      return phase;
  }
}

function same(one, other) {
  return (
    one === other ||
    (one &&
      other &&
      ["tensor", "pipeline", "data"].every((axis) => one[`${axis}_parallel_size`] === other[`${axis}_parallel_size`]) &&
      ranks(one) === ranks(other))
  );
}
