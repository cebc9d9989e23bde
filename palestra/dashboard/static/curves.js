// The first view: the runs with how far they are, and their curves.
import { badge, empty, h, replace } from "./dom.js";
import { ENDLESS, byPolicy, bytes, duration, gpu, metric, namesOf, number, percent, plural, whole, words } from "./format.js";
import { Chart, colourOf } from "./chart.js";
import { loadMetrics, onChange, state } from "./state.js";

// What is drawn first, in sections; all other metrics follow below.
const SECTIONS = [
  ["Reward", [["train/reward_mean", "validation/reward_mean"], ["validation/win_rate", "validation/win_rate_low", "validation/win_rate_high"], ["train/reward_std"], ["train/groups_zero_variance"]]],
  ["Learning", [["train/entropy"], ["train/grad_norm"], ["train/ratio_mean"], ["train/clip_fraction"], ["train/logprob_gap_mean", "train/logprob_gap_max"], ["train/learning_rate"]]],
  ["Rollouts", [["rollout/completion_tokens"], ["rollout/truncated_share"], ["rollout/tokens_per_second"], ["rollout/staleness_mean", "rollout/staleness_max"], ["rollout/drift_share"]]],
  ["Time", [["time/step_seconds", "time/rollout_seconds", "time/train_seconds"]]],
];
const DASHES = [undefined, [6, 4], [2, 3]];
const X = {
  steps: { label: "step", of: (columns) => columns.step },
  tokens: { label: "tokens", of: (columns) => cumulative(columns) },
  seconds: { label: "seconds", of: (columns) => columns.wall_seconds },
};
const chosen = { x: "steps", weight: 0, text: "" };

function cumulative(columns) {
  let sum = 0;
  const prompt = columns["rollout/prompt_tokens"] ?? [], sampled = columns["rollout/completion_tokens"] ?? [];
  return columns.step.map((_, place) => (sum += (prompt[place] ?? 0) + (sampled[place] ?? 0)));
}

export function href(run, ...parts) {
  return `#/${["run", run, ...parts].map((part) => encodeURIComponent(part)).join("/")}`;
}

export function stateBadge(run) {
  const kinds = { running: "good", completed: "plain", failed: "bad", stopped: "warn", unreadable: "bad", starting: "good", cancelled: "warn" };
  return badge(run.state, kinds[run.state] ?? "plain");
}

function tile(label, value, title = null) {
  return h("div", { class: "tile", title }, h("span", { class: "label" }, label), h("span", { class: "number" }, value));
}

function card(run) {
  const swatch = h("span", { class: "swatch" });
  swatch.style.setProperty("--swatch", colourOf(run.colour));
  const head = h("div", { class: "card-head" },
    state.runs.size > 1 ? h("label", { class: "pick" }, h("input", {
      type: "checkbox", checked: !state.hidden.has(run.run), "aria-label": `Draw ${run.title}`,
      onchange: (event) => { if (event.target.checked) state.hidden.delete(run.run); else state.hidden.add(run.run); redraw(); },
    }), swatch) : null,
    h("h2", {}, h("a", { href: href(run.run, "steps") }, run.title)), stateBadge(run));
  if (run.state === "unreadable") return h("article", { class: "card" }, head, h("p", { class: "problem" }, run.reason));
  const bar = h("progress", { max: Math.max(run.steps, 1), value: run.step, "aria-label": `Steps of ${run.title}` });
  const live = run.live;
  const phase = live === null ? null : `${live.phase}${live.phase_due ? `, ${live.phase_done} of ${live.phase_due} episodes` : ""}`;
  return h("article", { class: "card" }, head,
    h("p", { class: "models" }, Object.entries(run.models).map(([policy, model]) => `${policy}: ${model}`).join(", ")),
    run.kind === "inference" ? null : [run.steps < ENDLESS ? bar : null, h("p", { class: "pace" }, h("b", {}, run.steps < ENDLESS ? `${whole(run.step)} of ${plural(run.steps, "step")}` : plural(run.step, "step")),
      run.seconds_left ? `, about ${duration(run.seconds_left)} left` : "", run.seconds_per_step ? `, ${duration(run.seconds_per_step)} a step` : "")],
    phase === null ? null : h("p", { class: "phase" }, phase),
    run.reason ? h("p", { class: "problem" }, run.reason) : null,
    h("p", { class: "health" }, health(run)),
    ignored(live),
    run.damaged.length === 0 ? null : h("p", { class: "problem" }, `damaged: the metrics of ${run.damaged.length === 1 ? "step" : "steps"} ${run.damaged.join(", ")}`),
    h("div", { class: "tiles" },
      tile("reward", rewards(run.reward, run.rewards), "train/reward_mean of the newest step"),
      tile("validation", rewards(run.validation, run.validations), "validation/reward_mean of the newest evaluation"),
      tile("tokens/s", number(live === null ? run.tokens_per_second : live.tokens_per_second, 3)),
      tile("time", duration(run.seconds))),
    run.warnings.length === 0 ? null : h("details", { class: "warnings", "data-run": run.run }, h("summary", {}, plural(run.warnings.length, "warning")),
      h("ul", {}, run.warnings.map((one) => h("li", {}, h("a", { href: href(run.run, "step", one.step) }, `step ${one.step}`), ` ${one.text}`)), h("li", {}, h("a", { href: href(run.run, "findings") }, "all findings, with what they mean and the episodes that show them")))));
}

