// The tokens of an episode's rows, in pages that are loaded when they come near: coloured, and each with its whole story.
import { badge, h, replace, tokenText, visible } from "./dom.js";
import { number, plural, whole } from "./format.js";
import { at, get } from "./api.js";

const PAGE = 2000;
const FOLD = 60;  // tokens of a prompt that are shown unfolded
const PROBABILITIES = [["p-0", "≥ 90 %"], ["p-1", "≥ 50 %"], ["p-2", "≥ 20 %"], ["p-3", "≥ 5 %"], ["p-4", "≥ 1 %"], ["p-5", "less"]];
const BOUNDS = [0.9, 0.5, 0.2, 0.05, 0.01].map(Math.log);
const probability = (logprob) => (logprob === null ? "" : `p-${BOUNDS.filter((bound) => logprob < bound).length}`);
const COLOURS = {
  logprob: { label: "probability", legend: PROBABILITIES, of: (t) => probability(t.logprob) },
  trained_logprob: { label: "probability when trained", legend: PROBABILITIES, of: (t) => probability(t.trainedLogprob) },
  ratio: { label: "ratio", legend: [["a-n2", "< 0.8"], ["a-n1", "< 0.99"], ["a-0", "about 1"], ["a-p1", "> 1.01"], ["a-p2", "> 1.25"]], of: (t) => (t.ratio === null ? "" : t.ratio < 0.8 ? "a-n2" : t.ratio < 0.99 ? "a-n1" : t.ratio <= 1.01 ? "a-0" : t.ratio <= 1.25 ? "a-p1" : "a-p2") },
  advantage: { label: "advantage", legend: [["a-n2", "< −1"], ["a-n1", "< 0"], ["a-0", "0"], ["a-p1", "> 0"], ["a-p2", "> 1"]], of: (t) => (t.advantage === null ? "" : t.advantage === 0 ? "a-0" : `a-${t.advantage < 0 ? "n" : "p"}${Math.abs(t.advantage) > 1 ? 2 : 1}`) },
  trained: { label: "trained or not", legend: [["t-yes", "trained"], ["t-no", "sampled, not trained"], ["t-else", "trained in another row"], ["", "prompt"]], of: (t) => (t.trained ? "t-yes" : t.call >= 0 ? "t-no" : t.fate.startsWith("sampled") ? "t-else" : "") },
  fate: { label: "why (not) trained", group: (t) => t.fate },
  version: { label: "version", group: (t) => t.version },
  call: { label: "call", group: (t) => (t.call < 0 ? null : `call ${t.call}`) },
  temperature: { label: "temperature", group: (t) => (t.temperature === null ? null : number(t.temperature)) },
  grammar: { label: "grammar", legend: [["t-yes", "sampled, held to a grammar"], ["t-no", "sampled freely"], ["", "prompt"]], of: (t) => (t.call < 0 ? "" : t.grammar ? "t-yes" : "t-no") },
  weight: { label: "share in the loss", legend: [["t-yes", "has one"], ["t-no", "0"], ["", "not in the loss, or not known"]], of: (t) => (t.weight === null ? "" : t.weight === 0 ? "t-no" : "t-yes") },
};
const GROUPS = 6;  // colours of groups; a seventh has the first one's
let colour = "logprob";

