// What the page of a service knows: who the key belongs to, what it may do, and the changes of jobs as they happen.
import { ASK, events, PAUSES, send, takePlace } from "../api.js";
import { changed, connected } from "../state.js";

const MOST_NEWS = 50;
export const OPEN = ["queued", "starting", "running"];
export const HOLDING = ["starting", "running"];

export const service = {
  me: null,      // the answer of GET /me
  defaultModel: "",   // of a policy whose configuration names none
  news: [],      // changes of state since the page was opened, newest first
};

// Whether the key may change a job: it is of the job's user, or of an admin.
export function mayChange(job) {
  return service.me.role === "admin" || job.user === service.me.user;
}

// Ask the control plane, and read its answer as JSON.
export async function ask(path, query = {}, signal = undefined) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (Array.isArray(value)) value.forEach((one) => parts.append(name, one));
    else if (value !== null && value !== undefined && value !== "") parts.set(name, value);
  }
  const text = parts.toString();
  return (await send(`${path}${text ? `?${text}` : ""}`, { signal })).json();
}

export async function post(path, body, headers = {}) {
  const text = body === undefined ? undefined : JSON.stringify(body);
  return (await send(path, { method: "POST", body: text, headers: { "content-type": "application/json", ...headers } })).json();
}

export async function cancel(jobId) {
  return (await send(`/jobs/${encodeURIComponent(jobId)}`, { method: "DELETE" })).json();
}

let last = null;    // number of the newest change that was seen; null: none yet
let ending = null;  // ends the stream that is open

function take(change) {
  if (last !== null && change.number <= last) return;
  last = change.number;
  if (change.job_id === undefined) return;   // the beginning of the stream
  service.news.unshift(change);
  service.news.length = Math.min(service.news.length, MOST_NEWS);
  changed("job", change.job_id, change);
}

// Follow the changes of all jobs until `signal` is aborted. After a lost connection the server is asked for those after
// the last one that came, so none is missing; one that came before is not taken again.
async function followJobs(signal, refused) {
  let failures = 0, wasLost = false;
  while (!signal.aborted) {
    let pause = ASK;
    const leave = await takePlace();
    try {
      const answer = await send(`/events?follow=${leave !== null}`, { signal, headers: last === null ? {} : { "last-event-id": String(last) } });
      connected("live");
      if (wasLost) changed("job", null, null);   // what views show may have changed meanwhile
      wasLost = false;
      failures = 0;
      for await (const change of events(answer.body)) {
        if (signal.aborted) return;
        take(change);
      }
      pause = leave === null ? ASK : PAUSES[0];  // a stream ends with the server, or with the rights of the key
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) { connected(""); refused(); return; }
      connected("lost");
      wasLost = true;
      pause = PAUSES[Math.min(failures++, PAUSES.length - 1)];
    } finally {
      leave?.();
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

// A hidden tab holds no stream; in sight again, it goes on where it broke off.
let attend = () => {};

export function followWhileSeen(refused) {
  stopFollowing();
  attend = () => {
    if (document.hidden) { ending?.abort(); ending = null; return; }
    if (ending !== null) return;
    ending = new AbortController();
    followJobs(ending.signal, refused);
  };
  document.addEventListener("visibilitychange", attend);
  attend();
}

export function stopFollowing() {
  document.removeEventListener("visibilitychange", attend);
  ending?.abort();
  ending = null;
}

// Forget what was seen with another key.
export function reset() {
  stopFollowing();
  last = null;
  service.news.length = 0;
}

// Call a function again and again while the page is in sight, never twice at the same time. `refused` gets its errors.
// Gives the function that calls it now, and the one that ends it.
export function repeat(work, milliseconds, failed) {
  let running = false, again = false, stopped = false;
  async function turn() {
    if (stopped) return;
    if (running) { again = true; return; }
    running = true;
    try { await work(); failed(null); } catch (error) { if (!stopped) failed(error); }
    running = false;
    if (again) { again = false; turn(); }
  }
  const timer = setInterval(() => { if (!document.hidden) turn(); }, milliseconds);
  return { now: turn, stop: () => { stopped = true; clearInterval(timer); } };
}
