// The machines, what jobs hold of them, what their graphics cards do, and the quota of the tenant. How busy the other
// processors are, the control plane does not measure.
import { badge, empty, h, replace, scrolled } from "../dom.js";
import { gpu, plural, whole } from "../format.js";
import { href } from "../curves.js";
import { onChange } from "../state.js";
import { amount, jobBadge, resources, staleLine } from "./parts.js";
import { ask, HOLDING, repeat, service } from "./state.js";

const EVERY = 3000, MOST_JOBS = 500;

export async function machinesView() {
  const place = h("div", { class: "view wide service" });
  const stale = staleLine(), content = h("div", { class: "machines" });
  let drawn = "";
  async function load() {
    const [cluster, page] = await Promise.all([ask("/cluster"), ask("/jobs", { state: HOLDING, limit: MOST_JOBS })]);
    for (const node of cluster.nodes) say(node);
    const now = JSON.stringify([{ ...cluster, nodes: cluster.nodes.map(({ gpu_use: use, gpu_problem: problem, ...node }) => node) }, page.jobs.map((job) => [job.job_id, job.state, job.node])]);
    if (now === drawn) return;
    drawn = now;
    replace(content, quotas(cluster), h("h2", {}, "Machines"),
      h("p", { class: "muted" }, `${plural(cluster.live, "job")} of all tenants ${cluster.live === 1 ? "holds" : "hold"} something, ${whole(cluster.queued)} ${cluster.queued === 1 ? "waits" : "wait"}. Shown is what is allocated to jobs, and what the graphics cards do.`),
      cluster.draining ? h("p", { class: "note" }, "The cluster is draining: nothing starts.") : null,
      cluster.nodes.length === 0 ? empty("No machine is known.") : h("div", { class: "cards" }, cluster.nodes.map((node) => machine(node, page.jobs.filter((job) => job.node === node.node_id), figures.get(node.node_id)))));
  }
  // Figures change all the time, so they are put in place, and the rest is left alone, and with it the focus.
  const figures = new Map();
  function say({ node_id: name, gpu_use: use, gpu_problem: problem }) {
    if (!figures.has(name)) figures.set(name, h("ul", { class: "gpus", "aria-label": "What the graphics cards do" }));
    const list = figures.get(name), lines = problem ? [problem] : use.map(gpu);
    list.hidden = lines.length === 0;
    replace(list, lines.map((line, place) => h("li", { title: use[place]?.name || null, class: problem ? "muted" : "" }, line)));
  }
  place.append(h("div", { class: "head" }, h("h1", {}, "Machines and quotas")), stale.node, content);
  await load();
  const loads = repeat(load, EVERY, stale.say);
  const stop = onChange((what) => { if (what === "job") loads.now(); });
  return { title: "Machines", crumbs: [["machines", "#/machines"]], node: place, dispose: () => { stop(); loads.stop(); } };
}

function quotas({ in_use: used, quota, spent }) {
  const budget = spent === null ? [] : ["money", "hours", "tokens"].map((name) => [`${name} spent`, spent[name], quota[name], ""]).filter(([, , most]) => most !== null);
  const rows = [["jobs", used.jobs, quota.jobs, ""], ["CPUs", used.cpus, quota.cpus, ""], ["GPUs", used.gpus, quota.gpus, ""], ["memory", used.memory_gib, quota.memory_gib, " GiB"], ...budget];
  return h("section", { class: "quotas" }, h("h2", {}, `What ${service.me.tenant} holds`), scrolled("Quota", h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "of"), h("th", { scope: "col", class: "n" }, "in use"), h("th", { scope: "col", class: "n" }, "quota"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "share")))),
    h("tbody", {}, rows.map(([name, inUse, most, unit]) => h("tr", { "data-of": name }, h("th", { scope: "row" }, name), h("td", { class: "n" }, `${amount(inUse)}${unit}`), h("td", { class: "n" }, most === null ? "no limit" : `${amount(most)}${unit}`),
      h("td", { class: "share" }, most === null ? null : bar(`${name} of the quota`, inUse, most))))))));
}

// An amount of 0 has no bar: there is nothing of which a part could be used.
function bar(label, value, most) {
  return most > 0 ? h("progress", { max: most, value: Math.min(value, most), "aria-label": label }) : null;
}

function machine(node, mine, figures) {
  const others = node.jobs - mine.length;
  const parts = [["CPUs", node.cpus - node.free_cpus, node.cpus, ""], ["GPUs", node.gpus - node.free_gpus, node.gpus, ""], ["memory", node.memory_gib - node.free_memory_gib, node.memory_gib, " GiB"]];
  return h("article", { class: "card machine", "data-node": node.node_id },
    h("div", { class: "card-head" }, h("h2", { class: "path" }, node.node_id), badge(node.alive ? "alive" : "not alive", node.alive ? "good" : "bad"), node.draining ? badge("draining", "warn") : null),
    h("dl", { class: "held" }, parts.map(([name, held, all, unit]) => [h("dt", {}, name), h("dd", {}, h("span", {}, h("b", {}, amount(held)), ` of ${amount(all)}${unit} held`), bar(`${name} held`, held, all))])),
    figures,
    mine.length === 0 ? null : h("ul", { class: "holders" }, mine.map((job) => h("li", {}, jobBadge(job), " ", h("a", { href: href(job.job_id, "job") }, job.name), ` of ${job.user}: ${resources(job.resources)}`))),
    others > 0 ? h("p", { class: "muted" }, `${plural(others, "job")} that this key does not see`) : null,
    node.jobs === 0 ? h("p", { class: "muted" }, "No job runs here.") : null);
}
