// Requests to the API. What it refuses is thrown as a Problem.

const PATIENCE_MS = 120_000; // some answers take a minute

/** What went wrong, as the API says it (RFC 9457), or that it cannot be reached (status 0). */
export class Problem extends Error {
  constructor(status, body = {}, retryAfter = null) {
    super(body.detail || body.title || `the service answered ${status}`);
    this.status = status;
    this.code = body.code ?? null;
    this.title = body.title ?? "";
    this.errors = Array.isArray(body.errors) ? body.errors : [];
    this.retryAfter = retryAfter;
  }

  /** Whether the same may work a little later. */
  get passing() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/** Events: "unauthenticated" when the API wants to know who asks. */
export const session = new EventTarget();

/** A request with its answer as it comes; refusals are thrown. */
export async function send(method, path, { query, body, headers = {}, signal } = {}) {
  const url = new URL(path, location.origin);
  for (const [name, value] of Object.entries(query ?? {})) {
    for (const item of [value].flat())
      if (item !== null && item !== undefined && item !== "") url.searchParams.append(name, item);
  }
  const options = { method, headers: { Accept: "application/json", ...headers }, signal, credentials: "same-origin" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  const answer = await fetch(url, options).catch((failure) => {
    if (signal?.aborted) throw failure;
    throw new Problem(0, { detail: "The service cannot be reached. Trying again." });
  });
  if (!answer.ok) throw await refusal(answer, path);
  return answer;
}

/** Send a request and return the parsed answer, or null if it is empty. Rejects after two minutes without one. */
export async function call(method, path, { signal, ...options } = {}) {
  const limit = AbortSignal.timeout(PATIENCE_MS);
  try {
    const answer = await send(method, path, { ...options, signal: signal ? AbortSignal.any([signal, limit]) : limit });
    return answer.status === 204 ? null : await answer.json();
  } catch (failure) {
    if (failure.name !== "TimeoutError") throw failure;
    throw new Problem(0, { detail: "The service does not answer, or this browser has too many connections to it." });
  }
}

/** Read a resource. */
export const get = (path, query, signal) => call("GET", path, { query, signal });

/** The path of a job, or of what belongs to it. */
export const jobPath = (id, ...rest) => ["/v1/jobs", encodeURIComponent(id), ...rest].join("/");

/** A key under which a request is carried out once, however often it is sent. */
export function idempotencyKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function refusal(answer, path) {
  const retryAfter = Number(answer.headers.get("Retry-After")) || null;
  const body = await answer.json().catch(() => ({}));
  const problem = new Problem(answer.status, body, retryAfter);
  if (answer.status === 401 && path !== "/session") session.dispatchEvent(new Event("unauthenticated"));
  return problem;
}
