// A step with its groups; a group with its episodes side by side.
import { badge, box, copyable, empty, h, replace, scrolled, visible } from "./dom.js";
import { ENDLESS, duration, number, ofPolicies, plural, pretty, signed, whole, words } from "./format.js";
import { at, get } from "./api.js";
import { href } from "./curves.js";
import { advantageBadge, describe, leftOut, timeBar, timeLegend, winRate } from "./run.js";
import { state } from "./state.js";

function tile(label, value, title = null) {
  return h("div", { class: "tile", title }, h("span", { class: "label" }, label), h("span", { class: "number" }, value));
}

export function around(label, before, after) {
  return h("span", { class: "around" },
    h("a", { href: before, class: `button ${before ? "" : "off"}`, rel: "prev", "aria-disabled": before ? null : "true", title: `Previous ${label} ([)` }, "‹"),
    h("a", { href: after, class: `button ${after ? "" : "off"}`, rel: "next", "aria-disabled": after ? null : "true", title: `Next ${label} (])` }, "›"));
}

// A reward as a colour: where it lies between the least and the most of what stands beside it.
function shade(reward, least, most) {
  if (reward === null || reward === undefined) return "none";
  if (most === least) return "r-same";
  return `r-${Math.min(4, Math.floor(((reward - least) / (most - least)) * 5))}`;
}

