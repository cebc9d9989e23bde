"""docs/reference/commands.md: every command with its options, from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from palestra.cli.main import parser

_ABOUT = """
`palestra COMMAND --help` prints the same. An error is one line and exit code 2. A run's folder holds `config.toml`,
`metrics.jsonl` (one row a step), `curve.png`, `run.db` (every episode and call), `checkpoints/`, and `pool/` with past
versions where a role is played by them.
"""


def commands_page() -> str:
    """Return the page."""
    top = parser()
    (subparsers,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    lines = ["# Commands", _ABOUT, "| command | |", "|---|---|"]
    for choice in subparsers._choices_actions:
        name = choice.dest.split()[0]
        lines.append(f"| [`palestra {name}`](#palestra-{name}) | {_cell(choice.help or '')} |")
    for choice in subparsers._choices_actions:
        lines += _command(subparsers.choices[choice.dest.split()[0]])
    return "\n".join(lines) + "\n"


def _command(command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines about one command."""
    yield from ("", f"## `{command.prog}`", "", (command.description or "").strip())
    actions = [action for action in command._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    if actions:
        yield from ("", "| | |", "|---|---|")
    formatter = command._get_formatter()
    for action in actions:
        named = ", ".join(action.option_strings)
        value = _value(action)
        yield f"| `{f'{named} {value}'.strip()}` | {_cell(formatter._expand_help(action) if action.help else '')} |"
    if command.epilog:
        yield from ("", "```text", command.epilog.strip("\n"), "```")


def _value(action: argparse.Action) -> str:
    """Return what stands for the value of an option or argument."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is not None:
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _cell(text: str) -> str:
    """Return a text as a cell of a table has it."""
    return text.replace("|", "\\|").replace("\n", " ")
