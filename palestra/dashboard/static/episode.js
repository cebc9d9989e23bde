// An episode: why it was trained or not, its tree of calls, what was said, and its tokens.
import { badge, box, copyable, empty, h, playerBadges, replace, visible } from "./dom.js";
import { clock, duration, json, number, plural, pretty, whole, words } from "./format.js";
import { at, get, getPicture, getSeen } from "./api.js";
import { href } from "./curves.js";
import { around, notSent } from "./step.js";
import { state } from "./state.js";
import { tokensPart } from "./tokens.js";

const LONG = 1500;  // characters of a message that are shown before a click

function tile(label, value, title = null) {
  return h("div", { class: "tile", title }, h("span", { class: "label" }, label), h("span", { class: "number" }, value));
}

export async function episodeView({ run, rest, query }) {
  const name = rest[0];
  const found = await get(at(run, "episodes", name));
  const { line, calls } = found;
  const title = state.runs.get(run).title;
  const step = found.step;
  const seconds = calls.length ? Math.max(...calls.map((call) => call.started_at + call.seconds)) - Math.min(...calls.map((call) => call.started_at)) : null;
  const crumbs = [[title, href(run, "steps")]];
  if (step !== null) crumbs.push([`step ${step}`, href(run, "step", step)]);
  if (line.kind !== "adhoc") crumbs.push([`group ${line.group_index}`, href(run, "group", line.kind, line.group_index)]);
  crumbs.push([name, href(run, "episode", name)]);
  const sibling = (place) => (place < 0 ? null : href(run, "episode", name.replace(/-\d+$/, `-${String(place).padStart(2, "0")}`)));
  const agents = new Set(calls.map((call) => call.agent)), policies = new Set(calls.map((call) => call.policy));
  const several = { agents: agents.size > 1, policies: policies.size > 1 };
  const tokens = found.rows.length === 0 ? null : tokensPart({ run, episode: found, query });
  const conversation = h("div", { class: "conversation" });
  const talkFrom = (call, keep) => h("a", { class: "talkfrom", href: `${href(run, "talk")}?${new URLSearchParams({ episode: name, call: call.index, keep })}`, title: "Talk to a policy, going on from this message" }, "talk from here");
  replace(conversation, calls.length === 0 ? empty("No call of a model was recorded.") : calls.map((call, place) => callPart(run, call, calls[place - 1], several, tokens, talkFrom)));
  return {
    title: `${name} of ${title}`, crumbs, up: line.kind === "adhoc" ? href(run, "episodes") : href(run, "group", line.kind, line.group_index),
    node: h("div", { class: "view wide episode" },
      h("div", { class: "head" }, h("h1", {}, copyable(name)), badge(line.state, line.state === "discarded" ? "bad" : "plain"), line.kind === "train" ? null : badge(line.kind, "plain"), line.termination ? badge(words(line.termination), "plain", "How it ended") : null, Object.entries(line.refused).map(([name, count]) => badge(`${count} refused: ${words(name)}`, "bad", "Refused model calls")),
        line.attempts > 1 ? badge(`${line.attempts} attempts`, "warn") : null, playerBadges(line), around("episode of the group", sibling(line.sample_index - 1), sibling(line.sample_index + 1))),
      h("p", { class: `fate ${found.trained ? "yes" : "no"}` }, h("b", {}, found.trained ? "Trained. " : "Not trained. "), sentence(found.why)),
      line.reason ? h("p", { class: "note" }, `Given back or discarded: ${visible(line.reason)}`) : null,
      found.notes.map((note) => h("p", { class: "note" }, note)),
      h("div", { class: "tiles" }, tile("reward", number(line.reward, 4)), several.agents && line.rewards ? Object.entries(line.rewards).map(([agent, reward]) => tile(agent, number(reward, 4))) : null,
        Object.entries(found.named_rewards ?? {}).map(([which, reward]) => tile(which, reward === null ? "not scored" : number(reward, 4), "Part of the reward")),
        tile("calls", whole(calls.length)), tile("sampled tokens", whole(line.tokens)), tile("distinct tokens", whole(found.distinct_tokens), "That the model saw, each once"), tile("time", duration(seconds))),
      found.verdicts.map((one) => h("p", { class: "note verdict" }, `Judge: ${visible(one.name)} ${number(one.score, 4)}${one.reason ? `, because: ${visible(one.reason)}` : ""}`)),
      h("div", { class: "columns" },
        h("aside", {}, h("section", {}, h("h2", {}, "Task ", copyable(line.task_id)), box(pretty(found.task)), notSent(found.task_cut),
          Object.keys(found.metadata).length === 0 && found.metadata_cut === 0 ? null : [h("h2", {}, "Handed in with the reward"), box(pretty(found.metadata)), notSent(found.metadata_cut)]),
        calls.length < 2 ? null : h("section", {}, h("h2", {}, "Calls"), callTree(calls, several))),
        h("section", { class: "said" }, h("h2", {}, "What was said"), conversation)),
      tokens === null ? null : tokens.node),
    dispose: tokens === null ? undefined : tokens.dispose, keys: tokens === null ? undefined : tokens.keys,
  };
}

