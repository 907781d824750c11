// The courses behind the list's small curves: read once a job, then drawn on from the records.

import { get, jobPath } from "./api.js";

const POINTS = 60;
const AT_ONCE = 3;

/** Courses of jobs by id; `changed` is called with an id when its course has come. */
export class Histories {
  #courses = new Map();
  #waiting = [];
  #reading = 0;
  #stopped = new AbortController();

  constructor(changed) {
    this.changed = changed;
  }

  /** The samples of a job as far as they are known: a list of {step, loss, tokens_per_second}. */
  of(job) {
    if (!job.progress) return [];
    if (!this.#courses.has(job.id)) {
      this.#courses.set(job.id, []);
      this.#waiting.push(job.id);
      this.#read();
    }
    const course = this.#courses.get(job.id);
    if (course.length && course.at(-1).step < job.progress.step) course.push(job.progress);
    if (course.length > 2 * POINTS) course.splice(0, course.length, ...course.filter((_, index) => index % 2));
    return course;
  }

  /** Read no more. */
  stop() {
    this.#stopped.abort();
    this.#waiting = [];
  }

  async #read() {
    if (this.#reading >= AT_ONCE || !this.#waiting.length) return;
    const id = this.#waiting.shift();
    this.#reading += 1;
    try {
      const history = await get(jobPath(id, "metrics"), { points: POINTS, ranks: false }, this.#stopped.signal);
      this.#courses.set(id, history.samples);
      this.changed(id);
    } catch (problem) {
      if (problem.passing) this.#courses.delete(id); // asked for again with the next round; else the list goes without
    }
    this.#reading -= 1;
    this.#read();
  }
}
