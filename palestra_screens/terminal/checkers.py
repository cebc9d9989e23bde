"""Scores terminal tasks: by the answer, by the remaining files, or by running these in another sandbox."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from palestra.envs.tasks import final_answers
from palestra.errors import InvalidEnvironment
from palestra_screens.terminal.sandbox import SandboxLimits, UnfitFiles, run_once

Files = Mapping[str, bytes]
_SECONDS = 20.0
# The function is called in a program of our own, which knows arguments and no expected values.
_CALL = """import importlib, json, sys
sys.path.insert(0, ".")
module, function, arguments = json.loads(sys.argv[1])
called = getattr(importlib.import_module(module), function)
print(json.dumps([called(*pair) for pair in arguments]))
"""


async def check(task: Mapping[str, Any], files: Files, answer: str) -> float:
    """Return 1.0 if a task is solved, else 0.0.

    Args:
        files: of the home folder after the end of all processes.
        answer: the agent's; "": none.
    """
    kind = task.get("kind")
    if not isinstance(kind, str) or kind not in CHECKERS:
        raise InvalidEnvironment(f"a task has the kind {kind!r}; known are {', '.join(CHECKERS)}")
    return float(await CHECKERS[kind](task["expected"], files, answer))


async def _same_answer(expected: str, files: Files, answer: str) -> bool:
    return final_answers(answer, 1)[0].removeprefix("./") == expected


async def _same_files(expected: Mapping[str, str], files: Files, answer: str) -> bool:
    return all(files.get(path) == text.encode() for path, text in expected.items())


async def _committed(expected: Mapping[str, str], files: Files, answer: str) -> bool:
    """Return whether a branch has a file, asked of git in a new sandbox with a copy of the repository."""
    branch, file = expected["branch"], expected["file"]
    shown = await _printed(["git", "show", f"refs/heads/{branch}:{file}"], files)
    return shown.decode(errors="replace").strip() == expected["text"].strip()


async def _right_values(expected: Mapping[str, Any], files: Files, answer: str) -> bool:
    """Return whether a function gives the right values, called in a new sandbox with a copy of the files."""
    asked = json.dumps([expected["module"], expected["function"], expected["arguments"]])
    printed = await _printed(["python3", "-I", "-c", _CALL, asked], files)
    try:
        return bool(json.loads(printed) == expected["values"])
    except (ValueError, RecursionError):
        return False


async def _printed(command: Sequence[str], files: Files) -> bytes:
    """Return a program's output in a new sandbox with a copy of the files; empty if these don't fit into one.

    An agent could create such files, with holes or long names, and must not gain a retry of its episode.
    """
    try:
        return await run_once(command, files, SandboxLimits(), seconds=_SECONDS)
    except UnfitFiles:
        return b""


CHECKERS: Mapping[str, Callable[[Any, Files, str], Awaitable[bool]]] = {
    "find": _same_answer,
    "count": _same_answer,
    "edit": _same_files,
    "git": _committed,
    "fix": _right_values,
}
