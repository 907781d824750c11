// A job's numbers step by step: as the API has them, and drawn on by what its events say.

import { get, jobPath } from "./api.js";
import { finite } from "./format.js";

const POINTS = 500;

/** The course of one job. `range` is null or the steps between which it is wanted. */
export class Course {
  samples = [];
  evaluations = [];
  ranks = [];
  bucketSteps = 1;
  readSeconds = 0;
  range = null;

  constructor(id) {
    this.id = id;
  }

  /** Read it anew. */
  async read(signal) {
    const range = this.range;
    const began = performance.now();
    const [from_step, to_step] = range ?? [];
    const found = await get(jobPath(this.id, "metrics"), { points: POINTS, from_step, to_step }, signal);
    this.readSeconds = (performance.now() - began) / 1000;
    if (range !== this.range) return; // somebody has zoomed on
    this.samples = found.samples;
    this.evaluations = found.evaluations;
    this.ranks = found.ranks;
    this.bucketSteps = found.bucket_steps;
  }

  /** Take a progress event; steps that are done again take the place of those before. */
  progress(data) {
    const loss = finite(data.loss);
    const kept = this.samples.findLastIndex((sample) => sample.step < data.step) + 1;
    this.samples.splice(kept, this.samples.length, { ...data, loss, loss_min: loss, loss_max: loss });
  }

  /** Take an event with the ranks' times. */
  ranksTimes(data) {
    this.ranks = [...this.ranks.filter((row) => row.step < data.step), data];
  }

  /** Take an evaluation event. */
  evaluation(data) {
    this.evaluations = [
      ...this.evaluations.filter((one) => one.step < data.step),
      { step: data.step, loss: finite(data.loss), sets: data.sets ?? [] },
    ];
  }
}
