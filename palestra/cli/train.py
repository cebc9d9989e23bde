"""`palestra train`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import add_set, command, load_function, overrides
from palestra.config import load_config, parse_config


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "train",
        run,
        "train on what a function of yours returns: rollout(task, policy) -> reward",
        "  palestra train my_agent:rollout --tasks tasks.jsonl --validation held_out.jsonl --set steps=50",
    )
    parser.add_argument("rollout", help="module:function, or path/to/file.py:function")
    parser.add_argument("--tasks", type=Path, help="JSONL file, one task a line")
    parser.add_argument("--validation", type=Path, help="JSONL file of held-out tasks")
    parser.add_argument("--config", type=Path, help="the job, in TOML; without it, the defaults")
    parser.add_argument("--concurrency", type=int, help="episodes played at the same time")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the job's folder")
    add_set(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train in this process; return 130 where a signal stopped it."""
    from palestra.cluster.training import train_until_stopped

    settings = overrides(arguments.set)
    for split in ("train", "validation"):
        path = arguments.tasks if split == "train" else arguments.validation
        if path is not None:
            settings[f"tasks.{split}"] = str(path)
    config = load_config(arguments.config, settings) if arguments.config else parse_config({}, settings)
    result, _ = train_until_stopped(
        load_function(arguments.rollout), (), config, concurrency=arguments.concurrency, resume=arguments.resume
    )
    return 0 if result.state == "completed" else 130
