// What a run has cost, by phase and by policy or server; asked again after each step.
import { h, replace, scrolled, visible } from "./dom.js";
import { duration, whole } from "./format.js";
import { at, get } from "./api.js";
import { href } from "./curves.js";
import { runHead } from "./run.js";
import { onChange, state } from "./state.js";

export async function costsView({ run }) {
  const place = h("div", { "aria-live": "polite" });
  async function load() {
    const found = await get(at(run, "costs"));
    replace(place, found.counted ? null : h("p", { class: "muted" }, "Without [prices] or a [budget], a job does not count its calls. The command palestra cost reads them from the run."),
      found.priced ? null : h("p", { class: "muted" }, "The job has no [prices], so there is no money."),
      table("phase", found.phases, found), found.counted ? table("policy or server", found.payees, found) : null);
  }
  await load();
  const stop = onChange((what, name, event) => { if (what === "event" && name === run && event.kind === "step") load().catch(() => {}); });
  const { title } = state.runs.get(run);
  return { title: `Costs of ${title}`, crumbs: [[title, href(run, "steps")]], node: h("div", { class: "view" }, runHead(run, "costs"), place), dispose: stop };
}

function table(title, lines, found) {
  const columns = [
    ...(found.counted ? [["calls", (line) => whole(line.calls)], ["tokens in", (line) => whole(line.prompt_tokens)], ["tokens out", (line) => whole(line.reply_tokens)]] : []),
    ["time", (line) => duration(line.ms / 1000)],
    ...(found.priced ? [["money", (line) => line.shown]] : []),
  ];
  return scrolled(`Costs by ${title}`, h("table", { class: "rows" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, title), columns.map(([name]) => h("th", { scope: "col", class: "n" }, name)))),
    h("tbody", {}, [...lines, found.total].map((line) => h("tr", {}, h("th", { scope: "row" }, visible(line.name)), columns.map(([, text]) => h("td", { class: "n" }, text(line))))))));
}
