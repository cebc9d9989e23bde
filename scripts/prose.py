"""Measure how the package's docstrings and comments read, and fail where a goal of CONTRIBUTING.md is missed.

`python scripts/prose.py` prints one line for each goal, `--rooms` the same numbers for each room, and `--list GOAL` the
places that miss a goal (`short`, `parameters`, `shapes`, `words`).
"""

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "palestra"
# Words that make a sentence hard to follow: each has a plain one ("told" is "notified", "anew" is "again").
AVOIDED = re.compile(
    r"\b(told|anew|likewise|whoever|whatever|nobody|somebody|goes on|at once|of late)\b", re.IGNORECASE
)
ARRAYS = re.compile(r"\b(Tensor|ndarray|NDArray)\b")
SHAPE = re.compile(r"\[[A-Za-z0-9_+*.,: -]*\]|\bscalar\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Prose:
    """What was counted in some files; places are `file:line name`."""

    docstring_words: list[int] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    with_parameters: int = 0
    parameters_missing: list[str] = field(default_factory=list)
    with_arrays: int = 0
    shapes_missing: list[str] = field(default_factory=list)
    comments: int = 0
    code_lines: int = 0
    all_lines: int = 0
    avoided: list[str] = field(default_factory=list)

    def add(self, other: "Prose") -> None:
        """Add the counts of `other` to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def functions_of(tree: ast.AST, public: bool = True) -> Iterator[tuple[Function, bool]]:
    """Yield the functions below `tree` in source order, each with whether it and all around it are public."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, public and not node.name.startswith("_"))
        elif isinstance(node, Function):
            yield node, public and not node.name.startswith("_")
            yield from functions_of(node, public=False)
        else:
            yield from functions_of(node, public)


def parameters_of(function: Function) -> list[str]:
    """Return the names of the parameters that a caller passes, without `self`, `cls` and those that begin with `_`."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def has_arrays(function: Function) -> bool:
    """Say whether an annotation of the function names an array type."""
    given = function.args
    annotations = [a.annotation for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + [function.returns]
    return any(ARRAYS.search(ast.unparse(annotation)) for annotation in annotations if annotation is not None)


def comments_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment, except those that are addressed to a tool."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|pragma|!|mypy:|fmt:)", token.string):
            yield token.start[0], token.string


def measure(path: Path) -> Prose:
    """Count docstrings, comments and lines of one file."""
    text = path.read_text()
    tree = ast.parse(text)
    place = f"{path.relative_to(PACKAGE.parent)}"
    prose = Prose()
    documented: list[tuple[int, str, str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (doc := ast.get_docstring(node)):
            first = node.body[0]
            lines = (first.end_lineno or first.lineno) - first.lineno + 1
            documented.append((first.lineno, getattr(node, "name", "(file)"), doc, lines))
    for line, name, doc, _ in documented:
        words = len(doc.split())
        prose.docstring_words.append(words)
        if words <= 5:
            prose.short.append(f"{place}:{line} {name}: {doc}")
        prose.avoided += [f"{place}:{line} {name}: {found}" for found in AVOIDED.findall(doc)]
    for function, public in functions_of(tree):
        doc = ast.get_docstring(function) or ""
        names = parameters_of(function)
        if public and len(names) >= 3:
            prose.with_parameters += 1
            missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", doc)]
            if missing:
                prose.parameters_missing.append(f"{place}:{function.lineno} {function.name}: {', '.join(missing)}")
        if has_arrays(function):
            prose.with_arrays += 1
            if not SHAPE.search(doc):
                prose.shapes_missing.append(f"{place}:{function.lineno} {function.name}")
    commented = list(comments_of(text))
    prose.comments = len(commented)
    for line, comment in commented:
        prose.avoided += [f"{place}:{line} comment: {found}" for found in AVOIDED.findall(comment)]
    prose.all_lines = len(text.splitlines())
    alone = sum(1 for line in text.splitlines() if not line.strip() or line.strip().startswith("#"))
    prose.code_lines = prose.all_lines - alone - sum(lines for *_, lines in documented)
    return prose


def figures(prose: Prose) -> list[tuple[str, float, str, bool]]:
    """Return for each goal its name, the figure, the goal in words, and whether the figure meets it."""
    documented = max(len(prose.docstring_words), 1)
    median = statistics.median(prose.docstring_words or [0])
    short = 100 * len(prose.short) / documented
    named = 100 * (1 - len(prose.parameters_missing) / max(prose.with_parameters, 1))
    shaped = 100 * (1 - len(prose.shapes_missing) / max(prose.with_arrays, 1))
    comments = 100 * prose.comments / max(prose.code_lines, 1)
    avoided = 1000 * len(prose.avoided) / max(prose.all_lines, 1)
    return [
        ("words in the median docstring", median, "at least 15", median >= 15),
        ("% of docstrings with five words or fewer", short, "at most 8", short <= 8),
        ("% of public functions with three parameters or more that name them", named, "at least 60", named >= 60),
        ("% of functions with arrays that give shapes", shaped, "at least 90", shaped >= 90),
        ("comments in 100 lines of code", comments, "2 to 5", 2 <= comments <= 5),
        ("avoided words in 1000 lines", avoided, "at most 0.5", avoided <= 0.5),
    ]


def main() -> int:
    """Print the figures of the package and return 1 if one of them misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", action="store_true", help="also print the figures of each room")
    parser.add_argument("--list", choices=("short", "parameters", "shapes", "words"), help="list what misses this goal")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders to measure instead of the package")
    arguments = parser.parse_args()
    files = [
        f
        for path in arguments.paths or [PACKAGE]
        for f in (sorted(path.resolve().rglob("*.py")) if path.is_dir() else [path.resolve()])
    ]
    total, rooms = Prose(), dict[str, Prose]()
    for file in files:
        prose = measure(file)
        total.add(prose)
        rooms.setdefault(file.relative_to(PACKAGE).parts[0], Prose()).add(prose)
    if arguments.list:
        missing = {
            "short": total.short,
            "parameters": total.parameters_missing,
            "shapes": total.shapes_missing,
            "words": total.avoided,
        }
        print("\n".join(missing[arguments.list]))
        return 0
    if arguments.rooms:
        columns = {"median": 8, "short %": 9, "named %": 9, "shapes %": 10, "comments": 10, "avoided": 9}
        print(f"{'room':<14}" + "".join(f"{name:>{width}}" for name, width in columns.items()) + f"{'lines':>8}")
        for room, prose in rooms.items():
            values = zip(columns.values(), (value for _, value, _, _ in figures(prose)), strict=True)
            print(f"{room:<14}" + "".join(f"{value:>{width}.1f}" for width, value in values) + f"{prose.all_lines:>8}")
    for name, value, goal, met in figures(total):
        print(f"{'met   ' if met else 'MISSED'} {value:6.1f}  {name} ({goal})")
    return 0 if all(met for *_, met in figures(total)) else 1


if __name__ == "__main__":
    sys.exit(main())
