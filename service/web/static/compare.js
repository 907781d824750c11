// The page that compares jobs: it reads results and curves, keeps them up to date, and the view in the address.

import { get } from "./api.js";
import { FINISHED } from "./badge.js";
import { jobChooser } from "./compare/chooser.js";
import { curvesCard } from "./compare/curves.js";
import { tableCard } from "./compare/results.js";
import { importanceCard, spaceCards } from "./compare/space.js";
import { addressOf, readView, selection } from "./compare/view.js";
import { h, link, setText } from "./dom.js";
import { every } from "./live.js";
import { operatorsTenant } from "./signin.js";

const SECONDS = 5;
const ENDED_MS = 15_000; // between two reads once all jobs have ended: some may be retried, or join the group
const AT_ONCE = 50; // jobs in a request, so that the first curves show while others are read for the first time
const MOST_POINTS = 500; // of a curve
const ALL_POINTS = 40_000; // which are drawn in less time than people notice
const ADDRESS_MS = 150; // browsers refuse an address that changes with every move of a slider

/** Show the page; returns what ends it. */
export function showCompare(main) {
  document.title = "Compare · BOOST";
  const view = readView(location.hash);
  const stopped = new AbortController();
  const known = new Map(); // the curve of each job
  const final = new Set(); // the jobs whose curve does not change
  const noSweeps = new Set([""]); // groups that are no sweep's
  let comparison = { jobs: [], fields: [] };
  let drawn = `${view.metric} ${view.axis}`; // of what the known curves are
  let hidden = view.hide;
  let writing = null;
  let asked = 0;
  let readAt = -Infinity;

  const empty = h("p", { class: "empty" });
  const chooser = jobChooser(view, () => changed(true));
  const curves = curvesCard(view, changed);
  const table = tableCard(view, () => changed(false));
  const space = spaceCards(view, () => changed(false));
  const importance = importanceCard();
  const shown = h("div", { class: "comparison" }, curves.element, table.element, ...space.elements, importance.element);
  main.replaceChildren(
    h("nav", { "aria-label": "Where you are" }, link("/", {}, "← Jobs")),
    h("h1", {}, "Compare"),
    chooser.element,
    empty,
    shown,
  );
  shown.hidden = true;

  const reading = every(SECONDS, async () => {
    const mine = asked;
    await refresh(() => mine === asked && !stopped.signal.aborted);
  });

  function changed(anew) {
    clearTimeout(writing);
    writing = setTimeout(() => history.replaceState(null, "", addressOf(view)), ADDRESS_MS);
    const what = `${view.metric} ${view.axis}`;
    if (what !== drawn) {
      drawn = what;
      known.clear();
      curves.update(comparison.jobs, known);
    }
    if (view.hide !== hidden) {
      hidden = view.hide;
      space.draw();
    }
    if (!anew) return;
    final.clear();
    readAt = -Infinity;
    asked += 1; // what is under way is for another view
    reading.now();
  }

  async function refresh(current) {
    const ended = comparison.jobs.length && comparison.jobs.every((job) => FINISHED.has(job.state));
    if (ended && performance.now() < readAt + ENDED_MS) return;
    const which = selection(view);
    const { metric, axis, low, high, group, tenant } = view;
    const found = which ? await get("/v1/jobs/compare", which, stopped.signal) : { jobs: [], fields: [] };
    if (!current()) return;
    const same = JSON.stringify(found) === JSON.stringify(comparison);
    comparison = found;
    shown.hidden = !found.jobs.length;
    setText(
      empty,
      found.jobs.length ? "" : which ? "No job is found." : "Choose a group, tags, words, or single jobs.",
    );
    if (!same) {
      chooser.update(found.jobs);
      table.update(found);
      space.update(found);
    }
    const points = Math.min(MOST_POINTS, Math.floor(ALL_POINTS / found.jobs.length));
    for (const job of found.jobs) if (!FINISHED.has(job.state)) final.delete(job.id); // it is done again
    const jobs = found.jobs.filter((job) => !final.has(job.id));
    for (let begin = 0; begin < jobs.length; begin += AT_ONCE) {
      const some = jobs.slice(begin, begin + AT_ONCE);
      const query = { job: some.map((job) => job.id), metric, axis, low, high, points };
      const answer = await get("/v1/jobs/compare/curves", query, stopped.signal);
      if (!current()) return;
      const anew = answer.curves.some((curve) => !known.has(curve.id));
      for (const curve of answer.curves) known.set(curve.id, curve);
      for (const job of some) if (FINISHED.has(job.state)) final.add(job.id);
      if (anew || begin + AT_ONCE >= jobs.length) curves.update(found.jobs, known); // others are replaced at once
    }
    if (!jobs.length && !same) curves.update(found.jobs, known);
    await readImportance(group, tenant, current);
    if (current()) readAt = performance.now();
  }

  async function readImportance(group, tenant, current) {
    const own = operatorsTenant() ?? tenant; // whose sweeps the API shows: another's may have the same name
    if (noSweeps.has(group) || tenant !== own) return importance.update(null);
    try {
      const sweep = await get(`/v1/sweeps/${encodeURIComponent(group)}`, {}, stopped.signal);
      if (current()) importance.update(sweep);
    } catch (problem) {
      if (problem.passing || problem.status === 401) throw problem;
      noSweeps.add(group);
      importance.update(null);
    }
  }

  return () => {
    clearTimeout(writing);
    stopped.abort();
    reading.stop();
    chooser.stop();
    curves.stop();
    space.stop();
  };
}
