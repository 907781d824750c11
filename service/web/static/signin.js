// Who is signed in, and the form for a key. The key goes into a cookie that scripts cannot read.

import { call, get } from "./api.js";
import { h } from "./dom.js";
import { field } from "./dialog.js";
import { notify } from "./notices.js";

const NOBODY = "anonymous"; // by this name goes everybody while authentication is off

let identity = null;

/** Whether who is signed in may change jobs; also true while that is not known, the API has the last word. */
export function mayChange() {
  return !identity || identity.scopes.includes("submit") || identity.scopes.includes("admin");
}

/** Ask who is signed in and show it in the page's head. */
export async function identify() {
  identity = await get("/v1/whoami");
  const place = document.getElementById("identity");
  if (identity.name === NOBODY) return place.replaceChildren();
  const out = h("button", { type: "button", class: "quiet", on: { click: signOut } }, "Sign out");
  return place.replaceChildren(
    h(
      "span",
      { class: "who", title: `May: ${identity.scopes.join(", ")}` },
      h("strong", {}, identity.name),
      ` · ${identity.tenant}`,
    ),
    out,
  );
}

/** Show the form in place of the page; `done` is called with a key that the API has taken. */
export function showSignIn(main, done) {
  document.title = "Sign in · BOOST";
  document.getElementById("identity").replaceChildren();
  const input = h("input", {
    type: "password",
    name: "key",
    required: true,
    autocomplete: "current-password",
    spellcheck: "false",
  });
  const refusal = h("p", { class: "refusal", role: "alert" });
  const submit = h("button", { class: "primary", type: "submit" }, "Sign in");
  const form = h(
    "form",
    { class: "card sign-in", "aria-labelledby": "sign-in-title" },
    h("h1", { id: "sign-in-title" }, "Sign in"),
    field("API key", input, "It begins with boost_. Ask the operator of this service for one."),
    refusal,
    submit,
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await call("POST", "/session", { body: { key: input.value.trim() } });
      done();
    } catch (problem) {
      refusal.textContent = problem.message;
      submit.disabled = false;
    }
  });
  main.replaceChildren(form);
  input.focus();
}

async function signOut() {
  try {
    await call("DELETE", "/session");
    sessionStorage.clear(); // it has drafts, which are not for whoever signs in next
    location.assign("/");
  } catch (problem) {
    notify(problem);
  }
}
