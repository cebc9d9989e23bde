// The page: a key, the runs, and one view at a time, whose address stands behind the #.
import { append, h, replace, visible } from "./dom.js";
import { Refused } from "./api.js";
import * as session from "./session.js";
import { costsView } from "./costs.js";
import { curvesView } from "./curves.js";
import { episodesView } from "./episodes.js";
import { episodeView } from "./episode.js";
import { findingsView } from "./findings.js";
import { eventsView, settingsView, stepsView } from "./run.js";
import { groupView, stepView } from "./step.js";
import { talkView } from "./talk.js";
import { changed, followAll, loadRuns, onChange, state } from "./state.js";

const main = document.getElementById("main");
const VIEWS = { steps: stepsView, step: stepView, group: groupView, episodes: episodesView, episode: episodeView, findings: findingsView, costs: costsView, talk: talkView, settings: settingsView, events: eventsView };
let shown = null, turn = 0, service = null;   // service: what the page of `palestra serve` adds

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { parts, query: new URLSearchParams(query ?? "") };
}

async function make({ parts, query }) {
  if (service !== null) return service.make({ parts, query }, VIEWS);
  if (parts.length === 0) return curvesView({ query });
  const [what, run, name, ...rest] = parts;
  if (what !== "run" || !Object.hasOwn(VIEWS, name)) throw new Refused(404, "There is nothing at this address.");
  if (!state.runs.has(run)) throw new Refused(404, `There is no run ${run} on this page.`);
  return VIEWS[name]({ run, rest, query });
}

async function show() {
  const mine = ++turn;
  const waiting = setTimeout(() => main.classList.add("loading"), 200);
  let view;
  try {
    view = await make(parse());
  } catch (error) {
    if (error instanceof Refused && (error.status === 401 || (error.status === 403 && service === null))) {
      service?.end();
      await session.ask(main, error.message);
      await service?.begin(show, hide);
      return mine === turn || service !== null ? show() : undefined;
    }
    if (!(error instanceof Refused)) console.error(error);
    const said = error instanceof Refused ? error.message : "This view could not be drawn; the browser's console has the reason.";
    view = { title: "Not there", crumbs: [], node: h("div", { class: "view" }, h("h1", {}, "Not there"), h("p", { class: "problem", role: "alert" }, said), h("p", {}, h("button", { type: "button", onclick: show }, "Try again"), " ", h("a", { href: "#/" }, service === null ? "All runs" : "All jobs"))) };
  }
  clearTimeout(waiting);
  main.classList.remove("loading");
  if (mine !== turn) { if (view.dispose) view.dispose(); return; }
  if (shown !== null && shown.dispose) shown.dispose();
  const first = shown === null;
  shown = view;
  document.title = visible(`${view.title} · Palestra`);
  const several = state.runs.size > 1;
  replace(document.getElementById("crumbs"), h("ol", {}, [[service !== null ? "jobs" : several ? "runs" : "curves", "#/"], ...view.crumbs].map(([label, to], place, all) =>
    h("li", {}, h("a", { href: to, "aria-current": place === all.length - 1 ? "page" : null }, label)))));
  replace(main, view.node);
  scrollTo(0, 0);
  if (!first) main.focus({ preventScroll: true });
  performance.mark("palestra-ready");
  document.documentElement.dataset.ready = location.hash || "#/";
}

// End the view that is shown, which would go on asking.
function hide() {
  shown?.dispose?.();
  shown = null;
}

function connection() {
  const said = { lost: ["lost", "connection lost; trying again"], live: ["live", "live"] }[state.connection] ?? ["", ""];
  const place = document.getElementById("live");
  place.className = said[0];
  place.textContent = said[1];
}

const THEMES = ["auto", "light", "dark"];

function nextTheme() {
  const now = document.documentElement.dataset.theme;
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("palestra-theme", next); } catch { /* it then holds for this page */ }
  themed();
}

function themed() {
  document.getElementById("theme").textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[document.documentElement.dataset.theme];
  changed("theme");
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const follow = (rel) => { const link = main.querySelector(`a[rel=${rel}][href]`); if (link !== null) location.hash = link.getAttribute("href"); };
  if (event.key === "?") document.getElementById("help").showModal();
  else if (event.key === "t") nextTheme();
  else if (event.key === "[") follow("prev");
  else if (event.key === "]") follow("next");
  else if (event.key === "u" && shown !== null) location.hash = shown.up ?? "#/";
  else if (event.key === "/") { const search = main.querySelector("#search, .search"); if (search === null) return; event.preventDefault(); search.focus(); }
  else if (!(shown !== null && shown.keys && shown.keys(event.key))) return;
}

async function start() {
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
  document.addEventListener("keydown", keys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
  themed();
  await session.open(main);
  try {
    if (session.isService()) {
      service = await import("./service/main.js");
      await service.begin(show, hide);
    } else {
      await loadRuns();
    }
  } catch (error) {
    replace(main, h("div", { class: "view" }, h("h1", {}, "Not there"), h("p", { class: "problem", role: "alert" }, error.message)));
    return;
  }
  addEventListener("hashchange", show);
  onChange((what) => { if (what === "connection") connection(); });
  await show();
  if (service === null) followAll();
  append(document.body, [h("footer", {}, `Palestra ${state.version}`)]);
}

start();
