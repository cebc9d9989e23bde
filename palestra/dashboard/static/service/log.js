// The log of a job, as it is written. After a lost connection it goes on at the byte where it broke off.
import { h, replace, visible } from "../dom.js";
import { plural, whole } from "../format.js";
import { PAUSES, send, takePlace } from "../api.js";
import { href } from "../curves.js";
import { tabs } from "../run.js";
import { jobBadge } from "./parts.js";
import { ask, OPEN } from "./state.js";

const LAST = 2 ** 18;         // bytes that are shown at first
const MOST_LINES = 5000;      // that are kept; those before them are a click away
const MOST_OF_LINE = 2000;    // characters that are shown of one line
const COLOURS = /\u001b\[[0-9;:]*m/g;   // of text in a terminal

// Lines of a log in an element: text comes in pieces that end anywhere.
class Lines {
  constructor(place) {
    this.place = place;
    this.clear();
  }

  clear() {
    this.place.replaceChildren();
    this.line = null;    // the last one, while it has no end
    this.begun = "";     // its beginning
    this.more = 0;       // its characters that are not kept
    this.left = 0;       // lines that were left out above
  }

  add(text) {
    const pieces = text.split("\n"), made = document.createDocumentFragment();
    pieces.forEach((piece, number) => {
      if (number > 0) this.end(made);
      this.extend(piece, made);
    });
    this.place.append(made);
    while (this.place.childElementCount > MOST_LINES) { this.place.firstElementChild.remove(); this.left += 1; }
  }

  extend(piece, made) {
    if (piece === "") return;
    if (this.line === null) {
      this.line = h("div", { class: "line", dir: "auto" });
      made.append(this.line);
    }
    const room = Math.max(0, MOST_OF_LINE - this.begun.length);
    this.begun += piece.slice(0, room);
    this.more += Math.max(0, piece.length - room);
    this.line.textContent = visible(this.begun.replace(COLOURS, ""));
    if (this.more > 0) this.line.append(h("span", { class: "cut" }, ` … ${plural(this.more, "more character")}`));
  }

  end(made) {
    if (this.line === null) made.append(h("div", { class: "line" }, "\u00a0"));
    this.line = null;
    this.begun = "";
    this.more = 0;
  }
}

export async function logView({ job: id }) {
  let job = await ask(`/jobs/${encodeURIComponent(id)}`);
  const place = h("div", { class: "log", role: "log", tabindex: "0", "aria-label": `Log of ${job.name}`, "aria-live": "off" });
  const lines = new Lines(place);
  const said = h("p", { class: "muted", role: "status" });
  const stay = h("input", { type: "checkbox", id: "follow", checked: true });
  const head = h("div", { class: "head" });
  const earlier = h("button", { type: "button", hidden: true, onclick: () => read(0) }, "From the beginning");
  let ending = null;

  function titled() { replace(head, h("h1", {}, job.name), jobBadge(job)); }

  // Read the log from a byte on; null: the end of it, and what follows.
  async function read(from) {
    ending?.abort();
    const mine = ending = new AbortController(), decoder = new TextDecoder();
    let offset = from, failures = 0;
    lines.clear();
    while (!mine.signal.aborted) {
      const leave = await takePlace();
      try {
        const query = new URLSearchParams({ follow: leave !== null, ...(offset === null ? { last: LAST } : { offset }) });
        const answer = await send(`/jobs/${encodeURIComponent(id)}/logs?${query}`, { signal: mine.signal });
        const first = offset === null;
        offset ??= Number(answer.headers.get("log-offset"));
        if (first) earlier.hidden = offset === 0;
        if (from === 0) earlier.hidden = true;
        for await (const bytes of chunks(answer.body)) {
          offset += bytes.length;
          failures = 0;
          const atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 40;
          lines.add(decoder.decode(bytes, { stream: true }));
          if (stay.checked && (atEnd || place.scrollTop === 0)) place.scrollTop = place.scrollHeight;
          said.textContent = tell(offset);
        }
        const over = !OPEN.includes(job.state);
        job = await ask(`/jobs/${encodeURIComponent(id)}`, {}, mine.signal);
        titled();
        said.textContent = tell(offset);
        if (over && !OPEN.includes(job.state)) return;   // nothing was written after the job was over
      } catch (error) {
        if (mine.signal.aborted) return;
        if (error.status === 401 || error.status === 403 || error.status === 404) { said.textContent = error.message; return; }
        said.textContent = `Connection lost at byte ${whole(offset ?? 0)}; trying again.`;
        await new Promise((resolve) => setTimeout(resolve, PAUSES[Math.min(failures++, PAUSES.length - 1)]));
        continue;
      } finally {
        leave?.();
      }
      if (OPEN.includes(job.state)) await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  function tell(offset) {
    const written = offset === 0 ? "Nothing was written yet" : `${plural(offset, "byte")} of the log`;
    const left = lines.left > 0 ? `; ${plural(lines.left, "earlier line")} left out` : "";
    return `${written}${left}; the job ${OPEN.includes(job.state) ? `is ${job.state}, and what it writes appears here` : "has ended"}.`;
  }

  titled();
  said.textContent = tell(0);
  read(null);
  return { title: `Log of ${job.name}`, crumbs: [[job.name, href(id, "job")]], up: href(id, "job"),
    node: h("div", { class: "view wide service" }, head, tabs(id, "log"), h("p", { class: "controls" }, h("label", { for: "follow" }, stay, " Stay at the end"), earlier, said), place),
    dispose: () => ending?.abort() };
}

async function* chunks(body) {
  const reader = body.getReader();
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
