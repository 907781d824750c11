// The text that is being written, which survives that the page is loaded anew, and the key under which it is submitted.

import { idempotencyKey } from "../api.js";

/** The draft of a new job, or of one made from another; {text} is null if there is none. */
export class Draft {
  #name;

  constructor(from) {
    this.#name = `draft of a job ${from ?? ""}`;
    const kept = JSON.parse(sessionStorage.getItem(this.#name) ?? "{}");
    this.text = kept.text ?? null;
    this.key = kept.key ?? idempotencyKey();
  }

  /** Keep a text. Each has a key of its own, so that it is submitted once however often it is sent. */
  keep(text) {
    if (text === this.text) return;
    this.text = text;
    this.key = idempotencyKey();
    try {
      sessionStorage.setItem(this.#name, JSON.stringify({ text, key: this.key }));
    } catch {
      sessionStorage.removeItem(this.#name); // it is larger than a browser keeps
    }
  }

  /** Forget it: it has been submitted. */
  clear() {
    sessionStorage.removeItem(this.#name);
  }
}
