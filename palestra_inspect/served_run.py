"""A run that is at a server, read over HTTP as its page is: no folder, no database, no torch."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nlargest
from typing import get_args
from urllib.parse import quote

from rich.text import Text

from palestra.cli.options import JOB_ID
from palestra.client.exchange import Settings
from palestra.dashboard.answers import (
    CallAnswer,
    CostsAnswer,
    EpisodeDetail,
    EpisodesAnswer,
    ForkAnswer,
    MessageAnswer,
    MetricsAnswer,
    RunAnswer,
    RunsAnswer,
    SlowCallsAnswer,
)
from palestra.errors import ConfigError
from palestra.terminal import TerminalConsole, say
from palestra.types.records import EpisodeKind
from palestra.types.states import EpisodeState
from palestra.types.summaries import EpisodeSummary
from palestra_control.control import ControlClient
from palestra_inspect.episode_list import LISTED, as_json, episode_lines, newest_note

RUNS = "/dashboard/api/runs"
RETRY_SECONDS = 5.0  # a person waits for the answer
PAGE = 200  # episodes of an answer, the most that a server gives


@contextmanager
def served_run(source: str, control: str | None) -> Iterator[ServedRun]:
    """Open a run that is at a server.

    Args:
        source: a job of a service by its id; or the URL of a job's own server, whose key is in PALESTRA_API_KEY.
        control: URL of the service; None: PALESTRA_URL. Its key is in PALESTRA_KEY.
    """
    if JOB_ID.fullmatch(source) is not None:
        with ControlClient(control, retry_seconds=RETRY_SECONDS) as service:
            yield ServedRun(service, source)
        return
    found = Settings(source, None, None, RETRY_SECONDS)
    with ControlClient(found.url, found.key, retry_seconds=RETRY_SECONDS) as server:
        runs: RunsAnswer = server.request("GET", RUNS, RunsAnswer)
        if len(runs.runs) != 1:
            raise ConfigError(f"{source} has {len(runs.runs)} runs; of a service, name a job, and --control {source}")
        yield ServedRun(server, runs.runs[0].run)


class ServedRun:
    """One run of a server that has its page: a job's own, or a service."""

    def __init__(self, server: ControlClient, name: str) -> None:
        """Create without asking the server.

        Args:
            name: of the run at the server; at a service, the id of its job.
        """
        self.name, self._server, self._path = name, server, f"{RUNS}/{quote(name, safe='')}"

    def described(self) -> RunAnswer:
        """Return how far the run is."""
        found: RunAnswer = self._server.request("GET", self._path, RunAnswer)
        return found

    def metrics(self, after: int = -1) -> MetricsAnswer:
        """Return the metrics of the steps after `after`."""
        found: MetricsAnswer = self._server.request(
            "GET", f"{self._path}/metrics", MetricsAnswer, params={"after": after}
        )
        return found

    def costs(self) -> CostsAnswer:
        """Return what the run has cost so far."""
        found: CostsAnswer = self._server.request("GET", f"{self._path}/costs", CostsAnswer)
        return found

    def slow_calls(self) -> SlowCallsAnswer:
        """Return the slowest of the newest calls."""
        found: SlowCallsAnswer = self._server.request("GET", f"{self._path}/calls", SlowCallsAnswer)
        return found

    def episode(self, episode_id: str) -> EpisodeDetail:
        """Return an episode with its calls."""
        path = f"{self._path}/episodes/{quote(episode_id, safe='')}"
        found: EpisodeDetail = self._server.request("GET", path, EpisodeDetail)
        return found

    def pages(self, kind: str, state: str | None, most: int | None = None) -> Iterator[EpisodesAnswer]:
        """Yield episodes of one kind, newest first, in pages.

        Args:
            state: None: all.
            most: number of episodes; None: all.
        """
        query = {"kind": kind} | ({} if state is None else {"state": state})
        left = most
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            page: EpisodesAnswer = self._server.request(
                "GET", f"{self._path}/episodes", EpisodesAnswer, params=query | {"limit": str(size)}
            )
            yield page
            if page.following is None:
                return
            query["before"] = page.following
            left = None if left is None else left - len(page.episodes)

    def newest(self, kind: str | None, state: str | None, most: int) -> tuple[list[EpisodeSummary], dict[str, int]]:
        """Return the episodes that were claimed last, in canonical order, and the steps that trained them, by id."""
        kinds = get_args(EpisodeKind) if kind is None else (kind,)
        states = tuple(EpisodeState) if state is None else (state,)
        pages = [page for one in kinds for of in states for page in self.pages(one, of, most)]
        lines = [line for page in pages for line in page.episodes]
        last = nlargest(most, lines, key=lambda one: (one.claimed_at or 0.0, one.group_index, one.sample_index))
        last.sort(key=lambda one: (one.kind, one.group_index, one.sample_index))
        steps = {name: step for page in pages for name, step in page.trained_in.items()}
        return last, {one.episode_id: steps[one.episode_id] for one in last if one.episode_id in steps}