export function tokensPart({ run, episode, query }) {
  let row = Math.min(Number(query.get("row") ?? 0) || 0, episode.rows.length - 1);
  let selected = null;   // { row, place }
  const held = new Set(episode.calls.filter((call) => call.grammar !== "").map((call) => call.index));
  const groups = new Map();  // of the tokens that were seen: by name of the colour, the groups in the order in which they came
  const pages = new Map();  // by first token: { node, data, loading }
  const text = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens. Left and right arrows move from token to token." });
  const detail = h("div", { class: "token-detail", role: "status" }, h("p", { class: "muted" }, "Choose a token: click it, or use the arrow keys in the text."));
  const legend = h("p", { class: "legend" });
  const note = h("div");
  const select = h("select", { id: "colour", onchange: (event) => { colour = event.target.value; recolour(); } }, Object.entries(COLOURS).map(([name, { label }]) => h("option", { value: name, selected: name === colour }, label)));
  const rows = h("select", { id: "row", onchange: (event) => show(Number(event.target.value)) }, episode.rows.map((one) => h("option", { value: one.row, selected: one.row === row },
    `row ${one.row + 1}: ${plural(one.tokens, "token")}, ${whole(one.sampled)} sampled${episode.rows.some((other) => other.policy !== one.policy) ? `, ${one.policy}` : ""}${one.trained ? "" : ", not trained"}`)));
  const seen = new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) load(Number(entry.target.dataset.start)); }, { rootMargin: "600px" });

  function recolour() {
    select.value = colour;
    text.dataset.colour = colour;
    for (const page of pages.values()) if (page.data !== null) for (const span of page.node.querySelectorAll(".t")) span.className = classOf(page.data, Number(span.dataset.i) - page.data.start);
    const items = COLOURS[colour].legend ?? [...groups.get(colour) ?? []].map((label, place) => [`v-${place % GROUPS}`, label]);
    replace(legend, items.map(([kind, label]) => h("span", {}, h("span", { class: `t key ${kind}` }), label)));
  }

  function kindOf(token) {
    const { of, group } = COLOURS[colour];
    if (of !== undefined) return of(token);
    const label = group(token);
    if (label === null) return "";
    if (!groups.has(colour)) groups.set(colour, new Set());
    const known = groups.get(colour).add(label);
    return `v-${[...known].indexOf(label) % GROUPS}`;
  }

  function tokenAt(data, i) {
    return {
      place: data.start + i, id: data.ids[i], text: data.texts === null ? null : data.texts[i], call: data.calls[i], logprob: data.logprobs[i], trainedLogprob: data.trained_logprobs[i], ratio: data.ratios[i], advantage: data.advantages[i], weight: data.weights[i],
      version: data.versions[i] < 0 ? null : data.version_names[data.versions[i]], temperature: data.temperatures[i], fate: data.fate_texts[data.fates[i]], trained: data.trained[i], grammar: held.has(data.calls[i]),
    };
  }

  function classOf(data, i) {
    const token = tokenAt(data, i);
    const chosen = selected !== null && selected.row === row && selected.place === token.place ? " chosen" : "";
    return `t ${token.call < 0 ? "prompt" : "sampled"} ${kindOf(token)}${chosen}`;
  }

  // Load a page once; who asks for it meanwhile waits for the same answer.
  function load(start) {
    const page = pages.get(start);
    if (page === undefined || page.data !== null) return Promise.resolve();
    page.loading ??= fetchPage(page, start);
    return page.loading;
  }

  async function fetchPage(page, start) {
    try {
      page.data = await get(at(run, "episodes", episode.line.episode_id, "rows", row), { start, count: PAGE });
    } catch (error) {
      page.loading = null;
      if (pages.get(start) === page) replace(page.node, h("p", { class: "problem" }, error.message));
      return;
    }
    if (pages.get(start) !== page) return;  // another row was chosen meanwhile
    seen.unobserve(page.node);
    fill(page);
    replace(note, [...new Set(page.data.notes)].filter((one) => !episode.notes.includes(one)).map((one) => h("p", { class: "note" }, one)));
    recolour();
  }

  // The runs of a prompt are folded where they are long: one button stands for them.
  function fill(page) {
    const data = page.data, parts = [];
    const end = data.start + data.ids.length;
    for (const [from, to, call] of episode.rows[row].runs) {
      const first = Math.max(from, data.start), last = Math.min(to, end);
      if (first >= last) continue;
      const spans = () => Array.from({ length: last - first }, (_, k) => span(data, first - data.start + k));
      if (call >= 0 || last - first <= FOLD) { parts.push(...spans()); continue; }
      const shown = data.texts === null ? "" : data.texts.slice(first - data.start, first - data.start + 12).join("");
      const tail = data.texts === null ? "" : data.texts.slice(last - data.start - 8, last - data.start).join("");
      const button = h("button", { type: "button", class: "fold", title: "Unfold this part of the prompt", onclick: () => { button.replaceWith(...spans()); recolour(); } },
        `${plural(last - first, "token")} of the prompt: ${visible(shown).replaceAll("\n", " ").slice(0, 40)} … ${visible(tail).replaceAll("\n", " ").slice(-30)}`);
      parts.push(button);
    }
    page.node.style.removeProperty("min-height");
    replace(page.node, parts);
  }

  function span(data, i) {
    const token = tokenAt(data, i);
    return h("span", { class: classOf(data, i), "data-i": token.place }, token.text === null ? `${token.id} ` : tokenText(token.text));
  }

  function show(number_) {
    row = number_;
    rows.value = String(row);
    for (const page of pages.values()) seen.unobserve(page.node);
    pages.clear();
    const total = episode.rows[row].tokens;
    for (let start = 0; start < total; start += PAGE) {
      const node = h("div", { class: "page", "data-start": start });
      if (start > 0) node.style.setProperty("min-height", "100rem");
      pages.set(start, { node, data: null, loading: null });
    }
    replace(text, [...pages.values()].map((page) => page.node));
    for (const page of pages.values()) seen.observe(page.node);
    load(0);
  }

  async function choose(place, scroll) {
    const start = Math.floor(place / PAGE) * PAGE;
    if (!pages.has(start)) return;
    await load(start);
    const data = pages.get(start).data;
    if (data === null) return;
    const old = text.querySelector(".t.chosen");
    if (old !== null) old.classList.remove("chosen");
    selected = { row, place };
    let node = text.querySelector(`.t[data-i="${place}"]`);
    if (node === null) {  // in a folded part
      for (const button of pages.get(start).node.querySelectorAll(".fold")) button.click();
      node = text.querySelector(`.t[data-i="${place}"]`);
    }
    if (node !== null) { node.classList.add("chosen"); if (scroll) node.scrollIntoView({ block: "nearest" }); }
    describe(tokenAt(data, place - data.start));
    history.replaceState(null, "", `${location.hash.split("?")[0]}?row=${row}&token=${place}`);
  }

  function describe(token) {
    const call = episode.calls.find((one) => one.index === token.call);
    const facts = [["place", `${whole(token.place)} of ${whole(episode.rows[row].tokens)}`], ["id", String(token.id)],
      ["logprob when sampled", token.logprob === null ? null : number(token.logprob, 6)], ["probability", token.logprob === null ? null : `${number(Math.exp(token.logprob) * 100, 4)} %`],
      ["logprob when trained", token.trainedLogprob === null ? null : number(token.trainedLogprob, 6)], ["ratio", token.ratio === null ? null : number(token.ratio, 6)],
      ["advantage", token.advantage === null ? null : number(token.advantage, 5)], ["share in the loss", token.weight === null ? null : number(token.weight, 5)],
      ["version", token.version], ["temperature", token.temperature === null ? null : number(token.temperature)], ["call", token.call < 0 ? null : `${token.call}${call ? ` of ${call.agent}` : ""}`],
      ["grammar", call && call.grammar ? "the reply had to match one; see the call" : null]];
    replace(detail, h("p", { class: "token-text" }, h("code", {}, token.text === null ? String(token.id) : tokenText(token.text))),
      h("p", {}, badge(token.trained ? "trained" : "not trained", token.trained ? "good" : "plain")), h("p", { class: "why" }, token.fate),
      h("dl", {}, facts.filter(([, value]) => value !== null).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }

  text.addEventListener("click", (event) => { const node = event.target.closest(".t"); if (node !== null) choose(Number(node.dataset.i), false); });
  text.addEventListener("keydown", (event) => {
    const first = () => { const sampled = episode.rows[row].runs.find(([, , call]) => call >= 0); return sampled === undefined ? 0 : sampled[0]; };
    const now = selected !== null && selected.row === row ? selected.place : null;
    const last = episode.rows[row].tokens - 1;
    const moves = { ArrowRight: now === null ? first() : Math.min(now + 1, last), ArrowLeft: now === null ? first() : Math.max(now - 1, 0), Home: 0, End: last };
    if (event.key in moves) { event.preventDefault(); choose(moves[event.key], true); }
  });

  function toCall(index) {
    const found = episode.rows.find((one) => one.runs.some(([, , call]) => call === index));
    if (found === undefined) return;
    if (found.row !== row) show(found.row);
    text.focus({ preventScroll: true });
    choose(found.runs.find(([, , call]) => call === index)[0], true).then(() => { const node = text.querySelector(".t.chosen"); if (node !== null) node.scrollIntoView({ block: "center" }); });
  }

  show(row);
  recolour();
  if (query.get("token") !== null) setTimeout(() => choose(Number(query.get("token")) || 0, true), 0);
  const node = h("section", { class: "tokenpart" },
    h("div", { class: "head" }, h("h2", {}, "Tokens"), episode.rows.length > 1 ? h("label", { for: "row" }, h("span", { class: "unseen" }, "Row"), rows) : h("span", { class: "muted" }, `${plural(episode.rows[0].tokens, "token")}, ${whole(episode.rows[0].sampled)} sampled`),
      h("label", { class: "right", for: "colour" }, "Colour ", select)),
    legend, note, h("div", { class: "token-columns" }, text, detail));
  return {
    node, toCall, dispose: () => seen.disconnect(),
    keys: (key) => { if (key !== "c") return false; const names = Object.keys(COLOURS); colour = names[(names.indexOf(colour) + 1) % names.length]; recolour(); return true; },
  };
}
