// Search in the episodes of a run.
import { badge, empty, h, playerBadges, replace, scrolled } from "./dom.js";
import { number, plural, whole, words } from "./format.js";
import { at, get } from "./api.js";
import { href } from "./curves.js";
import { runHead } from "./run.js";
import { state } from "./state.js";

const FIELDS = ["kind", "state", "step", "group", "least_reward", "most_reward", "least_tokens", "most_tokens", "termination", "tool", "text", "forked"];

function field(name, label, input, className = "") {
  input.id = `f-${name}`;
  input.name = name;
  return h("label", { for: input.id, class: className }, h("span", {}, label), input);
}

function choice(values, value) {
  return h("select", {}, values.map(([name, label]) => h("option", { value: name, selected: name === (value ?? "") }, label)));
}

export async function episodesView({ run, query }) {
  const value = (name) => query.get(name) ?? "";
  const numeric = (name, step = "any") => h("input", { type: "number", step, value: value(name), size: 6 });
  const known = state.runs.get(run).episodes;
  const form = h("form", { class: "filters", role: "search" },
    field("text", "Text", h("input", { type: "search", value: value("text"), placeholder: "in task, messages, replies, metadata" }), "grow"),
    field("kind", "Kind", choice([["train", `train (${whole(total(known.train))})`], ["validation", `validation (${whole(total(known.validation))})`], ["adhoc", `ad hoc (${whole(total(known.adhoc))})`]], value("kind") || "train")),
    field("state", "State", choice([["", "any"], ["registered", "registered"], ["claimed", "claimed"], ["unjudged", "unjudged"], ["completed", "completed"], ["discarded", "discarded"]], value("state"))),
    field("step", "Step", numeric("step", 1)),
    h("fieldset", {}, h("legend", {}, "Reward"), field("least_reward", "from", numeric("least_reward")), field("most_reward", "to", numeric("most_reward"))),
    h("fieldset", {}, h("legend", {}, "Sampled tokens"), field("least_tokens", "from", numeric("least_tokens", 1)), field("most_tokens", "to", numeric("most_tokens", 1))),
    field("termination", "Ended", h("input", { value: value("termination"), placeholder: "e.g. max_steps" })),
    field("tool", "Tool", h("input", { value: value("tool"), placeholder: "name" })),
    field("forked", "Forks", choice([["", "any"], ["true", "lost exact tokens"], ["false", "none"]], value("forked"))),
    h("div", { class: "buttons" }, h("button", { class: "primary" }, "Search"), h("a", { class: "button", href: href(run, "episodes") }, "Clear")));
  form.querySelector("[name=text]").classList.add("search");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = new URLSearchParams();
    for (const name of FIELDS) { const found = (form.elements[name]?.value ?? value(name)).trim(); if (found !== "" && !(name === "kind" && found === "train")) wanted.set(name, found); }
    const next = `${href(run, "episodes")}${wanted.size ? `?${wanted}` : ""}`;
    if (location.hash === next) load(true); else location.hash = next;
  });
  const body = h("tbody");
  const status = h("p", { class: "muted", role: "status" });
  const more = h("button", { type: "button", hidden: true }, "More");
  let following = null, looked = 0;
  async function load(fresh) {
    const wanted = Object.fromEntries(FIELDS.map((name) => [name, query.get(name)]));
    if (fresh) { following = null; looked = 0; replace(body); }
    more.disabled = true;
    status.textContent = "Searching …";
    try {
      const found = await get(at(run, "episodes"), { ...wanted, before: following, limit: 50 });
      body.append(...found.episodes.map((line) => row(run, line)));
      following = found.following;
      looked += found.looked_at;
      const count = body.children.length;
      more.hidden = following === null;
      more.textContent = found.episodes.length < 50 && following !== null ? "Search on" : "More";
      status.textContent = count === 0 ? (following === null ? `No such episodes; ${plural(looked, "episode was", "episodes were")} looked at.` : `None among the newest ${whole(looked)}; there are older ones.`)
        : `${plural(count, "episode")}, newest first${following === null ? "" : "; there are more"}. ${plural(looked, "was", "were")} looked at.`;
    } catch (error) { status.textContent = error.message; }
    more.disabled = false;
  }
  more.addEventListener("click", () => load(false));
  await load(true);
  const filtered = FIELDS.some((name) => query.get(name));
  return {
    title: `Episodes of ${state.runs.get(run).title}`, crumbs: [[state.runs.get(run).title, href(run, "steps")], ["episodes", href(run, "episodes")]],
    node: h("div", { class: "view" }, runHead(run, "episodes"), form, status,
      body.children.length === 0 && !filtered ? empty("No episode is registered yet. ", "Of a job without an environment, workers have to come: ", h("code", {}, "palestra worker"), ".") :
      scrolled("Episodes", h("table", { class: "rows" }, h("thead", {}, h("tr", {}, ["episode", "task", "state", "reward", "calls", "tokens", "ended", ""].map((name, i) => h("th", { scope: "col", class: i > 2 && i < 6 ? "n" : "" }, name || h("span", { class: "unseen" }, "notes"))))), body)), more),
  };
}

function total(states) {
  return states === undefined ? 0 : Object.values(states).reduce((a, b) => a + b, 0);
}

function row(run, line) {
  return h("tr", {},
    h("td", {}, h("a", { href: href(run, "episode", line.episode_id) }, line.episode_id)),
    line.damaged ? h("td", { colspan: 7, class: "problem" }, `damaged: ${line.damaged}`) : [
      h("td", { class: "task" }, line.task_id), h("td", {}, badge(line.state, line.state === "discarded" ? "bad" : line.state === "claimed" ? "good" : "plain", line.worker)),
      h("td", { class: "n" }, number(line.reward, 4)), h("td", { class: "n" }, whole(line.calls)), h("td", { class: "n" }, whole(line.tokens)),
      h("td", {}, line.termination ? words(line.termination) : ""),
      h("td", { class: "left" }, line.attempts > 1 ? badge(`${line.attempts} attempts`, "warn") : null, playerBadges(line), Object.entries(line.forks).map(([reason, count]) => badge(`${count} ${words(reason)}`, "warn")), Object.entries(line.refused).map(([name, count]) => badge(`${count} refused: ${words(name)}`, "bad")), line.reason ? h("span", { class: "muted small" }, line.reason.slice(0, 160)) : null)]);
}