def show_served(run: ServedRun, arguments: argparse.Namespace) -> None:
    """Print the requested list or episode."""
    if arguments.unfold:
        raise ConfigError("--unfold needs the run's folder; the page of the server shows tokens")
    if arguments.json:
        _write_json(run, arguments)
        return
    console = TerminalConsole(soft_wrap=True)
    if arguments.episode is not None:
        for text in episode_texts(run.episode(arguments.episode)):
            console.print(text)
        return
    limit = LISTED if arguments.limit is None else arguments.limit
    lines, trained = run.newest(arguments.kind, arguments.state, limit)
    for line in episode_lines(lines, time.time(), console.width if console.is_terminal else None, trained):
        console.print(line)
    if len(lines) == limit:
        console.print(newest_note(limit))


def _write_json(run: ServedRun, arguments: argparse.Namespace) -> None:
    """Write a line of JSON for each episode, or one for the requested episode with its calls."""
    if arguments.episode is not None:
        say(as_json(run.episode(arguments.episode)))
    elif arguments.limit is None and not sys.stdout.isatty():
        for kind in get_args(EpisodeKind) if arguments.kind is None else (arguments.kind,):
            for page in run.pages(kind, arguments.state):
                for line in page.episodes:
                    say(as_json(line))
    else:
        limit = LISTED if arguments.limit is None else arguments.limit
        for line in run.newest(arguments.kind, arguments.state, limit)[0]:
            say(as_json(line))


def episode_texts(found: EpisodeDetail) -> Iterator[Text]:
    """Yield an episode: its reward, its task, why it was trained or not, and its calls with their messages."""
    line = found.line
    reward = "none" if line.reward is None else f"{line.reward:g}"
    yield Text.assemble((line.episode_id, "bold"), f"  {line.state}  reward {reward}  attempts {line.attempts}")
    if line.rewards is not None and len(line.rewards) > 1:
        yield Text("; ".join(f"{agent} earned {earned:g}" for agent, earned in line.rewards.items()))
    if found.named_rewards:
        named = (f"{name} {'not scored' if n is None else f'{n:g}'}" for name, n in found.named_rewards.items())
        yield Text("; ".join(named))
    for verdict in found.verdicts:
        because = f", because: {verdict.reason}" if verdict.reason else ""
        yield Text(f"verdict: {verdict.name} {verdict.score:g}{because}")
    yield Text(f"task {line.task_id}: {found.task}{_cut(found.task_cut, 'bytes')}")
    if line.worker is not None:
        yield Text(f"held by {line.worker}")
    for failed in filter(None, (line.reason, line.earlier_reason)):
        yield Text(f"{'failed' if failed is line.reason else 'an earlier attempt failed'}: {failed}")
    if found.metadata or found.metadata_cut:
        yield Text(f"metadata: {found.metadata}{_cut(found.metadata_cut, 'bytes')}")
    yield Text(found.why, style="dim")
    for call in found.calls:
        yield from _call(call)


def _call(call: CallAnswer) -> Iterator[Text]:
    after = "" if call.after is None else f", begins like call {call.after}"
    sizes = f"{call.prompt_tokens - call.reused} read + {call.sampled} sampled, {call.seconds:.2f} s"
    yield Text(f"── call {call.index}, {call.agent}, step {call.time_step}{after}: {sizes} ──", style="dim")
    if call.fork is not None:
        yield Text(_fork(call.fork), style="yellow")
    for message in call.messages:
        yield from _message(message)
    yield from _message(call.reply, "cut at its limit" if call.finish_reason == "length" else "")


def _fork(fork: ForkAnswer) -> str:
    where = "" if fork.call is None else f" (call {fork.call}, message {fork.message}, token {fork.position})"
    return f"⑂ {fork.reason.replace('_', ' ')}{where}: {fork.text}"


def _message(message: MessageAnswer, note: str = "") -> Iterator[Text]:
    name = f" {message.name}" if message.name else ""
    yield Text(f"[{message.role}{name}]{note and f' ({note})'}", style="bold cyan")
    if message.reasoning:
        yield Text(f"(thought) {message.reasoning}", style="dim")
    for part in message.content:
        yield Text(part.text + _cut(part.cut, "characters") if part.image is None else f"[picture {part.image}]")
    for call in message.tool_calls:
        yield Text(f"→ {call.name}({call.arguments})", style="yellow")
    if message.tool_calls_cut:
        yield Text(f"→{_cut(message.tool_calls_cut, 'calls')}", style="yellow")


def _cut(number: int, unit: str) -> str:
    """Return the note that something is left out; empty if nothing is."""
    return f" … ({number:,} more {unit})" if number else ""
