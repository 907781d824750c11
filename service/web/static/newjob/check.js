// The service's own word on what is typed: asked once typing pauses, one request at a time, about the newest text.

const PAUSE_MS = 400;
const RETRY_SECONDS = 5;

/**
 * Ask about each content that `check` is given.
 *
 * `ask` takes one, and what says whether it is still the newest; `told` hears what came of the newest: {}, {refused}, or
 * {passing} when it is asked again later.
 */
export function checker(ask, told) {
  let newest = null;
  let timer = null;
  let asking = false;
  let stopped = false;

  function later(milliseconds) {
    clearTimeout(timer);
    timer = setTimeout(turn, milliseconds);
  }

  async function turn() {
    if (asking || newest === null) return;
    asking = true;
    const content = newest;
    const result = await ask(content, () => !stopped && content === newest).then(
      () => ({}),
      (problem) => (problem.passing ? { passing: problem } : { refused: problem }),
    );
    asking = false;
    if (stopped) return;
    if (content !== newest) return later(0); // it has been about an old text
    told(result);
    if (result.passing) later(1000 * (result.passing.retryAfter ?? RETRY_SECONDS));
  }

  return {
    check(content) {
      newest = content;
      later(PAUSE_MS);
    },
    stop() {
      stopped = true;
      newest = null;
      clearTimeout(timer);
    },
  };
}
