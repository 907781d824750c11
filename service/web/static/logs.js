// The ranks' logs as they come, of one rank or level if wanted. What is shown is bounded.

import { jobPath } from "./api.js";
import { card, h, setText } from "./dom.js";
import { exactMoment, whole } from "./format.js";
import { follow } from "./stream.js";

const MOST_LINES = 2000;
const SEVERE = ["ERROR", "CRITICAL"];
const LEVELS = {
  "All levels": [],
  "INFO and above": ["INFO", "WARNING", ...SEVERE],
  "Warnings and errors": ["WARNING", ...SEVERE],
  Errors: SEVERE,
};
const SPANS = [
  ["", "From the start"],
  ["86400", "Last day"],
  ["3600", "Last hour"],
  ["600", "Last 10 minutes"],
];
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** The card. `finished` says whether the job has ended, and when; `ranks` in `update` how many there are. */
export function logCard(id, finished) {
  const lines = h("div", { class: "log", role: "log", "aria-label": "Log lines", "aria-live": "off", tabindex: 0 });
  const rank = h("select", { class: "small", "aria-label": "Rank" }, h("option", { value: "" }, "All ranks"));
  const level = h(
    "select",
    { class: "small", "aria-label": "Level" },
    Object.keys(LEVELS).map((name) => h("option", { value: name }, name)),
  );
  const span = h(
    "select",
    { class: "small", "aria-label": "Since" },
    SPANS.map(([seconds, name]) => h("option", { value: seconds }, name)),
  );
  const pause = h(
    "button",
    { type: "button", class: "small", "aria-pressed": "false", "aria-label": "Pause the log" },
    "Pause",
  );
  const newest = h("button", { type: "button", class: "small newest", hidden: true }, "↓ Newest");
  const note = h("p", { class: "muted", role: "status" });
  const element = card(
    "Logs",
    { id: "logs", controls: [rank, level, span, pause] },
    h("div", { class: "log-frame" }, lines, newest),
    note,
  );
  let waiting = [];
  let drawing = 0;
  let atEnd = true;
  let dropped = 0;
  let stop = () => {};

  function begin() {
    stop();
    waiting = [];
    dropped = 0;
    lines.replaceChildren();
    say();
    const until = finished() ? Date.parse(finished()) : Date.now();
    const since = span.value && new Date(until - 1000 * Number(span.value)).toISOString();
    stop = follow(
      jobPath(id, "logs"),
      { rank: rank.value, level: LEVELS[level.value], since, follow: true },
      // Only while it is in view: a browser has six connections for all its tabs.
      { event: take, ended: () => !finished(), place: element },
    );
  }

  function take(event) {
    waiting.push(event);
    if (waiting.length > MOST_LINES) dropped += waiting.splice(0, waiting.length - MOST_LINES).length;
    drawing ||= requestAnimationFrame(draw);
  }

  function draw() {
    drawing = 0;
    if (paused()) return say();
    lines.append(...waiting.splice(0).map(line));
    while (lines.children.length > MOST_LINES) {
      lines.firstChild.remove();
      dropped += 1;
    }
    if (atEnd) lines.scrollTop = lines.scrollHeight;
    return say();
  }

  function say() {
    const held = paused() && waiting.length ? `Paused; newer lines: ${whole(waiting.length)}. ` : "";
    const gone = dropped ? `The newest ${whole(MOST_LINES)} lines; ${whole(dropped)} older ones are not shown.` : "";
    setText(note, held + gone || (lines.children.length ? "" : "No lines."));
  }

  const paused = () => pause.getAttribute("aria-pressed") === "true";
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", String(!paused()));
    draw();
  });
  lines.addEventListener("scroll", () => {
    atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 24;
    newest.hidden = atEnd;
  });
  newest.addEventListener("click", () => {
    lines.scrollTop = lines.scrollHeight;
  });
  for (const filter of [rank, level, span]) filter.addEventListener("change", begin);
  begin();

  /** Offer so many ranks to choose from. */
  function update(ranks) {
    while (rank.options.length - 1 < ranks)
      rank.append(h("option", { value: rank.options.length - 1 }, `Rank ${rank.options.length - 1}`));
  }

  return { element, update, restart: begin, stop: () => (stop(), cancelAnimationFrame(drawing)) };
}

function line({ time, data }) {
  return h(
    "div",
    {
      class: `line level-${String(data.level)
        .toLowerCase()
        .replace(/[^a-z]/g, "")}`,
    },
    h("time", { datetime: time, title: exactMoment(time) }, CLOCK.format(new Date(time))),
    h("span", { class: "rank" }, `rank ${data.rank}`),
    h("span", { class: "level" }, data.level),
    h("span", { class: "message" }, data.message),
  );
}
