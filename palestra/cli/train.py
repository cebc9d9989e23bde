"""`palestra train`: a job and the function that plays its episodes, in one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from palestra.cli.options import REWARDS, add_command, add_set, overrides
from palestra.extensions import FUNCTION, load_function


def add_train(commands: Any) -> None:
    """Add the command `train`, which takes a rollout function and its tasks."""
    parser = add_command(
        commands,
        "train",
        _run,
        "train on what a function of yours returns: rollout(task, endpoint) -> reward, or reward(task, answer)",
        "  palestra train my_agent:rollout --tasks tasks.jsonl --validation held_out.jsonl --set steps=50\n"
        "  palestra train --reward my_rewards.py:score --tasks prompts.jsonl   # one answer to each task's `prompt`",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("rollout", nargs="?", help=f"the function that plays: {FUNCTION}; without it, --reward")
    parser.add_argument(
        "--reward",
        metavar="FUNCTION",
        help="score one answer to each task's `prompt` with this function, (task, answer) -> number, named as the "
        "rollout is; without it, the rollout plays",
    )
    parser.add_argument(
        "--tasks", metavar="FILE", type=Path, help="JSONL file, one task a line; without it, what the job names"
    )
    parser.add_argument(
        "--validation", metavar="FILE", type=Path, help="JSONL file of held-out tasks; without it, what the job names"
    )
    parser.add_argument("--config", metavar="JOB.TOML", type=Path, help="the job, in TOML; without it, the defaults")
    parser.add_argument(
        "--concurrency",
        metavar="EPISODES",
        type=int,
        help="episodes played at the same time; without it, those of a step",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the job's folder")
    add_set(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Train in this process until the steps are done; return 130 after a signal."""
    from palestra.config import load_config, parse_config
    from palestra.runtime.arguments import Play
    from palestra.runtime.training import train_until_stopped

    settings = overrides(arguments.set)
    for split in ("train", "validation"):
        path = arguments.tasks if split == "train" else arguments.validation
        if path is not None:
            settings[f"tasks.{split}"] = str(path)
    config = load_config(arguments.config, settings) if arguments.config else parse_config({}, settings)
    play = Play(
        rollout=None if arguments.rollout is None else load_function(arguments.rollout),
        reward=None if arguments.reward is None else load_function(arguments.reward, REWARDS),
    )
    result, _ = train_until_stopped(
        play,
        (),
        config,
        concurrency=arguments.concurrency,
        resume=arguments.resume,
    )
    return 0 if result.state == "completed" else 130
