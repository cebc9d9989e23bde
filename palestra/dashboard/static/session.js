// The viewer's key of this tab. It comes from the one-time code behind the # of a link, from another tab of the same page,
// or from the form. It is kept in the tab's sessionStorage and sent in a header: never in an address, never in a cookie,
// which browsers would also send to other servers of this machine.
import { h, replace } from "./dom.js";

const STORED = "palestra-key", STORED_TALK = "palestra-talk";
let key = null;
let service = false;  // whether this is a service, whose page shows the jobs of a tenant
let talk = null;   // the key that calls policies; null: this tab may only look
const channel = "BroadcastChannel" in window ? new BroadcastChannel("palestra-key") : null;

// The header that has the key; null: there is none, or none any more.
export function header() {
  return key === null ? null : { authorization: `Bearer ${key}` };
}

async function exchange(given) {
  const answer = await fetch("/dashboard/session", { method: "POST", headers: { authorization: `Bearer ${given}` }, cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : `the server answered ${answer.status}`);
  return body;
}

// Keep the viewer's key, and the one that calls policies where the given key brought one.
function keep(found) {
  key = found.key;
  service = found.service;
  talk = found.talk ?? talk;
  try {
    sessionStorage.setItem(STORED, key);
    if (talk !== null) sessionStorage.setItem(STORED_TALK, talk);
  } catch { /* the keys then live as long as the page */ }
}

export function isService() {
  return service;
}

export function talkHeader() {
  return talk === null ? null : { authorization: `Bearer ${talk}` };
}

// Take a key that opens more, so that this tab may talk. Raises what the server says of another one.
export async function allowTalk(given) {
  const found = await exchange(given);
  if (found.talk === null) throw new Error("this key may look, and not talk; the job's key is in RUN/api_key");
  keep(found);
}

export function forgetTalk() {
  talk = null;
  try { sessionStorage.removeItem(STORED_TALK); } catch { /* nothing was kept */ }
}

function forget() {
  key = null;
  forgetTalk();
  try { sessionStorage.removeItem(STORED); } catch { /* nothing was kept */ }
}

// The server has said that it ends. Another program may listen on its port next, so no tab sends it the key.
export function serverEnded() {
  forget();
  if (channel !== null) channel.postMessage({ ended: true });
}

function fromOtherTab() {
  if (channel === null) return Promise.resolve(null);
  return new Promise((resolve) => {
    const timer = setTimeout(() => resolve(null), 300);
    channel.addEventListener("message", (event) => {
      if (event.data && event.data.key) { clearTimeout(timer); resolve(event.data.key); }
    }, { once: true });
    channel.postMessage({ ask: true });
  });
}

if (channel !== null) {
  channel.addEventListener("message", (event) => {
    if (event.data && event.data.ask && key !== null) channel.postMessage({ key });
    if (event.data && event.data.ended) forget();
  });
}

// Find the key of this tab; ask for it where there is none. Returns when the page may read.
export async function open(main) {
  let said = "";
  const code = /^#(once-[0-9a-f]+)$/.exec(location.hash);
  if (code !== null) {
    history.replaceState(null, "", `${location.pathname}#/`);  // the code is no part of the history
    try { keep(await exchange(code[1])); return; } catch (error) { said = error.message; }
  }
  try { key = sessionStorage.getItem(STORED); talk = sessionStorage.getItem(STORED_TALK); } catch { key = null; }
  if (key === null) key = await fromOtherTab();
  if (key !== null) {
    try { keep(await exchange(key)); return; } catch { forget(); }
  }
  await ask(main, said);
}

// Ask for a key with a form, until one is good.
export function ask(main, said) {
  forget();
  return new Promise((resolve) => {
    const input = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", required: true });
    const problem = h("p", { class: "problem", role: "alert" }, said);
    const form = h("form", { class: "login" },
      h("h1", {}, "This page needs a key"),
      h("p", {}, "Of a service (", h("code", {}, "palestra serve"), "): your key, ", h("code", {}, "pk_…"), "; a viewer's is enough to look. Of a running job: what is in ", h("code", {}, "RUN/api_key"), ", or a viewer's key. Of ", h("code", {}, "palestra dashboard"),
        ": open the link that it printed; Enter in its terminal prints another one."),
      h("label", { for: "key" }, "Key"), input, h("button", { class: "primary" }, "Open"), problem);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try { keep(await exchange(input.value.trim())); resolve(); } catch (error) { problem.textContent = error.message; input.select(); }
    });
    replace(main, form);
    input.focus();
  });
}
