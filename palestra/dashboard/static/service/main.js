// What the page of a service adds to that of runs: jobs, their logs, machines, and a form that starts a job.
import { empty, h } from "../dom.js";
import { get, Refused } from "../api.js";
import { curvesView, href } from "../curves.js";
import { tabs } from "../run.js";
import { ask as askForKey } from "../session.js";
import { onChange, showRuns, state } from "../state.js";
import { jobView } from "./job.js";
import { jobsView } from "./jobs.js";
import { logView } from "./log.js";
import { machinesView } from "./machines.js";
import { startView } from "./start.js";
import { ask, followWhileSeen, reset, service } from "./state.js";

const OWN = { job: jobView, log: logView };
const MOST_BESIDE = 8;   // runs whose curves are drawn beside one another
let reshow = () => {}, leave = () => {};
let outdated = false;   // whether the job of a run that is known has another state now: it may have begun again

onChange((what, job) => { if (what === "job" && (job === null || state.runs.has(job))) outdated = true; });

async function show(runs) {
  if (outdated) await showRuns([]);
  outdated = false;
  await showRuns(runs);
}

// Learn what the key may do, and follow the jobs of its tenant. `draw` draws the present view again, `hide` ends it.
export async function begin(draw, hide) {
  reshow = draw;
  leave = hide;
  reset();
  service.me = await ask("/me");
  const known = await get("").catch(() => ({ version: state.version, default_model: "" }));
  state.version = known.version;
  service.defaultModel = known.default_model;
  places();
  followWhileSeen(() => reshow());
}

// End all that a key has opened.
export function end() {
  leave();
  reset();
  document.getElementById("places")?.remove();
}

function places() {
  document.getElementById("places")?.remove();
  const link = (to, label) => h("a", { href: to }, label);
  const nav = h("nav", { id: "places", "aria-label": "Service" },
    link("#/", "Jobs"), link("#/machines", "Machines"), link("#/start", "Start a job"));
  const who = h("span", { class: "who" }, `${service.me.user} (${service.me.role}) of ${service.me.tenant}`);
  const forget = h("button", { type: "button", class: "link", title: "Forget the key of this tab", onclick: async () => {
    end();
    await askForKey(document.getElementById("main"), "");
    await begin(reshow, leave);
    reshow();
  } }, "Forget key");
  nav.append(who, forget);
  document.getElementById("crumbs").after(nav);
}

export async function make({ parts, query }, views) {
  for (const link of document.querySelectorAll("#places a")) {
    if (link.getAttribute("href") === `#/${["machines", "start"].includes(parts[0]) ? parts[0] : ""}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const [what, run, name, ...rest] = parts;
  if (what === undefined) return jobsView({ query });
  if (what === "machines") return machinesView();
  if (what === "start") return startView({ query });
  if (what === "curves") {
    await show([...new Set(query.getAll("job"))].slice(0, MOST_BESIDE));
    return beside(await curvesView({ query }));
  }
  if (what !== "run" || name === undefined) throw new Refused(404, "There is nothing at this address.");
  if (Object.hasOwn(OWN, name)) return OWN[name]({ job: run, query });
  if (name !== "curves" && !Object.hasOwn(views, name)) throw new Refused(404, "There is nothing at this address.");
  try {
    await show([run]);
  } catch (error) {
    if (error.status !== 404) throw error;
    return notBegun(run, name, error.message);
  }
  if (name !== "curves") return views[name]({ run, rest, query });
  const view = await curvesView({ query });
  view.node.prepend(tabs(run, "curves"));
  return { ...view, crumbs: [[state.runs.get(run).title, href(run, "job")]] };
}

const beside = (view) => ({ ...view, title: "Curves", crumbs: [["curves", location.hash]] });

// A job whose run can't be read yet; the view is drawn again when the job's state changes.
async function notBegun(job, name, why) {
  const place = h("div", { class: "view" }, h("h1", {}, job), tabs(job, name), empty(why));
  const stop = onChange((what, changedJob) => { if (what === "job" && (changedJob === job || changedJob === null)) reshow(); });
  return { title: job, crumbs: [[job, href(job, "job")]], node: place, dispose: stop };
}

