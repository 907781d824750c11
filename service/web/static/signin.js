// Who is signed in, and the form for a key. The key goes into a cookie that scripts cannot read.

import { call, get } from "./api.js";
import { h } from "./dom.js";
import { field } from "./dialog.js";
import { notify } from "./notices.js";

const NOBODY = "anonymous"; // by this name goes everybody while authentication is off

const OUT = "signed out";
const tabs = new BroadcastChannel("session"); // what is signed in is the browser, with all its tabs

let identity = null;

tabs.addEventListener("message", ({ data }) => {
  if (data === OUT) sessionStorage.clear();
  location.reload();
});

/** Whether who is signed in may change jobs; also true while that is not known, the API has the last word. */
export function mayChange() {
  return !identity || identity.scopes.includes("submit") || identity.scopes.includes("admin");
}

/** Whether who is signed in is known to see all tenants' jobs. */
export function seesAll() {
  return Boolean(identity?.scopes.includes("admin"));
}

/** The tenant of a key that sees all tenants' jobs, for which links and filters have to name one; null for others. */
export function operatorsTenant() {
  return seesAll() && identity.name !== NOBODY ? identity.tenant : null;
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
      tabs.postMessage("signed in");
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
    tabs.postMessage(OUT);
    location.assign("/");
  } catch (problem) {
    notify(problem);
  }
}