// Fields of model calls that had no effect.
function ignored(live) {
  const fields = Object.entries(live?.ignored_fields ?? {});
  if (fields.length === 0) return null;
  return h("p", { class: "health", title: "Agents sent these fields, and they had no effect." },
    `ignored in calls: ${fields.map(([name, calls]) => `${name} (${whole(calls)})`).join(", ")}`);
}

// How the store does, and the engines of a running job.
function health(run) {
  const { live } = run;
  const store = `store ${bytes(run.store_bytes)}${run.disk_free_bytes === null ? "" : `, ${bytes(run.disk_free_bytes)} free`}`;
  if (live === null) return store;
  const kept = live.kv_bytes > 0 ? `, ${bytes(live.kv_bytes_used)} of ${bytes(live.kv_bytes)} keys and values` : "";
  const gpus = live.gpu_problem ? [`no figures of the GPUs (${live.gpu_problem})`] : live.gpus.map(gpu);
  return `engine ${whole(live.requests_running)} running, ${whole(live.requests_waiting)} waiting${kept}; ${[plural(live.workers, "worker"), ...gpus, store].join("; ")}`;
}

// The reward of the only policy that is trained, or of each of several.
function rewards(sole, several) {
  return Object.keys(several ?? {}).length > 0 ? byPolicy(several, 3) : number(sole, 3);
}

let redraw = () => {};

