"""The updates of all policies that a job trains: which are due in a step, and what each has learned from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palestra.algorithms.base import Algorithm
from palestra.algorithms.regularization import Regularization
from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.learner.budget import TrainingBudget
from palestra.learner.groups import DynamicSampling
from palestra.learner.recordings import Recordings
from palestra.learner.teacher import ServedTeacher
from palestra.learner.update import AddEvent, PolicyUpdate
from palestra.session import PolicySet
from palestra.store import RunStore
from palestra.trainer.base import Trainer
from palestra.types.metrics import by_policy
from palestra.types.records import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What the updates of a step have done.

    Attributes:
        policies: the policies whose update was due, in their order.
        row: metrics by full name.
        staleness: number of trained tokens of all policies by age.
    """

    policies: tuple[str, ...]
    row: dict[str, float]
    staleness: dict[int, int]


class PolicyUpdates:
    """Trains the policies of a job that are not frozen, each by its own share of the episodes."""

    def __init__(
        self,
        config: JobConfig,
        trainer: Trainer,
        algorithms: Mapping[str, Algorithm],
        regularizations: Mapping[str, Regularization],
        policies: PolicySet,
        budget: TrainingBudget,
        add_event: AddEvent,
        store: RunStore,
    ) -> None:
        """Assemble an update for each policy that is trained.

        Args:
            algorithms: of each of them, by its name.
            regularizations: of each of them, by its name.

        Raises:
            ConfigError: a server that is to teach can't be asked, as it is configured.
        """
        self._algorithms, self._policies, self._store = algorithms, policies, store
        self._groups_per_step = config.rollout.groups_per_step
        self._teachers = {
            name: ServedTeacher(served, policies.runtime(name))
            for name in policies.trained
            if (served := config.algorithm_of(name).served_teacher) is not None
        }
        self._updates = {
            name: PolicyUpdate(
                config,
                trainer,
                algorithms[name],
                regularizations[name],
                name,
                budget,
                add_event,
                store,
                self._teachers.get(name),
            )
            for name in policies.trained
        }

    async def prepare(self) -> None:
        """Look whether the servers that teach are there; an error closes the connections to all of them.

        Raises:
            ConfigError: one of them can't teach.
            TeacherFailed: one of them does not answer.
        """
        try:
            for teacher in self._teachers.values():
                await teacher.check()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connections to servers that teach."""
        for teacher in self._teachers.values():
            await teacher.close()

    def recordings(self) -> Recordings | None:
        """Return the recorded episodes that are trained in place of played ones; None: episodes are played.

        Raises:
            ConfigError: several policies are trained, and the episodes do not say which of them has played what.
        """
        trained = self._policies.trained
        sources = [(name, source) for name in trained if (source := self._algorithms[name].recorded) is not None]
        if not sources:
            return None
        (policy, source), *_ = sources
        if len(trained) > 1:
            raise ConfigError(
                f"the algorithm of policy {policy!r} trains recorded episodes, which do not say which of "
                f"{' and '.join(map(repr, trained))} has played what; train one policy a job with it"
            )
        return Recordings(source, self._policies.runtime(policy), self._store)

    def due(self, step: int) -> dict[str, PolicyUpdate]:
        """Return the updates that are made in a step, by the policy's name."""
        return {name: update for name, update in self._updates.items() if update.due(step)}

    def dynamic_sampling(self, step: int) -> DynamicSampling | None:
        """Return which groups of a step are replaced: those from which none of its updates learns; None: none are."""
        due = self.due(step)
        most = max((self._algorithms[name].dynamic_sampling for name in due), default=0)

        async def teaches(episode_ids: Sequence[str]) -> bool:
            trajectories = await self._store.calls.trajectories(episode_ids)
            return any(update.learns_from(trajectories) for update in due.values())

        return DynamicSampling(teaches=teaches, most=most * self._groups_per_step) if most else None

    async def train(self, step: int, trajectories: Sequence[Trajectory]) -> Trained:
        """Make the updates of a step, and return its metrics.

        Args:
            trajectories: the episodes of its manifest, in canonical order.
        """
        due = self.due(step)
        # All batches are made before the first update, so that no policy's rows depend on another one's update.
        batches = {name: await update.make_batch(step, trajectories) for name, update in due.items()}
        row, ages, seconds = dict[str, float](), Counter[int](), 0.0
        for name, update in self._updates.items():
            if name in due:
                ages.update(batches[name].staleness)
                found = await update.train(step, batches[name])
                seconds += found["time/train_seconds"]
            else:
                found = update.metrics_of(trajectories)
            row |= by_policy(found, name) if self._policies.roles.rivals else found
        row["time/train_seconds"] = seconds
        return Trained(policies=tuple(due), row=row, staleness=dict(ages))
