"""`palestra check`: whether a job will work on this machine, and what a step costs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

from palestra.cli.options import add_command, add_set, overrides
from palestra.cli.own_process import end_soon
from palestra.errors import ConfigError, PalestraError
from palestra.extensions import FUNCTION, extensions, load_function
from palestra.terminal import TerminalConsole, one_line, say

if TYPE_CHECKING:
    from rich.table import Table

    from palestra.config import JobConfig
    from palestra.config.section import Mistake
    from palestra_inspect.checking import CheckFinding
    from palestra_inspect.trial import Trial

GIB = 2**30
MISTAKEN = 2  # exit code


def add_check(commands: Any) -> None:
    """Add the command `check`, with the same configuration options as `run`."""
    parser = add_command(
        commands,
        "check",
        _run,
        "say what of a job will not work on this machine, and what its first two steps take",
        "  palestra check job.toml\n"
        "  palestra check job.toml --no-trial --set rollout.group_size=16   # without loading the model\n\n"
        "exit code: 0 it should work, 1 something will not, 2 an error of usage or of the configuration",
    )
    parser.add_argument("config", metavar="JOB.TOML", type=Path, help="the job (docs/reference/configuration.md)")
    parser.add_argument("--no-trial", action="store_true", help="look at configuration and machine only; run no steps")
    parser.add_argument(
        "--trial-seconds", metavar="SECONDS", type=float, default=300.0, help="end the trial after so long"
    )
    parser.add_argument(
        "--rollout",
        metavar="FUNCTION",
        help=f"your function plays the episodes: {FUNCTION}; without it, the environment",
    )
    parser.add_argument("--json", action="store_true", help="print findings and what the trial took as one JSON object")
    add_set(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Check the job, run two steps unless that is impossible, print both results, and return the exit code."""
    from palestra.client.plain_values import checked_amount
    from palestra.runtime.starting_points import with_checkpoints
    from palestra_inspect.checking import CheckFinding, check_job

    rollout = None if arguments.rollout is None else load_function(arguments.rollout)
    limit_seconds = checked_amount("--trial-seconds", arguments.trial_seconds, above_zero=True, endless=True)
    config, mistakes, can_try = _read(arguments.config, overrides(arguments.set))
    wrong = [CheckFinding(key=".".join(mistake.place) or "job", text=mistake.text) for mistake in mistakes]
    for finding in wrong:
        say(f"palestra: {arguments.config}: {finding.text}", file=sys.stderr)
    if config is None:
        if arguments.json:
            say(json.dumps(_as_json(wrong, None), indent=2))
        return MISTAKEN
    chosen = config.environment
    if rollout is not None and (chosen.name is not None or chosen.url is not None or config.harness is not None):
        raise ConfigError(
            "--rollout: the job's own environment or harness plays its episodes; take that out, or --rollout"
        )
    config = with_checkpoints(config)
    end = _TrialEnd()
    with end.of_signals(), _progress(arguments.json) as report:
        report("looking at configuration and machine")
        findings, trial = check_job(config), None
        if can_try and not arguments.no_trial and not any(finding.fatal for finding in (*wrong, *findings)):
            tried, trial = _tried(config, limit_seconds, rollout, report, end)
            findings += tried
    if arguments.json:
        say(json.dumps(_as_json([*wrong, *findings], trial, config), indent=2))
    else:
        _show(config, findings, trial, works=not wrong)
    code = end.code or (MISTAKEN if wrong else int(any(finding.fatal for finding in findings)))
    end_soon(code)  # a trial that was left behind may still compute
    return code


def _read(path: Path, settings: dict[str, Any]) -> tuple[JobConfig | None, list[Mistake], bool]:
    """Return a job, its mistakes, and whether steps can be tried: without users, a run of another kind has none.

    Raises:
        ConfigError: the first mistake of such a run.
    """
    from palestra.cli.run import job_of
    from palestra.config import find_mistakes
    from palestra.config.loading import read_tables
    from palestra.extensions import KINDS

    tables = read_tables(path)
    if settings.get("kind", tables.get("kind")) in extensions(KINDS):
        return job_of(tables, settings, str(path))[0], [], False
    return *find_mistakes(path, settings), True


