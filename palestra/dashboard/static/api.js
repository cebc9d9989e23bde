// Reading from the server: answers as JSON, and the stream of events, which goes on where it broke off.
import { header, serverEnded } from "./session.js";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Send a request to an address of this server; raises what it says where it refuses.
export async function send(path, { headers = {}, ...options } = {}) {
  const own = header();
  if (own === null) throw new Refused(0, "the server has ended");
  let answer;
  try {
    answer = await fetch(path, { headers: { ...headers, ...own }, cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server can't be reached; it may have ended");
  }
  if (answer.ok) return answer;
  let said = `the server answered ${answer.status}`;
  try { said = (await answer.json()).error.message; } catch { /* no answer of ours: a proxy's, perhaps */ }
  throw new Refused(answer.status, said);
}

function request(path, signal = undefined) {
  return send(`/dashboard/api/${path}`, { signal });
}

export async function get(path, query = {}, signal = undefined) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parts.set(name, value);
  }
  const text = parts.toString();
  return (await request(`runs${path}${text ? `?${text}` : ""}`, signal)).json();
}

// A stored picture of a run, as a Blob with the type that the server has read from its bytes.
export async function getPicture(run, digest) {
  return (await request(`runs${at(run, "pictures", digest)}`)).blob();
}

// The pixels that the model of a policy got of a picture, with the rows and columns of its tiles or of the squares of embeddings, and words about them.
export async function getSeen(run, digest, policy) {
  const answer = await request(`runs${at(run, "pictures", digest, "seen", policy)}`);
  const [rows, columns] = answer.headers.get("x-palestra-tiles").split(" ").map(Number);
  return { rows, columns, said: answer.headers.get("x-palestra-seen").replaceAll(" x ", " × "), file: await answer.blob() };
}

export async function post(path, body) {
  return (await send(`/dashboard/api/runs${path}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) })).json();
}

// An address below a run; every part is encoded.
export function at(run, ...parts) {
  return `/${[run, ...parts].map((part) => encodeURIComponent(part)).join("/")}`;
}

export const PAUSES = [500, 1000, 2000, 5000];  // milliseconds before the next attempts
const STREAMS = 3;  // of all windows in sight: browsers open six connections to a server
export const ASK = 2000;   // milliseconds between the questions of a further window

// Take one of the places for streams; gives the function that leaves it, or null if there is none.
export function takePlace(number = 1) {
  if (navigator.locks === undefined) return Promise.resolve(() => {});  // a page without TLS from another machine
  if (number > STREAMS) return Promise.resolve(null);
  return new Promise((resolve, reject) => {
    navigator.locks.request(`palestra-stream-${number}`, { ifAvailable: true }, (lock) => {
      if (lock === null) { resolve(takePlace(number + 1)); return undefined; }
      return new Promise((leave) => resolve(leave));
    }).catch(reject);
  });
}

// Call `onEvent` with every event of some runs, each once, until `signal` is aborted or all of them are over, and `onLine`
// with how far a run is whenever that has changed.
// `positions` has the number of the newest known event of each run, and is kept up to date, so that a later call goes on
// from there. `onState` gets "live", "lost" or "over". A window without a place for a stream asks every two seconds.
export async function follow(positions, onEvent, onLine, onState, signal) {
  let failures = 0;
  while (!signal.aborted) {
    let pause = ASK;
    const leave = await takePlace();
    try {
      const query = new URLSearchParams([...positions].map(([name, number]) => ["after", `${name}:${number}`]));
      query.set("follow", leave !== null);
      const answer = await request(`events?${query}`, signal);
      onState("live");
      for await (const event of events(answer.body)) {
        if (signal.aborted) return;
        if (event.event_id === undefined && event.kind === "replaced") { location.reload(); return; }  // another run has the folder
        if (event.event_id === undefined && event.kind === "ended") { serverEnded(); onState("over"); return; }
        if (event.event_id === undefined) { onLine(event); continue; }
        if (event.event_id <= positions.get(event.run)) continue;
        positions.set(event.run, event.event_id);
        failures = 0;
        onEvent(event);
      }
      failures = 0;
      if (leave !== null) { onState("over"); return; }
    } catch (error) {
      if (signal.aborted) return;
      if (header() === null) { onState("over"); return; }  // another tab has heard that the server ended
      if (error.status === 401 || error.status === 403 || error.status === 404) { onState("over"); return; }
      onState("lost");
      pause = PAUSES[Math.min(failures++, PAUSES.length - 1)];
    } finally {
      leave?.();
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const data = piece.split("\n").find((line) => line.startsWith("data: "));
      if (data !== undefined && data !== "data: [DONE]") yield JSON.parse(data.slice("data: ".length));
    }
  }
}
