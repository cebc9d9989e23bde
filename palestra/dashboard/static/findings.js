// What the doctor's rules say about a run: each sign with its episodes; asked again after each step.
import { badge, empty, h, replace, visible } from "./dom.js";
import { plural, words } from "./format.js";
import { at, get } from "./api.js";
import { href } from "./curves.js";
import { runHead } from "./run.js";
import { onChange, state } from "./state.js";

const PAUSE = 1000, TURNS = 6;  // milliseconds before the question after a step, twice as long before each further attempt; the most of them

export async function findingsView({ run }) {
  const place = h("div", { class: "findings", "aria-live": "polite" });
  let said = "";   // what is drawn; news that change nothing leave it alone, and with it the focus
  async function load(step = 0) {
    const found = await get(at(run, "findings"), { step });
    const text = JSON.stringify(found);
    if (text === said) return found.step;
    said = text;
    replace(place, h("p", { class: "muted" }, summary(found)), found.findings.map((one) => finding(run, one)));
    return found.step;
  }
  await load();
  // One question after a step, of whatever steps came during the pause; more only where the server could not answer.
  let newest = 0, asking = false;
  async function reload() {
    if (asking) return;
    asking = true;
    for (let turn = 0; turn < TURNS; turn++) {
      await new Promise((resolve) => setTimeout(resolve, PAUSE * 2 ** turn));
      try { if (await load(newest) >= newest) break; } catch { /* the stream says that the connection is lost */ }
    }
    asking = false;
  }
  const stop = onChange((what, name, event) => {
    if (what !== "event" || name !== run || event.kind !== "step") return;
    newest = Math.max(newest, event.data.step);
    reload();
  });
  const { title } = state.runs.get(run);
  return { title: `Findings in ${title}`, crumbs: [[title, href(run, "steps")]], node: h("div", { class: "view" }, runHead(run, "findings"), place), dispose: stop };
}

function summary({ step, steps, rules, findings }) {
  if (step === 0) return "No step is finished yet.";
  const holds = findings.filter((one) => one.holds).length;
  const here = findings.length === 0 ? "no sign" : `${plural(findings.length, "sign")}, ${holds === findings.length ? "all of them now" : `${holds} of them now`}`;
  return `${plural(rules, "rule")} over ${step} of ${plural(steps, "step")}: ${here}.`;
}

function when(run, one) {
  const step = (number) => h("a", { href: href(run, "step", number) }, `step ${number}`);
  if (one.holds) return ["since ", step(one.since)];
  if (one.since === one.until) return ["in ", step(one.since), ", not any more"];
  return ["from ", step(one.since), " to ", step(one.until), ", not any more"];
}

function finding(run, one) {
  return h("article", { class: `finding ${one.holds ? "holds" : "past"}` },
    h("div", { class: "head" }, h("h2", {}, words(one.code)), one.policy === "" ? null : badge(`policy ${one.policy}`, "plain"),
      badge(one.holds ? "now" : "past", one.holds ? "warn" : "plain"), h("span", { class: "muted" }, when(run, one), `, ${plural(one.steps, "step")} in all`)),
    h("dl", {}, [["seen", one.seen], ["it means", one.means], ["try", one.remedy]].map(([label, text]) => [h("dt", {}, label), h("dd", {}, visible(text))]),
      one.episodes.length === 0 ? null : [h("dt", {}, "episodes"), h("dd", {}, one.episodes.map((name, place) => [place > 0 ? ", " : "", h("a", { href: href(run, "episode", name) }, name)]))]));
}