export async function stepView({ run, rest, query }) {
  const step = Number(rest[0]);
  const found = await get(at(run, "steps", step));
  const row = found.row;
  const title = state.runs.get(run).title;
  const rewards = found.groups.flatMap((group) => group.episodes).map((line) => line.reward).filter((reward) => reward !== null);
  const bounds = [Math.min(...rewards), Math.max(...rewards)];
  const place = h("div", { class: "groups" });
  const order = { value: query.get("order") ?? "batch" };
  function sorted() {
    const mean = (group) => { const r = group.episodes.map((one) => one.reward).filter((x) => x !== null); return r.length ? r.reduce((a, b) => a + b, 0) / r.length : -Infinity; };
    const spread = (group) => { const r = group.episodes.map((one) => one.reward).filter((x) => x !== null); return r.length ? Math.max(...r) - Math.min(...r) : -1; };
    const groups = [...found.groups];
    if (order.value === "worst") groups.sort((a, b) => mean(a) - mean(b));
    if (order.value === "best") groups.sort((a, b) => mean(b) - mean(a));
    if (order.value === "spread") groups.sort((a, b) => spread(b) - spread(a));
    return groups;
  }
  function render() { replace(place, sorted().map((group) => groupCard(run, group, bounds))); }
  render();
  const own = [["reward", "train/reward_mean"], ["± in the batch", "train/reward_std"], ["validation", "validation/reward_mean"], ["episodes", "train/episodes"],
    ["trained tokens", "train/trained_tokens"], ["entropy", "train/entropy"], ["gradient", "train/grad_norm"], ["staleness", "rollout/staleness_mean"]];
  const counts = ["train/episodes", "train/trained_tokens"];
  const numbers = [...own.flatMap(([label, name]) => Object.entries(ofPolicies(row, name)).map(([policy, value]) =>
    [`${policy} ${label}`.trim(), counts.includes(name) ? whole(value) : number(value, 3), policy === "" ? name : `${policy}/${name}`])),
    ["win rate", winRate(row) || "–", "validation/win_rate"], ["tokens/s", number(row["rollout/tokens_per_second"], 3), "rollout/tokens_per_second"], ["time", duration(row["time/step_seconds"]), "time/step_seconds"]];
  const out = leftOut(row);
  const events = found.events.filter((event) => event.kind !== "warning"), warnings = found.events.filter((event) => event.kind === "warning");
  return {
    title: `Step ${step} of ${title}`, crumbs: [[title, href(run, "steps")], [`step ${step}`, href(run, "step", step)]], up: "#/",
    node: h("div", { class: "view" },
      h("div", { class: "head" }, h("h1", {}, step === 0 ? "Before the first step" : `Step ${step}`), h("span", { class: "muted" }, found.steps < ENDLESS ? ` of ${found.steps}` : ""),
        around("step", step > 0 ? href(run, "step", step - 1) : null, step < found.steps ? href(run, "step", step + 1) : null),
        Object.entries(found.versions).map(([policy, version]) => badge(`${policy} ${version}`, "plain", "Version of the policy before the step"))),
      Object.keys(row).length === 0 ? empty(found.batch.length > 0 ? "Its batch is fixed, and it is not finished yet." : "This step is not finished yet.") : h("div", { class: "tiles" }, numbers.filter(([, value]) => value !== "–").map(([label, value, name]) => tile(label, value, name))),
      timeBar(row) === null ? null : h("div", { class: "steptime" }, timeBar(row), timeLegend()),
      warnings.length === 0 ? null : h("ul", { class: "warnlist" }, warnings.map((event) => h("li", {}, visible(event.data.text)))),
      out.length + events.length === 0 ? null : h("section", {}, h("h2", {}, "Left out"), h("p", {}, out), events.length === 0 ? null : h("ul", {}, events.map((event) => h("li", {}, badge(words(event.kind), "warn"), " ", describe(run, event))))),
      h("section", {}, h("div", { class: "head" }, h("h2", {}, "Groups"), h("span", { class: "muted" }, `${plural(found.groups.length, "task")}, rewards of their episodes`),
        h("label", { class: "right" }, "Order ", h("select", { onchange: (event) => { order.value = event.target.value; render(); } },
          [["batch", "as in the batch"], ["worst", "worst first"], ["best", "best first"], ["spread", "most different first"]].map(([value, label]) => h("option", { value, selected: value === order.value }, label))))),
      found.groups.length === 0 ? empty(step === 0 ? "Nothing is trained before the first step." : "No episodes are registered for this step yet.") : place),
      found.validation.length === 0 ? null : h("section", {}, h("h2", {}, "Evaluation after the step"), h("p", {}, `${plural(found.validation.length, "task")}. `, h("a", { href: `${href(run, "episodes")}?kind=validation&step=${step}` }, "List its episodes"))),
      Object.keys(row).length === 0 ? null : h("details", { class: "more" }, h("summary", {}, h("h2", {}, "All numbers of this step")), scrolled("All numbers", h("table", { class: "rows" }, h("tbody", {},
        Object.keys(row).sort().map((name) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", { class: "n", title: String(row[name]) }, number(row[name], 6)))))))),
    ),
  };
}

function groupCard(run, group, [least, most]) {
  const known = group.episodes.map((line) => line.reward).filter((reward) => reward !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const equal = known.length > 1 && new Set(known).size === 1;
  return h("article", { class: "group" },
    h("h3", {}, h("a", { href: href(run, "group", group.kind, group.group_index) }, `group ${group.group_index}`), " ", h("span", { class: "muted task" }, visible(group.task))),
    h("p", { class: "strip" }, group.episodes.map((line) => h("a", { class: `cell ${shade(line.reward, least, most)}`, href: href(run, "episode", line.episode_id), title: `${line.episode_id}: ${line.damaged ? "damaged" : line.state}, ${plural(line.tokens, "token")}` },
      line.damaged ? "⚠" : line.reward === null ? "…" : number(line.reward, 2)))),
    h("p", { class: "muted small" }, mean === null ? "no rewards yet" : `mean ${number(mean, 3)}`, equal ? ", all equal: not trained" : "", group.state === "dropped" ? ", dropped: too many episodes were lost" : group.state === "skipped" ? ", skipped: nothing to learn from, and replaced" : ""));
}

// The beginning that a text has in common with any of the others, on a border of words.
export function commonStart(text, others) {
  let longest = 0;
  for (const other of others) {
    let i = 0;
    while (i < text.length && i < other.length && text[i] === other[i]) i += 1;
    if (i < text.length) while (i > 0 && !/\s/.test(text[i - 1])) i -= 1;
    longest = Math.max(longest, i);
  }
  return longest;
}

// What a page says of values of a task, or of metadata, that are too long for it.
export function notSent(bytes) {
  return bytes === 0 ? null : h("p", { class: "note" }, `${whole(bytes)} further bytes are not sent to the page; palestra episodes RUN ID prints them.`);
}

export async function groupView({ run, rest }) {
  const [kind, index] = [rest[0], Number(rest[1])];
  const found = await get(at(run, "groups", kind, index));
  const title = state.runs.get(run).title;
  const replies = found.members.map((member) => member.reply);
  const rewards = found.members.map((member) => member.line.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const prompt = found.members.map((member) => member.prompt).find((text) => text !== "");
  const same = found.members.every((member) => member.prompt === "" || member.prompt === prompt);
  const crumbs = [[title, href(run, "steps")]];
  if (found.step > 0 || kind === "validation") crumbs.push([`step ${found.step}`, href(run, "step", found.step)]);
  crumbs.push([`group ${index}`, href(run, "group", kind, index)]);
  return {
    title: `Group ${index} of ${title}`, crumbs, up: href(run, "step", found.step),
    node: h("div", { class: "view wide" },
      h("div", { class: "head" }, h("h1", {}, `Group ${index}`), kind === "train" ? null : badge(kind, "plain"), found.state ? badge(found.state, ["dropped", "skipped"].includes(found.state) ? "warn" : "plain") : null,
        around("group", index > 0 ? href(run, "group", kind, index - 1) : null, href(run, "group", kind, index + 1))),
      h("section", { class: "taskbox" }, h("h2", {}, "Task ", copyable(found.task_id)), box(pretty(found.task)), notSent(found.task_cut),
        same && prompt ? [h("h2", {}, "Asked"), box(prompt)] : null),
      found.notes.map((note) => h("p", { class: "note" }, note)),
      h("p", { class: "muted" }, `${plural(found.members.length, "episode")}`, mean === null ? "" : `, mean reward ${number(mean, 3)}`, ". Beginnings that replies have in common are pale."),
      h("div", { class: "members" }, found.members.map((member, place) => memberCard(run, member, replies.filter((_, i) => i !== place && replies[i] !== ""), mean, same)))),
  };
}

function memberCard(run, member, others, mean, same) {
  const line = member.line;
  const common = commonStart(member.reply, others);
  const difference = line.reward === null || mean === null ? null : line.reward - mean;
  return h("article", { class: `member ${member.trained ? "trained" : ""}` },
    h("h2", {}, h("a", { href: href(run, "episode", line.episode_id) }, line.episode_id)),
    line.damaged ? h("p", { class: "problem" }, member.why) : [
      h("p", { class: "reward" }, h("b", {}, line.reward === null ? line.state : number(line.reward, 4)), difference === null ? null : h("span", { class: "muted" }, ` ${signed(difference)} from the mean`)),
      h("p", { class: "badges" }, advantageBadge(member.advantage), badge(plural(line.tokens, "token"), "plain"), line.calls > 1 ? badge(plural(line.calls, "call"), "plain") : null,
        member.mean_logprob === null ? null : badge(`logprob ${number(member.mean_logprob, 3)}`, "plain", "Mean of its sampled tokens"),
        line.termination ? badge(words(line.termination), "plain") : null, member.weight === null || !member.trained ? null : badge(`weight ${number(member.weight, 3)}`, "plain", "Share of each of its tokens in the loss"),
        Object.entries(line.forks).map(([reason, count]) => badge(`${count} ${words(reason)}`, "warn"))),
      h("p", { class: "why" }, member.trained ? "trained" : member.why),
      same || !member.prompt ? null : box(member.prompt, "asked"),
      member.reply === "" ? empty(line.calls ? "an empty reply" : "no call of a model") : h("pre", { class: "reply" }, h("span", { class: "common" }, visible(member.reply.slice(0, common))), visible(member.reply.slice(common))),
      member.reply.length >= 1200 ? h("p", { class: "muted small" }, "cut here; the episode has all of it") : null]);
}
