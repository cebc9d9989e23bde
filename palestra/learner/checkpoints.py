"""Schedule of checkpoints: written as often as the job says, while the next step is already played."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from palestra.config import JobConfig
from palestra.errors import CheckpointError
from palestra.learner.update import AddEvent
from palestra.trainer.base import Trainer

log = logging.getLogger("palestra.learner")


class Stateful(Protocol):
    """Something that remembers from step to step."""

    def state(self) -> dict[str, Any]:
        """Return what is remembered, as JSON; empty: nothing."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` has returned; empty in checkpoints without it."""
        ...


class CheckpointSchedule:
    """Writes the checkpoints of the policies that are trained, one after another; a frozen policy has none."""

    def __init__(
        self,
        config: JobConfig,
        trainer: Trainer,
        folders: Mapping[str, Path],
        remembered: Mapping[str, Stateful],
        wall_seconds: Callable[[], float],
        add_event: AddEvent,
    ) -> None:
        """Create the schedule; no checkpoint is known until `load`.

        Args:
            config: the job.
            trainer: the trainer that has the policies.
            folders: folder of the checkpoints of each trained policy, by the policy's name.
            remembered: what has a state that is saved with the weights, by its key in the checkpoint.
            wall_seconds: returns how long the job has run.
            add_event: records an event of the job.
        """
        self._config, self._trainer, self._folders = config, trainer, dict(folders)
        self._remembered, self._wall_seconds, self._add_event = dict(remembered), wall_seconds, add_event
        self._saving: asyncio.Task[None] | None = None
        self._seconds = 0.0  # time of checkpoints since the last `take_seconds`
        self.saved_step = 0  # step of the newest checkpoint

    async def load(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint of each policy into the trainer, and the states saved with it.

        Returns the state saved with it, or None if there is none.

        Raises:
            CheckpointError: all checkpoints of a policy are damaged, or those of two policies are of different steps.
        """
        states = {policy: await self._trainer.load(policy, folder) for policy, folder in self._folders.items()}
        steps = {policy: 0 if state is None else int(state["step"]) for policy, state in states.items()}
        if len(set(steps.values())) > 1:
            raise CheckpointError(f"the newest checkpoints of the policies are of different steps: {steps}")
        self.saved_step = max(steps.values())
        state = next(iter(states.values()))
        if state is not None:
            for key, one in self._remembered.items():
                one.restore(state.get(key, {}))
        return state

    async def save_if_due(self, step: int, last: bool) -> None:
        """Start writing a checkpoint of this step if the job wants one; the next episodes are played meanwhile.

        Args:
            step: the step that was just trained.
            last: whether training ends with it.
        """
        if step % self._config.checkpoint.every_steps == 0 or last:
            await self.finish()
            self._saving = asyncio.create_task(self._save(step, self._state(step)))

    async def save_now(self, step: int) -> None:
        """Write a checkpoint of this step, unless there is one, and return when it is on disk."""
        await self.finish()
        if step > self.saved_step:
            await self._save(step, self._state(step))

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def close(self) -> None:
        """Wait for the checkpoint that is being written, if any; a failure is logged and not raised."""
        if self._saving is not None:
            (error,) = await asyncio.gather(self._saving, return_exceptions=True)
            if isinstance(error, Exception):
                log.error("a checkpoint could not be written: %s: %s", type(error).__name__, error)

    def take_seconds(self) -> float:
        """Return the seconds spent on checkpoints that finished since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _state(self, step: int) -> dict[str, Any]:
        """Return the JSON that is saved beside the weights of a step."""
        state = {"step": step, "wall_seconds": self._wall_seconds(), "config_digest": self._config.digest()}
        # The states are taken now: while the checkpoint is written, the next step may change them.
        return state | {key: own for key, one in self._remembered.items() if (own := one.state())}

    async def _save(self, step: int, state: Mapping[str, Any]) -> None:
        started = time.monotonic()
        paths = {
            policy: await self._trainer.save(policy, folder, state, f"save {step}")
            for policy, folder in self._folders.items()
        }
        self.saved_step = step
        self._seconds += (seconds := time.monotonic() - started)
        for policy, path in paths.items():
            whose = {"policy": policy} if len(self._config.policies) > 1 else {}
            await self._add_event("saved", {"step": step, "path": str(path), "seconds": seconds, **whose})
