"""Terminal output of a running job: a line per step and the remaining time, or the number of answered calls."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from palestra.config import JobConfig
from palestra.engine.driver import driver_of
from palestra.runtime.watchdog import STALLED_SECONDS, PlainLines, describe_situation, situation_of
from palestra.terminal import TerminalConsole, one_line
from palestra.trainer.checkpoint import FOLDER_OF_REWARDS, best_weights
from palestra.trainer.quarantine import read_quarantine
from palestra.types.metrics import of_policies, win_rate_words
from palestra.types.progress import ENDLESS, of_steps
from palestra.types.states import LOSSES, STUCK, TurnState

if TYPE_CHECKING:
    from palestra.runtime.local_job import LocalJob

REFRESH_SECONDS = 0.25
LOADING = "loading the model"
MOST_HOLDERS = 10_000  # the most held episodes that are counted by worker
# Kinds of events whose text is for whoever waits.
_SAID = ("tasks_grouped", "tasks_left_out", "judge_doubtful", "version_quarantined", "live_serving", "gate_returned")
SHOWN_STATES = (TurnState.PENDING, TurnState.GENERATING, TurnState.INTERACTING)


class Console:
    """Shows a job on a terminal, or as plain lines if the output is not a terminal."""

    def __init__(
        self, config: JobConfig, quiet: bool = False, file: IO[str] | None = None, notes: Sequence[str] = ()
    ) -> None:
        self._notes = notes
        self._config, self._beginning = config, beginning(config)
        self._out = TerminalConsole(quiet=quiet, soft_wrap=True, file=file)
        self._bars = Progress(
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("steps" if config.token_budget is None else "sampled tokens"),
            console=self._out,
            auto_refresh=False,
        )
        self._bar = self._bars.add_task(
            "", total=config.token_budget or (config.steps if config.steps < ENDLESS else None)
        )
        shown = not quiet and file is None and sys.stdout.isatty()
        self._live = Live(console=self._out, transient=True, auto_refresh=False) if shown else None
        self._plain = None if quiet or shown else PlainLines(time.monotonic())
        self._moved: tuple[tuple[object, ...], float] = (
            (),
            time.monotonic(),
        )  # the last change that was seen, and when
        self._job: LocalJob | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="palestra-console", daemon=True)

    def __enter__(self) -> Self:
        for note in self._notes:
            self._out.print(note)
        self._out.print(Text.assemble((self._config.name, "bold"), f": {self._headline()}{self._target()}"))
        if self._live is not None:
            self._live.start()
        if self._live is not None or self._plain is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def ready(self, job: LocalJob) -> None:
        """Print the URL of the job's data plane, which listens now."""
        self._job = job
        key = job.opened.folder.path / "api_key"
        self._say(f"data plane at {job.url}, its key in {key}; the page is {job.url}/dashboard")

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Print a line for an event of the job, if it is of interest."""
        if kind == "numerics":
            self._say_numerics(data)
        elif kind == "running" and data["step"]:
            self._say(f"resumed after step {data['step']}")
        elif kind == "evaluated" and data["step"] == 0 and of_policies(data, "validation/reward_mean"):
            self._say(f"before training: {_validation(data)}")
        elif kind == "step" and data["step"]:
            self._say(self._step_line(data))
        elif kind == "warning":
            self._say(_warning(data["text"]))
        elif kind in (*LOSSES, STUCK, *_SAID):
            self._say(one_line(data["text"]))

    def finished(self, state: str, checkpoints: Mapping[str, Path]) -> None:
        """Print where the results are, or how to continue, when the job is over or was stopped."""
        folder = self._config.folder
        if state != "completed":
            self._out.print(f"stopped; go on with --resume, in a script with resume=True (the run is in {folder})")
            return
        self._out.print(Text.assemble(("\ndone", "bold"), f": {folder / 'curve.png'}, {folder / 'metrics.jsonl'}"))
        for policy, path in checkpoints.items():
            whose = f"{policy}: " if len(checkpoints) > 1 else ""
            if self._config.algorithm_of(policy).trains_policy:
                self._out.print(f"model:  {whose}{path}  (load it with transformers)")
            else:
                self._out.print(f"model:  {path / FOLDER_OF_REWARDS}  (a reward model: name it in judge.path)")
            held = read_quarantine(path.parent)
            if held is not None:
                self._out.print(f"held:   versions from step {held.since} on; export takes them with --force")
            if (best := best_weights(path.parent)) is not None and not (held and held.holds(best[1])):
                self._out.print(f"best:   {best[0]}  after step {best[1]}; export and eval take it")
        run = shlex.quote(str(folder))
        chosen = f" --policy {shlex.quote(self._config.players.default)}" if self._config.trains_several else ""
        self._out.print(
            "next:   "
            f"palestra dashboard {run}   the run in the browser\n"
            f"        palestra episodes {run}   what was played, token by token\n"
            f"        palestra export {run} my-model{chosen}   the model as a folder"
        )

    def _step_line(self, row: dict[str, float]) -> Text:
        budget, steps = self._config.token_budget, self._config.steps
        if budget is None:
            text = f"step {of_steps(int(row['step']), steps, len(str(steps)))}   "
        else:
            text = (
                f"step {int(row['step'])}   {int(row['rollout/sampled_tokens']):>{len(f'{budget:,}')},}/{budget:,}   "
            )
        # Of several trained policies each has a reward; the name of the only one says whose it is beside frozen ones.
        sole = self._config.players.default if len(self._config.policies) > 1 else ""
        rewards = of_policies(row, "train/reward_mean").items()
        if (right := row.get("train/pair_accuracy")) is None:
            text += "   ".join(f"{policy or sole} reward {mean:5.2f}".lstrip() for policy, mean in rewards)
        else:  # the rewards of a pair only say which reply was chosen
            text += f"pairs {right:4.0%} right"
        rate = row.get("rollout/tokens_per_second")
        text += f"   {'-' if rate is None else f'{rate:.0f}':>6} tok/s   {row['time/step_seconds']:5.1f} s"
        if of_policies(row, "validation/reward_mean"):
            return Text.assemble(f"{text}   ", (_validation(row), "bold"))
        return Text(text)

    def _headline(self) -> str:
        budget, steps = self._config.token_budget, self._config.steps
        until = f"{steps} step{'s' * (steps != 1)}" if steps < ENDLESS else "until it is stopped"
        if budget is not None:
            until = f"{budget:,} sampled tokens"
        return f"{models_of(self._config)}, {until}; tok/s: prompts and replies"

    def _say(self, text: str | Text) -> None:
        """Print a permanent line."""
        self._out.print(text)
        if self._plain is not None:
            self._plain.wrote(time.monotonic())

    def _say_numerics(self, data: dict[str, Any]) -> None:
        self._say(one_line(data["text"]))
        if data["problem"]:
            self._say(_warning(f"layers are computed without compiled functions, and slower: {data['problem']}"))

    def _target(self) -> str:
        return f" → {self._config.folder}"

    def _refresh(self) -> None:
        loading_said = False  # a line that is repeated says that a job stands still, which one that loads does not
        while not self._stop.wait(REFRESH_SECONDS):
            job = self._job
            if self._live is not None:
                self._live.update(Group(*self._now(job)), refresh=True)
            elif self._plain is not None and not (job is None and loading_said):
                news, text = self._situation(job)
                if text and self._plain.due(news, time.monotonic()):
                    self._out.print(text)
                    loading_said = job is None

    def _situation(self, job: LocalJob | None) -> tuple[object, str]:
        """Return a value that changes with news, and the job's situation as a line, which may be empty."""
        if job is None:
            return self._beginning, self._beginning
        now, at = situation_of(job), time.monotonic()
        if now.moved != self._moved[0]:
            self._moved = now.moved, at
        still = at - self._moved[1]
        holders = job.plane.store.leases.holders(MOST_HOLDERS) if still >= STALLED_SECONDS else ()
        return (now.moved, now.waits_for_workers, still >= STALLED_SECONDS), describe_situation(now, still, holders)

    def _now(self, job: LocalJob | None) -> Sequence[RenderableType]:
        """Return the live output below the lines; `job` is None while the model is loading."""
        lines = [self._beginning]
        if job is not None:
            done = job.progress.step if self._config.token_budget is None else job.progress.sampled_tokens
            self._bars.update(self._bar, completed=done)
            lines = [self._situation(job)[1], *self._going_on(job)]
        return self._bars, *(Text(line, style="dim", no_wrap=False, overflow="fold") for line in lines)

    def _going_on(self, job: LocalJob) -> list[str]:
        """Return lines about current episodes, calls, tokens and rewards, and where the time is spent."""
        context, store, episodes = job.plane.sessions.context, job.plane.store, job.progress.episodes
        parts = (
            []
            if episodes is None
            else [
                f"episodes {episodes.completed:,} done, {episodes.claimed:,} in flight, {episodes.registered:,} waiting"
            ]
        )
        parts += [f"calls {job.plane.sessions.in_flight:,} in flight", f"{context.rate.per_second:,.0f} tok/s"]
        if recent := job.plane.recent_rewards:
            means = ", ".join(f"{policy} {reward:.2f}".lstrip() for policy, reward in recent.items())
            parts.append(f"reward {means} (last {len(store.episodes.recent_rewards)})")
        found = context.times.seconds
        seconds = {state: found.get(state, 0.0) for state in SHOWN_STATES}
        whole = sum(seconds.values())
        shares = [f"{state.value} {spent / whole:.0%}" for state, spent in seconds.items()] if whole else []
        stale, trained = job.progress.staleness, sum(job.progress.staleness.values())
        if any(stale):  # some tokens are of an older version
            ages = ", ".join(f"{age}: {tokens / trained:.0%}" for age, tokens in sorted(stale.items()))
            shares.append(f"staleness {ages}")
        return ["   ".join(parts), "   ".join(shares)]


