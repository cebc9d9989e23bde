// The jobs of a tenant, newest first, with the queue and what has just happened.
import { empty, h, replace, scrolled } from "../dom.js";
import { clock, whole } from "../format.js";
import { get } from "../api.js";
import { href } from "../curves.js";
import { onChange } from "../state.js";
import { ago, amount, confirmCancel, isSelected, jobBadge, models, progress, renewTimes, resources, staleLine } from "./parts.js";
import { ask, HOLDING, mayChange, OPEN, repeat, service } from "./state.js";

const STATES = [["", "all"], ["open", "open"], ["queued", "queued"], ["running", "running"], ["completed", "completed"], ["failed", "failed"], ["cancelled", "cancelled"]];
const PAGE = 25, MOST_QUEUED = 100, EVERY = 3000;

function statesOf(chosen) {
  if (chosen === "open") return OPEN;
  return chosen === "running" ? HOLDING : chosen === "" ? [] : [chosen];
}

function address(values) {
  const text = new URLSearchParams(Object.entries(values).filter(([, value]) => value)).toString();
  return `#/${text ? `?${text}` : ""}`;
}

export async function jobsView({ query }) {
  const chosen = query.get("state") ?? "", named = query.get("name") ?? "", cursor = query.get("cursor");
  const tiles = h("div", { class: "tiles", "aria-label": "Now" });
  const queue = h("section", { class: "queue" });
  const table = h("div");
  const pages = h("p", { class: "controls pages" });
  const news = h("section", { class: "news" });
  const stale = staleLine();
  const picked = new Set();   // jobs whose curves are to be drawn beside one another
  const compare = h("a", { class: "button", hidden: true }, "Curves of the chosen");
  let progressOf = new Map(), drawn = "";

  async function load() {
    const [page, waiting, cluster, runs] = await Promise.all([
      ask("/jobs", { state: statesOf(chosen), name: named, cursor, limit: PAGE }),
      cursor === null && chosen === "" ? ask("/jobs", { state: "queued", limit: MOST_QUEUED }) : { jobs: [] },
      ask("/cluster"),
      get(""),
    ]);
    progressOf = new Map(runs.runs.map((run) => [run.run, run]));
    const now = JSON.stringify([page, waiting, cluster, runs.runs.map((run) => [run.run, run.step, run.seconds_left])]);
    renewTimes(view);
    if (now === drawn || isSelected(view)) return;
    drawn = now;
    keepFocus(() => render(page, waiting.jobs, cluster));
  }

  function render(page, waiting, cluster) {
    replace(tiles, [
      tile("jobs that hold resources", `${whole(cluster.in_use.jobs)}${of(cluster.quota.jobs)}`, "Jobs of the tenant, and its quota"),
      tile("CPUs", `${amount(cluster.in_use.cpus)}${of(cluster.quota.cpus)}`, "That jobs of the tenant hold, and its quota"),
      tile("GPUs", `${amount(cluster.in_use.gpus)}${of(cluster.quota.gpus)}`, "That jobs of the tenant hold, and its quota"),
      tile("wait, of all tenants", whole(cluster.queued))]);
    queue.hidden = waiting.length === 0;
    const ordered = [...waiting].sort((a, b) => (a.place ?? Infinity) - (b.place ?? Infinity) || a.created_at - b.created_at);
    replace(queue, h("h2", {}, "Queue"), h("ol", {}, ordered.map((job) => h("li", { "data-job": job.job_id },
      h("span", { class: "place", title: "Its turn among the waiting jobs of all tenants" }, job.place === null ? "–" : `${whole(job.place)}.`),
      h("span", {}, h("a", { href: href(job.job_id, "job") }, job.name), " ", h("span", { class: "why" }, job.reason), " ", h("span", { class: "muted" }, resources(job.resources), ", submitted ", ago(job.created_at)))))));
    replace(table, page.jobs.length === 0 ? empty(chosen === "" && named === "" && cursor === null ? "This tenant has no jobs yet." : "No job is like that.") : scrolled("Jobs", h("table", { class: "rows jobs" },
      h("thead", {}, h("tr", {}, ["state", "name", "model", "user", "submitted", "in this state", "progress", ""].map((name) => h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "cancel"))))),
      h("tbody", {}, page.jobs.map(row)))));
    replace(pages, cursor === null ? null : h("a", { class: "button", rel: "prev", href: address({ state: chosen, name: named }) }, "Newest"),
      page.cursor === null ? null : h("a", { class: "button", rel: "next", href: address({ state: chosen, name: named, cursor: page.cursor }) }, "Older"));
    pages.hidden = cursor === null && page.cursor === null;
    drawNews();
  }

  function row(job) {
    const waits = job.state === "queued";
    return h("tr", { "data-job": job.job_id },
      h("td", { class: "state" }, h("input", { type: "checkbox", checked: picked.has(job.job_id), "aria-label": `Choose ${job.name}, ${job.job_id}`, onchange: (event) => pick(job.job_id, event.target.checked) }), " ", jobBadge(job)),
      h("td", { class: "name" }, h("a", { href: href(job.job_id, "job") }, job.name), h("span", { class: "path" }, job.job_id)),
      h("td", { class: "model", "data-label": "model" }, models(job, progressOf.get(job.job_id))), h("td", { "data-label": "user" }, job.user),
      h("td", { class: "when", "data-label": "submitted" }, ago(job.created_at)), h("td", { class: "when", "data-label": "in this state" }, ago(job.changed_at)),
      h("td", { class: "how" }, waits ? h("span", { class: "why" }, job.place === null ? "" : `${whole(job.place)}. in the queue: `, job.reason) : job.state === "running" ? progress(progressOf.get(job.job_id)) : h("span", { class: "muted" }, job.reason)),
      h("td", { class: "acts" }, OPEN.includes(job.state) && !job.cancel_requested && mayChange(job) ? h("button", { type: "button", class: "link", "aria-label": `Cancel ${job.name}`, onclick: () => confirmCancel(job, () => loads.now()) }, "cancel") : null));
  }

  function pick(id, chosen_) {
    if (chosen_) picked.add(id); else picked.delete(id);
    compare.hidden = picked.size === 0;
    compare.setAttribute("href", `#/curves?${new URLSearchParams([...picked].map((one) => ["job", one]))}`);
  }

  function drawNews() {
    news.hidden = service.news.length === 0;
    replace(news, h("h2", {}, "Since this page was opened"), h("ol", { reversed: true }, service.news.map((one) => h("li", { "data-number": one.number },
      h("span", { class: "when" }, clock(one.at).slice(11)), " ", h("a", { href: href(one.job_id, "job") }, one.job_id), ` ${one.previous === null ? "" : `${one.previous} → `}${one.following}: `, h("span", { class: "muted" }, one.reason)))));
  }

  // The tables are drawn again with each news; what has the focus keeps it, also where its job stands elsewhere now.
  function keepFocus(draw) {
    const focused = document.activeElement, row = focused.closest("[data-job]");
    const list = row?.parentElement.tagName, job = row?.dataset.job;
    draw();
    if (row === null) return;
    const again = [...view.querySelectorAll(`${list} > [data-job]`)].find((one) => one.dataset.job === job);
    again?.querySelector(focused.tagName)?.focus({ preventScroll: true });
  }

  const filter = h("form", { class: "controls", role: "search", onsubmit: (event) => { event.preventDefault(); go(); } },
    h("label", {}, "State ", h("select", { name: "state", onchange: () => go() }, STATES.map(([value, label]) => h("option", { value, selected: value === chosen }, label)))),
    h("label", { class: "grow" }, h("span", {}, "Name"), h("input", { type: "search", id: "search", name: "name", value: named, placeholder: "exactly this name" })),
    h("button", {}, "Show"), compare);
  function go() { location.hash = address({ state: filter.elements.state.value, name: filter.elements.name.value.trim() }); }

  const view = h("div", { class: "view wide service" }, h("div", { class: "head" }, h("h1", {}, "Jobs"), h("span", { class: "muted" }, `of ${service.me.tenant}`),
    h("a", { class: "button primary right", href: "#/start" }, "Start a job")), stale.node, tiles, filter, queue, table, pages, news);
  await load();
  const loads = repeat(load, EVERY, stale.say);
  const stop = onChange((what) => { if (what === "job") loads.now(); });
  return { title: "Jobs", crumbs: [], node: view, dispose: () => { stop(); loads.stop(); } };
}

function tile(label, value, title = null) {
  return h("div", { class: "tile", title }, h("span", { class: "label" }, label), h("span", { class: "number" }, value));
}

const of = (quota) => (quota === null ? "" : ` of ${amount(quota)}`);

