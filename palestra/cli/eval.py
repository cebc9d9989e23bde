"""`palestra eval`: the mean reward of a model or a checkpoint, and the outcome of each task."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import FUNCTION, add_set, command, load_function, overrides
from palestra.errors import ConfigError
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.config import JobConfig
    from palestra.runtime.evaluating import Evaluation


def add(commands: Any) -> None:
    """Add the command `eval`, which takes a model, tasks, and what plays them."""
    parser = command(
        commands,
        "eval",
        run,
        "score a model or a checkpoint on tasks, greedily",
        "  palestra eval runs/addition held_out.jsonl --rollout my_agent.py:rollout\n"
        "  palestra eval runs/gomoku/checkpoints/step-000030 --environment gomoku\n\n"
        "exit code: 0 every task was scored, 1 some were not, 2 an error, 130 stopped",
    )
    parser.add_argument("model", metavar="CHECKPOINT", help="a checkpoint's folder, a run's (its newest), or a model")
    parser.add_argument(
        "tasks",
        metavar="TASKS",
        nargs="?",
        type=Path,
        help="JSONL file, one task a line; without it, the environment's",
    )
    played = parser.add_mutually_exclusive_group(required=True)
    played.add_argument(
        "--rollout", metavar="FUNC", help=f"what plays: {FUNCTION}; or, without it, one of the next two"
    )
    played.add_argument(
        "--environment",
        metavar="NAME",
        help="an environment that ships (palestra environments); or, without it, --rollout or --reward",
    )
    played.add_argument(
        "--reward",
        metavar="FUNC",
        help="what scores one answer to each task's `prompt`, (task, answer) -> number; without it, --rollout or "
        "--environment plays",
    )
    parser.add_argument(
        "--config", metavar="JOB.TOML", type=Path, help="a job, in TOML, whose settings hold; without it, the defaults"
    )
    parser.add_argument(
        "--concurrency", metavar="EPISODES", type=int, default=64, help="episodes played at the same time"
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="keep the episodes there, for `palestra episodes`; without it, they are not kept",
    )
    parser.add_argument("--quiet", action="store_true", help="print only the last line")
    add_set(parser)


def run(arguments: argparse.Namespace) -> int:
    """Score the model, print the outcome of each task, and return the exit code that the help names."""
    from palestra.client.arguments import checked_count
    from palestra.runtime.evaluating import evaluate_until_stopped

    config = _config(arguments)
    checked_count("--concurrency", arguments.concurrency)
    if arguments.tasks is None and arguments.environment is None:
        raise ConfigError("name a file of tasks (TASKS); only with --environment there need be none")
    found, _ = evaluate_until_stopped(
        None if arguments.rollout is None else load_function(arguments.rollout),
        () if arguments.tasks is None else arguments.tasks,
        config,
        reward=None if arguments.reward is None else load_function(arguments.reward),
        concurrency=arguments.concurrency,
        quiet=arguments.quiet,
    )
    _show(found, arguments.quiet)
    if not found.complete:
        return 130
    return 0 if len(found.rewards) == len(found.outcomes) else 1


def _config(arguments: argparse.Namespace) -> JobConfig:
    """Return the job whose settings the evaluation has, with the model and the environment of the arguments."""
    from palestra.config import load_config, parse_config
    from palestra.runtime.run_dir import newest_of_run

    settings = overrides(arguments.set)
    config = load_config(arguments.config, settings) if arguments.config else parse_config({}, settings)
    environment = config.environment.model_copy(update={"name": arguments.environment})
    return config.with_model(newest_of_run(arguments.model)).model_copy(
        update={"environment": environment, "run_dir": arguments.run_dir, "name": "eval"}
    )


def _show(found: Evaluation, quiet: bool) -> None:
    """Print a line for each task, unless `quiet`, and the mean reward with its interval."""
    for outcome in () if quiet else found.outcomes:
        said = f"{outcome.reward:g}" if outcome.reward is not None else f"not scored: {outcome.reason or 'not played'}"
        say(f"{outcome.task_id}  {' '.join(said.split())}")
    scored, total = len(found.rewards), len(found.outcomes)
    if found.mean is None:
        say(f"none of {total} tasks was scored")
        return
    between = "" if found.interval is None else " (95 % interval {:.3f} to {:.3f})".format(*found.interval)
    rest = "" if scored == total else f"; {total - scored} of {total} were not scored"
    say(f"mean reward {found.mean:.3f}{between} on {scored} tasks{rest}")
