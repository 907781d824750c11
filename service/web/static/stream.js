// Server-sent events over fetch: unlike EventSource it tells why a stream was refused.

import { send } from "./api.js";
import { pauseAfter } from "./live.js";
import { connection } from "./notices.js";

/**
 * Follow a stream while the tab is visible and the element `place`, if given, is in view. It resumes where it stopped, as
 * after a lost connection.
 *
 * `event` takes each event's data; `ended` is called when the service has ended the stream and says
 * whether to ask again. Returns a function that stops.
 */
export function follow(path, query, { event, ended = () => false, place = null }) {
  let lastId = null;
  let controller = null;
  let timer = null;
  let failures = 0;
  let over = false;
  let inView = !place;
  const looking = new IntersectionObserver((entries) => {
    inView = entries.at(-1).isIntersecting;
    pauseOrGoOn();
  });

  async function run() {
    clearTimeout(timer);
    if (over || controller || document.hidden || !inView) return;
    const mine = (controller = new AbortController());
    let pause = null;
    try {
      const brought = await read(mine.signal);
      failures = 0;
      // A service that stops ends its streams, too: they are at their end when there is nothing more.
      over = !brought && !ended();
      pause = over ? null : brought ? 0 : 1;
    } catch (problem) {
      if (mine.signal.aborted) return;
      failures += 1;
      pause = pauseAfter(problem, failures);
      over = pause === null;
    }
    controller = null;
    if (pause !== null) timer = setTimeout(run, pause * 1000);
  }

  /** Read on; says whether any event has come. */
  async function read(signal) {
    const before = lastId;
    const headers = { Accept: "text/event-stream", ...(lastId !== null && { "Last-Event-ID": lastId }) };
    const answer = await send("GET", path, { query, headers, signal });
    connection(null);
    failures = 0;
    for await (const message of messages(answer.body)) {
      signal.throwIfAborted();
      lastId = message.id ?? lastId;
      if (message.data !== "") event(JSON.parse(message.data));
    }
    return lastId !== before;
  }

  function pauseOrGoOn() {
    if (!document.hidden && inView) return run();
    clearTimeout(timer);
    controller?.abort();
    controller = null;
  }

  document.addEventListener("visibilitychange", pauseOrGoOn);
  if (place) looking.observe(place);
  run();
  return () => {
    over = true;
    clearTimeout(timer);
    controller?.abort();
    looking.disconnect();
    document.removeEventListener("visibilitychange", pauseOrGoOn);
  };
}

/** The events of a body: id and data of each. */
export async function* messages(body) {
  let message = { id: null, data: [] };
  for await (const line of lines(body)) {
    if (line === "") {
      if (message.id !== null || message.data.length) yield { id: message.id, data: message.data.join("\n") };
      message = { id: null, data: [] };
    } else if (line.startsWith("id:")) {
      message.id = line.slice(3).trimStart();
    } else if (line.startsWith("data:")) {
      message.data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((failure) => Promise.reject(cutOff(failure)));
      if (done) return;
      const parts = (rest + value).split(/\r?\n/);
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function cutOff(failure) {
  return failure.name === "AbortError"
    ? failure
    : Object.assign(new Error("The connection was lost."), { passing: true, status: 0 });
}
