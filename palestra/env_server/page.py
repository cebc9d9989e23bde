"""The page of an environment server: its sessions, read with the server's key. It loads no external resources."""

from __future__ import annotations

import base64
import hashlib

_SCRIPT = """
const form = document.querySelector("form"), body = document.querySelector("tbody"), told = document.querySelector("p");
const columns = ["session_id", "state", "age_seconds", "silent_seconds", "episodes", "observations", "actions",
                 "open"];
let key = "";
async function show() {
  if (!key) return;
  try {
    const answer = await fetch("v1/sessions", {headers: {authorization: "Bearer " + key}});
    const found = await answer.json();
    if (!answer.ok) { told.textContent = found.error.message; key = ""; form.hidden = false; return; }
    form.hidden = true;
    told.textContent = `${found.environment}: ${found.sessions.length} of ${found.limit} sessions, ` +
      `${found.waiting} waiting, ${found.opened} since the start` +
      (found.draining ? "; draining: no new sessions" : "");
    body.replaceChildren(...found.sessions.map(session => {
      const row = document.createElement("tr");
      row.append(...columns.map(name => {
        const cell = document.createElement("td");
        cell.textContent = session[name];
        return cell;
      }));
      return row;
    }));
  } catch (error) { told.textContent = "the server does not answer"; }
}
form.addEventListener("submit", event => { event.preventDefault(); key = form.elements.key.value.trim(); show(); });
setInterval(show, 2000);
"""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .75rem .25rem 0; }
td { font-variant-numeric: tabular-nums; border-top: 1px solid #8884; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
"""
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Environment server</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><h1>Environment server</h1>
<form><label>Key of this server <input name="key" type="password" autocomplete="off" required></label>
<button>Show the sessions</button></form>
<p role="status"></p>
<table><thead><tr><th scope="col">session<th scope="col">state<th scope="col">age (s)<th scope="col">silent (s)
<th scope="col">episodes<th scope="col">observations<th scope="col">actions<th scope="col">open</tr></thead>
<tbody></tbody></table>
<script>{_SCRIPT}</script></body></html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
