"""`palestra eval`: the mean reward of a model or a checkpoint, and the outcome of each task."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import ENVIRONMENT, REWARDS, add_command, add_set, load_environment, overrides
from palestra.errors import ConfigError
from palestra.extensions import FUNCTION, load_function
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.config import JobConfig
    from palestra.runtime.scores import Evaluation


def add_eval(commands: Any) -> None:
    """Add the command `eval`, which takes a model, tasks, and an environment or function."""
    parser = add_command(
        commands,
        "eval",
        _run,
        "score a model or a checkpoint on tasks, greedily",
        "  palestra eval runs/addition held_out.jsonl --rollout my_agent.py:rollout\n"
        "  palestra eval runs/gomoku/checkpoints/step-000030 --environment gomoku\n"
        "  palestra eval runs/duel --environment gomoku-duel --policy white --model black=tiny-random\n"
        "  palestra eval runs/duel --environment gomoku-duel --random opponent\n\n"
        "exit code: 0 every task was scored, 1 some were not, 2 an error, 130 stopped",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint's folder, a run's (the weights that validated best, or else its newest), or a model",
    )
    parser.add_argument(
        "tasks",
        metavar="TASKS",
        nargs="?",
        type=Path,
        help="JSONL file, one task a line; without it, tasks.validation of the configuration, or those of an "
        "environment that ships",
    )
    played = parser.add_mutually_exclusive_group(required=True)
    played.add_argument(
        "--rollout", metavar="FUNC", help=f"what plays: {FUNCTION}; or, without it, one of the next two"
    )
    played.add_argument("--environment", metavar="NAME", help=f"{ENVIRONMENT}; or, without it, --rollout or --reward")
    played.add_argument(
        "--reward",
        metavar="FUNC",
        help="what scores one answer to each task's `prompt`, (task, answer) -> number; without it, --rollout or "
        "--environment plays",
    )
    parser.add_argument(
        "--config",
        metavar="JOB.TOML",
        type=Path,
        help="a job, in TOML, whose settings hold; without it, those of the run that CHECKPOINT is of (prompt, limits, "
        "sampling), or else the defaults",
    )
    parser.add_argument("--policy", metavar="NAME", help="print the rewards of this policy; without it, of each")
    parser.add_argument(
        "--model",
        metavar="NAME=MODEL",
        action="append",
        default=[],
        help="play a policy with another model or checkpoint, such as an opponent; may be given several times",
    )
    parser.add_argument(
        "--random",
        metavar="AGENT",
        action="append",
        default=[],
        help="let an agent draw its legal moves in place of its policy; may be given several times",
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


def _run(arguments: argparse.Namespace) -> int:
    """Score the model, print the outcome of each task, and return the exit code documented in the help."""
    from palestra.client.plain_values import checked_count
    from palestra.runtime.arguments import Play
    from palestra.runtime.evaluating import evaluate_until_stopped
    from palestra.runtime.starting_points import run_of

    environment = load_environment(arguments.environment)
    config = _config(arguments, environment if isinstance(environment, str) else None)
    checked_count("--concurrency", arguments.concurrency)
    if arguments.tasks is None and config.tasks.validation is None and not isinstance(environment, str):
        raise ConfigError("name a file of tasks (TASKS); only with an environment that ships there need be none")
    play = Play(
        rollout=None if arguments.rollout is None else load_function(arguments.rollout),
        environment=environment,
        reward=None if arguments.reward is None else load_function(arguments.reward, REWARDS),
    )
    found, _ = evaluate_until_stopped(
        play,
        () if arguments.tasks is None else arguments.tasks,
        config,
        random=arguments.random,
        concurrency=arguments.concurrency,
        quiet=arguments.quiet,
    )
    if not arguments.quiet and arguments.config is None and run_of(arguments.checkpoint) is None:
        say("settings were the defaults and --set; --config RUN/config.toml takes those of a run", file=sys.stderr)
    if arguments.policy is not None and found.policies:
        found = found.of(arguments.policy)
    _show(found, arguments.quiet)
    if not found.complete:
        return 130
    return 0 if found.scored == len(found.outcomes) else 1


def _config(arguments: argparse.Namespace, environment: str | None) -> JobConfig:
    """Return the evaluation's configuration, with models from the arguments, and an environment that ships."""
    from palestra.config import load_config, name_settings, parse_config
    from palestra.runtime.arguments import with_harness_of_run
    from palestra.runtime.starting_points import config_of_run, with_checkpoints, with_models

    settings = overrides(arguments.set)
    if arguments.config is not None:
        config = load_config(arguments.config, settings)
    elif (of_run := config_of_run(arguments.checkpoint, environment, settings)) is not None:
        config = of_run
        if not arguments.quiet:
            say(f"as in the run: {name_settings(config) or 'its settings are the defaults'}", file=sys.stderr)
    else:
        config = parse_config({}, settings)
    config = with_harness_of_run(config, arguments.reward, arguments.rollout, arguments.environment)
    played = config.environment.model_copy(update={"name": environment})
    config = config.model_copy(update={"environment": played})
    config = with_checkpoints(with_models(with_models(config, arguments.checkpoint), _models(arguments.model)))
    if arguments.policy is not None and arguments.policy not in config.trained_policies:
        known = " and ".join(map(repr, config.trained_policies))
        raise ConfigError(f"--policy {arguments.policy}: {known} would be scored, and no other policy")
    return config.model_copy(update={"run_dir": arguments.run_dir, "name": "eval"})


def _models(given: Sequence[str]) -> dict[str, str]:
    """Return the models of `--model NAME=MODEL` by the policy's name."""
    found = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not (name and equals and model):
            raise ConfigError(f"--model {text}: write NAME=MODEL, as in --model black=tiny-random")
        found[name] = model
    return found


def _show(found: Evaluation, quiet: bool) -> None:
    """Print a line for each task, unless `quiet`, and each policy's mean reward with its interval."""
    for outcome in () if quiet else found.outcomes:
        rewards = [f"{name} {reward:g}" for name, reward in outcome.by_policy.items()]
        if outcome.reward is not None:
            rewards.append(f"{outcome.reward:g}")
        said = ", ".join(rewards) or f"not scored: {outcome.reason or 'not played'}"
        say(f"{outcome.task_id}  {' '.join(said.split())}")
    if not found.scored:
        say(f"none of {len(found.outcomes)} tasks was scored")
        return
    for name in found.policies:
        _show_mean(found.of(name), f"{name}: ")
    if not found.policies:
        _show_mean(found, "")


def _show_mean(found: Evaluation, whose: str) -> None:
    """Print the mean reward of one policy."""
    scored, total = found.scored, len(found.outcomes)
    if found.mean is None:
        say(f"{whose}none of {total} tasks was scored")
        return
    between = "" if found.interval is None else " (95 % interval {:.3f} to {:.3f})".format(*found.interval)
    rest = "" if scored == total else f"; {total - scored} of {total} were not scored"
    rest += f"; {found.replayed}" if found.replays else ""
    say(f"{whose}mean reward {found.mean:.3f}{between} on {scored} tasks{rest}")
