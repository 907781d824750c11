// The page of a new job: a job file is written, checked and planned while it is, and submitted.

import { call, get } from "../api.js";
import { ask } from "../dialog.js";
import { card, h, link, setText } from "../dom.js";
import { layout } from "../format.js";
import { planView } from "../plan.js";
import { mayChange } from "../signin.js";
import { checker } from "./check.js";
import { Draft } from "./draft.js";
import { textEditor } from "./editor.js";
import { exampleList, exampleMenu } from "./examples.js";
import { textOf } from "./origin.js";
import { problemList } from "./problems.js";
import { Schema } from "./schema.js";
import { placeOf, read } from "./text.js";

const READING_MS = 120;

/** The page for a new text, or for one made from a job: {element, begin, stop}. `open` shows another page. */
export async function newJob(from, open, signal) {
  const load = (path) => get(path, {}, signal);
  const [openapi, { examples }, { queues }] = await Promise.all(
    ["/openapi.json", "/v1/examples", "/v1/queues"].map(load),
  );
  const schema = new Schema(openapi);
  const draft = new Draft(from);
  const fresh = from && draft.text === null ? await textOf(from, schema, signal) : "";
  return writing({ fresh, draft, schema, examples, queues: queues.map(({ name }) => name), open });
}

function writing({ fresh, draft, schema, examples, queues, open }) {
  const allowed = mayChange();
  const text = draft.text ?? fresh;
  const unedited = new Set(["", fresh, ...examples.map((example) => example.text)]);
  let said = read(text);
  let reading = null;
  let submitting = false;

  const status = h("p", { class: "check-status", role: "status" });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const problems = problemList((at) => editor.focus(at));
  const plan = h("div");
  const editor = textEditor({
    text,
    readOnly: !allowed,
    changed,
    submit,
    help: { schema, places: () => said.places, named: { queue: () => queues } },
  });
  const button = h("button", { class: "primary", type: "button", disabled: !allowed, on: { click: submit } }, "Submit");
  const service = checker(check, told);
  const element = h(
    "article",
    { class: "new-job", "aria-label": "New job" },
    h("nav", { "aria-label": "Where you are" }, link("/", {}, "← Jobs")),
    h(
      "div",
      { class: "job-title" },
      h("h1", {}, "New job"),
      h("div", { class: "actions" }, exampleMenu(examples, choose), button),
    ),
    !allowed &&
      h("p", { class: "explanation" }, "Your key may only read: ask the operator for one that may submit jobs."),
    h(
      "div",
      { class: "writing" },
      h(
        "section",
        { class: "card file", "aria-label": "Job file" },
        editor.element,
        h("div", { class: "under" }, status, h("small", {}, "Ctrl+Space: what may stand here. Ctrl+Enter: submit.")),
        refusal,
        problems.element,
      ),
      card("Plan", { id: "plan" }, plan),
    ),
  );

  function changed() {
    draft.keep(editor.text());
    clearTimeout(reading);
    reading = setTimeout(look, READING_MS);
    setText(refusal, "");
  }

  /** Read the text, check it by the schema at once, and have the service check it. */
  function look() {
    said = read(editor.text());
    show([...said.problems, ...(said.content ? placed(schema.errors(said.content)) : [])]);
    element.classList.toggle("stale", true);
    setText(status, said.content ? "Being checked…" : said.problems.length ? "It cannot be read yet." : "");
    service.check(said.content);
    if (!editor.text().trim())
      plan.replaceChildren(h("p", {}, "Begin with an example, or type."), exampleList(examples, choose));
  }

  /** The plan first: it is there at once, while the look for the data may take a while. */
  async function check(content, isNewest) {
    const planned = await call("POST", "/v1/plans", { body: content });
    if (!isNewest()) return;
    plan.replaceChildren(...planView(planned, layout(sizes(content)), "as written"));
    element.classList.toggle("stale", false);
    if (allowed) await call("POST", "/v1/jobs/dry-run", { body: content });
  }

  function told({ refused, passing }) {
    if (passing) return setText(status, `Not checked yet: ${passing.message}`);
    if (refused) return refuse(refused);
    show([]);
    return setText(status, allowed ? "Checked: it can be submitted." : "Checked.");
  }

  function refuse(problem) {
    const fields = placed(problem.errors);
    show(fields.length ? fields : [{ from: 0, to: 0, message: problem.message }]);
    setText(status, "The service does not take it as it is.");
    if (!plan.querySelector("table")) plan.replaceChildren(h("p", {}, "There is a plan as soon as nothing is wrong."));
  }

  /** Where errors that name fields are in the text. */
  function placed(errors) {
    return errors.map(({ field, message }) => {
      const place = placeOf(said.places, field);
      return {
        from: place?.from ?? 0,
        to: place?.to ?? 0,
        message: field === "body" ? message : `${field}: ${message}`,
      };
    });
  }

  function show(unordered) {
    const found = unordered.toSorted((one, other) => one.from - other.from);
    editor.mark(found);
    problems.update(found.map((problem) => ({ ...problem, line: editor.line(problem.from) })));
  }

  async function choose(example) {
    const edited = !unedited.has(editor.text());
    const sure = {
      title: "Replace your text?",
      text: `${example.name} takes the place of what you have written. Ctrl+Z brings that back.`,
      action: "Replace",
      act: async () => true,
    };
    if (edited && !(await ask(sure))) return;
    editor.replace(example.text);
    editor.focus(0);
  }

  async function submit() {
    if (submitting || !allowed) return;
    clearTimeout(reading);
    look();
    setText(refusal, "");
    if (!said.content) return refuseUnread();
    submitting = button.disabled = true;
    try {
      const headers = { "Idempotency-Key": draft.key };
      const job = await call("POST", "/v1/jobs", { body: said.content, headers });
      draft.clear();
      open(`/jobs/${encodeURIComponent(job.id)}`);
    } catch (problem) {
      if (!problem.passing) refuse(problem);
      setText(refusal, notSubmitted(problem));
    }
    submitting = button.disabled = false;
  }

  function refuseUnread() {
    setText(
      refusal,
      said.problems.length ? "It is not submitted: it cannot be read." : "There is nothing to submit yet.",
    );
    editor.focus(said.problems[0]?.from ?? 0);
  }

  return {
    element,
    /** Begin, once it is in the document. */
    begin() {
      look();
      if (allowed) editor.focus(0);
    },
    stop() {
      clearTimeout(reading);
      service.stop();
      editor.stop();
    },
  };
}

function notSubmitted(problem) {
  if (!problem.passing) return problem.errors.length ? "It is not submitted: see below." : problem.message;
  const said = problem.status ? problem.message : "The service cannot be reached.";
  const again = problem.retryAfter ? `again in ${problem.retryAfter} s` : "again";
  return `${said} Your text is kept: submit it ${again}. However often it is sent, there will be one job.`;
}

function sizes({ parallelism }) {
  return { tensor_parallel_size: 1, pipeline_parallel_size: 1, data_parallel_size: 1, ...parallelism };
}
