// A run in tables: its steps and where their time goes, its settings, its events.
import { badge, empty, h, replace, scrolled, visible } from "./dom.js";
import { byPolicy, clock, duration, json, number, ofPolicies, percent, plural, signed, whole, words } from "./format.js";
import { at, get } from "./api.js";
import { href, stateBadge } from "./curves.js";
import { isService } from "./session.js";
import { loadMetrics, onChange, state } from "./state.js";
import { decision, versionsOf } from "./versions.js";

// The parts of a step's time, in order; what is left of time/step_seconds is the rest.
export const PARTS = [["rollout", "time/rollout_seconds"], ["train", "time/train_seconds"], ["publish", "time/publish_seconds"]];

export function tabs(run, current) {
  const ofService = isService() ? [["job", "Job"], ["log", "Log"], ["curves", "Curves"]] : [];
  return h("nav", { class: "tabs", "aria-label": "Parts of the run" }, [...ofService, ["steps", "Steps"], ["episodes", "Episodes"], ["findings", "Findings"], ["costs", "Costs"], ["talk", "Talk"], ["settings", "Settings"], ["events", "Events"]].map(([name, label]) =>
    h("a", { href: href(run, name), "aria-current": name === current ? "page" : null }, label)));
}

export function runHead(name, current) {
  const run = state.runs.get(name);
  return [h("div", { class: "head" }, h("h1", {}, run.title), stateBadge(run), h("span", { class: "muted path" }, run.folder)), tabs(name, current)];
}

export function timeBar(row) {
  const whole_ = row["time/step_seconds"];
  if (!whole_) return null;
  const known = PARTS.map(([label, metric]) => [label, row[metric] ?? 0]);
  const rest = Math.max(0, whole_ - known.reduce((sum, [, seconds]) => sum + seconds, 0));
  const all = [...known, ["rest", rest]];
  const said = all.map(([label, seconds]) => `${label} ${duration(seconds)} (${percent(seconds / whole_)})`).join(", ");
  return h("div", { class: "timebar", role: "img", "aria-label": said, title: said }, all.map(([label, seconds]) => {
    const part = h("span", { class: `part ${label}` });
    part.style.setProperty("flex-grow", String(Math.max(seconds / whole_, 0)));
    return part;
  }));
}

export function timeLegend() {
  return h("p", { class: "legend" }, [...PARTS.map(([label]) => label), "rest"].map((label) => h("span", {}, h("span", { class: `part ${label}` }), label)));
}

const STEPS = 200;  // rows that are drawn together; a run may have thousands

function stepRow(run, row) {
  return h("tr", { "data-step": row.step },
    h("td", { class: "n" }, h("a", { href: href(run, "step", row.step) }, whole(row.step))),
    ["train/reward_mean", "train/reward_std", "validation/reward_mean", "train/entropy", "train/grad_norm"].map((name) => h("td", { class: "n" }, byPolicy(ofPolicies(row, name), 3))),
    h("td", { class: "n" }, whole(row["rollout/completion_tokens"])),
    h("td", { class: "n" }, number(row["rollout/tokens_per_second"], 3)),
    h("td", { class: "n" }, duration(row["time/step_seconds"] ?? row["time/validation_seconds"])),
    h("td", { class: "time" }, timeBar(row)),
    h("td", { class: "left" }, leftOut(row)));
}

export async function stepsView({ run }) {
  const metrics = await loadMetrics(run);
  const { columns } = metrics;
  const body = h("tbody");
  const nothing = empty("No step is finished yet.");
  const rowAt = (place) => Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column[place]]));
  const table = h("div", {}, metrics.damaged.length === 0 ? null : h("p", { class: "problem" }, `damaged: the metrics of ${metrics.damaged.length === 1 ? "step" : "steps"} ${metrics.damaged.join(", ")}`),
    timeLegend(), scrolled("Steps", h("table", { class: "rows" }, h("thead", {}, h("tr", {}, ["step", "reward", "±", "validation", "entropy", "gradient", "tokens", "tokens/s", "time", "where it goes", "left out"].map((name, i) =>
      h("th", { scope: "col", class: i < 9 ? "n" : "" }, name)))), body)));
  const more = h("button", { type: "button", onclick: older }, "Older steps");
  // Place in the columns of the oldest row that is drawn; their length while none is.
  let drawn = (columns.step ?? []).length;
  function older() {
    const until = Math.max(0, drawn - STEPS);
    const rows = [];
    while (drawn > until) rows.push(stepRow(run, rowAt(--drawn)));
    body.append(...rows);
    say();
  }
  function say() {
    table.hidden = body.firstChild === null;
    nothing.hidden = !table.hidden;
    more.hidden = drawn === 0;
  }
  // A step that was trained: its row replaces one of the same step, or stands above those of earlier steps.
  function put(step) {
    const row = stepRow(run, rowAt(columns.step.indexOf(step)));
    const next = [...body.children].find((one) => Number(one.dataset.step) <= step) ?? null;
    if (next !== null && Number(next.dataset.step) === step) next.replaceWith(row);
    else if (next !== null || drawn === 0) body.insertBefore(row, next);
    say();
  }
  older();
  const stop = onChange((what, name, event) => { if (what === "metrics" && name === run) put(event.data.step); });
  return { title: `Steps of ${state.runs.get(run).title}`, crumbs: [[state.runs.get(run).title, href(run, "steps")]], node: h("div", { class: "view" }, runHead(run, "steps"), nothing, table, h("p", {}, more)), dispose: stop };
}

