"""A coding agent with one tool: calls the model over chat completions until it calls no tool.

`agent.py URL TASK [MORE]`: MORE is JSON, fields of each call; `"edits": true` in it changes the replies it sends back.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

if "--version" in sys.argv:
    sys.exit("agent, version 1.2.3")
url, task, *more = sys.argv[1:]
fields = json.loads(more[0]) if more else {}
edits = fields.pop("edits", False)
command = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "parameters": command}}]
messages = [{"role": "user", "content": task}]
while True:
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": tools} | fields
    headers = {"authorization": f"Bearer {os.environ['KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        reply = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
    calls = reply.get("tool_calls") or []
    if edits:
        reply["content"] = "Something else."
    messages.append({name: reply[name] for name in ("role", "content", "tool_calls") if reply.get(name)})
    for call in calls:
        done = subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, capture_output=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout.decode()})
    if not calls:
        print(reply["content"])
        break
