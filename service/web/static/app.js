// Which page an address means, and moving between pages without loading them anew.

import { session } from "./api.js";
import { showCompare } from "./compare.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { showNewJob } from "./newjob.js";
import { notify } from "./notices.js";
import { identify, showSignIn } from "./signin.js";
import { showSweep, showSweeps } from "./sweeps.js";

const main = document.getElementById("main");
let stop = () => {};

function show() {
  stop();
  stop = () => {};
  main.replaceChildren();
  const sweep = /^\/sweeps\/([^/]+)$/.exec(location.pathname);
  const job = /^\/jobs\/([^/]+)$/.exec(location.pathname);
  if (location.pathname === "/new") stop = showNewJob(main, open);
  else if (location.pathname === "/sweeps") stop = showSweeps(main);
  else if (sweep) stop = showSweep(main, decoded(sweep[1]));
  else if (location.pathname === "/compare") stop = showCompare(main);
  else stop = job ? showJob(main, decoded(job[1]), open) : showJobs(main);
}

/** A decoded part of an address. A malformed one, such as 100%, is left as it is, and nothing has that name. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function open(address) {
  history.pushState(null, "", address);
  show();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
}

async function begin() {
  try {
    await identify();
  } catch (problem) {
    if (problem.status === 401) return;
    if (problem.status !== 0) notify(problem);
  }
  show();
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash of an address may be a view
  main.focus();
});
document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[data-route]");
  if (!anchor || event.defaultPrevented || event.button !== 0) return;
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  open(anchor.getAttribute("href"));
});
addEventListener("popstate", show);
session.addEventListener("unauthenticated", () => {
  if (main.querySelector(".sign-in")) return;
  stop();
  stop = () => {};
  showSignIn(main, begin);
});
begin();