export async function curvesView({ query }) {
  if (query.get("x") in X) chosen.x = query.get("x");
  const cards = h("section", { class: "cards", "aria-label": "Runs" });
  const charts = new Map();   // key → { chart, names, node }
  const grid = h("div", { class: "sections" });
  const readable = [...state.runs.values()].filter((run) => run.state !== "unreadable" && run.kind !== "inference");
  await Promise.all(readable.map((run) => loadMetrics(run.run).catch(() => null)));

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const found = [...charts.values()].find((one) => one.node === entry.target);
      if (found !== undefined) { found.visible = entry.isIntersecting; if (found.visible) draw(found); }
    }
  }, { rootMargin: "300px" });
  const sizes = new ResizeObserver(() => { for (const one of charts.values()) if (one.visible) one.chart.resize(); });
  sizes.observe(grid);

  function shownRuns() {
    return [...state.runs.values()].filter((run) => state.metrics.has(run.run) && !state.hidden.has(run.run));
  }

  function draw(one) {
    const several = shownRuns().length > 1;
    const curves = [];
    for (const run of shownRuns()) {
      const columns = state.metrics.get(run.run).columns;
      if (columns.step === undefined) continue;
      const x = X[chosen.x].of(columns) ?? columns.step;
      one.names.forEach((name, place) => {
        if (columns[name] === undefined) return;
        const kept = columns.step.map((_, i) => i).filter((i) => x[i] !== null && x[i] !== undefined && columns[name][i] !== null);
        const label = several ? run.title + (one.names.length > 1 ? ` ${metricLabel(name, one.names)}` : "") : metricLabel(name, one.names);
        curves.push({
          run: run.run, label, dash: several ? DASHES[place] : undefined,
          colour: colourOf(several ? run.colour : place), x: kept.map((i) => x[i]), y: kept.map((i) => columns[name][i]),
          steps: kept.map((i) => columns.step[i]),
        });
      });
    }
    one.chart.xLabel = X[chosen.x].label;
    one.chart.draw(curves, chosen.weight);
  }

  redraw = () => { for (const one of charts.values()) if (one.visible) draw(one); };

  function info(name, what) {
    for (const run of state.metrics.values()) if (run[what][name] !== undefined) return run[what][name];
    return "";
  }

  function figure(names) {
    const chart = new Chart({
      label: `Curve of ${names.map((name) => words(name)).join(" and ")}. Left and right arrows move between steps, Enter opens a step.`,
      xLabel: X[chosen.x].label, onStep: (run, step) => { location.hash = href(run, "step", step); },
    });
    const units = [...new Set(names.map((name) => info(name, "units")).filter((unit) => unit && unit !== "1"))];
    const caption = h("figcaption", {}, h("span", { class: "name" }, names.length > 1 ? metric(names[0]).replace(/ (mean|seconds)$/, "") : metric(names[0])),
      h("span", { class: "unit" }, units.join(", ")),
      h("details", { class: "formula" }, h("summary", { "aria-label": `What ${names[0]} is` }, "?"),
        h("dl", {}, names.map((name) => [h("dt", {}, h("code", {}, name)), h("dd", {}, info(name, "formulas") || "of this run's algorithm or environment")]))));
    const node = h("figure", {}, caption, chart.node);
    const one = { chart, names, node, visible: false };
    charts.set(names.join(), one);
    seen.observe(node);
    return node;
  }

  let built = 0;   // names of metrics that were known when the charts were made
  const knownNames = () => new Set([...state.metrics.values()].flatMap((run) => Object.keys(run.columns)));

  function build() {
    for (const one of charts.values()) { seen.unobserve(one.node); one.chart.destroy(); }
    charts.clear();
    const known = knownNames();
    built = known.size;
    if (known.size === 0) {
      replace(grid, readable.length === 0
        ? empty([...state.runs.values()].some((run) => run.kind === "inference") ? "This job serves a model: nothing is trained, so there are no curves." : "No run here can be drawn; the cards above say why.")
        : empty("No step is finished yet. ", "The first numbers come when the first step, or the evaluation before it, has ended."));
      return;
    }
    const wanted = chosen.text.trim().toLowerCase();
    const fits = (name) => wanted === "" || name.toLowerCase().includes(wanted) || metric(name).includes(wanted);
    const drawn = new Set(["step", "version", "wall_seconds"]);
    const sections = SECTIONS.map(([title, figures]) => [title, figures.map((names) => names.flatMap((name) => namesOf(known, name)).filter(fits)).filter((names) => names.length > 0)]);
    sections.forEach(([, figures]) => figures.flat().forEach((name) => drawn.add(name)));
    const rest = [...known].filter((name) => !drawn.has(name) && fits(name)).sort();
    const nodes = sections.filter(([, figures]) => figures.length > 0).map(([title, figures]) =>
      h("section", {}, h("h2", {}, title), h("div", { class: "charts" }, figures.map(figure))));
    if (rest.length > 0) {
      const inner = h("div", { class: "charts" });
      const details = h("details", { class: "more", open: wanted !== "" }, h("summary", {}, h("h2", {}, `Others (${rest.length})`)), inner);
      let made = false;
      const make = () => { if (details.open && !made) { made = true; inner.append(...rest.map((name) => figure([name]))); } };
      details.addEventListener("toggle", make);
      make();
      nodes.push(details);
    }
    replace(grid, nodes.length > 0 ? nodes : empty(`No metric has “${chosen.text}” in its name.`));
  }

  // Cards are made again with each news; what has the focus, and what is unfolded, stays so.
  function renderCards() {
    const controls_ = () => [...cards.querySelectorAll("a, input, summary")];
    const focused = controls_().indexOf(document.activeElement);
    const unfolded = new Set([...cards.querySelectorAll("details[open]")].map((one) => one.dataset.run));
    replace(cards, [...state.runs.values()].map(card));
    for (const one of cards.querySelectorAll("details")) one.open = unfolded.has(one.dataset.run);
    if (focused >= 0) controls_()[focused]?.focus({ preventScroll: true });
  }

  const controls = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "x axis ", h("select", { name: "x", onchange: (event) => { chosen.x = event.target.value; redraw(); } },
      Object.keys(X).map((name) => h("option", { value: name, selected: name === chosen.x }, name)))),
    h("label", { class: "smoothing" }, "Smoothing ", h("input", {
      type: "range", min: 0, max: 0.98, step: 0.02, value: chosen.weight, name: "weight",
      oninput: (event) => { chosen.weight = Number(event.target.value); event.target.nextSibling.textContent = percent(chosen.weight); redraw(); },
    }), h("output", {}, percent(chosen.weight))),
    h("label", { class: "grow" }, h("span", { class: "unseen" }, "Metrics with this in their name"), h("input", {
      type: "search", id: "search", placeholder: "metric …", value: chosen.text,
      oninput: (event) => { chosen.text = event.target.value; build(); },
    })),
    h("button", { type: "button", onclick: () => { for (const one of charts.values()) one.chart.reset(); } }, "Whole range"),
    h("span", { class: "hint" }, "Drag to zoom, click a point to open its step."));

  renderCards();
  build();
  const stop = onChange((what) => {
    if (what === "run") renderCards();
    if (what === "metrics") { if (knownNames().size !== built) build(); else redraw(); }
    if (what === "theme") { renderCards(); redraw(); }
  });
  return {
    title: state.runs.size === 1 ? [...state.runs.values()][0].title : plural(state.runs.size, "run"),
    crumbs: [],
    node: h("div", { class: "view wide" }, h("h1", { class: "unseen" }, "Runs and curves"), cards, readable.length > 0 ? controls : null, grid),
    dispose: () => { stop(); seen.disconnect(); sizes.disconnect(); for (const one of charts.values()) one.chart.destroy(); redraw = () => {}; },
  };
}

function metricLabel(name, names) {
  if (names.length === 1) return metric(name);
  const steps = name.split("/"), group = steps.at(-2), whose = steps.length > 2 ? `${steps[0]} ` : "";
  return group === "validation" ? `${whose}validation` : group === "train" && names.some((other) => other.includes("validation/")) ? `${whose}training` : metric(name);
}
