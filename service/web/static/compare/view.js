// What the compare page shows, as the part of its address after #, so that a link shows the same; without defaults.

const ONE = {
  group: "",
  search: "",
  tenant: "",
  metric: "loss",
  axis: "step",
  color: "best_validation_loss",
  sort: "",
  across: "",
  up: "final_loss",
};
const MANY = ["job", "tag", "hide"];
const NUMBERS = ["smooth", "low", "high"];
const FLAGS = ["logx", "logy", "descending"];

/** The view that an address's hash describes. */
export function readView(hash) {
  const told = new URLSearchParams(hash.replace(/^#/, ""));
  const view = {};
  for (const [name, standard] of Object.entries(ONE)) view[name] = told.get(name) ?? standard;
  for (const name of MANY) view[name] = [...new Set(told.getAll(name).filter(Boolean))];
  for (const name of NUMBERS) {
    const text = told.get(name);
    view[name] = text && Number.isFinite(Number(text)) ? Number(text) : null;
  }
  for (const name of FLAGS) view[name] = told.has(name);
  view.smooth = Math.min(0.99, Math.max(0, view.smooth ?? 0));
  return view;
}

/** The address of a view. */
export function addressOf(view) {
  const told = new URLSearchParams();
  for (const [name, standard] of Object.entries(ONE)) if (view[name] !== standard) told.set(name, view[name]);
  for (const name of MANY) for (const value of view[name]) told.append(name, value);
  for (const name of NUMBERS) if (view[name]) told.set(name, String(view[name]));
  if (view.low === 0) told.set("low", "0");
  for (const name of FLAGS) if (view[name]) told.set(name, "1");
  const text = told.toString();
  return text ? `/compare#${text}` : "/compare";
}

/** The address of a view of the jobs of a group, with tags, or found by words; of one tenant, if it is given. */
export function addressOfJobs({ group = "", tag = [], search = "", tenant = "" }) {
  return addressOf({ ...readView(""), group, tag, search, tenant });
}

/** What of a view says which jobs, as the API takes it; null if it says none. */
export function selection({ job, group, tag, search, tenant }) {
  return job.length || group || tag.length || search ? { job, group, tag, search, tenant } : null;
}