function sentence(text) {
  const plain = text.replace(/^(not trained|trained|never trained)[:;]? ?/, "").replace(", not trained:", ":");
  return `${plain.charAt(0).toUpperCase()}${plain.slice(1)}.`;
}

// Calls as a tree: a call stands below the one whose tokens its prompt begins with. A chain is not indented.
function callTree(calls, several) {
  const below = new Map(calls.map((call) => [call.index, []]));
  const roots = [];
  for (const call of calls) (call.after === null ? roots : below.get(call.after) ?? roots).push(call);
  const branch = (list) => h("ul", { class: "tree" }, list.map((call) => {
    const items = [];
    let now = call;
    while (true) {
      items.push(node(now, several));
      const next = below.get(now.index);
      if (next.length !== 1) { if (next.length > 1) items.push(branch(next)); break; }
      now = next[0];
    }
    return h("li", {}, items);
  }));
  return branch(roots);
}

function node(call, several) {
  return h("a", { class: `node ${call.trained ? "trained" : ""}`, href: `#call-${call.index}`, onclick: (event) => { event.preventDefault(); const part = document.getElementById(`call-${call.index}`); part.scrollIntoView({ block: "start" }); part.focus({ preventScroll: true }); } },
    h("b", {}, `call ${call.index}`), several.agents ? ` ${call.agent}` : "", several.policies ? ` (${call.policy})` : "",
    h("span", { class: "muted" }, ` ${whole(call.reused)} reused + ${whole(call.prompt_tokens - call.reused)} read + ${whole(call.sampled)} sampled`),
    call.finish_reason === "length" ? badge("cut", "warn", "Ended at its token limit") : null, call.trained ? null : badge("not trained", "plain", call.why),
    call.fork === null ? null : h("span", { class: `fork ${call.fork.drift ? "drift" : ""}` }, [badge("forked", call.fork.drift ? "warn" : "plain"), ` ${words(call.fork.reason)}: ${call.fork.text}`]));
}

function callPart(run, call, before, several, tokens, talkFrom) {
  const begins = call.after === null ? (before === undefined ? "" : "begins anew") : before !== undefined && call.after === before.index ? "" : `begins like call ${call.after}`;
  const details = [["policy", `${call.policy}, ${call.versions.map(([version, count]) => (call.versions.length > 1 ? `${version} (${plural(count, "token")})` : version)).join(", ")}`], ["temperature", number(call.temperature)], ["most tokens", whole(call.max_tokens)], ["seed", call.seed],
    ...Object.entries(call.sampling).map(([name, value]) => [words(name), json(value)]), ["tools offered", call.tools.join(", ")], ["stop string", call.stop], ["began", clock(call.started_at)], ["took", duration(call.seconds)], ["mean logprob", number(call.mean_logprob)]];
  return h("article", { class: "call", id: `call-${call.index}`, tabindex: "-1" },
    h("h3", {}, `call ${call.index}`, h("span", { class: "muted" }, several.agents ? ` ${call.agent},` : "", ` step ${call.time_step}`, several.policies ? `, ${call.policy}` : "", begins ? `, ${begins}` : ""),
      tokens === null ? null : h("button", { type: "button", class: "link", onclick: () => tokens.toCall(call.index) }, "tokens")),
    call.fork === null ? null : h("p", { class: `forkline ${call.fork.drift ? "drift" : ""}` }, [badge("forked", call.fork.drift ? "warn" : "plain"), ` ${words(call.fork.reason)}: ${call.fork.text}`], call.fork.call === null ? "" : ` (call ${call.fork.call}, message ${call.fork.message}, token ${whole(call.fork.position)})`),
    call.messages.length === 0 ? empty(call.messages_before === 0 ? "a prompt of token ids or raw text" : "no new message: an earlier call begins with this prompt, too") : call.messages.map((message, place) => messagePart(run, message, "", talkFrom(call, call.messages_before + place + 1), call.policy)),
    messagePart(run, call.reply, call.finish_reason === "length" ? "cut at its limit" : "", call.messages.length === 0 && call.messages_before === 0 ? null : talkFrom(call, call.messages_before + call.messages.length + 1), call.policy),
    h("details", { class: "calldetails" }, h("summary", {}, "how it was sampled"), h("dl", {}, details.filter(([, value]) => value !== "" && value !== null && value !== "–").map(([name, value]) => [h("dt", {}, name), h("dd", {}, visible(String(value)))])),
      call.grammar === "" ? null : [h("h4", {}, "Grammar that the reply has to match"), box(call.grammar)], h("p", { class: "muted" }, call.why)));
}

