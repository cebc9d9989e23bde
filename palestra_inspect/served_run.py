"""A run that is at a server, read over HTTP as its page is: no folder, no database, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nlargest
from typing import get_args
from urllib.parse import quote

from palestra.cli.options import JOB_ID
from palestra.client.exchange import Settings
from palestra.dashboard.answers import (
    CostsAnswer,
    EpisodeDetail,
    EpisodeLine,
    EpisodesAnswer,
    MetricsAnswer,
    RunAnswer,
    RunsAnswer,
    SlowCallsAnswer,
)
from palestra.errors import ConfigError
from palestra.types.records import EpisodeKind
from palestra.types.states import EpisodeState
from palestra_control.control import ControlClient

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

    def newest(self, kind: str | None, state: str | None, most: int) -> tuple[list[EpisodeLine], dict[str, int]]:
        """Return the episodes that were claimed last, in canonical order, and the steps that trained them, by id."""
        kinds = get_args(EpisodeKind) if kind is None else (kind,)
        states = tuple(EpisodeState) if state is None else (state,)
        pages = [page for one in kinds for of in states for page in self.pages(one, of, most)]
        lines = [line for page in pages for line in page.episodes]
        last = nlargest(most, lines, key=lambda one: (one.claimed_at or 0.0, one.group_index, one.sample_index))
        last.sort(key=lambda one: (one.kind, one.group_index, one.sample_index))
        steps = {name: step for page in pages for name, step in page.trained_in.items()}
        return last, {one.episode_id: steps[one.episode_id] for one in last if one.episode_id in steps}
