// Talk to a policy: a conversation of one's own, or one that goes on from a message of a recorded episode. The calls are
// made outside any episode, so nothing of them is recorded or trained.
import { badge, box, copyable, empty, h, replace, visible } from "./dom.js";
import { plural } from "./format.js";
import { at, events, get, Refused } from "./api.js";
import { href } from "./curves.js";
import { runHead } from "./run.js";
import { localModel } from "./local_model.js";
import { allowTalk, forgetTalk, header, isService, talkHeader } from "./session.js";
import { state } from "./state.js";

const ROLES = ["user", "system", "tool", "assistant"];

export async function talkView({ run, query }) {
  const line = state.runs.get(run);
  // The page of runs in folders serves a checkpoint itself, where it can; that of a service does not.
  const local = line.live === null && line.serve !== "" && !isService() ? await localModel(run, (now) => answersAs(now)) : null;
  let policies = line.live === null ? [] : line.live.policies;
  const saved = line.live === null ? [] : line.live.checkpoints;
  const from = query.get("episode"), call = query.get("call");
  const forked = from === null ? null : await get(at(run, "episodes", from, "calls", call));
  const messages = forked === null ? [] : forked.messages.slice(0, Number(query.get("keep") ?? forked.messages.length));
  const list = h("div", { class: "conversation", role: "log", "aria-label": "Conversation" });
  const problem = h("p", { class: "problem", role: "alert" });
  let stopping = null;   // of the call that is in flight

  const setting = (label, input) => h("label", {}, label, " ", input);
  const choices = () => policies.map((name) => h("option", { value: name, selected: forked !== null && forked.policy === name }, name));
  const policy = h("select", { name: "policy" }, choices(),
    saved.length === 0 ? null : h("optgroup", { label: "checkpoints" }, saved.filter((name) => !policies.includes(name)).map((name) => h("option", { value: name }, name))));
  const temperature = h("input", { type: "number", name: "temperature", min: 0, max: 2, step: "any", value: forked === null ? 1 : forked.temperature });
  const longest = h("input", { type: "number", name: "max_tokens", min: 1, step: 1, value: forked === null ? 256 : forked.max_tokens });
  const role = h("select", { name: "role", "aria-label": "Who says it" }, ROLES.map((name) => h("option", { value: name }, name)));
  const text = h("textarea", { name: "text", rows: 3, "aria-label": "What is said" });
  const send = h("button", { class: "primary" }, "Send");
  const stop = h("button", { type: "button", hidden: true, onclick: () => stopping?.abort() }, "Stop");

  function render() {
    replace(list, messages.length === 0 ? empty("Nothing is said yet.") : messages.map(said));
    send.textContent = text.value.trim() === "" && messages.length > 0 ? "Sample a reply" : "Send";
  }

  function said(message, place) {
    const cut = h("button", { type: "button", class: "link", onclick: () => { messages.length = place + 1; render(); text.focus(); } }, "go on from here");
    const edit = h("button", { type: "button", class: "link", onclick: () => { messages.length = place; role.value = ROLES.includes(message.role) ? message.role : "user"; text.value = message.content; render(); text.focus(); } }, "edit");
    return h("div", { class: `message ${message.role}` }, h("p", { class: "role" }, message.role, message.note ? badge(message.note, "warn") : null, stopping === null && policies.length > 0 ? [cut, edit] : null),
      message.reasoning_content ? h("details", { class: "thought" }, h("summary", {}, "thought"), h("pre", { dir: "auto" }, visible(message.reasoning_content))) : null,
      message.content === "" ? null : h("pre", { dir: "auto" }, visible(message.content)),
      (message.tool_calls ?? []).map((one) => h("pre", { class: "toolcall" }, h("b", {}, `→ ${visible(one.function.name)}`), `(${visible(one.function.arguments)})`)));
  }

  async function sample() {
    problem.textContent = "";
    if (text.value.trim() !== "") { messages.push({ role: role.value, content: text.value }); text.value = ""; role.value = "user"; }
    if (messages.length === 0) return;
    const reply = { role: "assistant", content: "" };
    const asked = { model: policy.value, messages: messages.map(({ note, ...message }) => message), stream: true, temperature: Number(temperature.value), max_tokens: Number(longest.value) };
    if (forked !== null && forked.tools.length > 0) asked.tools = forked.tools;
    stopping = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    messages.push(reply);
    render();
    try {
      if (saved.includes(asked.model)) await asking(`checkpoints/${encodeURIComponent(asked.model)}`, {}, stopping.signal);
      for await (const piece of calling(asked, stopping.signal, local === null ? "/v1" : local.route)) { take(reply, piece); list.lastChild.replaceWith(said(reply, messages.length - 1)); }
    } catch (error) {
      if (error.name === "AbortError") reply.note = "stopped";
      else {
        if (reply.content === "" && !reply.tool_calls && !reply.reasoning_content) messages.pop();
        problem.textContent = error.message;
        if (local !== null) local.look();
        else if (error.status === 401 || error.status === 403) { forgetTalk(); showForm(); }
      }
    }
    stopping = null;
    send.disabled = false;
    stop.hidden = true;
    render();
  }

  const composer = h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); sample(); } },
    h("p", { class: "controls" }, setting("Policy", policy), setting("Temperature", temperature), setting("At most", longest), " tokens"),
    h("p", { class: "controls" }, role, h("span", { class: "muted" }, "Ctrl+Enter sends. Nothing here is recorded or trained.")), text, h("p", { class: "controls" }, send, stop));
  text.addEventListener("input", render);
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); if (!send.disabled) sample(); } });

  const place = h("div");
  function showForm() { replace(place, keyForm(() => replace(place, composer))); }
  // The policies of the checkpoint that is loaded; none while there is none.
  function answersAs(now) {
    policies = now;
    replace(policy, choices());
    const conversation = forked === null ? null : asJson(messages);
    replace(place, now.length > 0 ? composer : local.able ? otherwise(line, conversation) : noEngine(line, conversation));
    if (stopping === null) render();
  }
  if (local !== null) answersAs(local.policies());
  else if (policies.length === 0) replace(place, noEngine(line, forked === null ? null : asJson(messages)));
  else if (talkHeader() === null) showForm();
  else replace(place, composer);
  render();
  const head = forked === null ? null : h("p", {}, "Goes on from ", h("a", { href: href(run, "episode", from) }, from), `, call ${call}, ${plural(messages.length, "message")}.`, forked.tools.length > 0 ? ` ${plural(forked.tools.length, "tool")} offered.` : "");
  return {
    title: `Talk to ${line.title}`, crumbs: [[line.title, href(run, "steps")]],
    node: h("div", { class: "view talk" }, runHead(run, "talk"), local === null ? null : local.node, head, forked === null ? null : forked.notes.map((note) => h("p", { class: "note" }, note)), forked !== null || policies.length > 0 || (local !== null && local.able) ? list : null, problem, place),
    dispose: () => { stopping?.abort(); local?.dispose(); },
  };
}

