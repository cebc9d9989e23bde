// Elements, and text of others in them. Text is only ever set as text: nothing that an episode says can become an element,
// and what would hide or reorder the text beside it is made visible.

const SHOWN = new Set(["title", "aria-label"]);  // attributes that people read

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value === true ? "" : SHOWN.has(name) ? visible(String(value)) : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

// Characters that would hide, reorder or erase what stands beside them: controls, marks of direction, spaces without
// width. Joiners stay: scripts and emoji need them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;

function name(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// The text with hidden characters replaced by visible names.
export function visible(text) {
  return text.replace(HIDDEN, (found) => (found === "\r" ? "␍" : name(found)));
}

// A token's text on one line: spaces and line feeds are seen.
export function tokenText(text) {
  if (text === "") return "∅";
  return visible(text).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

export function badge(text, kind = "", title = null) {
  return h("span", { class: `badge ${kind}`, title }, text);
}

// Past versions that play a role of an episode, such as opponent: white@5.
export function playerBadges(line) {
  return Object.entries(line.players).map(([role, player]) => badge(`${role}: ${player}`, "plain", "Who plays this role in this episode"));
}

export function empty(text, ...more) {
  return h("p", { class: "empty" }, text, ...more);
}

// Text in a box that scrolls where it is long; the keyboard can scroll it then, too.
export function box(text, kind = "") {
  const long = text.length > 400 || text.split("\n").length > 10;
  return h("pre", { class: `box ${kind}`, tabindex: long ? "0" : null }, text);
}

export function scrolled(label, ...children) {
  return h("div", { class: "scrolled", role: "region", tabindex: "0", "aria-label": label }, ...children);
}

// A button that copies, because ids are long.
export function copyable(text) {
  return h("button", {
    type: "button", class: "copy", title: "Copy",
    onclick: async (event) => {
      const button = event.currentTarget;
      try { await navigator.clipboard.writeText(text); button.classList.add("done"); } catch { getSelection().selectAllChildren(button); }
      setTimeout(() => button.classList.remove("done"), 1200);
    },
  }, text);
}
