"""The commands that the documents show: whether the real parser takes them, and whether what they name exists."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from documents.blocks import ROOT, Block

TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def lines_of(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a block, in words; of a console, what follows a `$`."""
    for line in block.text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        for part in line.split("#")[0].split(";"):
            if words := shlex.split(part):
                yield words


def saved_by(page: Path) -> list[str]:
    """Return the scripts that a reader of a page has saved."""
    return re.findall(r"\b[Ss]ave(?: this)?\s+as\s+`(\S+\.py)`", page.read_text())


def trouble(words: list[str], saved: Sequence[str] = ()) -> str | None:
    """Return what is wrong with a command; None: it can be given so. `saved`: scripts that the reader has."""
    match words:
        case ["palestra", *arguments]:
            return palestra_trouble(arguments)
        case ["make", *targets]:
            known = TARGET.findall((ROOT / "Makefile").read_text())
            return next((f"the Makefile has no target {name}" for name in targets if name not in known), None)
        case ["pip", "install", *arguments]:
            return pip_trouble(arguments)
        case ["export", *settings]:
            return None if all(re.match(r"PALESTRA_[A-Z_]+=", setting) for setting in settings) else "not ours"
        case ["python", "-m", "venv", *_] | ["source", ".venv/bin/activate"]:
            return None
        case ["python", "-c", code]:
            return None if ast.parse(code).body else "it does nothing"
        case ["python", script, *_]:
            return None if script in saved or (ROOT / script).is_file() else f"there is no {script}"
        case ["curl", *arguments]:
            return curl_trouble(arguments)
        case [first, *_] if re.match(r"[A-Z_]+=", first):  # a variable for the next lines
            return None
    return f"no test knows the command {words[0]}"


def palestra_trouble(arguments: list[str]) -> str | None:
    """Return what the command line says of arguments; None: it takes them."""
    from palestra.cli.main import parser

    try:
        parser().parse_args(arguments)
    except SystemExit as end:
        return f"exit code {end.code}" if end.code else None
    return None


def curl_trouble(arguments: list[str]) -> str | None:
    """Return the request, if docs/reference/api.md, which is made from the code, has no such route."""
    method = arguments[arguments.index("-X") + 1] if "-X" in arguments else "GET"
    url = next(one for one in arguments if one.startswith(("http", "$JOB_URL")))
    path = urlsplit(url.replace("$JOB_URL", "http://job").partition("$(")[0]).path
    listed = re.findall(r"`([A-Z]+) (/[^`?]*)`", (ROOT / "docs/reference/api.md").read_text())
    known = any(method == verb and path == route.partition("{")[0] for verb, route in listed)
    return None if known else f"there is no route {method} {path}"


def pip_trouble(arguments: list[str]) -> str | None:
    """Return whether an extra is not one of ours, or a version is another one than ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {pin for extra in extras.values() for pin in extra if "==" in pin}
    for argument in arguments:
        if (found := re.fullmatch(r"(?:\.|palestra)\[([\w,]+)\]", argument)) and not set(found[1].split(",")) <= set(
            extras
        ):
            return f"there is no extra {found[1]}"
        if "==" in argument and argument not in pins:
            return f"{argument} is not what pyproject.toml has"
    return None