class _TrialEnd:
    """Ends a running trial at a signal as at its time limit, so that its measurements are still printed.

    Attributes:
        asked: gets an item at a signal. A queue, because a signal handler must not wait for the lock of an event.
        trying: whether the trial has begun. Until then there is nothing to print, and a signal exits immediately.
        code: exit code of the last signal; 0: no signal came.
    """

    def __init__(self) -> None:
        self.asked, self.trying, self.code = SimpleQueue[None](), False, 0

    @contextlib.contextmanager
    def of_signals(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP while the block is open: the first ends the trial, the second exits."""

        def leave(number: int, _frame: FrameType | None) -> None:
            again, self.code = self.code, 128 + number
            if again or not self.trying:
                sys.exit(self.code)
            self.asked.put(None)

        before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _tried(
    config: JobConfig, limit_seconds: float, rollout: Any, report: Callable[[str], None], end: _TrialEnd
) -> tuple[list[CheckFinding], Trial | None]:
    """Return the findings of two steps, and their measurements; None for a job that only serves its model."""
    from palestra_inspect.checking import CheckFinding
    from palestra_inspect.estimate import budget_findings, estimate_of
    from palestra_inspect.trial import try_steps

    end.trying, serves = True, config.kind == "inference"
    try:
        trial = try_steps(config, report, limit_seconds, rollout, end.asked)
    except PalestraError as error:
        return [CheckFinding(key=_key_in(str(error), config), text=one_line(str(error)))], None
    found = estimate_of(config, trial)
    findings = [] if found is None else list(budget_findings(config, found))
    if trial.stopped:
        what, key = ("loading it takes", "model") if serves else ("two steps take", "rollout.groups_per_step")
        text = f"{what} longer than {limit_seconds:g} s (--trial-seconds)"
        if end.code:
            text = f"the trial was ended by {signal.Signals(end.code - 128).name}"
        below = "" if serves else "; below is what was measured"
        findings.append(CheckFinding(key=key, text=text + below, fatal=False))
    if serves:
        return findings, None
    if not trial.rows:
        return findings, trial
    row = trial.rows[-1]
    if row["rollout/truncated_share"] == 1.0:
        text = "every reply of the trial reached max_tokens; an answer that is cut may never get a reward"
        findings.append(CheckFinding(key="sampling.max_tokens", text=text, fatal=False))
    if row["train/episodes_without_tokens"] >= row["train/episodes"] > 0:
        text = "the policy that is trained was not called in the trial; give the agent that is to learn no frozen role"
        findings.append(CheckFinding(key="roles", text=text))
    elif row.get("train/groups_zero_variance", 0.0) >= config.rollout.groups_per_step:
        text = (
            "all rewards of each group of the trial were equal, so that nothing was trained; the numbers below lack "
            "training, and where that stays so, nothing is learned"
        )
        findings.append(CheckFinding(key="rollout.group_size", text=text, fatal=False))
    return findings, trial


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
    """Yield a progress reporter: one changing line on a terminal, else lines on standard error."""
    console = TerminalConsole(stderr=True, quiet=quiet)
    if quiet or not console.is_terminal:
        yield lambda text: None if quiet else say(f"palestra: {text}", file=sys.stderr)
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text} …")


def _as_json(findings: Sequence[CheckFinding], trial: Trial | None, config: JobConfig | None = None) -> dict[str, Any]:
    from palestra_inspect.estimate import estimate_of

    whole = None if trial is None or config is None else estimate_of(config, trial)
    taken = None if trial is None else dataclasses.asdict(trial)
    if taken is not None:
        del taken["used"]  # a row for each episode
    return {
        "works": not any(finding.fatal for finding in findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "trial": taken,
        "estimate": None if whole is None else dataclasses.asdict(whole),
    }


def _show(config: JobConfig, findings: Sequence[CheckFinding], trial: Trial | None, works: bool) -> None:
    """Print a line for each finding, then the trial's measurements."""
    from rich.text import Text

    console = TerminalConsole()
    for finding in findings:
        word, style = ("will not work", "bold red") if finding.fatal else ("note", "yellow")
        found = Text.assemble((word, style), "  ", (finding.key, "bold"), f": {finding.text}")
        console.print(found, soft_wrap=True)
    if works and not any(finding.fatal for finding in findings):
        console.print("nothing stands against this job here", style="green")
    if trial is None:
        return
    console.print(Text.assemble("\ntwo steps of ", (config.name, "bold"), f", tried for {trial.seconds:.0f} s:"))
    console.print(_table(config, trial))
    if trial.stand_in:
        text = "your agent plays outside, so one question stood in for it; --rollout FILE:FUNCTION plays your own"
        console.print(f"- {text}", style="dim", soft_wrap=True)


def _table(config: JobConfig, trial: Trial) -> Table:
    """Return the table of a trial: quantity, value of each step, and a remark."""
    from rich.table import Table

    from palestra.models.device import available_bytes
    from palestra.types.progress import duration
    from palestra_inspect.estimate import estimate_of, evaluations
    from palestra_inspect.trial import plays_episodes

    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for number, row in enumerate(trial.rows, 1):
        parts = f"playing {row['time/rollout_seconds']:.1f} s, training {row['time/train_seconds']:.1f} s"
        table.add_row(f"step {number}", f"{row['time/step_seconds']:.1f} s", parts)
    played = "sampled" if plays_episodes(config) else "learned"
    table.add_row(
        f"tokens {played}", f"{trial.completion_tokens:,}", f"in {trial.calls:,} calls of {trial.episodes:,} episodes"
    )
    if (whole := estimate_of(config, trial)) is not None:
        row = trial.rows[-1]
        table.add_row("replies cut", f"{row['rollout/truncated_share']:.0%}", "at max_tokens")
        rest = (
            f"{config.steps:,} steps like the last one, and {evaluations(config) if trial.held_out else 0} evaluations"
        )
        table.add_row("time of the job", whole.hours.shown(lambda hours: duration(hours * 3600)), rest)
        table.add_row("tokens of the job", whole.tokens.shown(lambda tokens: f"{tokens:,.0f}"), "prompts and replies")
        if whole.money is not None:
            table.add_row("cost of the job", whole.money.shown(lambda money: f"{money:,.2f}"), "by [prices]")
    table.add_row("memory", f"{trial.memory_bytes / GIB:.1f} GiB", f"{available_bytes() / GIB:.1f} GiB are free")
    if trial.gpu_bytes:
        table.add_row("memory of the GPU", f"{trial.gpu_bytes / GIB:.1f} GiB", "")
    if trial.checkpoint_bytes:
        size = f"{trial.checkpoint_bytes / 2**20:,.1f} MiB"
        table.add_row("checkpoint", size, f"each; {config.checkpoint.keep} are kept")
    return table
