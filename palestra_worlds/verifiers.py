"""`VerifiersRollout`: environments of the package `verifiers` as agents of a job.

An environment of verifiers runs its agents itself, and calls their models at a URL of OpenAI's API. It gets the URL and
the key of a job's episode, so the job records every call token by token. The rollout runs where verifiers is installed:
in a worker, which only needs the client of this package.
"""

from __future__ import annotations

import asyncio
import copy
import os
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import islice
from typing import Any

from palestra.client.episode import ModelEndpoint, RolloutResult
from palestra.client.plain_values import checked_count
from palestra.errors import ConfigError, EnvironmentFailed

EPISODES_SERVED = 500  # after which an environment is replaced: it keeps a client for each key until it stops serving


class VerifiersRollout:
    """A rollout function that plays an environment of verifiers: `palestra worker play.py:rollout`.

    A task of the job is `{"idx": 3}`, the index of a task in the environment's taskset; `tasks` creates them. The
    reward is the sum of the trace's weighted rewards, as in verifiers; the single rewards and the metrics are recorded
    with the episode. An episode that verifiers reports as failed fails the attempt, without a reward; one that was not
    scored is left out of training.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the environment.

        Args:
            config: the contents of `[env]` in a configuration of verifiers, such as `{"taskset": {"id": "gsm8k-v1"},
                "agent": {"max_turns": 4}}`. Sampling settings are the job's own.

        Raises:
            ConfigError: verifiers or the environment is not installed, or the environment has several agents.
        """
        self._config = dict(config)
        self._new = self._loaded()
        self._serving: _Serving | None = None

    def tasks(self, count: int, first: int = 0) -> list[dict[str, Any]]:
        """Return tasks for the job: indices of tasks in the taskset.

        Args:
            count: number of tasks.
            first: index of the first.

        Raises:
            ConfigError: the taskset has fewer.
        """
        checked_count("count", count)
        found = [task.data.idx for task in islice(self._new.taskset, first, first + count)]
        if len(found) < count:
            raise ConfigError(f"the taskset has {first + len(found)} tasks, and {first + count} were asked for")
        return [{"id": f"{self._new.taskset.config.id}-{place}", "idx": place} for place in found]

    async def __call__(self, task: Mapping[str, Any], policy: ModelEndpoint) -> RolloutResult:
        """Play one episode; see the class."""
        chosen = self._task(task)
        async with self._served() as environment, _key_variable(policy.api_key) as variable:
            configs = import_module("verifiers.v1.configs.client")
            clients = import_module("verifiers.v1.clients")
            client = configs.EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
            context = clients.ModelContext(model=policy.model, client=client)
            episode = await environment.run_episode(chosen, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = f"{errors[0].type}: {errors[0].message}" if errors else "it does not say why"
            raise EnvironmentFailed(f"verifiers reports that the episode has failed: {said}"[:2000])
        if len(episode.traces) != 1:
            raise EnvironmentFailed(f"the episode has {len(episode.traces)} traces, and the reward is that of one")
        (trace,) = episode.traces
        scored = trace.rewards and all(reward is not None for reward in trace.rewards.values())
        named = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        metadata = {"verifiers": {"rewards": named, "metrics": dict(trace.metrics), "turns": trace.num_turns}}
        return RolloutResult(reward=float(trace.reward) if scored else None, metadata=metadata)

    async def close(self) -> None:
        """Stop serving, after running episodes have ended."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.left = 0
            if serving.users == 0:
                await serving.retire()

    def _loaded(self) -> Any:
        try:
            loaders = import_module("verifiers.v1.utils.loaders")
        except ImportError as error:
            raise ConfigError(f"environments of verifiers need verifiers 0.4 or newer: {error}") from error
        given = copy.deepcopy(self._config)  # validation puts its own objects in
        taskset = given.get("taskset") or {}
        try:
            kind = loaders.environment_class(taskset.get("id", ""), given.get("id", ""))
            config = import_module("verifiers.v1.utils.generic").concrete_type(
                kind, import_module("verifiers.v1.configs.env").EnvConfig, origin=import_module("verifiers.v1.env").Env
            )
            environment = kind(config.model_validate(given))
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise ConfigError(f"verifiers can't load {taskset.get('id')!r}: {' '.join(str(error).split())}") from error
        agents = import_module("verifiers.v1.configs.agent").agent_config_fields(environment.config)
        if len(agents) != 1:
            raise ConfigError(f"the environment has the agents {', '.join(agents)}; only one can be trained")
        return environment

    def _task(self, task: Mapping[str, Any]) -> Any:
        place = task.get("idx")
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            raise ConfigError(f"a task of verifiers is an object with `idx`, and not {dict(task)!r}; see `tasks`")
        found = next(islice(self._new.taskset, place, None), None)
        if found is None:
            raise ConfigError(f"the taskset has no task {place}")
        return found

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """Lend an environment that serves; after EPISODES_SERVED episodes another one."""
        serving = self._serving
        if serving is None:
            serving = self._serving = _Serving(self._loaded())
        serving.users += 1
        serving.left -= 1
        if serving.left == 0:
            self._serving = None
        try:
            try:
                await serving.begun()
            except EnvironmentFailed:
                self._serving = None if self._serving is serving else self._serving
                raise
            yield serving.environment
        finally:
            serving.users -= 1
            if serving.left == 0 and serving.users == 0:
                await serving.retire()


class _Serving:
    """A serving environment, started and ended in one task."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.users, self.left = 0, EPISODES_SERVED
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enough = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def begun(self) -> None:
        """Wait until the environment serves."""
        await asyncio.wait((self._ready,))
        if error := self._ready.exception():
            raise EnvironmentFailed(f"the environment of verifiers does not serve: {error}") from error

    async def retire(self) -> None:
        """End the serving."""
        self._enough.set()
        await asyncio.wait((self._task,))

    async def _serve(self) -> None:
        try:
            async with self.environment.serving():
                self._ready.set_result(None)
                await self._enough.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)


@asynccontextmanager
async def _key_variable(key: str) -> AsyncIterator[str]:
    """Hold a key in a variable, where verifiers wants it, with `API_KEY` in its name, so that no program gets it."""
    name = f"PALESTRA_EPISODE_API_KEY_{uuid.uuid4().hex.upper()}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]
