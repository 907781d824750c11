// Which jobs the list shows: by state, queue, tenant, group, tags and words in what describes them. The address keeps it.

import { STATES } from "./badge.js";
import { h, setText } from "./dom.js";
import { operatorsTenant, seesAll } from "./signin.js";

const TYPING_MS = 300;

/** The filters' controls. `changed` is called when another list is wanted; `query` says which; `stop` ends them. */
export function jobFilters(changed) {
  const chosen = new URLSearchParams(location.search);
  const states = new Set(chosen.getAll("state").filter((state) => STATES.includes(state)));
  const counts = new Map(STATES.map((state) => [state, h("span", { class: "count" })]));
  const chips = STATES.map((state) =>
    h(
      "button",
      {
        type: "button",
        class: `chip state-${state.toLowerCase()}`,
        "aria-pressed": String(states.has(state)),
        on: { click: (event) => toggle(event.currentTarget, state) },
      },
      state.toLowerCase(),
      counts.get(state),
    ),
  );
  const search = h("input", {
    type: "search",
    placeholder: "Name, group, tag or note",
    "aria-label": "Part of a name, group, tag or note",
    maxlength: 100,
    value: chosen.get("search") ?? "",
  });
  let group = chosen.get("group") ?? "";
  let tags = chosen.getAll("tag");
  let tenant = chosen.get("tenant") ?? "";
  const labels = h("div", { class: "chips", role: "group", "aria-label": "Tenant, group and tags" });
  const queue = h("select", { "aria-label": "Queue" }, h("option", { value: "" }, "All queues"));
  let wantedQueue = chosen.get("queue") ?? "";
  let typing = null;

  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(told, TYPING_MS);
  });
  queue.addEventListener("change", () => {
    wantedQueue = queue.value;
    told();
  });

  function toggle(chip, state) {
    states.has(state) ? states.delete(state) : states.add(state);
    chip.setAttribute("aria-pressed", String(states.has(state)));
    told();
  }

  /** The tenant, group and tags that links have led to, each to be let go of by a click. */
  function showLabels() {
    const chosenOnes = [
      ...(tenant ? [[`tenant ${tenant}`, () => (tenant = "")]] : []),
      ...(group ? [[`group ${group}`, () => (group = "")]] : []),
      ...tags.map((tag) => [`tag ${tag}`, () => (tags = tags.filter((other) => other !== tag))]),
    ];
    labels.replaceChildren(
      ...chosenOnes.map(([text, leave]) =>
        h(
          "button",
          { type: "button", class: "chip label", title: `Show jobs without ${text}, too`, on: { click: () => (leave(), told()) } },
          `${text} ×`,
        ),
      ),
    );
  }

  function told() {
    showLabels();
    const address = new URLSearchParams();
    for (const [key, value] of Object.entries(query()))
      for (const item of [value].flat()) if (item) address.append(key, item);
    const text = address.toString();
    history.replaceState(null, "", text ? `/?${text}` : "/");
    changed();
  }

  function query() {
    return { state: [...states], queue: wantedQueue, tenant, group, tag: tags, search: search.value.trim() };
  }

  /** Show the queues that there are, and how many jobs are in each state, which is known of all tenants' together. */
  function update(queues) {
    const names = [...new Set([...queues.map((one) => one.name), wantedQueue].filter(Boolean))];
    if (
      names.join() !==
      Array.from(queue.options, (option) => option.value)
        .slice(1)
        .join()
    ) {
      queue.replaceChildren(queue.options[0], ...names.map((one) => h("option", { value: one }, one)));
    }
    queue.value = wantedQueue;
    for (const [state, place] of counts) {
      const count = queues.reduce((sum, one) => sum + (one.jobs[state] ?? 0), 0);
      setText(place, count && seesAll() && !tenant ? String(count) : "");
    }
  }

  const element = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Jobs", on: { submit: (event) => event.preventDefault() } },
    h("div", { class: "chips", role: "group", "aria-label": "State" }, chips),
    labels,
    h("div", { class: "fields" }, queue, search),
  );
  showLabels();
  return { element, query, update, stop: () => clearTimeout(typing) };
}
