// Which jobs are compared: those of a group, with tags or found by words, and single ones.

import { get } from "../api.js";
import { h, setText } from "../dom.js";
import { field } from "../dialog.js";

const TYPING_MS = 300;
const MOST_FOUND = 20;

/** The form. `changed` is called after `view` has; `update` takes the jobs that are compared; `stop` ends it. */
export function jobChooser(view, changed) {
  const [group, tags, search] = [view.group, view.tag.join(" "), view.search].map((value) =>
    h("input", { type: "text", value, maxlength: 100 }),
  );
  const find = h("input", { type: "search", maxlength: 100, placeholder: "Name, group, tag or note" });
  const results = h("ul", { class: "found-jobs", "aria-label": "Jobs found" });
  const single = h("ul", { class: "chips", "aria-label": "Single jobs" });
  const none = h("p", { class: "muted", role: "status" });
  const summary = h("summary");
  const element = h(
    "details",
    { class: "card chooser", open: !(view.job.length || view.group || view.tag.length || view.search) },
    summary,
    h(
      "div",
      { class: "choices" },
      field("Group or sweep", group),
      field("Tags", tags, "Jobs with all of them."),
      field("Words", search, "In name, group, tags or notes."),
      field("Add single jobs", find),
    ),
    results,
    none,
    single,
  );
  let typing = null;
  let asked = 0;
  let names = new Map();

  for (const input of [group, tags, search]) input.addEventListener("input", () => later(take));
  find.addEventListener("input", () => later(look));

  function later(act) {
    clearTimeout(typing);
    typing = setTimeout(act, TYPING_MS);
  }

  function take() {
    Object.assign(view, {
      group: group.value.trim(),
      tag: tags.value.split(/\s+/).filter(Boolean),
      search: search.value.trim(),
    });
    changed();
  }

  async function look() {
    const mine = ++asked;
    const words = find.value.trim();
    const page = await get("/v1/jobs", { search: words, limit: MOST_FOUND }).catch((problem) => ({
      jobs: [],
      problem,
    }));
    if (mine !== asked) return;
    const missing = page.next_cursor ? "None among the newest 10,000 jobs." : "No job is found.";
    setText(none, words ? (page.problem?.message ?? (page.jobs.length ? "" : missing)) : "");
    results.replaceChildren(
      ...(words ? page.jobs : []).map((job) => {
        const input = h("input", {
          type: "checkbox",
          checked: view.job.includes(job.id),
          on: { change: () => choose(job.id, input.checked) },
        });
        return h("li", {}, h("label", { class: "check" }, input, job.name, h("small", { class: "id" }, job.id)));
      }),
    );
  }

  function choose(id, wanted) {
    view.job = wanted ? [...new Set([...view.job, id])] : view.job.filter((other) => other !== id);
    showSingle();
    changed();
  }

  function showSingle() {
    single.replaceChildren(
      ...view.job.map((id) =>
        h(
          "li",
          {},
          h(
            "button",
            {
              type: "button",
              class: "chip label",
              title: `Compare without ${id}`,
              on: { click: () => (choose(id, false), look()) },
            },
            `${names.get(id) ?? id} ×`,
          ),
        ),
      ),
    );
  }

  function update(jobs) {
    setText(summary, jobs.length === 1 ? "1 job is compared" : `${jobs.length} jobs are compared`);
    names = new Map(jobs.map((job) => [job.id, job.name]));
    showSingle();
  }

  update([]);
  return { element, update, stop: () => clearTimeout(typing) };
}
