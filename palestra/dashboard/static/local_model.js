// A checkpoint of a run that `palestra dashboard` serves itself: which there are, how far the loading is, and its end.
import { badge, h, replace } from "./dom.js";
import { duration } from "./format.js";
import { at, get, post, Refused } from "./api.js";

const LOADING = 1000, READY = 5000;  // milliseconds between two questions

// The panel of a run; null: this page serves none. `answers` is called with the policies that answer, [] for none,
// whenever they change.
export async function localModel(run, answers) {
  let now;
  try { now = await get(at(run, "talk")); } catch (error) { if (error instanceof Refused && error.status === 404) return null; throw error; }
  let timer = null, over = false, said = [];
  const problem = h("p", { class: "problem", role: "alert" });
  const status = h("p", { class: "controls", role: "status" });
  const choice = h("select", { name: "checkpoint" }, now.checkpoints.map((name) => h("option", { value: name, selected: name === now.checkpoint }, name)));
  const load = h("button", { type: "button", class: "primary", onclick: () => change("load", { checkpoint: choice.value }) }, "Load this checkpoint");
  const end = h("button", { type: "button", onclick: () => change("end", {}) }, "End it");
  const node = h("section", { class: "local", "aria-label": "Model on this machine" },
    now.able ? h("p", { class: "controls" }, h("label", {}, "Checkpoint", " ", choice), load, end) : h("p", { class: "note" }, `No checkpoint can be loaded from this page: ${now.why}.`), status, problem);

  function draw() {
    const running = now.state === "loading" || now.state === "ready";
    load.disabled = running && choice.value === now.checkpoint;
    end.hidden = !running;
    if (now.state === "loading") replace(status, badge("loading", "warn"), ` ${now.checkpoint}: ${now.phase}, for ${duration(now.seconds)}`);
    else if (now.state === "ready") replace(status, badge("ready", "good"), ` ${now.checkpoint} answers, from a process of its own on this machine. It ends with the dashboard, or after ten minutes without a call.`);
    else replace(status, now.reason ? `${now.checkpoint}: ${now.reason}.` : "");
    const policies = now.state === "ready" ? now.policies : [];
    if (JSON.stringify(policies) !== JSON.stringify(said)) { said = policies; answers(policies); }
  }

  async function change(what, body) {
    problem.textContent = "";
    try { now = await post(at(run, "talk", what), body); } catch (error) { problem.textContent = error.message; }
    draw();
    wait();
  }

  // A hidden tab asks nothing; in sight again, it asks where it left off.
  function wait() {
    clearTimeout(timer);
    if (over || document.hidden || (now.state !== "loading" && now.state !== "ready")) return;
    timer = setTimeout(look, now.state === "loading" ? LOADING : READY);
  }

  async function look() {
    if (over || document.hidden) return;
    try { now = await get(at(run, "talk")); } catch { /* the stream says that the connection is lost */ }
    if (over) return;
    draw();
    wait();
  }

  choice.addEventListener("change", draw);
  document.addEventListener("visibilitychange", look);
  said = now.state === "ready" ? now.policies : [];
  draw();
  wait();
  return { node, look, able: now.able, route: `/dashboard/api/runs${at(run, "talk")}`, policies: () => said,
    dispose: () => { over = true; clearTimeout(timer); document.removeEventListener("visibilitychange", look); } };
}