// A picture exactly as it is stored. It is fetched when it comes into sight: an address can't carry the key.
function picturePart(run, digest, policy) {
  const note = h("figcaption", { class: "muted" }, `picture ${digest.slice(0, 12)}…`);
  const picture = h("img", { class: "picture", alt: `picture ${digest.slice(0, 12)}` });
  const figure = h("figure", { class: "picture", title: digest }, picture, note, seenPart(run, digest, policy));
  const seen = new IntersectionObserver(async (entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    try {
      const address = URL.createObjectURL(await getPicture(run, digest));
      picture.onload = () => { URL.revokeObjectURL(address); note.append(`, ${whole(picture.naturalWidth)} × ${whole(picture.naturalHeight)} pixels`); };
      picture.src = address;
    } catch (error) {
      picture.remove();
      note.append(`: ${error.message}`);
    }
  });
  seen.observe(figure);
  return figure;
}

// What the model got of a picture: exactly its pixels, under a grid of lines that are drawn by the page.
function seenPart(run, digest, policy) {
  const place = h("details", { class: "seen" }, h("summary", { class: "muted" }, "as the model got it"));
  place.addEventListener("toggle", async () => {
    if (!place.open || place.dataset.asked) return;
    place.dataset.asked = "yes";
    try {
      const seen = await getSeen(run, digest, policy);
      const address = URL.createObjectURL(seen.file);
      const picture = h("img", { class: "picture", alt: `picture ${digest.slice(0, 12)}, ${seen.said}` });
      picture.onload = () => URL.revokeObjectURL(address);
      picture.src = address;
      place.append(h("div", { class: "cutpicture" }, picture, gridLines("across", "top", seen.rows), gridLines("down", "left", seen.columns)), h("p", { class: "muted" }, seen.said));
    } catch (error) {
      place.append(h("p", { class: "muted" }, error.message));
    }
  });
  return place;
}

function gridLines(kind, side, parts) {
  return Array.from({ length: parts - 1 }, (_, number) => {
    const line = h("i", { class: kind });
    line.style.setProperty(side, `${100 * (number + 1) / parts}%`);
    return line;
  });
}

function messagePart(run, message, note, fork, policy) {
  const body = [];
  if (message.reasoning) body.push(h("details", { class: "thought", open: message.reasoning.length < 400 }, h("summary", {}, "thought"), longText(message.reasoning, 0)));
  for (const part of message.content) body.push(part.image === null ? longText(part.text, part.cut) : picturePart(run, part.image, policy));
  for (const call of message.tool_calls) body.push(h("pre", { class: "toolcall" }, h("b", {}, `→ ${visible(call.name)}`), `(${visible(call.arguments)})`));
  if (message.tool_calls_cut > 0) body.push(h("p", { class: "note" }, `${whole(message.tool_calls_cut)} further tool calls are not sent to the page; palestra episodes RUN ID --text prints them.`));
  if (body.length === 0) body.push(h("p", { class: "muted" }, "(empty)"));
  return h("div", { class: `message ${message.role}` }, h("p", { class: "role" }, message.role, message.name ? ` ${visible(message.name)}` : "", note ? badge(note, "warn") : null, fork), body);
}

function longText(text, cut) {
  const shown = visible(text);
  const place = h("pre", { dir: "auto" }, shown.slice(0, LONG));
  const rest = cut === 0 ? null : h("p", { class: "note" }, `${whole(cut)} further characters are not sent to the page; palestra episodes RUN ID --text prints them.`);
  if (shown.length <= LONG) return [place, rest];
  const more = h("button", { type: "button", class: "link", onclick: () => { place.textContent = shown; more.remove(); } }, `${whole(shown.length - LONG)} more characters`);
  return [place, more, rest];
}
