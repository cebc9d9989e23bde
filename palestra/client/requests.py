"""The requests that both clients of a data plane send in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from palestra.client.episode import Episode, Reward, RolloutResult
from palestra.client.exchange import Exchange, Settings, push, send_call
from palestra.client.protocol import ApiCall, abort_call, finish_call, heartbeat_call

Done = TypeVar("Done")  # None in a script, a coroutine of None in an event loop


class EpisodeRequests(ABC, Generic[Done]):
    """What a client sends about its episodes; the methods of `AsyncClient` are awaited.

    Each request is idempotent, and is retried for up to `retry_seconds` while the server cannot be reached.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, worker_id: str | None = None, retry_seconds: float = 300.0
    ) -> None:
        """Create a client of the data plane at `url`.

        Args:
            url: URL of the server, as printed by `palestra run`, e.g. `http://127.0.0.1:7411`.
            api_key: the job's key; None: the environment variable PALESTRA_API_KEY.
            worker_id: a name, recorded with each episode.
            retry_seconds: how long to retry a call while the server cannot be reached, for example while it restarts.
                The first failure and the server's return are logged as warnings of the logger `palestra.client`.

        Raises:
            ConfigError: there is no key, or `url` is not a valid URL.
        """
        self._settings = Settings(url, api_key, worker_id, retry_seconds)

    @abstractmethod
    def _finish(self, steps: Exchange[None]) -> Done:
        """Execute an exchange."""

    def end_episode(
        self,
        episode: Episode,
        reward: Reward | RolloutResult | None = None,
        *,
        step_rewards: Sequence[Reward] | None = None,
        metadata: Mapping[str, Any] | None = None,
        named_rewards: Mapping[str, float | None] | None = None,
        truncated: bool = False,
    ) -> Done:
        """Submit the reward of an episode. When the call returns, the reward is on the server's disk.

        Args:
            episode: the claimed episode.
            reward: a finite number, or one for each agent by name; None: there are named rewards. Or a `RolloutResult`,
                which contains all of the following; one without a score leaves the episode out of training.
            step_rewards: for each TimeStep, in order, a reward, or rewards by agent; None: none.
            metadata: JSON to record with the episode; `palestra episodes` shows it.
            named_rewards: several rewards of the episode, by name, which the job weights and adds up
                (`algorithm.reward_weights`). None in place of one: not scored, which differs from 0.
            truncated: whether the episode was cut off before its end, for example by a step limit.

        Raises:
            Conflict: the episode was given to another worker, or ended before with another reward.
            InvalidRequest: a reward is not a finite number, or the metadata is not JSON.
        """
        parts = {"step_rewards": step_rewards, "metadata": metadata, "named_rewards": named_rewards}
        return self._finish(self._sent(finish_call(episode, reward, **parts, truncated=truncated)))

    def abort_episode(self, episode: Episode, reason: str = "", *, discard: bool = False) -> Done:
        """Release an episode without a reward, because of a failure not caused by the policy.

        Args:
            episode: the claimed episode.
            reason: text to record with the attempt.
            discard: whether to drop the episode instead of retrying it.
        """
        return self._finish(self._sent(abort_call(episode, reason, discard)))

    def heartbeat(self, episode: Episode) -> Done:
        """Renew the lease of an episode that is played outside a `with` block.

        Needed only if more time than the lease may pass between two model calls of the episode.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the episode no longer belongs to this client.
        """
        return self._finish(self._sent(heartbeat_call(episode)))

    def push_tasks(
        self, train: Iterable[Mapping[str, Any]] | str | Path, validation: Iterable[Mapping[str, Any]] | str | Path = ()
    ) -> Done:
        """Push all tasks of the job at once; pushing the same tasks again has no effect.

        Args:
            train: tasks to train on: JSON objects, whose key `id`, if present, also names the task, in a list, an
                iterator, a data set or a DataFrame; or the path of a JSONL file with one per line. All are checked
                before the first is sent; those of an iterator wait in a temporary file.
            validation: tasks to evaluate on, in the same forms.

        Raises:
            ConfigError: the file is missing, or a line is not a JSON object; nothing is pushed.
            InvalidRequest: a task is not a JSON object.
        """
        return self._finish(push(self._settings, train, validation))

    def _sent(self, call: ApiCall[Any]) -> Exchange[None]:
        yield from send_call(self._settings, call)
