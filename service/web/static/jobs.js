// The page of all jobs: a list that keeps itself up to date, and what of the cluster they use.

import { call, get } from "./api.js";
import { FINISHED, STATES } from "./badge.js";
import { clusterPanels } from "./cluster.js";
import { addressOfJobs } from "./compare/view.js";
import { ask } from "./dialog.js";
import { h, link, setText } from "./dom.js";
import { jobFilters } from "./filters.js";
import { Histories } from "./histories.js";
import { COLUMNS, jobRow } from "./jobrow.js";
import { every } from "./live.js";
import { notify } from "./notices.js";
import { mayChange } from "./signin.js";

const LIST_SECONDS = 2;
const CLUSTER_SECONDS = 5;
const PAGE = 25;
const MOST_COUNTED = 500;

/** Show the page; returns what ends it. */
export function showJobs(main) {
  document.title = "Jobs · BOOST";
  const pages = [null]; // the cursors that led here
  const rows = new Map();
  const shown = new Map();
  let asked = 0;

  const body = h("tbody");
  const empty = h("p", { class: "empty" });
  const table = h(
    "table",
    { class: "jobs" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        COLUMNS.map((column, index) => h("th", { scope: "col", class: `cell-${index}` }, column)),
      ),
    ),
    body,
  );
  const newer = h(
    "button",
    { type: "button", on: { click: () => turn(() => pages.length > 1 && pages.pop()) } },
    "← Newer",
  );
  const older = h(
    "button",
    { type: "button", on: { click: () => turn(() => older.next && pages.push(older.next)) } },
    "Older →",
  );
  const where = h("span", { "aria-live": "polite" });
  const compare = link("/compare", { class: "button" }, "Compare");
  const cancel = h("button", { type: "button", class: "danger", on: { click: cancelThese } }, "Cancel these");
  const filters = jobFilters(() => {
    compare.href = addressOfJobs(filters.query());
    turn(() => pages.splice(1));
  });
  compare.href = addressOfJobs(filters.query());
  const cluster = clusterPanels();
  const histories = new Histories(
    (id) => shown.has(id) && rows.get(id)?.update(shown.get(id), histories.of(shown.get(id))),
  );

  main.append(
    h(
      "div",
      { class: "overview" },
      h(
        "section",
        { class: "list", "aria-labelledby": "jobs-title" },
        h(
          "div",
          { class: "job-title" },
          h("h1", { id: "jobs-title" }, "Jobs"),
          h("div", { class: "actions" }, cancel, link("/sweeps", {}, "Sweeps"), compare, link("/new", { class: "primary" }, "New job")),
        ),
        filters.element,
        table,
        empty,
        h("nav", { class: "pages", "aria-label": "Pages of jobs" }, newer, where, older),
      ),
      cluster.element,
    ),
  );

  const list = every(LIST_SECONDS, async () => {
    const mine = ++asked;
    const page = await get("/v1/jobs", { ...filters.query(), limit: PAGE, cursor: pages.at(-1) });
    if (mine === asked) showPage(page);
  });
  const around = every(CLUSTER_SECONDS, async () => {
    const [{ queues }, nodes] = await Promise.all([get("/v1/queues"), get("/v1/nodes")]);
    filters.update(queues);
    cluster.update(queues, nodes);
  });

  function turn(change) {
    change();
    asked += 1; // what is under way is for another page
    list.now();
  }

  /** What the filters leave that has not ended, as a request; null unless they leave some jobs out. */
  function toCancel() {
    const which = Object.fromEntries(Object.entries(filters.query()).filter(([, value]) => value.length));
    const state = (which.state ?? STATES).filter((each) => !FINISHED.has(each));
    return Object.keys(which).length && state.length ? { ...which, state } : null;
  }

  async function cancelThese() {
    try {
      const which = toCancel();
      const { jobs, next_cursor: next } = await get("/v1/jobs", { ...which, limit: MOST_COUNTED });
      const count = jobs.filter((job) => !job.cancel_requested).length;
      await ask({
        title: `Cancel ${next ? "at least " : ""}${count} ${count === 1 ? "job" : "jobs"}?`,
        text: "All that the filters leave, on every page. Workers end within seconds. What came after the newest checkpoints is lost.",
        action: "Cancel them",
        danger: true,
        act: async () => {
          while ((await call("POST", "/v1/jobs/cancel", { body: which })).remaining);
        },
      });
      list.now();
    } catch (problem) {
      notify(problem);
    }
  }

  function showPage({ jobs, next_cursor: next }) {
    shown.clear();
    for (const job of jobs) {
      shown.set(job.id, job);
      if (!rows.has(job.id)) rows.set(job.id, jobRow(job));
      rows.get(job.id).update(job, histories.of(job));
    }
    const wanted = jobs.map((job) => rows.get(job.id).element);
    if (wanted.length !== body.children.length || wanted.some((row, index) => row !== body.children[index])) {
      body.replaceChildren(...wanted);
    }
    table.hidden = !jobs.length;
    cancel.hidden = !toCancel();
    cancel.disabled = !mayChange();
    setText(
      empty,
      jobs.length
        ? ""
        : next
          ? "None among these jobs. “Older” searches on."
          : "No jobs here. Write one with “New job”, or: boost submit examples/cola-tiny.yaml",
    );
    newer.disabled = pages.length === 1;
    older.disabled = !next;
    older.next = next;
    newer.parentElement.hidden = pages.length === 1 && !next;
    setText(where, pages.length > 1 || next ? `Page ${pages.length}` : "");
  }

  return () => {
    list.stop();
    around.stop();
    filters.stop();
    histories.stop();
  };
}
