"""Counts of the package: its size, what repeats, and how much can be configured; `make figures` prints them.

Sizes are lines of Python. Branches on kinds of engines are 0: tests/unit/engine/test_drivers.py looks for them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Parts of pages that a command writes, and whole pages of that kind, which say so at their beginning.
WRITTEN = re.compile(
    r"<!-- measured by .*?<!-- to here -->|<!-- (?P<part>[\w -]+) -->\n.*?<!-- end of (?P=part) -->", re.DOTALL
)
MANY = 8  # parameters
# What starts other processes of ours, ends them and talks to them.
PROCESSES = """palestra/process/* palestra/engine/remote_weights.py palestra/client/fleet.py palestra/grammars/worker.py
palestra_inspect/checkpoint_server.py palestra/runtime/engine_process.py palestra/runtime/runner_fleet.py
palestra/tracking/process.py palestra_sharded/processes.py
palestra_bases/remote.py palestra_bases/job.py
palestra_bases/link.py palestra_bases/protocol.py palestra_bases/server.py
palestra_engines/external/process.py palestra_service/ray/memory_watch.py palestra_service/ray/process_host.py"""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a module, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a function takes, `self` left out."""
    taken = function.args
    names = [one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def repeated(trees: dict[str, ast.Module]) -> list[str]:
    """Public names of functions and classes that two or more modules define."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    named = ({node.name for node in tree.body if isinstance(node, kinds)} for tree in trees.values())  # overloads: once
    found = Counter(name for names in named for name in names)
    return sorted(name for name, times in found.items() if times > 1 and not name.startswith("_"))


def words_by_hand(page: Path) -> int:
    """How many words of a page people write: those that no command writes."""
    text = page.read_text()
    return 0 if "<!-- made by " in text[:300] else len(WRITTEN.sub("", text).split())


def main() -> None:
    """Print a table in Markdown."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    files = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: text.count("\n") for name, text in texts.items()}
    core = [name for name in texts if name.startswith("palestra/")]
    processes = [name for name in texts if any(Path(name).match(pattern) for pattern in PROCESSES.split())]
    every = [function for tree in trees.values() for function in functions(tree)]
    rows = (ROOT / "docs" / "reference" / "configuration.md").read_text().splitlines()
    keys = [re.match(r"\| `(\w+)` \|", row) for row in rows]
    named = [key[1] for key in keys if key]
    by_hand = sum(words_by_hand(page) for page in (ROOT / "docs").rglob("*.md"))
    table = {
        "core: lines / files": f"{sum(lines[name] for name in core):,} / {len(core)}",
        "all packages: lines / files": f"{sum(lines.values()):,} / {len(lines)}",
        "functions": f"{len(every):,}",
        "other processes: lines / files": f"{sum(lines[name] for name in processes):,} / {len(processes)}",
        f"functions with {MANY} or more parameters": str(sum(parameters(one) >= MANY for one in every)),
        "public top-level names defined twice or more": str(len(repeated(trees))),
        "configuration: different keys / rows": f"{len(set(named))} / {len(named)}",
        "words of documentation by hand": f"{by_hand:,}",
    }
    print("| | |\n|---|--:|")
    for name, value in table.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
