"""`palestra judge check`: what a judge is worth, measured before a job trusts it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from palestra.cli.options import add_command, add_set, overrides
from palestra.errors import ConfigError
from palestra.terminal import say


def add_judge(commands: Any) -> None:
    """Add the command `judge check`, which takes labels and the configuration of a job."""
    parser = add_command(
        commands,
        "judge",
        _run,
        "compare the judge of a configuration with labels, with itself, and with empty replies",
        "  palestra judge check labels.jsonl --config job.toml\n"
        "  palestra judge check labels.jsonl --config job.toml --out labels.check.json   # for judge.checked\n\n"
        "exit code: 0 within the bounds, 1 below one of them, 2 an error",
    )
    parser.add_argument("what", choices=["check"], help="what to do")
    parser.add_argument("labels", metavar="LABELS", type=Path, help="a JSONL file; the page on judges has its keys")
    parser.add_argument("--config", metavar="FILE", type=Path, required=True, help="a TOML file with the table [judge]")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write what was found as JSON, for judge.checked; without it, it is only shown",
    )
    add_set(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Check the judge, and print what it is worth."""
    import asyncio

    from palestra.config import JudgeAccess, load_config
    from palestra_judges.bounds import IN_WORDS
    from palestra_judges.check import check_judge
    from palestra_judges.config import Relative, Rubric

    config = load_config(arguments.config, overrides(arguments.set)).judge
    if not isinstance(config, Rubric | Relative):
        raise ConfigError(f"{arguments.config} has no table [judge] of the kind 'rubric' or 'relative'")
    if config.url is None:
        raise ConfigError("a policy judges in its job only; serve its model (palestra run), and check it by judge.url")
    config = config.model_copy(update={"checked": None})

    async def checked() -> dict[str, Any]:
        return await check_judge(config, config.make(JudgeAccess(url="", key=str)), arguments.labels)  # type: ignore[arg-type]

    found = asyncio.run(checked())
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name in IN_WORDS:
        say(f"{name:21}{_shown(found[name])}{_interval(found, name)}")
    for name, one in found.get("criteria", {}).items():
        about = f"kappa {_shown(one['kappa'])}{_interval(one, 'kappa')}"
        say(f"  {name}: {about}, tau-b {_shown(one['tau_b'])}, equal {one['equal']:.0%}")
    if found["failed"]:
        say(f"{'failed questions':21}{found['failed']:.0%}, which are in none of these numbers")
    for text in found["below"]:
        say(f"below the bounds: {text}")
    return 1 if found["below"] else 0


def _interval(found: dict[str, Any], name: str) -> str:
    given = found.get(f"{name}_interval")
    if given is None or None in given:  # of equal values nothing is known
        return "" if given is None else " (interval unknown)"
    return f" ({_shown(given[0])} to {_shown(given[1])})"


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
