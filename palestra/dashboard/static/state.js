// What the page knows: the runs, their metrics in columns, which are shown, and what comes by their streams.
import { at, follow, get } from "./api.js";

const COLOURS = 8;
const listeners = new Set();

export const state = {
  runs: new Map(),      // by name: the answer of the server, with `colour`
  metrics: new Map(),   // by name of the run: { columns, units, formulas, rows }
  hidden: new Set(),    // names of runs whose curves are not drawn
  connection: new Map(),  // by name of the run: "live", "lost" or "over"
  version: "",
};

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed(what, run) {
  for (const listener of [...listeners]) listener(what, run);
}

export async function loadRuns() {
  const found = await get("");
  state.version = found.version;
  found.runs.forEach((run, place) => state.runs.set(run.run, { ...run, colour: place % COLOURS }));
}

export async function loadMetrics(name) {
  const known = state.metrics.get(name);
  if (known !== undefined) return known;
  const found = await get(at(name, "metrics"));
  state.metrics.set(name, found);
  return found;
}

const refreshing = new Map();

// Ask for the run's line again, at most once a second.
function refresh(name) {
  if (refreshing.has(name)) return;
  refreshing.set(name, setTimeout(async () => {
    refreshing.delete(name);
    try {
      const found = await get(at(name));
      state.runs.set(name, { ...found, colour: state.runs.get(name).colour });
      changed("run", name);
    } catch { /* the stream says that the connection is lost */ }
  }, 300));
}

// A row of a step goes into the columns in the place of its step: a step that is trained again replaces its row.
export function putRow(metrics, row) {
  const columns = metrics.columns;
  if (columns.step === undefined) columns.step = [];
  const steps = columns.step;
  let place = steps.findIndex((step) => step >= row.step);
  if (place < 0) place = steps.length;
  const again = steps[place] === row.step;
  for (const name of new Set([...Object.keys(columns), ...Object.keys(row)])) {
    if (columns[name] === undefined) columns[name] = new Array(metrics.rows).fill(null);
    const value = typeof row[name] === "number" ? row[name] : null;
    columns[name].splice(place, again ? 1 : 0, value);
  }
  metrics.rows = steps.length;
}

// What an event says of its run, without asking: the server of a job ends with it, and can't be asked for the last step.
function news(name, event) {
  const run = state.runs.get(name), data = event.data;
  if (event.kind === "step") {
    Object.assign(run, { step: Math.max(run.step, data.step), reward: data["train/reward_mean"] ?? run.reward, validation: data["validation/reward_mean"] ?? run.validation, seconds: data.wall_seconds ?? run.seconds });
  } else if (event.kind === "completed" || event.kind === "failed") {
    Object.assign(run, { state: event.kind, reason: data.reason ?? null, live: null, seconds_left: null });
  } else {
    return;
  }
  changed("run", name);
}

// Follow every run that can be read; finished ones end their stream by themselves.
export function followAll() {
  const ending = new AbortController();
  for (const run of state.runs.values()) {
    if (run.state === "unreadable" || (run.live === null && run.state !== "running")) continue;
    const metrics = state.metrics.get(run.run);
    const after = metrics === undefined ? run.last_event : metrics.last_event;
    follow(run.run, after, (event) => {
      news(run.run, event);
      if (event.kind === "step" && state.metrics.has(run.run)) {
        const { at: _at, kind: _kind, ...row } = event.data;
        putRow(state.metrics.get(run.run), row);
        changed("metrics", run.run);
      }
      changed("event", run.run);
      refresh(run.run);
    }, (connection) => {
      state.connection.set(run.run, connection);
      changed("connection", run.run);
    }, ending.signal);
  }
  setInterval(() => {
    if (document.hidden) return;
    for (const run of state.runs.values()) if (run.live !== null || run.state === "running") refresh(run.run);
  }, 3000);
}
