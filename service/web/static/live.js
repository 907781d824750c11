// What is done again and again, and only while somebody looks.

import { connection, notify } from "./notices.js";

const LONGEST_PAUSE = 30;

/** Do `work` now and every so many seconds while the tab is visible. Returns {now, stop}. */
export function every(seconds, work) {
  let timer = null;
  let busy = false;
  let stopped = false;
  let failures = 0;
  let again = false; // asked for while it was under way

  async function turn() {
    clearTimeout(timer);
    timer = null;
    again ||= busy;
    if (stopped || busy || document.hidden) return;
    busy = true;
    let pause = seconds;
    try {
      await work();
      failures = 0;
      connection(null);
    } catch (problem) {
      failures += 1;
      pause = pauseAfter(problem, failures, seconds);
    }
    busy = false;
    if (again && pause !== null) pause = 0;
    again = false;
    if (!stopped && pause !== null) timer = setTimeout(turn, pause * 1000);
  }

  document.addEventListener("visibilitychange", turn);
  turn();
  return {
    now: turn,
    stop() {
      stopped = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", turn);
    },
  };
}

/** Seconds to wait after a failure, which is told; null when there is no use in going on. */
export function pauseAfter(problem, failures, least = 1) {
  if (problem.name === "AbortError" || problem.status === 401) return null;
  if (problem.passing) {
    connection(problem);
    return problem.retryAfter ?? Math.min(LONGEST_PAUSE, Math.max(least, 2 ** failures / 2));
  }
  notify(problem);
  if (problem.status === undefined) console.error(problem);
  return null;
}
