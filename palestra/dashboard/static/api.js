// Reading from the server: answers as JSON, and the stream of events, which goes on where it broke off.
import { header } from "./session.js";

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function request(path, headers = {}, signal = undefined) {
  let answer;
  try {
    answer = await fetch(`/dashboard/api/runs${path}`, { headers: { ...header(), ...headers }, cache: "no-store", signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server can't be reached; it may have ended");
  }
  if (answer.ok) return answer;
  let said = `the server answered ${answer.status}`;
  try { said = (await answer.json()).error.message; } catch { /* no answer of ours: a proxy's, perhaps */ }
  throw new Refused(answer.status, said);
}

export async function get(path, query = {}, signal = undefined) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parts.set(name, value);
  }
  const text = parts.toString();
  return (await request(path + (text ? `?${text}` : ""), {}, signal)).json();
}

// An address below a run; every part is encoded.
export function at(run, ...parts) {
  return `/${[run, ...parts].map((part) => encodeURIComponent(part)).join("/")}`;
}

const PAUSES = [500, 1000, 2000, 5000];  // milliseconds before the next attempts

// Call `onEvent` with every event after number `after`, each once, until `signal` is aborted or the run is over.
// `onState` gets "live", "lost" or "over".
export async function follow(run, after, onEvent, onState, signal) {
  let last = after, failures = 0;
  while (!signal.aborted) {
    try {
      const answer = await request(`${at(run, "events")}`, { "last-event-id": String(last) }, signal);
      onState("live");
      for await (const event of events(answer.body)) {
        if (event.id <= last) continue;
        last = event.id;
        failures = 0;
        onEvent(event);
      }
      onState("over");
      return;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403 || error.status === 404) { onState("over"); return; }
      onState("lost");
      const pause = PAUSES[Math.min(failures++, PAUSES.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const fields = {};
      for (const line of piece.split("\n")) {
        const colon = line.indexOf(":");
        if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 1).trimStart();
      }
      if (fields.data !== undefined) yield { id: Number(fields.id), kind: fields.event, data: JSON.parse(fields.data) };
    }
  }
}
