"""`palestra check`: whether a job will work on this machine, and what a step of it takes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_set, command, overrides
from palestra.errors import PalestraError
from palestra.terminal import TerminalConsole, one_line, say

if TYPE_CHECKING:
    from rich.table import Table

    from palestra.config import JobConfig
    from palestra.runtime.checking import Finding
    from palestra.runtime.trial import Estimate

GIB = 2**30
MISTAKEN = 2  # exit code
NEARLY = 0.9  # of the free memory; above, a job may still be ended by the kernel


def add(commands: Any) -> None:
    """Add the command `check`, which takes a job's configuration as `run` does."""
    parser = command(
        commands,
        "check",
        run,
        "say what of a job will not work on this machine, and estimate memory, tokens and seconds of a step",
        "  palestra check job.toml\n"
        "  palestra check job.toml --no-trial --set rollout.group_size=16   # without loading the model\n\n"
        "exit code: 0 it should work, 1 something will not, 2 an error of usage or of the configuration",
    )
    parser.add_argument("config", metavar="JOB.TOML", type=Path, help="the job, in TOML (docs/configuration.md)")
    parser.add_argument(
        "--no-trial", action="store_true", help="look at configuration and machine only; run no steps, estimate nothing"
    )
    parser.add_argument(
        "--trial-seconds", metavar="SECONDS", type=float, default=300.0, help="give the trial up after so long"
    )
    parser.add_argument("--json", action="store_true", help="print findings and estimate as one JSON object")
    add_set(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the job, try it for two steps where nothing stands against it, print both, and return the exit code."""
    from palestra.client.arguments import checked_amount
    from palestra.config import find_mistakes
    from palestra.runtime.checking import Finding, check_job
    from palestra.runtime.memory import available_bytes
    from palestra.runtime.starting_points import with_checkpoints

    limit_seconds = checked_amount("--trial-seconds", arguments.trial_seconds, above_zero=True, endless=True)
    config, mistakes = find_mistakes(arguments.config, overrides(arguments.set))
    wrong = [Finding(key=".".join(mistake.place) or "job", text=mistake.text) for mistake in mistakes]
    for finding in wrong:
        say(f"palestra: {arguments.config}: {finding.text}", file=sys.stderr)
    if config is None:
        if arguments.json:
            say(json.dumps(_as_json(wrong, None), indent=2))
        return MISTAKEN
    config = with_checkpoints(config)
    with _stoppable(), _progress(arguments.json) as report:
        report("looking at configuration and machine")
        # Before a model is loaded: what the trial itself takes is a part of what the job will take.
        free, findings, estimate = available_bytes(), check_job(config), None
        if not arguments.no_trial and not any(finding.fatal for finding in (*wrong, *findings)):
            tried, estimate = _tried(config, limit_seconds, free, report)
            findings += tried
    if arguments.json:
        say(json.dumps(_as_json([*wrong, *findings], estimate), indent=2))
    else:
        _show(config, findings, estimate, free, works=not wrong)
    if wrong:
        return MISTAKEN
    return 1 if any(finding.fatal for finding in findings) else 0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit, so that the folder of the trial is removed as after an error."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tried(
    config: JobConfig, limit_seconds: float, free: int, report: Callable[[str], None]
) -> tuple[list[Finding], Estimate | None]:
    """Return what a trial finds, and what a step takes; None where no step ended."""
    from palestra.runtime.checking import Finding
    from palestra.runtime.trial import estimate_step, load_model

    try:
        if config.kind == "inference":
            load_model(config, report)
            return [], None
        estimate = estimate_step(config, report, limit_seconds)
    except TimeoutError:
        text = f"two short steps take longer than {limit_seconds:g} s; a smaller model, or fewer and shorter episodes?"
        return [Finding(key="rollout.groups_per_step", text=text, fatal=False)], None
    except PalestraError as error:
        return [Finding(key=_key_in(str(error), config), text=one_line(str(error)))], None
    findings = []
    if estimate.memory_bytes > NEARLY * free:
        findings.append(
            Finding(
                key="trainer.micro_batch_tokens",
                text=f"the job takes about {estimate.memory_bytes / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; "
                "lower trainer.micro_batch_tokens, sampling.max_tokens or engine.cache_gib",
                fatal=estimate.memory_bytes > free,
            )
        )
    if estimate.truncated_share == 1.0:
        text = "every reply of the trial reached max_tokens; an answer that is cut may never get a reward"
        findings.append(Finding(key="sampling.max_tokens", text=text, fatal=False))
    if estimate.silent_share == 1.0:
        text = "the policy that is trained was not called in the trial; give the agent that is to learn no frozen role"
        findings.append(Finding(key="roles", text=text))
    elif estimate.teaching_share == 0.0:
        text = "all rewards of each group of the trial were equal; where that stays so, nothing is learned"
        findings.append(Finding(key="rollout.group_size", text=text, fatal=False))
    return findings, estimate


def _key_in(text: str, config: JobConfig) -> str:
    """Return the key that an error of a start is about: the one that its text names, else the model's."""
    policy = f"policies.{config.players.default}"
    named = {
        "max_context": f"{policy}.max_context",
        "engine.cache_gib": "engine.cache_gib",
        "server.port": "server.port",
        "algorithm.from_run": "algorithm.from_run",
        "is no conversation": "tasks.train",
        "algorithm.teacher_server": "algorithm.teacher_server",
        "the teacher": "algorithm.teacher",
        "algorithm": "algorithm.name",
        "environment": "environment",
    }
    return next((key for word, key in named.items() if word in text), f"{policy}.model")


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows how far the command is: one line that changes on a terminal, else lines on standard error."""
    console = TerminalConsole(stderr=True, quiet=quiet, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda text: None if quiet else say(f"palestra: {text}", file=sys.stderr)
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text} …")


def _as_json(findings: Sequence[Finding], estimate: Estimate | None) -> dict[str, Any]:
    return {
        "works": not any(finding.fatal for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "estimate": None if estimate is None else dataclasses.asdict(estimate),
    }


def _show(config: JobConfig, findings: Sequence[Finding], estimate: Estimate | None, free: int, works: bool) -> None:
    """Print a line for each finding, then the table of the estimate and what it assumes."""
    console = TerminalConsole(highlight=False)
    for finding in findings:
        word, style = ("will not work", "bold red") if finding.fatal else ("note", "yellow")
        console.print(f"[{style}]{word}[/]  [bold]{finding.key}[/]: ", end="")
        console.print(finding.text, markup=False, soft_wrap=True)
    if works and not any(finding.fatal for finding in findings):
        console.print("[green]nothing stands against this job here[/]")
    if estimate is None:
        return
    console.print(f"\nestimate for a step of [bold]{config.name}[/], from a trial of {estimate.trial_seconds:.0f} s:")
    console.print(_table(config, estimate, free))
    for assumption in estimate.assumptions:
        console.print(f"- {assumption}", style="dim", markup=False, soft_wrap=True)


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _table(config: JobConfig, estimate: Estimate, free: int) -> Table:
    """Return the table of an estimate: what, how much, and a remark."""
    from rich.table import Table

    from palestra.runtime.trial_play import plays_episodes
    from palestra.types.progress import duration

    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    least, most = estimate.step_seconds, estimate.most_step_seconds
    training = _span(f"{estimate.train_seconds:.1f} s", f"{estimate.most_train_seconds:.1f} s")
    table.add_row(
        "time of a step",
        _span(f"{least:.1f} s", f"{most:.1f} s"),
        f"playing {estimate.rollout_seconds:.1f} s, training {training}",
    )
    steps = config.steps
    if config.token_budget is not None and estimate.completion_tokens:
        steps = min(steps, math.ceil(config.token_budget / estimate.completion_tokens))
    job = _span(duration(least * steps), duration(most * steps))
    table.add_row("time of the job", job, f"{steps} steps, without evaluations")
    tokens = "tokens sampled" if plays_episodes(config) else "tokens learned"
    table.add_row(tokens, f"{estimate.completion_tokens:,}", f"in {estimate.calls:,} calls a step")
    table.add_row("tokens of prompts", f"{estimate.prompt_tokens:,}", f"{estimate.episodes:,} episodes a step")
    table.add_row("memory", f"{estimate.memory_bytes / GIB:.1f} GiB", f"of {free / GIB:.1f} GiB that are free")
    if estimate.gpu_bytes:
        table.add_row("memory of the GPU", f"{estimate.gpu_bytes / GIB:.1f} GiB", "")
    kept = f"each; {config.checkpoint.keep} are kept"
    table.add_row("checkpoint", f"{estimate.checkpoint_bytes / 2**20:,.1f} MiB", kept)
    return table
