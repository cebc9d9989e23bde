"""Plays all cases and writes what they gave into docs/reference/frameworks.md (`make frameworks`)."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unit.building import rows_of

from frameworks.cases import ALL, NAMES, OTHERS, Case
from frameworks.playing import ENVIRONMENTS, Played, missing

BEGIN, END = "<!-- measured by `make frameworks`; do not edit from here -->", "<!-- to here -->"
FRAMEWORKS = {**NAMES, **OTHERS}
ALWAYS = ("model", "messages", "input", "instructions", "tools")  # differ with every request
_DRIFT_HEAD = """| framework | agent | API | calls | kept exact | forks | rows |
|---|---|---|--:|--:|---|--:|"""


def versions() -> str:
    """Of what was measured: the packages that the requirements name first."""
    heads = (path.read_text().split("\n\n")[0] for path in ENVIRONMENTS.values())
    return "; and ".join(", ".join(re.findall(r"^\S+==\S+$", head, re.M)) for head in heads).replace("==", " ")


def drift_rows(played: Mapping[str, Played]) -> Iterable[str]:
    """A line for each agent; wires that gave the same share one."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for case in ALL:
        found = played[case.name]
        after_the_first = len(found.chats) - 1
        kept = sum(chat.fork is None for chat in found.chats[1:])
        forks = Counter(reason for reason in found.forks if reason)
        said = ", ".join(f"`{reason}` x {count}" for reason, count in forks.items()) or "–"
        key = (FRAMEWORKS[case.framework], case.what)
        rest = (str(len(found.chats)), f"{kept} of {after_the_first}", said, str(len(rows_of(found.chats))))
        lines.setdefault((*key, *rest), []).append(case.wire)
    for (framework, what, *rest), wires in lines.items():
        yield f"| {framework} | {what} | {'; '.join(wires)} | {' | '.join(rest)} |"


def field_rows(played: Mapping[str, Played]) -> Iterable[str]:
    """A line for each API and field: which framework sends it, and with which values."""
    seen: dict[tuple[str, str], dict[str, set[str]]] = {}
    for case in ALL:
        for request in played[case.name].sent:
            for name, value in fields_of(request.body):
                seen.setdefault((request.path, name), {}).setdefault(FRAMEWORKS[case.framework], set()).add(value)
    for (path, name), values in sorted(seen.items()):
        cells = [", ".join(sorted(values.get(framework, ()))) or "–" for framework in FRAMEWORKS.values()]
        yield f"| `{path}` | `{name}` | {' | '.join(cells)} |"


def fields_of(body: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Each field of a request with its value in short; of messages, items and tools the keys that they have."""
    for name, value in body.items():
        if name in ("messages", "input"):
            for item in value if isinstance(value, list) else ():
                yield from ((f"{name}[].{key}", "yes") for key in item)
        elif name == "tools":
            for tool in value:
                yield from ((f"tools[].{key}", "yes") for key in tool)
                yield from ((f"tools[].function.{key}", "yes") for key in tool.get("function", {}))
        elif name in ALWAYS:
            yield name, "yes"
        elif isinstance(value, dict) and "schema" in json.dumps(value):
            yield name, "`json_schema`"
        else:
            yield name, f"`{json.dumps(value)}`"


async def measured() -> str:
    """The tables."""
    played = {}
    for case in ALL:
        played[case.name] = await _played(case)
    fields_head = f"| path | field | {' | '.join(FRAMEWORKS.values())} |\n|---|---|{'---|' * len(FRAMEWORKS)}"
    return "\n".join(
        [
            f"Measured with {versions()}.\n",
            _DRIFT_HEAD,
            *drift_rows(played),
            "\n## What they send\n",
            "Every field of every request above, with its values.\n",
            fields_head,
            *field_rows(played),
        ]
    )


async def _played(case: Case) -> Played:
    with tempfile.TemporaryDirectory() as folder:
        return await case.play(Path(folder))


def main(page: Path) -> None:
    if (why := missing()) is not None:
        sys.exit(why)
    text = page.read_text()
    found = re.search(f"{re.escape(BEGIN)}\n(.*?){re.escape(END)}", text, re.S)
    assert found is not None, f"{page} has no measured part"
    page.write_text(text[: found.start(1)] + "\n" + asyncio.run(measured()) + "\n\n" + text[found.end(1) :])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
