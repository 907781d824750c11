// A job's course and events, kept up to date: history first, then what happens as it happens.

import { jobPath } from "./api.js";
import { every } from "./live.js";
import { follow } from "./stream.js";
import { TIMELINE_KINDS } from "./timeline.js";

const MADE_OF_CHECKPOINTS = ["sample", "scores"];
const LEAST_SECONDS = 5;
const PATIENCE = 20; // a course is read again no sooner than after so many times what reading it took
const OVERLAP_MS = 10_000;

/**
 * Follow a job.
 *
 * `happened` takes each event of the timeline, each sample and all scores, and progress, evaluations and ranks' times from now on; `read` is
 * called whenever the course has been read; `finished` says whether the job has ended.
 */
export function watch(course, { happened, read, finished }) {
  let stopStream = () => {};
  let lastId = 0;
  let stale = true;
  let readAt = -Infinity;
  let wanted = null;
  let begun = false;
  let stopped = false;

  const reading = every(1, async () => {
    const due = stale && performance.now() - readAt > 1000 * Math.max(LEAST_SECONDS, PATIENCE * course.readSeconds);
    if (!due && wanted === course.range && begun) return;
    wanted = course.range;
    stale = false;
    await course.read();
    if (stopped) return;
    readAt = performance.now();
    read();
    if (!begun) past();
    begun = true;
  });

  /** Read the timeline's events so far, then follow all. */
  function past() {
    const path = jobPath(course.id, "events");
    stopStream = follow(
      path,
      { kind: [...TIMELINE_KINDS, ...MADE_OF_CHECKPOINTS], follow: false },
      { event: take, ended: () => (present(path), false) },
    );
  }

  function present(path) {
    const newest = course.samples.at(-1)?.time;
    const since = newest && new Date(Date.parse(newest) - OVERLAP_MS).toISOString();
    const kind = [...TIMELINE_KINDS, ...MADE_OF_CHECKPOINTS, "progress", "evaluation", "ranks"];
    stopStream = follow(path, { kind, after: lastId, since, follow: true }, { event: take, ended: () => !finished() });
  }

  function take(event) {
    if (event.id <= lastId) return;
    lastId = event.id;
    if (event.kind === "progress") course.progress(event.data);
    if (event.kind === "evaluation") course.evaluation(event.data);
    if (event.kind === "ranks") course.ranksTimes(event.data);
    stale ||= event.kind === "progress" || event.kind === "restart";
    happened(event);
  }

  return {
    reading,
    /** Follow again after a job that had ended goes on. */
    restart() {
      stopStream();
      present(jobPath(course.id, "events"));
    },
    stop() {
      stopped = true;
      reading.stop();
      stopStream();
    },
  };
}
