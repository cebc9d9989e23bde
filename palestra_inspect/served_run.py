"""A run that is at a server, read over HTTP as its page is: no folder, no database, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from typing import TypeVar, get_args
from urllib.parse import quote

from pydantic import BaseModel
from rich.text import Text

from palestra.cli.options import JOB_ID
from palestra.client.exchange import Settings
from palestra.dashboard.answers import (
    CostsAnswer,
    EpisodeDetail,
    EpisodesAnswer,
    MetricsAnswer,
    RunAnswer,
    RunsAnswer,
    SlowCall,
    SlowCallsAnswer,
    TokensAnswer,
)
from palestra.errors import ConfigError, PalestraError
from palestra.types.records import EpisodeKind
from palestra.types.states import ENDED, EpisodeState
from palestra.types.summaries import EpisodeSummary
from palestra_control.control import ControlClient

A = TypeVar("A", bound=BaseModel)
RUNS = "/dashboard/api/runs"
RETRY_SECONDS = 5.0  # a person waits for the answer
PAGE, TOKENS = 200, 5000  # episodes and tokens of an answer, the most that a server gives


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

    def _get(self, path: str, answer: type[A], **query: str | int) -> A:
        found: A = self._server.request("GET", f"{self._path}{path}", answer, params=query)
        return found

    def described(self) -> RunAnswer:
        """Return how far the run is; one that cannot be read says why."""
        try:
            return self._get("", RunAnswer)
        except PalestraError as error:
            return RunAnswer(run=self.name, title=self.name, folder="", state="unreadable", reason=str(error))

    def metrics(self, after: int = -1) -> MetricsAnswer:
        """Return the metrics of the steps after `after`."""
        return self._get("/metrics", MetricsAnswer, after=after)

    def costs(self) -> CostsAnswer:
        """Return what the run has cost so far."""
        return self._get("/costs", CostsAnswer)

    def slow_calls(self) -> list[SlowCall]:
        """Return the slowest of the newest calls."""
        return self._get("/calls", SlowCallsAnswer).calls

    def episode(self, episode_id: str, whole: bool = False) -> EpisodeDetail:
        """Return an episode with its calls. `whole`: a server cuts texts that are too long for a page anyway."""
        return self._get(f"/episodes/{quote(episode_id, safe='')}", EpisodeDetail)

    def tokens(self, episode_id: str, row: int, start: int) -> TokensAnswer:
        """Return the next tokens of a row of an episode."""
        return self._get(f"/episodes/{quote(episode_id, safe='')}/rows/{row}", TokensAnswer, start=start, count=TOKENS)

    def tables(self) -> list[tuple[Sequence[str], list[Sequence[str]]]]:
        """Return no tables: other packages read them in the run's folder."""
        return []

    def picture(self, digest: str, policy: str) -> Text:
        """Return a line for a picture, which stays at the server."""
        return Text(f"[picture {digest}]")

    def newest(self, kind: str | None, state: str | None, most: int) -> tuple[list[EpisodeSummary], dict[str, int]]:
        """Return the episodes that were claimed last, in canonical order, and the steps that trained them, by id."""
        kinds = get_args(EpisodeKind) if kind is None else (kind,)
        states = tuple(EpisodeState) if state is None else (state,)
        pages = [page for one in kinds for of in states for page in self._pages(one, of, most)]
        lines = [line for page in pages for line in page.episodes]
        last = nlargest(most, lines, key=lambda one: (one.claimed_at or 0.0, one.group_index, one.sample_index))
        last.sort(key=lambda one: (one.kind, one.group_index, one.sample_index))
        steps = {name: step for page in pages for name, step in page.trained_in.items()}
        return last, {one.episode_id: steps[one.episode_id] for one in last if one.episode_id in steps}

    def every(self, kind: str | None, state: str | None) -> Iterator[list[EpisodeSummary]]:
        """Yield all episodes, a piece at a time."""
        for one in get_args(EpisodeKind) if kind is None else (kind,):
            for page in self._pages(one, state):
                yield page.episodes

    def ended(self, most: int) -> list[EpisodeSummary]:
        """Return the episodes that ended last, the newest first."""
        known = self.described().episodes
        pairs = [(kind, state) for kind, states in known.items() for state in ENDED if states.get(state)]
        pages = [page for kind, state in pairs for page in self._pages(kind, state, most)]
        return nlargest(most, (line for page in pages for line in page.episodes), key=lambda one: one.ended_at or 0.0)

    def _pages(self, kind: str, state: str | None, most: int | None = None) -> Iterator[EpisodesAnswer]:
        """Yield episodes of one kind, newest first, in pages. `state`: None: all. `most`: None: all."""
        query = {"kind": kind} | ({} if state is None else {"state": state})
        left = most
        while left is None or left > 0:
            page = self._get("/episodes", EpisodesAnswer, limit=PAGE if left is None else min(left, PAGE), **query)
            yield page
            if page.following is None:
                return
            query["before"] = page.following
            left = None if left is None else left - len(page.episodes)