def _warning(text: str) -> Text:
    return Text.assemble(("warning:", "yellow"), f" {one_line(text)}")


def models_of(config: JobConfig) -> str:
    """Describe the models of a job, with their policies' names if there are several."""
    if len(config.policies) == 1:
        return next(iter(config.policies.values())).model
    return ", ".join(
        f"{name}: {policy.model}{' (frozen)' if policy.frozen else ''}" for name, policy in config.policies.items()
    )


def _validation(row: dict[str, Any]) -> str:
    scored, total = int(row["validation/scored"]), int(row["validation/total"])
    of = f"{total}" if scored == total else f"{scored} of {total}"
    means = of_policies(row, "validation/reward_mean").items()
    said = ", ".join(f"{policy} {mean:.2f}".lstrip() for policy, mean in means)
    cut = int(row.get("validation/replies_cut", 0))
    won = win_rate_words(row)
    return f"validation {said} on {of} tasks{won and f', {won}'}" + (
        f", {cut} of {int(row['validation/replies'])} replies cut" if cut else ""
    )


def console_of(config: JobConfig, file: IO[str] | None = None) -> Console:
    """Return the console for this kind of job; `file` replaces standard output."""
    return (ServingConsole if config.kind == "inference" else Console)(config, file=file)


class ServingConsole(Console):
    """Shows an inference job on a terminal, or as plain lines."""

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Print the totals when the job has ended, and losses; other events are not shown."""
        if kind == "numerics":
            self._say_numerics(data)
        elif kind == "served":
            tokens = data["prompt_tokens"] + data["completion_tokens"]
            self._out.print(f"served {data['calls']:,} calls, {tokens:,} tokens")
        elif kind in LOSSES:
            self._say(one_line(data["text"]))

    def finished(self, state: str, checkpoints: Mapping[str, Path]) -> None:
        """Print how to serve the model again."""
        folder = self._config.folder
        self._out.print(f"stopped; the same command serves it again under the same key (the run is in {folder})")

    def _headline(self) -> str:
        return f"serving {models_of(self._config)}"

    def _situation(self, job: LocalJob | None) -> tuple[object, str]:
        return super()._situation(None) if job is None else ("", "")  # plain lines about calls would only fill a log

    def _now(self, job: LocalJob | None) -> Sequence[RenderableType]:
        if job is None:
            return (Text(self._beginning, style="dim"),)
        context = job.plane.sessions.context
        counts = context.counts
        tokens = counts["prompt_tokens"] + counts["completion_tokens"]
        parts = [
            f"calls {counts['calls']:,} answered, {job.plane.sessions.in_flight:,} in flight",
            f"{tokens:,} tokens",
            f"{context.rate.per_second:,.0f} tok/s",
        ]
        return Text(job.progress.phase), Text("   ".join(parts), style="dim")


def beginning(config: JobConfig) -> str:
    """Describe what a job does before it listens: servers take half a minute or more to start, and
    their logs say why.
    """
    found = [driver_of(table).beginning(config, table) for table in config.engine.tables]
    return "; ".join(text for text in found if text is not None) or LOADING
