// The versions of a live run with a gate: a line of stages for each, and what decided them.
import { badge, h, replace, scrolled, visible } from "./dom.js";
import { clock, number, whole, words } from "./format.js";
import { at, get } from "./api.js";

const LABELS = { live: "good", canary: "warn", rejected: "bad", quarantined: "bad", gone_back: "bad" };
const NOT_NUMBERS = new Set(["version", "stage", "text", "number", "at"]);

// What a decision says, with the numbers that decided.
export function decision(data) {
  const numbers = Object.entries(data).filter(([key, value]) => !NOT_NUMBERS.has(key) && typeof value === "number");
  const why = numbers.length === 0 ? "" : ` (${numbers.map(([key, value]) => `${words(key)} ${number(value, 3)}`).join(", ")})`;
  return [`version ${whole(data.version)} `, data.stage ? badge(words(data.stage), LABELS[data.stage] ?? "plain") : null, ` ${visible(String(data.text))}${why}`];
}

// The timeline of a run's versions; `add` takes one more decision. Without any, it is empty.
export async function versionsOf(run) {
  const known = new Map();  // a decision that was written again after a kill has the same number
  const node = h("div", { class: "versions" });
  let before = null;
  do {
    const found = await get(at(run, "history"), { before, limit: 500, kind: "gate_decided" });
    for (const event of found.events) known.set(event.data.number, event.data);
    before = found.before;
  } while (before !== null);
  function add(event) {
    known.set(event.data.number, event.data);
    draw();
  }
  function draw() {
    const all = [...known.values()].sort((one, other) => one.number - other.number);
    const lines = new Map();
    for (const data of all.filter((one) => one.stage)) lines.set(data.version, [...(lines.get(data.version) ?? []), data]);
    if (lines.size === 0) return;
    const start = all[0].at, end = Math.max(Date.now() / 1000, all.at(-1).at + 1);
    const rows = [...lines].sort(([one], [other]) => other - one).map(([version, found]) => h("tr", {},
      h("th", { scope: "row", class: "n" }, whole(version)), h("td", {}, badge(words(found.at(-1).stage), LABELS[found.at(-1).stage] ?? "plain")),
      h("td", { class: "span" }, line(found, start, end)), h("td", { class: "text" }, visible(String(found.at(-1).text)))));
    const legend = ["candidate", "shadow", "canary", "live"].map((stage) => h("span", {}, h("span", { class: `part stage-${stage}` }), stage));
    replace(node, h("h2", {}, "Versions"), h("p", { class: "legend" }, legend), scrolled("Versions", h("table", { class: "rows" }, h("thead", {}, h("tr", {}, ["version", "stage", `since ${clock(start)}`, "why"].map((name, place) => h("th", { scope: "col", class: place === 0 ? "n" : "" }, name)))), h("tbody", {}, rows))), h("h2", {}, "Events"));
  }
  draw();
  return { node, add };
}

// The stages of a version from its first to its last, or to now, along the time of all.
function line(found, start, end) {
  const parts = found.map((data, place) => [data.stage, data.at, found[place + 1]?.at ?? end]);
  const said = found.map((data) => `${words(data.stage)} since ${clock(data.at)}`).join(", ");
  const bar = h("div", { class: "timebar", role: "img", "aria-label": said, title: said });
  const before = h("span", { class: "part before" });
  before.style.setProperty("flex-grow", String((parts[0][1] - start) / (end - start)));
  bar.append(before, ...parts.map(([stage, from, until]) => {
    const part = h("span", { class: `part stage-${stage}` });
    part.style.setProperty("flex-grow", String((until - from) / (end - start)));
    return part;
  }));
  return bar;
}
