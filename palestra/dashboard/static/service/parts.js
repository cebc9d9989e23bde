// What several views of jobs show: a state, a model, a progress, a time, and the question before a job is cancelled.
import { badge, h } from "../dom.js";
import { duration, plural, whole } from "../format.js";
import { cancel, service } from "./state.js";

const MOST_OF_NAME = 300;   // characters of models
const KINDS = { queued: "warn", starting: "good", running: "good", completed: "plain", failed: "bad", cancelled: "plain" };

export function jobBadge(job) {
  return badge(job.cancel_requested && !["completed", "failed", "cancelled"].includes(job.state) ? `${job.state}, ending` : job.state, KINDS[job.state] ?? "plain");
}

// The models of a job by policy: those of its run, or what its configuration names before there is one.
export function models({ config }, run = undefined) {
  if (run !== undefined && run.models !== undefined && Object.keys(run.models).length > 0) return named(Object.entries(run.models));
  const policies = config.policies;
  if (policies !== null && typeof policies === "object" && !Array.isArray(policies) && Object.keys(policies).length > 0) {
    return named(Object.entries(policies).map(([name, policy]) => [name, policy?.model ?? config.model ?? service.defaultModel]));
  }
  return String(config.model ?? service.defaultModel).slice(0, MOST_OF_NAME);
}

const named = (policies) => policies.map(([name, model]) => (policies.length === 1 && name === "policy" ? String(model) : `${name}: ${model}`)).join(", ").slice(0, MOST_OF_NAME);

export function resources({ cpus, gpus, memory_gib: memory }) {
  return [`${amount(cpus)} CPU`, gpus > 0 ? `${amount(gpus)} GPU` : null, memory > 0 ? `${amount(memory)} GiB` : null].filter(Boolean).join(", ");
}

export function amount(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US", { maximumFractionDigits: 2 });
}

// A moment as people read it: how long ago; the exact time, in a title, beside it.
export function ago(at) {
  const date = new Date(at * 1000);
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString("en-GB") }, since(date));
}

function since(date) {
  const seconds = Math.max(0, (Date.now() - date) / 1000);
  return seconds < 1 ? "now" : `${duration(seconds)} ago`;
}

// Bring the times in a view up to date, and leave everything else as it is.
export function renewTimes(view) {
  for (const time of view.querySelectorAll("time")) time.textContent = since(new Date(time.dateTime));
}

// Whether text in an element is selected, which drawing it again would undo.
export function isSelected(element) {
  const selection = getSelection();
  return !selection.isCollapsed && element.contains(selection.anchorNode);
}

// How far a run is, by what its server has reported; null where nothing is known.
export function progress(run) {
  if (run === undefined || run.state === "unreadable" || run.kind === "inference") return null;
  const left = run.seconds_left === null ? "" : `, about ${duration(run.seconds_left)} left`;
  return h("div", { class: "progress" }, h("progress", { max: Math.max(run.steps, 1), value: run.step, "aria-label": `Steps of ${run.title}` }),
    h("span", {}, `${whole(run.step)} of ${plural(run.steps, "step")}${left}`));
}

// Ask whether a job is to be cancelled, and cancel it. `done` gets the job as it is then.
export function confirmCancel(job, done) {
  const problem = h("p", { class: "problem", role: "alert" });
  const sure = h("button", { class: "primary danger", type: "button" }, "Cancel the job");
  const dialog = h("dialog", { class: "confirm", "aria-labelledby": "cancel-title" },
    h("h2", { id: "cancel-title" }, `Cancel ${job.name}?`),
    h("p", {}, h("code", {}, job.job_id), ` is ${job.state}. `, job.state === "queued" ? "It then never starts." : "It saves what it has trained, and ends; what it holds is then free for others."),
    problem, h("p", { class: "buttons" }, h("button", { type: "button", autofocus: true, onclick: () => dialog.close() }, "Let it be"), sure));
  sure.addEventListener("click", async () => {
    sure.disabled = true;
    try { done(await cancel(job.job_id)); dialog.close(); } catch (error) { problem.textContent = error.message; sure.disabled = false; }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

// A line that says why a view could not be brought up to date; empty where it could.
export function staleLine() {
  const node = h("p", { class: "problem", role: "status" });
  return { node, say: (error) => { node.textContent = error === null ? "" : `Not up to date: ${error.message}.`; } };
}