// What a row says was left out of its step, in words.
export function leftOut(row) {
  const kinds = [["train/groups_zero_variance", "equal groups", "Groups whose rewards are all equal: nothing to learn from"], ["train/groups_dropped", "dropped groups", ""], ["train/groups_skipped", "skipped groups", "Replaced by dynamic_sampling: nothing to learn from"],
    ["train/episodes_discarded", "discarded", ""], ["train/episodes_stale", "stale", ""], ["train/episodes_untrainable", "untrainable", ""],
    ["train/episodes_without_tokens", "without tokens", ""], ["train/calls_abandoned", "abandoned calls", ""]];
  return kinds.flatMap(([name, label, title]) => Object.entries(ofPolicies(row, name)).filter(([, count]) => count > 0)
    .map(([policy, count]) => badge(`${policy} ${whole(count)} ${label}`.trim(), "plain", title || null)));
}

export async function settingsView({ run }) {
  const found = await get(at(run, "settings"));
  const changed = new Set(found.changed);
  const only = h("input", { type: "checkbox", id: "only" });
  const place = h("div");
  const sections = Object.entries(found.config);
  function rows(prefix, table) {
    return Object.entries(table).flatMap(([key, value]) => {
      const name = prefix + key;
      if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > 0) return rows(`${name}.`, value);
      if (only.checked && !changed.has(name)) return [];
      return [h("tr", { class: changed.has(name) ? "changed" : "" }, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, h("code", {}, visible(json(value)))), h("td", {}, changed.has(name) ? badge("set", "good") : null))];
    });
  }
  function render() {
    const body = rows("", Object.fromEntries(sections));
    replace(place, body.length === 0 ? empty("Every key has its default.") : scrolled("Settings", h("table", { class: "rows settings" }, h("tbody", {}, body))));
  }
  only.addEventListener("change", render);
  render();
  return { title: `Settings of ${state.runs.get(run).title}`, crumbs: [[state.runs.get(run).title, href(run, "steps")]],
    node: h("div", { class: "view" }, runHead(run, "settings"), h("p", { class: "controls" }, h("label", { for: "only" }, only, " Only what differs from the defaults")), place) };
}

export async function eventsView({ run }) {
  const body = h("tbody");
  const more = h("button", { type: "button" }, "Older");
  let before = null;
  async function load() {
    const found = await get(at(run, "history"), { before, limit: 100 });
    body.append(...found.events.map(line));
    before = found.before;
    more.hidden = before === null;
  }
  function line(event) {
    return h("tr", {}, h("td", { class: "n" }, whole(event.event_id)), h("td", { class: "when" }, clock(event.at)), h("td", {}, badge(words(event.kind), kindOf(event.kind))), h("td", { class: "text" }, describe(run, event)));
  }
  more.addEventListener("click", load);
  const [versions] = await Promise.all([versionsOf(run), load()]);
  const nothing = body.firstChild === null ? empty("Nothing has happened yet.") : null;
  let newest = body.firstChild === null ? 0 : Number(body.firstChild.firstChild.textContent.replaceAll(",", ""));
  const stop = onChange((what, name, event) => {
    if (what !== "event" || name !== run || event.event_id <= newest) return;
    if (event.kind === "gate_decided") versions.add(event);
    newest = event.event_id;
    nothing?.remove();
    body.prepend(line(event));
  });
  return { title: `Events of ${state.runs.get(run).title}`, crumbs: [[state.runs.get(run).title, href(run, "steps")]],
    node: h("div", { class: "view" }, runHead(run, "events"), versions.node, nothing, scrolled("Events", h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, ["", "when", "what", ""].map((name) => h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "number or text"))))), body)), more), dispose: stop };
}

function kindOf(kind) {
  if (kind === "failed" || kind === "episode_untrainable") return "bad";
  return kind === "warning" || kind === "lease_expired" || kind === "group_dropped" ? "warn" : kind === "completed" ? "good" : "plain";
}

// The win rate of a row of metrics with its interval, after some words; "" if it has none.
export function winRate(row, before = "") {
  const [mean, low, high] = ["", "_low", "_high"].map((end) => row[`validation/win_rate${end}`]);
  return mean === undefined || mean === null ? "" : `${before}${number(mean, 2)} (${number(low, 2)} to ${number(high, 2)})`;
}

export function describe(run, event) {
  const data = event.data;
  if (event.kind === "step") return [h("a", { href: href(run, "step", data.step) }, `step ${data.step}`), Object.keys(ofPolicies(data, "train/reward_mean")).length === 0 ? "" : ` reward ${byPolicy(ofPolicies(data, "train/reward_mean"), 3)}`, data["time/step_seconds"] === undefined ? "" : ` in ${duration(data["time/step_seconds"])}`];
  if (event.kind === "evaluated") return `after step ${data.step}: validation ${byPolicy(ofPolicies(data, "validation/reward_mean"), 3)}${winRate(data, ", win rate ")}`;
  if (event.kind === "warning") return [h("a", { href: href(run, "step", data.step) }, `step ${data.step}`), ` ${visible(String(data.text))}`];
  if (event.kind === "gate_decided" || event.kind === "gate_returned") return decision(data);
  const episode = typeof data.episode_id === "string" ? [h("a", { href: href(run, "episode", data.episode_id) }, data.episode_id), " "] : [];
  const rest = Object.entries(data).filter(([key]) => key !== "episode_id").map(([key, value]) => `${words(key)} ${typeof value === "number" ? number(value) : typeof value === "string" ? value : json(value)}`);
  return [...episode, rest.join(", ")];
}

export function advantageBadge(advantage) {
  if (advantage === null || advantage === undefined) return null;
  const [least, most] = advantage;
  const text = least === most ? signed(least) : `${signed(least)} … ${signed(most)}`;
  return badge(`advantage ${text}`, most <= 0 && least < 0 ? "minus" : least >= 0 && most > 0 ? "plus" : "plain", "How much better than the others of its group: the sign says whether its tokens become more probable");
}

export { plural };
