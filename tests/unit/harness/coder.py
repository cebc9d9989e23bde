"""A small coding agent: asks the model over chat completions, and writes its reply into hello.txt."""

import json
import os
import sys
import urllib.request

url, task = sys.argv[1:]
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": task}]}
headers = {"authorization": f"Bearer {os.environ['KEY']}", "content-type": "application/json"}
request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
reply = json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
with open("hello.txt", "w") as file:
    file.write(reply)
with open(os.path.expanduser("~/settings.json")) as file:
    print(json.load(file)["model"], "says", reply)
