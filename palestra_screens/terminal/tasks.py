"""Tasks for a terminal, drawn from a seed: find, count, edit, git, and a function whose test fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from palestra.envs.tasks import Split, draw_tasks

_WORDS = (
    *("amber", "basalt", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "indigo", "juniper", "kelp", "lagoon"),
    *("maple", "nectar", "onyx", "pebble", "quartz", "raven", "saffron", "tundra", "umber", "violet", "willow"),
)
_LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")
Task = dict[str, Any]


def terminal_tasks(split: Split, count: int, seed: int) -> list[Task]:
    """Draw tasks of all kinds in `KINDS`, each with the same probability. The splits share no seed.

    Keys: `id`, `kind`, `prompt`, `files` (text by path), `begin` (a command run first, as the agent) and `expected`
    (for the kind's checker; hidden from the agent).
    """
    return draw_tasks(split, count, seed, _draw)


def _draw(source: random.Random) -> Task:
    kind, number = source.choice(list(KINDS)), source.randrange(2**31)
    made = KINDS[kind](random.Random(f"{kind} {number}"))
    return {"id": f"{kind}-{number}", "kind": kind, "begin": "", **made}


def _find(source: random.Random) -> Task:
    """Create a folder of notes, one of which has a word."""
    word, *others = source.sample(_WORDS, 8)
    names = [(source.choice(others), source.choice(_WORDS), source.randrange(100)) for _ in range(12)]
    paths = sorted({f"notes/{folder}/{name}{number}.txt" for folder, name, number in names})
    files = {path: _lines(source, others, 5) for path in paths}
    wanted = source.choice(paths)
    files[wanted] = f"{files[wanted]}{source.choice(others)} {word}\n"
    prompt = f"Exactly one file below notes/ has the word {word}. Finish with its path, such as notes/a/b.txt."
    return {"prompt": prompt, "files": files, "expected": wanted}


def _count(source: random.Random) -> Task:
    """Create a log, and ask for the number of its lines with a level."""
    level = source.choice(_LEVELS)
    lines = [f"{source.choice(_LEVELS)} {source.choice(_WORDS)}" for _ in range(source.randint(40, 90))]
    count = sum(line.startswith(f"{level} ") for line in lines)
    prompt = f"How many lines of events.log begin with {level}? Finish with the number."
    return {"prompt": prompt, "files": {"events.log": "\n".join(lines) + "\n"}, "expected": str(count)}


def _edit(source: random.Random) -> Task:
    """Create a file of settings, one of which is to be changed."""
    names = source.sample(_WORDS, 6)
    values = {name: source.randrange(1000) for name in names}
    name, value = source.choice(names), source.randrange(1000, 2000)

    def text() -> str:
        return "".join(f"{key} = {number}\n" for key, number in values.items())

    before = text()
    values[name] = value
    prompt = f"Set {name} to {value} in settings.ini and change nothing else. Then finish with the answer done."
    return {"prompt": prompt, "files": {"settings.ini": before}, "expected": {"settings.ini": text()}}


def _git(source: random.Random) -> Task:
    """Create a repository, in which a file is to be committed on a new branch."""
    branch, name, word = source.sample(_WORDS, 3)
    prompt = (
        f"In the git repository of this folder, make a branch {branch} and commit a new file {name}.txt on it, which "
        f"holds the one line {word}. Then finish with the answer done."
    )
    begin = (
        "git init -q -b main && git config user.name agent && git config user.email agent@example.org "
        "&& git add . && git commit -qm start"
    )
    expected = {"branch": branch, "file": f"{name}.txt", "text": f"{word}\n"}
    return {
        "prompt": prompt,
        "files": {"README": _lines(source, list(_WORDS), 2)},
        "begin": begin,
        "expected": expected,
    }


# A function's name, a wrong body, and what it is to return.
_FUNCTIONS: tuple[tuple[str, str, Callable[[int, int], float]], ...] = (
    ("add", "a - b", lambda a, b: a + b),
    ("larger", "min(a, b)", max),
    ("distance", "a - b", lambda a, b: abs(a - b)),
    ("average", "a + b / 2", lambda a, b: (a + b) / 2),
    ("same_sign", "a + b > 0", lambda a, b: a * b > 0),
    ("remainder", "a // b", lambda a, b: a % b),
)


def _fix(source: random.Random) -> Task:
    """Make a function with a bug, and a test that finds it."""
    function, wrong, right = source.choice(_FUNCTIONS)
    name = source.choice(_WORDS)
    called = f"{name}_{function}"
    pairs = [[source.randint(-20, 20), source.choice([n for n in range(-9, 10) if n])] for _ in range(12)]
    values = [right(*pair) for pair in pairs]
    known = [f"{called}({a}, {b}) == {value!r}" for (a, b), value in list(zip(pairs, values, strict=True))[:6]]
    shown = "".join(f"assert {claim}, '{claim}'\n" for claim in known)
    files = {
        f"{name}.py": f"def {called}(a, b):\n    return {wrong}\n",
        f"test_{name}.py": f"from {name} import {called}\n\n{shown}print('passed')\n",
    }
    prompt = (
        f"python3 test_{name}.py fails because of a bug in {name}.py. Mend {name}.py, then finish with the answer done."
    )
    expected = {"module": name, "function": called, "arguments": pairs, "values": values}
    return {"prompt": prompt, "files": files, "expected": expected}


def _lines(source: random.Random, words: list[str], count: int) -> str:
    return "".join(" ".join(source.choices(words, k=4)) + "\n" for _ in range(count))


KINDS: dict[str, Callable[[random.Random], Task]] = {
    "find": _find,
    "count": _count,
    "edit": _edit,
    "git": _git,
    "fix": _fix,
}
