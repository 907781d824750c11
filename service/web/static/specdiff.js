// In which fields of its spec a job differs from another one.

import { get, jobPath } from "./api.js";
import { h, link } from "./dom.js";

/** A form that asks which job to compare with, first the one that it was cloned from, and the answer. */
export function specDiff(job) {
  const other = h("input", { type: "text", required: true, placeholder: "ID of another job", "aria-label": "ID of another job", value: job.cloned_from ?? "" });
  const answer = h("div", { "aria-live": "polite" });
  async function compare() {
    try {
      const diff = await get(jobPath(job.id, "diff", encodeURIComponent(other.value.trim())));
      answer.replaceChildren(h("div", { class: "scroll", tabindex: 0 }, table(diff)));
    } catch (problem) {
      answer.replaceChildren(h("p", { class: "refusal" }, problem.message));
    }
  }
  const form = h(
    "form",
    { class: "fields", on: { submit: (event) => (event.preventDefault(), compare()) } },
    other,
    h("button", { type: "submit" }, "Compare"),
  );
  return h("div", { class: "spec-diff" }, form, answer);
}

function table({ jobs, fields }) {
  if (!fields.length) return h("p", {}, "No field differs.");
  const heads = jobs.map((id) => h("th", { scope: "col" }, link(`/jobs/${encodeURIComponent(id)}`, {}, id)));
  return h(
    "table",
    { class: "plain" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Field"), heads)),
    [true, false].map((submitted) =>
      h(
        "tbody",
        { class: submitted ? null : "muted", title: submitted ? null : "Follows from the fields above, or was chosen by the service" },
        fields
          .filter((each) => each.submitted === submitted)
          .map(({ field, values }) => h("tr", {}, h("th", { scope: "row" }, field), values.map((value) => h("td", {}, text(value))))),
      ),
    ),
  );
}

function text(value) {
  if (value === null) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}
