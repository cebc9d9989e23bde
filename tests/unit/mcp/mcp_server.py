"""A small server of MCP on standard input and output, with the faults that a test asks for by its arguments."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from typing import NoReturn

TOOLS = [
    {
        "name": "add",
        "description": "Add.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    },
    *(
        {"name": name, "inputSchema": {"type": "object"}}
        for name in ("parts", "show", "spoil", "fail", "hang", "die", "grow", "large", "flood")
    ),
]
PARTS = [
    {"type": "text", "text": "seen"},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"type": "resource_link", "uri": "file:///a", "name": "a"},
    {"type": "resource", "resource": {"uri": "file:///b", "text": "words"}},
    {"type": "resource", "resource": {"uri": "file:///c", "blob": "AAA=", "mimeType": "x/y"}},
    {"type": "hologram"},
]
DOT = (  # a PNG of one red pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
# The same with other bits where its pixels are, which nobody sees who does not decode them.
DAMAGED = DOT[:60] + "AAAA" + DOT[64:]
SHOWN = [
    {"type": "text", "text": "one"},
    {"type": "text", "text": "two"},
    {"type": "image", "data": DOT, "mimeType": "image/png"},
    {"type": "resource", "resource": {"uri": "file:///d", "blob": DOT, "mimeType": "image/png"}},
    {"type": "image", "data": "AAAA", "mimeType": "image/png"},
]
SPOILT = [{"type": "image", "data": data, "mimeType": "image/png"} for data in (DOT, DAMAGED)]
CONTENT = {"parts": PARTS, "show": SHOWN, "spoil": SPOILT}
VARIABLES = ("SECRET_OF_A_TEST", "GIVEN")


def main(fault: str) -> None:
    if fault == "slow":
        time.sleep(60)
    if fault == "dies":
        sys.exit("no licence")
    if fault == "chatty":
        print("Welcome!", flush=True)
    if fault == "leaves":
        subprocess.Popen(["sleep", "600"], start_new_session=False)
    seen: list[str] = []
    for line in sys.stdin:
        message = json.loads(line)
        seen.append(message.get("method", "answer"))
        for answer in answers(message, fault, seen):
            print(json.dumps({"jsonrpc": "2.0", **answer}), flush=True)
        if fault == "stubborn":
            continue
    if fault == "stubborn":
        time.sleep(600)


def answers(message: dict, fault: str, seen: list[str]) -> list[dict]:
    number = message.get("id")
    match message.get("method"):
        case "initialize":
            version = "1999-01-01" if fault == "old" else message["params"]["protocolVersion"]
            able = {} if fault == "without" else {"tools": {"listChanged": True}}
            ping = {"id": "p", "method": "ping"}
            return [ping, {"id": number, "result": {"protocolVersion": version, "capabilities": able}}]
        case "tools/list":
            return [{"id": number, **page(message["params"], fault)}]
        case "tools/call":
            return called(message["params"]["name"], message["params"]["arguments"], number, seen)
        case _:
            return []


def page(given: dict, fault: str) -> dict:
    place = int(given.get("cursor", 0))
    result = {"tools": TOOLS[place : place + 3]}
    if fault == "endless":
        return {"result": result | {"nextCursor": "0"}}
    return {"result": result | ({"nextCursor": str(place + 3)} if place + 3 < len(TOOLS) else {})}


def called(name: str, given: dict, number: int, seen: list[str]) -> list[dict]:
    def said(text: str, **more: object) -> list[dict]:
        return [{"id": number, "result": {"content": [{"type": "text", "text": text}], **more}}]

    match name:
        case "add":
            return said(str(given["a"] + given.get("b", 0)))
        case "parts" | "show" | "spoil":
            return [{"id": number, "result": {"content": CONTENT[name]}}]
        case "fail":
            return said("the disk is full", isError=True)
        case "hang":
            return []
        case "die":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        case "flood":
            flood(given["with"])
        case "grow":
            TOOLS.append({"name": "new", "inputSchema": {"type": "object"}})
            return [{"method": "notifications/tools/list_changed"}, *said("grown")]
        case "large":
            return said("x" * given["size"])
        case "new":
            return [{"id": number, "result": {"content": [], "structuredContent": {"seen": seen}}}]
        case "environment":
            return said(json.dumps({name: os.environ.get(name) for name in VARIABLES}))
        case _:
            return [{"id": number, "error": {"code": -32602, "message": f"Invalid params: no {name}"}}]


def flood(kind: str) -> NoReturn:
    """Write without a pause."""
    if kind != "messages":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "of a fork" and os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 20  # so that no test leaves it behind
    else:
        end = math.inf
    lines = {"messages": b'{"jsonrpc":"2.0","method":"notifications/message"}\n' * 1000, "empty lines": b"\n" * 50_000}
    line = lines.get(kind, b"x" * 60_000)
    while time.monotonic() < end:
        os.write(2 if kind == "errors" else 1, line)
    os._exit(0)


if __name__ == "__main__":
    TOOLS.append({"name": "environment", "inputSchema": {"type": "object"}})
    main(sys.argv[1] if len(sys.argv) > 1 else "")
