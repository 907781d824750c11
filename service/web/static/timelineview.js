// The timeline drawn: a bar of stretches with a mark for each restart, and what happened as a list.

import { card, h, setText } from "./dom.js";
import { duration, layout, moment, whole, words } from "./format.js";
import { restartText, story } from "./story.js";
import { ranks, restarts, stretches } from "./timeline.js";

const NAMES = {
  queued: "Queued",
  waiting: "Waiting for room",
  starting: "Starting",
  running: "Running",
  recovering: "Recovering",
  paused: "Paused",
};
const HINT = "Point at a stretch or a mark, or tap it, to read what it was.";
const LEAST_HEIGHT = 40; // in percent, so that a layout can still be read
const MOST_TOLD = 200;
const TICKS = 5;

/** The card; running stretches are as high as they have ranks. `update` takes the job and its timeline events. */
export function timelineCard() {
  const bar = h("div", { class: "timeline-bar" });
  const marks = h("div", { class: "timeline-marks" });
  const axis = h("div", { class: "timeline-axis", "aria-hidden": "true" });
  const legend = h("ul", { class: "legend plain" });
  const told = h("div", { class: "told", "aria-live": "polite" }, HINT);
  const list = h("ol", { class: "story" });
  const count = h("summary", {}, "What happened");
  const element = card(
    "Timeline",
    { id: "timeline" },
    h("div", { class: "timeline" }, marks, bar, axis),
    told,
    legend,
    h("details", {}, count, list),
  );
  let listed = null;

  function update(job, events) {
    const end = job.finished_at ? Date.parse(job.finished_at) : Date.now();
    const parts = stretches(events, end);
    if (!parts.length) return;
    const start = parts[0].from;
    const span = Math.max(1, parts.at(-1).to - start);
    const place = (at) => `${Math.min(100, Math.max(0, (100 * (at - start)) / span))}%`;
    const most = Math.max(1, ...parts.filter((part) => part.shape).map((part) => ranks(part.shape)));
    bar.replaceChildren(...parts.map((part) => stretch(part, most, place)));
    const found = restarts(events);
    if (marks.children.length !== found.length) marks.replaceChildren(...found.map(mark));
    found.forEach((restart, index) => marks.children[index].style.setProperty("left", place(restart.at)));
    axis.replaceChildren(...ticks(start, span));
    legend.replaceChildren(...legendItems(parts));
    tell(events, found.length);
  }

  function stretch(part, most, place) {
    const name = part.shape ? `${NAMES[part.phase]} in ${layout(part.shape)}` : NAMES[part.phase];
    const text = `${name} for ${duration((part.to - part.from) / 1000)}, from ${moment(part.from)}`;
    const element = h(
      "span",
      {
        class: `phase-${part.phase}`,
        role: "img",
        "aria-label": text,
        title: text,
        on: { click: () => setText(told, text) },
      },
      part.shape ? h("span", {}, layout(part.shape)) : null,
    );
    if (part.shape) element.style.setProperty("height", `${Math.max(LEAST_HEIGHT, (100 * ranks(part.shape)) / most)}%`);
    element.style.setProperty("left", place(part.from));
    element.style.setProperty("width", `calc(${place(part.to)} - ${place(part.from)})`);
    return element;
  }

  function mark(restart) {
    const text = restartText(restart);
    const show = () => setText(told, text);
    return h("button", {
      type: "button",
      class: "restart-mark",
      "aria-label": text,
      title: text,
      on: { click: show, focus: show, mouseenter: show },
    });
  }

  function tell(events, restarted) {
    if (listed === events.length) return;
    listed = events.length;
    const again = restarted ? `, ${restarted} ${restarted === 1 ? "restart" : "restarts"}` : "";
    setText(count, `What happened (${events.length}${again})`);
    list.replaceChildren(
      ...events
        .slice(-MOST_TOLD)
        .reverse()
        .map((event) =>
          h(
            "li",
            {},
            h("time", { datetime: event.time }, moment(event.time)),
            h("b", {}, words(event.kind)),
            h("span", {}, story(event)),
          ),
        ),
    );
  }

  return { element, update };
}

function ticks(start, span) {
  return Array.from({ length: TICKS }, (_, index) => {
    const at = start + (span * index) / (TICKS - 1);
    const day = span > 86_400_000;
    const text = new Date(at).toLocaleString(
      undefined,
      day
        ? { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" }
        : { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(span < 600_000 && { second: "2-digit" }) },
    );
    return h("span", {}, text);
  });
}

function legendItems(parts) {
  const spent = new Map();
  for (const part of parts) spent.set(part.phase, (spent.get(part.phase) ?? 0) + (part.to - part.from) / 1000);
  return [...spent].map(([phase, length]) =>
    h("li", {}, h("i", { class: `phase-${phase}` }), h("span", {}, NAMES[phase]), h("b", {}, duration(length))),
  );
}
