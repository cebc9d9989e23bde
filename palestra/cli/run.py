"""`palestra run`, `train` and `demo`: one job on this machine, until its steps are done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import REWARDS, add_command, add_set, overrides
from palestra.cli.own_process import end_soon
from palestra.errors import NotFound
from palestra.extensions import FUNCTION, KINDS, extensions, load_extension, load_function
from palestra.terminal import say

if TYPE_CHECKING:
    from palestra.config import JobConfig
    from palestra.runtime.console import Console
    from palestra.runtime.terms import JobTerms
    from palestra.types.progress import JobProgress


def add_run(commands: Any) -> None:
    """Add the command `run`, which takes a job's configuration."""
    parser = add_command(
        commands,
        "run",
        _run,
        "run one job on this machine, with its data plane open, until its steps are done; or serve its model",
        "  palestra run job.toml\n  palestra run job.toml --resume\n"
        "  palestra run job.toml --set kind=inference   # until Ctrl-C\n\n"
        "then, in another terminal, any script with palestra.Client; the key is in RUN/api_key",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("config", metavar="JOB.TOML", type=Path, help="the job (docs/reference/configuration.md)")
    parser.add_argument("--resume", action="store_true", help="continue the run in the job's folder")
    add_set(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Serve the job, and train, until its steps are done or Ctrl-C; return 130 after a signal."""
    from palestra.config.loading import read_tables
    from palestra.http.server import run_on_uvloop
    from palestra.models.device import tune_malloc
    from palestra.runtime.console import console_of
    from palestra.runtime.run_dir import resolve_run_dir
    from palestra.runtime.starting_points import newest_checkpoints, with_checkpoints

    config, terms = job_of(read_tables(arguments.config), overrides(arguments.set), str(arguments.config))
    config = with_checkpoints(config)
    config = resolve_run_dir(config, arguments.resume, lambda text: say(f"palestra: {text}", file=sys.stderr))
    if config.engine.has_model:
        tune_malloc()  # before the console starts the first thread
    # The console is shown from here on, because loading the model takes seconds in which nothing else is written.
    console = console_of(config)
    with console:
        progress = run_on_uvloop(_served(config, console, terms))
        console.finished(progress.state.value, newest_checkpoints(config))
    return 0 if progress.over else 130


def job_of(tables: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> tuple[JobConfig, JobTerms]:
    """Return the job of a configuration, and how it is started; its `kind` may be one that a package brings.
    `settings`: by dotted key, they replace values of `tables`.
    """
    from palestra.config import parse_config
    from palestra.runtime.terms import USUAL

    kind = settings.get("kind", tables.get("kind"))
    if isinstance(kind, str) and (point := extensions(KINDS).get(kind)) is not None:
        made: tuple[JobConfig, JobTerms] = load_extension(point)(tables, settings, source)
        return made
    return parse_config(tables, settings, source), USUAL


async def _served(config: JobConfig, console: Console, terms: JobTerms) -> JobProgress:
    """Serve the job; work that its environment leaves behind does not delay the end of the process."""
    from palestra.runtime.local import serve

    try:
        return await serve(config, console.report, console.ready, terms)
    finally:
        end_soon()


def add_demo(commands: Any) -> None:
    """Add the command `demo`, with some options of `recipes/addition.py`."""
    parser = add_command(
        commands,
        "demo",
        _demonstrate,
        "train SmolLM2-135M to add, on this machine, in three to twelve minutes",
        "  palestra demo --steps 10",
    )
    parser.set_defaults(trains=True)
    parser.add_argument("--steps", metavar="STEPS", type=int, default=36, help="training steps")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="number from which all sampling and all orders follow"
    )
    parser.add_argument("--resume", action="store_true", help="continue the newest run of the demo")


def _demonstrate(arguments: argparse.Namespace) -> None:
    """Run `recipes/addition.py` of the checkout or the installed package."""
    from palestra.runtime import training  # noqa: F401 - where the client alone is installed, says what to install

    here = Path(__file__).parent
    for folder in (here.parents[1] / "recipes", here / "recipes"):  # a checkout; an installed package
        if (folder / "addition.py").is_file():
            demonstrate = load_function(f"{folder / 'addition.py'}:demonstrate")
            demonstrate(arguments.steps, arguments.seed, arguments.resume)
            return
    raise NotFound("recipes/addition.py is not there; install Palestra again")


def add_train(commands: Any) -> None:
    """Add the command `train`, which takes a rollout function and its tasks."""
    parser = add_command(
        commands,
        "train",
        _train,
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


def _train(arguments: argparse.Namespace) -> int:
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
    result, _ = train_until_stopped(play, (), config, concurrency=arguments.concurrency, resume=arguments.resume)
    return 0 if result.state == "completed" else 130
