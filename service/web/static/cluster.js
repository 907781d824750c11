// Queues against their limits, and nodes with what runs on them.

import { card, h, link } from "./dom.js";
import { ago, node as nodeText, short, words } from "./format.js";

const MOST_CELLS = 16;

/** Both panels. `update` takes the queues and the answer of /v1/nodes. */
export function clusterPanels() {
  const queueList = h("ul", { class: "queues" });
  const nodeList = h("ul", { class: "nodes" });
  const seen = h("p", { class: "muted" });
  const element = h(
    "aside",
    { class: "cluster", "aria-label": "Cluster" },
    card("Queues", { id: "queues" }, queueList),
    card("Nodes", { id: "nodes", controls: [seen] }, nodeList),
  );
  function update(queues, { seen_at: at, nodes }) {
    queueList.replaceChildren(...queues.map(queueItem));
    nodeList.replaceChildren(...(nodes.length ? nodes.map(nodeItem) : [h("li", { class: "muted" }, "No nodes.")]));
    seen.textContent = at ? `seen ${ago(at)}` : "not seen yet";
  }
  return { element, update };
}

function queueItem(queue) {
  const counts = Object.entries(queue.jobs).filter(
    ([state, count]) => count && !["SUCCEEDED", "FAILED", "CANCELLED"].includes(state),
  );
  return h(
    "li",
    {},
    h(
      "div",
      { class: "pair" },
      h("strong", {}, queue.name),
      h("small", {}, counts.map(([state, count]) => `${count} ${words(state)}`).join(", ") || "nothing waits or runs"),
    ),
    queue.description && h("small", {}, queue.description),
    use("GPUs", queue.used_gpus, queue.gpus),
    use("CPUs", queue.used_cpus, queue.cpus),
  );
}

function nodeItem(node) {
  const gpus = node.total.GPU ?? 0;
  const cpus = node.total.CPU ?? 0;
  const own = node.jobs.map((job) =>
    link(`/jobs/${encodeURIComponent(job.id)}`, { class: "on-node" }, job.name, h("small", {}, ` × ${job.ranks}`)),
  );
  if (node.other_ranks) own.push(h("span", { class: "on-node muted" }, `others × ${node.other_ranks}`));
  if (node.dataset) {
    const what = node.dataset.name ? `dataset ${node.dataset.name}` : "a dataset";
    own.push(h("span", { class: "on-node muted" }, `${what}: ${node.dataset.cpus} CPUs`));
  }
  return h(
    "li",
    {},
    h(
      "div",
      { class: "pair" },
      h("strong", { title: labels(node) }, nodeName(node)),
      node.draining && h("span", { class: "badge state-failed" }, "draining"),
      node.unusable && h("span", { class: "badge state-failed" }, "not used"),
    ),
    node.unusable && h("small", {}, `It ${node.unusable}.`),
    gpus > 0 &&
      (gpus <= MOST_CELLS && Number.isInteger(gpus)
        ? cells(gpus - (node.free.GPU ?? 0), gpus)
        : use("GPUs", gpus - (node.free.GPU ?? 0), gpus)),
    use("CPUs", cpus - (node.free.CPU ?? 0), cpus),
    own.length > 0 && h("div", { class: "on-nodes" }, own),
  );
}

/** The name that people gave a node, else the beginning of its id. */
function nodeName(node) {
  return node.labels["ray.io/node-name"] ?? nodeText(node.node_id);
}

function labels(node) {
  return [node.node_id, ...Object.entries(node.labels).map(([name, value]) => `${name}: ${value}`)].join("\n");
}

function use(what, used, limit) {
  if (!limit)
    return used ? h("small", { class: "use pair" }, h("span", {}, what), h("span", {}, `${short(used)} in use`)) : null;
  const fill = h("span", {
    class: used > limit ? "over" : "",
    style: { width: `${Math.min(100, (100 * used) / limit)}%` },
  });
  return h(
    "div",
    { class: "use" },
    h("small", { class: "pair" }, h("span", {}, what), h("span", {}, `${short(used)} of ${short(limit)}`)),
    h("div", { class: "progress thin", "aria-hidden": "true" }, fill),
  );
}

function cells(used, total) {
  const each = Array.from({ length: total }, (_, index) => h("i", { class: index < Math.ceil(used) ? "used" : "" }));
  return h(
    "div",
    { class: "use" },
    h("small", { class: "pair" }, h("span", {}, "GPUs"), h("span", {}, `${short(used)} of ${total}`)),
    h("div", { class: "gpu-cells", "aria-hidden": "true" }, each),
  );
}
