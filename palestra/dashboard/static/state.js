// What the page knows: the runs, their metrics in columns, which are shown, and what comes by their streams.
import { at, follow, get } from "./api.js";
import { ofPolicies } from "./format.js";

const COLOURS = 8;
const listeners = new Set();

export const state = {
  runs: new Map(),      // by name: the answer of the server, with `colour`
  metrics: new Map(),   // by name of the run: { columns, units, formulas, rows }
  hidden: new Set(),    // names of runs whose curves are not drawn
  connection: "",       // "live", "lost" or "over"; "": nothing is followed
  version: "",
};

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed(what, run, event) {
  for (const listener of [...listeners]) listener(what, run, event);
}

export async function loadRuns() {
  const found = await get("");
  state.version = found.version;
  found.runs.forEach((run, place) => state.runs.set(run.run, { ...run, colour: place % COLOURS }));
}

const loading = new Map();  // by name of a run whose metrics are asked for: the answer to come, and rows that came meanwhile

export async function loadMetrics(name) {
  const known = state.metrics.get(name);
  if (known !== undefined) return known;
  if (!loading.has(name)) loading.set(name, { rows: [], answer: askMetrics(name) });
  return loading.get(name).answer;
}

async function askMetrics(name) {
  try {
    const found = await get(at(name, "metrics"));
    for (const row of loading.get(name).rows) putRow(found, row);
    state.metrics.set(name, found);
    return found;
  } finally {
    loading.delete(name);
  }
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
  if (event.kind === "step" && typeof data.step === "number") {
    Object.assign(run, { step: Math.max(run.step, data.step), reward: data["train/reward_mean"] ?? run.reward, validation: data["validation/reward_mean"] ?? run.validation,
      rewards: { ...run.rewards, ...several(data, "train/reward_mean") }, validations: { ...run.validations, ...several(data, "validation/reward_mean") }, seconds: data.wall_seconds ?? run.seconds });
  } else if (event.kind === "completed" || event.kind === "failed") {
    Object.assign(run, { state: event.kind, reason: data.reason ?? null, live: null, seconds_left: null });
  } else {
    return;
  }
  changed("run", name);
}

// A metric of each of several trained policies; nothing where one is trained.
function several(row, name) {
  return Object.fromEntries(Object.entries(ofPolicies(row, name)).filter(([policy]) => policy !== ""));
}

function take(event) {
  const name = event.run, metrics = state.metrics.get(name);
  if (!state.runs.has(name)) return;
  news(name, event);
  if (event.kind === "step" && typeof event.data.step === "number") {
    loading.get(name)?.rows.push(event.data);
    if (metrics !== undefined) { putRow(metrics, event.data); changed("metrics", name, event); }
  }
  changed("event", name, event);
}

// How far a run is; the stream has it.
function takeLine(line) {
  if (!state.runs.has(line.run)) return;  // others are shown now
  state.runs.set(line.run, { ...line, colour: state.runs.get(line.run).colour });
  changed("run", line.run);
}

let stopFollowing = () => {}, choosing = Promise.resolve();

// Show these runs, and no others: a service has too many to show them all. Raises what the server says of one.
export function showRuns(names) {
  choosing = choosing.catch(() => {}).then(async () => {
    if (names.length === state.runs.size && names.every((name) => state.runs.has(name))) return;
    stopFollowing();
    stopFollowing = () => {};
    for (const known of [state.runs, state.hidden, state.metrics]) known.clear();
    const found = await Promise.all(names.map((name) => get(at(name))));
    found.forEach((run, place) => state.runs.set(run.run, { ...run, colour: place % COLOURS }));
    stopFollowing = followAll(() => {});
  });
  return choosing;
}

// Follow every run that is running by one stream. A hidden tab holds none, because browsers allow six connections to a
// server, for all tabs; when it is shown, the stream is taken up where it broke off. `said` gets the state of the
// connection. Gives the function that ends it.
export function followAll(said = connected) {
  const positions = new Map();
  for (const run of state.runs.values()) {
    if (run.state === "unreadable" || (run.live === null && run.state !== "running")) continue;
    positions.set(run.run, (state.metrics.get(run.run) ?? run).last_event);
  }
  let ending = null, over = false;
  function attend() {
    if (document.hidden) { ending?.abort(); ending = null; return; }
    if (ending !== null || over) return;
    ending = new AbortController();
    follow(positions, take, takeLine, (connection) => { over = connection === "over"; said(connection); }, ending.signal);
  }
  if (positions.size > 0) {
    document.addEventListener("visibilitychange", attend);
    attend();
  }
  return () => { document.removeEventListener("visibilitychange", attend); ending?.abort(); };
}

export function connected(connection) {
  state.connection = connection;
  changed("connection");
}
