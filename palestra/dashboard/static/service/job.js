// One job: why it is in its state, what it holds, how far it is, and what happened to it.
import { copyable, h, replace, scrolled } from "../dom.js";
import { clock, duration, json, whole } from "../format.js";
import { at, get } from "../api.js";
import { href } from "../curves.js";
import { tabs } from "../run.js";
import { onChange } from "../state.js";
import { ago, confirmCancel, isSelected, jobBadge, models, progress, renewTimes, resources, staleLine } from "./parts.js";
import { ask, mayChange, OPEN, post, repeat } from "./state.js";

const EVERY = 3000, MOST_SHOWN = 20000;   // characters of a configuration

export async function jobView({ job: id }) {
  const head = h("div", { class: "head" }), facts = h("section", { class: "facts" }), happened = h("section"), config = h("section");
  const stale = staleLine();
  let shown = null, written = "", configured = "";

  async function load() {
    const [job, changes] = await Promise.all([ask(`/jobs/${encodeURIComponent(id)}`), ask(`/jobs/${encodeURIComponent(id)}/changes`)]);
    const run = job.state === "queued" ? undefined : await get(at(id)).catch(() => undefined);   // it may not have begun
    const now = JSON.stringify([job, changes, run?.step, run?.seconds_left]);
    renewTimes(facts);
    if (now === written || isSelected(facts)) return;
    written = now;
    shown = job;
    render(job, changes, run);
  }

  function render(job, changes, run) {
    const acts = document.activeElement?.dataset?.act;
    replace(head, h("h1", {}, job.name), jobBadge(job), h("span", { class: "right" },
      h("a", { class: "button", href: `#/start?like=${encodeURIComponent(id)}` }, "Start one like it"),
      !OPEN.includes(job.state) ? h("button", { type: "button", "data-act": "again", onclick: again }, "Run it again") : null,
      mayChange(job) && OPEN.includes(job.state) && !job.cancel_requested ? h("button", { type: "button", "data-act": "cancel", class: "danger", onclick: () => confirmCancel(shown, () => loads.now()) }, "Cancel") : null));
    if (acts) head.querySelector(`[data-act="${acts}"]`)?.focus({ preventScroll: true });
    const rows = [
      ["why", h("span", { class: "why" }, job.reason)],
      ["in the queue", job.place === null ? null : `${whole(job.place)}. of all that wait`],
      ["progress", progress(run)],
      ["id", copyable(job.job_id)], ["user", job.user], ["kind", `${job.kind}, priority ${job.priority}${job.attached ? ", attached" : ""}`],
      ["model", models(job, run)],
      [job.state === "running" || job.state === "starting" ? "holds" : "needs", resources(job.resources)],
      ["node", job.node],
      ["submitted", [clock(job.created_at), ", ", ago(job.created_at)]], [`${job.state} since`, [clock(job.changed_at), ", ", ago(job.changed_at)]],
      ["starts", `${whole(job.starts)}, ${whole(job.restarts_left)} more after a loss`],
      ["time limit", job.time_limit_seconds === null ? null : duration(job.time_limit_seconds)],
      ["begins with", job.from_job === null ? null : [h("a", { href: href(job.from_job, "job") }, job.from_job), job.from_step === null ? "" : ` after step ${whole(job.from_step)}`]],
      ["own page", job.url !== null ? [h("a", { href: `${job.url}/dashboard`, rel: "noreferrer" }, `${job.url}/dashboard`), " with the key of the job"] : null],
    ];
    replace(facts, h("dl", {}, rows.filter(([, value]) => value !== null && value !== "").map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
    replace(happened, h("h2", {}, "What happened"), scrolled("Changes of state", h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, ["when", "state", "why"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, [...changes].reverse().map((one) => h("tr", {}, h("td", { class: "when" }, clock(one.at)), h("td", {}, one.following), h("td", { class: "text" }, one.reason)))))));
    const text = json(job.config, 2);
    if (text !== configured) {
      configured = text;
      replace(config, h("h2", {}, "Configuration"), h("pre", { class: "box", tabindex: "0", role: "region", "aria-label": "Configuration" }, text.slice(0, MOST_SHOWN)),
        text.length > MOST_SHOWN ? h("p", { class: "note" }, `${whole(text.length - MOST_SHOWN)} more characters are not shown.`) : null);
    }
  }

  async function again() {
    try {
      const job = await post(`/jobs/${encodeURIComponent(id)}/resubmit`);
      location.hash = href(job.job_id, "job");
    } catch (error) { stale.node.textContent = error.message; }
  }

  await load();
  const loads = repeat(load, EVERY, stale.say);
  const stop = onChange((what, changed) => { if (what === "job" && (changed === id || changed === null)) loads.now(); });
  return { title: shown.name, crumbs: [[shown.name, href(id, "job")]], up: "#/",
    node: h("div", { class: "view service" }, head, tabs(id, "job"), stale.node, facts, happened, config), dispose: () => { stop(); loads.stop(); } };
}