const asJson = (messages) => JSON.stringify({ messages }, null, 2);

function noEngine(line, conversation) {
  if (line.serve === "") return empty("No engine runs here, and this run has trained no model.");
  return h("div", {}, h("p", { class: "note" }, "No engine runs here. This command serves the newest checkpoint; its own page, below the address that it prints, has this view:"), ...command(line, conversation));
}

// The command, where the page can do without.
function otherwise(line, conversation) {
  return h("details", {}, h("summary", {}, "A command that serves the newest checkpoint, for longer than this page is there"), ...command(line, conversation));
}

function command(line, conversation) {
  return [h("pre", { class: "box" }, copyable(line.serve)),
    conversation === null ? null : h("details", {}, h("summary", {}, "The conversation as the body of a request to it"), box(conversation))];
}

function keyForm(done) {
  const input = h("input", { type: "password", id: "talk-key", autocomplete: "off", spellcheck: "false", required: true });
  const problem = h("p", { class: "problem", role: "alert" });
  return h("form", { class: "composer", onsubmit: async (event) => {
    event.preventDefault();
    try { await allowTalk(input.value.trim()); done(); } catch (error) { problem.textContent = error.message; }
  } }, h("p", {}, "A viewer's key may look, and not spend the engine. To talk, type the job's key, which is in ", h("code", {}, "RUN/api_key"), "; this tab keeps one that can do no more than this."),
    h("label", { for: "talk-key" }, "Key of the job"), input, h("p", {}, h("button", { class: "primary" }, "Allow")), problem);
}

async function asking(route, body, signal, base = "/v1") {
  const answer = await fetch(`${base}/${route}`, { method: "POST", headers: { ...(base === "/v1" ? talkHeader() : header()), "content-type": "application/json" }, body: JSON.stringify(body), cache: "no-store", signal });
  if (answer.ok) return answer;
  let said = `the server answered ${answer.status}`;
  try { said = (await answer.json()).error.message; } catch { /* a proxy's answer */ }
  throw new Refused(answer.status, said);
}

async function* calling(body, signal, base) {
  const answer = await asking("chat/completions", body, signal, base);
  for await (const piece of events(answer.body)) {
    if (piece.error) throw new Refused(500, piece.error.message);
    if (piece.choices.length > 0) yield piece.choices[0];
  }
}

function take(reply, { delta, finish_reason: reason }) {
  if (delta.content) reply.content += delta.content;
  if (delta.reasoning_content) reply.reasoning_content = (reply.reasoning_content ?? "") + delta.reasoning_content;
  for (const { index, id, function: part } of delta.tool_calls ?? []) {  // all but the arguments first, then these
    const call = ((reply.tool_calls ??= [])[index] ??= { id, type: "function", function: { name: part.name, arguments: "" } });
    call.function.arguments += part.arguments;
  }
  if (reason === "length") reply.note = "cut at its limit";
}
