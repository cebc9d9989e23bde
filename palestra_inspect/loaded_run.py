"""`palestra.load_run`: the metrics, episodes, calls and tokens of a run as plain rows, for a notebook or a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from palestra.config import JobConfig, load_saved_config
from palestra.errors import NotFound, PalestraError
from palestra.store.browsing import browse
from palestra.store.calls import TrainedCall, read_trajectory, trained_call
from palestra.store.run_log import readable_metrics
from palestra.store.run_store import UNREADABLE
from palestra.store.search import readable_summaries
from palestra.store.tables import OF_GROUP, episodes, groups, trained_tokens
from palestra.types.calls import Chat
from palestra.types.summaries import EpisodeSummary

Row = dict[str, Any]
PAGE = 500  # episodes that are read together


class LoadedRun:
    """A run in a folder, finished or running. Methods read its present state and change nothing.

    Rows are dicts: `pandas.DataFrame(run.episodes())` and `polars.DataFrame(run.episodes())` accept them. A damaged
    record is left out of `calls` and `tokens`; `episodes` names it in its column `damaged`.
    """

    def __init__(self, path: Path | str) -> None:
        """Create the object without reading the run.

        Raises:
            NotFound: the folder is not a run's.
        """
        self.path = Path(path)
        if not (self.path / "run.db").is_file():
            raise NotFound(f"{self.path} is not the folder of a run (it has no run.db)")

    def __repr__(self) -> str:
        """Return the call that creates the object."""
        return f"load_run({str(self.path)!r})"

    @property
    def config(self) -> JobConfig:
        """Return the configuration of the run.

        Raises:
            ConfigError: it is missing or cannot be read.
        """
        return load_saved_config(self.path)

    def metrics(self) -> list[Row]:
        """Return a row for each finished step: `step`, and each of its metrics (docs/reference/metrics.md)."""
        with browse(self.path / "run.db") as connection:
            return [dict(row) for row in readable_metrics(connection).rows]

    def episodes(self, kind: str | None = None, state: str | None = "completed", step: int | None = None) -> list[Row]:
        """Return a row for each episode, in canonical order.

        Args:
            kind: `train`, `validation` or `adhoc`; None: all.
            state: such as `completed`; None: all.
            step: the step that trains them or, for validation, before which they are scored; None: all.
        """
        with browse(self.path / "run.db") as connection:
            return [row for row, _ in _episodes(connection, kind, state, step, None)]

    def calls(self, episode_id: str | None = None, *, kind: str | None = None, step: int | None = None) -> list[Row]:
        """Return a row for each model call of the last attempt of completed episodes.

        Args:
            episode_id: only this episode, completed or not; None: all completed ones.
            kind: see `episodes`.
            step: see `episodes`.
        """
        with browse(self.path / "run.db") as connection:
            return [_call(chat) for chat in _chats(connection, kind, step, episode_id)]

    def tokens(self, episode_id: str | None = None, *, kind: str | None = None, step: int | None = None) -> list[Row]:
        """Return a row for each sampled token: id, logprob, the logprob when it was trained (or None), version.

        A long run has millions of tokens: select an episode or a step. Arguments as in `calls`.
        """
        with browse(self.path / "run.db") as connection:
            trained = _trained(connection)
            return [
                row
                for chat in _chats(connection, kind, step, episode_id)
                for row in _tokens(chat, trained.get((chat.episode_id, chat.index)))
            ]


def load_run(path: Path | str) -> LoadedRun:
    """Return a run in a folder, finished or running, without reading it yet.

    Args:
        path: the run's folder, such as `TrainResult.run_dir`.

    Raises:
        NotFound: the folder is not a run's.
    """
    return LoadedRun(path)


def _episodes(
    connection: Connection, kind: str | None, state: str | None, step: int | None, episode_id: str | None
) -> Iterator[tuple[Row, bool]]:
    """Yield the row of each episode, and whether the episode can be read."""
    wanted = select(episodes, groups.c.step).outerjoin(groups, OF_GROUP)
    for column, value in (
        (episodes.c.kind, kind),
        (episodes.c.state, state),
        (groups.c.step, step),
        (episodes.c.episode_id, episode_id),
    ):
        if value is not None:
            wanted = wanted.where(column == value)
    ordered = wanted.order_by(episodes.c.kind, episodes.c.group_index, episodes.c.sample_index)
    for rows in connection.execute(ordered.execution_options(yield_per=PAGE)).partitions(PAGE):
        for row, found in zip(rows, readable_summaries(connection, rows), strict=True):
            if found.damaged is None:
                yield _episode(found, row.step), True
            else:
                yield {"episode_id": found.episode_id, "step": row.step, "damaged": found.damaged}, False


def _episode(found: EpisodeSummary, step: int | None) -> Row:
    same = ("episode_id", "kind", "group_index", "sample_index", "task_id", "state", "reward", "rewards", "calls")
    more = ("attempts", "termination", "reason", "metadata")
    return {
        **{name: getattr(found, name) for name in (*same, *more)},
        "step": step,
        "tokens": found.tokens,
        "forks": sum(found.forks.values()),
        "damaged": None,
    }


def _chats(connection: Connection, kind: str | None, step: int | None, episode_id: str | None) -> Iterator[Chat]:
    state = None if episode_id else "completed"
    for row, readable in _episodes(connection, kind, state, step, episode_id):
        if readable:
            try:
                yield from read_trajectory(connection, row["episode_id"]).chats
            except (PalestraError, *UNREADABLE, KeyError, IndexError, TypeError):
                continue  # damaged: `palestra episodes` and the page say how


def _call(chat: Chat) -> Row:
    return {
        "episode_id": chat.episode_id,
        "call": chat.index,
        "time_step": chat.time_step,
        "agent": chat.agent,
        "policy": chat.policy,
        "parent": None if chat.parent is None else chat.parent.index,
        "prompt_tokens": chat.prompt_tokens,
        "tokens": len(chat.completion_ids),
        "finish_reason": chat.finish_reason,
        "fork": None if chat.fork is None else chat.fork.reason.value,
        "temperature": chat.sampling.temperature,
        "max_tokens": chat.sampling.max_tokens,
        "seed": chat.sampling.seed,
        "started_at": chat.started_at,
        "seconds": chat.finished_at - chat.started_at,
        "reply": chat.reply,
    }


def _tokens(chat: Chat, trained: TrainedCall | None) -> Iterator[Row]:
    versions = [str(span.version) for span in chat.versions for _ in range(span.tokens)]
    start = 0 if trained is None else trained.start - chat.prompt_tokens
    for position, (token, logprob, version) in enumerate(
        zip(chat.completion_ids.tolist(), chat.logprobs.tolist(), versions, strict=True)
    ):
        again = None
        if trained is not None and 0 <= position - start < len(trained.logprobs):
            found = float(trained.logprobs[position - start])
            again = None if found != found else found  # NaN: the token is not trained
        yield {
            "episode_id": chat.episode_id,
            "call": chat.index,
            "position": position,
            "token": token,
            "logprob": logprob,
            "trained_logprob": again,
            "version": version,
            "policy": chat.policy,
            "agent": chat.agent,
        }


def _trained(connection: Connection) -> dict[tuple[str, int], TrainedCall]:
    found = (trained_call(row) for row in connection.execute(select(trained_tokens)))
    return {(call.episode_id, call.index): call for call in found}
