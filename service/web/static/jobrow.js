// One job in the list.

import { badge, explanation, FINISHED } from "./badge.js";
import { h, link, setText, time } from "./dom.js";
import { about, duration, layout, loss, percent, seconds, short, UNKNOWN, whole } from "./format.js";
import { goodputBar } from "./goodput.js";
import { sparkline } from "./spark.js";

export const COLUMNS = ["Job", "State", "Progress", "Loss", "Tokens/s", "Layout", "Goodput", "Age"];

/** A row. `update` takes the job and the samples of its course. */
export function jobRow(job) {
  const name = link(`/jobs/${encodeURIComponent(job.id)}`, { class: "job-link" });
  const [origin, why, steps, share, lossNow, rate, size, productive, age] = Array.from({ length: 9 }, () => h("span"));
  why.className = "why";
  const state = badge();
  const bar = progressBar();
  const curves = [sparkline("Loss"), sparkline("Tokens a second")];
  const goodput = goodputBar();
  const cells = [
    [name, h("small", { class: "id" }, job.id), h("small", {}, origin)],
    [state.element, h("small", {}, why)],
    [bar.element, h("small", { class: "pair" }, steps, share)],
    [lossNow, curves[0].element],
    [rate, curves[1].element],
    [size],
    [productive, goodput.element],
    [age],
  ];
  const element = h(
    "tr",
    {},
    cells.map((content, index) =>
      h(
        index ? "td" : "th",
        {
          "data-label": COLUMNS[index],
          class: `cell-${index}`,
          scope: index ? null : "row",
        },
        content,
      ),
    ),
  );

  function update(now, course) {
    setText(name, now.name);
    setText(
      origin,
      [now.tenant, now.queue, now.spec.priority && `priority ${now.spec.priority}`, now.spec.group, ...now.spec.tags]
        .filter(Boolean)
        .join(" · "),
    );
    state.update(now);
    setText(why, explanation(now));
    why.title = why.textContent;
    const total = now.spec.training.steps;
    const done = stepsDone(now);
    bar.update(done, total);
    setText(steps, `${whole(done)} / ${whole(total)}`);
    setText(
      share,
      now.state === "RUNNING" && now.progress ? `${duration(now.progress.eta_seconds)} left` : percent(done / total),
    );
    setText(lossNow, now.progress ? loss(now.progress.loss) : UNKNOWN);
    setText(rate, now.progress ? short(now.progress.tokens_per_second) : UNKNOWN);
    curves[0].update(course.map((sample) => sample.loss));
    curves[1].update(course.map((sample) => sample.tokens_per_second));
    setText(size, layout(now.shape ?? now.spec.parallelism));
    size.title = "sizes of tensor, pipeline, context and data parallelism";
    const { spent, total: all } = goodput.update(now.goodput);
    setText(productive, percent(all ? spent.productive / all : 0));
    age.replaceChildren(
      time(now.submitted_at, about(seconds(now.submitted_at))),
      now.finished_at && FINISHED.has(now.state)
        ? h("small", {}, `took ${about(seconds(now.submitted_at, now.finished_at))}`)
        : "",
    );
  }
  return { element, update };
}

/** Steps that a job has done, before its first one those of the checkpoint that it continues from. */
export const stepsDone = (job) => job.progress?.step ?? job.goodput.highest_step;

/** Steps done of all, as a bar. */
export function progressBar() {
  const fill = h("span");
  const element = h(
    "div",
    { class: "progress", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": 0 },
    fill,
  );
  function update(done, total) {
    fill.style.setProperty("width", `${total ? Math.min(100, (100 * done) / total) : 0}%`);
    element.setAttribute("aria-valuemax", total);
    element.setAttribute("aria-valuenow", done);
  }
  return { element, update };
}
