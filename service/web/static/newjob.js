// The page of a new job, at /new, and with ?from= of one made from another. Its editor is large, so it comes when it is wanted.

import { h, link } from "./dom.js";

/** Show the page; returns what ends it. `open` shows another page. */
export function showNewJob(main, open) {
  document.title = "New job · BOOST";
  const from = new URLSearchParams(location.search).get("from");
  const stopped = new AbortController();
  let writing = null;
  begin().catch((problem) => problem.name !== "AbortError" && problem.status !== 401 && absent(problem));
  return () => {
    stopped.abort();
    writing?.stop();
  };

  async function begin() {
    const { newJob } = await import("./newjob/page.js");
    const made = await newJob(from, open, stopped.signal);
    if (stopped.signal.aborted) return made.stop();
    writing = made;
    main.replaceChildren(writing.element);
    return writing.begin();
  }

  function absent(problem) {
    main.replaceChildren(
      h("p", { class: "empty" }, problem.message),
      h("p", { class: "empty" }, link("/", {}, "← Jobs")),
    );
  }
}
