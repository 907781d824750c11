// The page of one job: its parts, and what keeps them up to date.

import { get, jobPath } from "./api.js";
import { FINISHED } from "./badge.js";
import { checkpointCard } from "./checkpoints.js";
import { Course } from "./course.js";
import { curveCards } from "./curves.js";
import { card, h, link } from "./dom.js";
import { goodputCard } from "./goodput.js";
import { heatCard } from "./heat.js";
import { jobHead } from "./jobhead.js";
import { every } from "./live.js";
import { logCard } from "./logs.js";
import { planCard } from "./plan.js";
import { samplesCard } from "./samples.js";
import { scoresCard } from "./scores.js";
import { specDiff } from "./specdiff.js";
import { steerCard } from "./steer.js";
import { watch } from "./watch.js";
import { ranks, restarts, TIMELINE_KINDS } from "./timeline.js";
import { timelineCard } from "./timelineview.js";
import { validationCard } from "./validation.js";

const RECORD_SECONDS = 5;
const DRAW_SECONDS = 1;
const LIST_SECONDS = 1;

/** Show the page; returns what ends it. `open` shows another page. */
export function showJob(main, id, open) {
  document.title = "Job · BOOST";
  const stopped = new AbortController();
  const stops = [() => stopped.abort()];
  begin().catch((problem) => problem.name !== "AbortError" && problem.status !== 401 && absent(main, problem));
  return () => stops.forEach((stop) => stop());

  async function begin() {
    let job = await get(jobPath(id), {}, stopped.signal);
    const versions = await get("/v1/versions", {}, stopped.signal).catch(() => ({})); // for a link that can be missed
    const events = [];
    const course = new Course(id);
    const head = jobHead(take, open, versions.ray_dashboard_url);
    const parts = {
      steer: steerCard(take),
      timeline: timelineCard(),
      goodput: goodputCard(),
      heat: heatCard(),
      plan: planCard(),
      checkpoints: checkpointCard(id),
      validation: validationCard(),
      samples: samplesCard(),
      scores: scoresCard(),
    };
    const sets = job.spec.data.validation.map(({ name }) => name);
    const curves = curveCards(course, sets, () => reading.now());
    const logs = logCard(id, () => (FINISHED.has(job.state) ? job.finished_at : null));
    const spec = h("pre", { tabindex: 0 });
    stops.push(curves.stop, parts.heat.stop, logs.stop);
    main.replaceChildren(
      h(
        "article",
        { class: "job", "aria-label": job.name },
        head.element,
        parts.steer.element,
        parts.timeline.element,
        parts.goodput.element,
        curves.element,
        parts.validation.element,
        parts.samples.element,
        parts.scores.element,
        parts.heat.element,
        logs.element,
        parts.checkpoints.element,
        parts.plan.element,
        card("Spec", { id: "spec" }, h("details", {}, h("summary", {}, "As it is now, defaults included"), spec), specDiff(job)),
      ),
    );

    let saved = 0;
    let listed = null; // with which number of checkpoints saved the list has been read
    let changed = true;
    function take(record) {
      const again = FINISHED.has(job.state) && !FINISHED.has(record.state);
      job = record;
      changed = true;
      if (again) logs.restart();
      if (again) watching.restart();
      draw();
    }

    function draw() {
      head.update(job);
      parts.steer.update(job);
      parts.timeline.update(job, events);
      parts.goodput.update(job);
      parts.plan.update(job);
      parts.validation.update(job);
      parts.samples.update();
      logs.update(job.shape ? ranks(job.shape) : 0);
      if (!changed) return;
      changed = false;
      spec.textContent = JSON.stringify(job.spec, null, 2);
      const changes = events.filter((event) => event.kind === "steered").map((event) => event.data.step);
      curves.update(restarts(events).map((restart) => restart.resumed_step), changes);
      parts.heat.update(course.ranks, job.shape?.nodes);
    }

    const watching = watch(course, {
      finished: () => FINISHED.has(job.state),
      happened(event) {
        changed = true;
        if (TIMELINE_KINDS.includes(event.kind)) events.push(event);
        if (event.kind === "progress") job = { ...job, progress: event.data };
        if (event.kind === "scores") parts.scores.take(event.data);
        if (event.kind === "sample") parts.samples.take(event.data);
        if (event.kind === "evaluation") job = { ...job, evaluation: event.data };
        if (["state", "restart", "shape", "steered"].includes(event.kind)) records.now();
        if (event.kind === "checkpoint") saved += 1;
      },
      read() {
        changed = true;
        draw();
      },
    });
    const reading = watching.reading;
    const records = every(RECORD_SECONDS, async () => take(await get(jobPath(id), {}, stopped.signal)));
    const drawing = every(DRAW_SECONDS, async () => draw());
    // Old checkpoints' events come all at once, for which the list is read once or twice.
    const lists = every(LIST_SECONDS, async () => {
      const now = saved;
      if (now === listed) return;
      await parts.checkpoints.read(stopped.signal);
      listed = now;
    });
    const once = every(RECORD_SECONDS, async () => {
      await parts.plan.read(job);
      once.stop();
    });
    stops.push(watching.stop, records.stop, drawing.stop, lists.stop, once.stop);
  }
}

function absent(main, problem) {
  main.replaceChildren(
    h(
      "section",
      { class: "card absent" },
      h("h1", {}, problem.title || "No job"),
      h("p", {}, problem.message),
      link("/", {}, "← Jobs"),
    ),
  );
}
