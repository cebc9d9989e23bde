"""The possible replies of episodes' calls, for algorithms that train every choice."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.errors import ConfigError, InvalidRequest
from palestra.learner.batch import Choices, choice_key
from palestra.trainer.base import Trainer
from palestra.types.records import Trajectory

MOST_CHOICES = 256  # replies of a call; each is a row
MOST_KNOWN = 16_384  # grammars whose choices are kept


class CallChoices:
    """Asks the trainer for the choices of each grammar once, and caches them."""

    def __init__(self, trainer: Trainer, policy: str, algorithm: str) -> None:
        """Begin with an empty cache."""
        self._trainer, self._policy, self._algorithm = trainer, policy, algorithm
        self._known: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {}

    async def of(self, trajectories: Sequence[Trajectory]) -> Choices:
        """Return the choices of all calls of the policy."""
        found = {}
        for trajectory in trajectories:
            for chat in trajectory.chats:
                if chat.policy != self._policy or (key := choice_key(chat)) in found:
                    continue
                if not chat.sampling.grammar:
                    raise ConfigError(
                        f"algorithm.name is {self._algorithm!r}, which needs replies that are held to finitely many "
                        f"choices, and call {chat.index} of episode {trajectory.episode.episode_id} was not; give its "
                        "agent `choices`, or send `structured_outputs = {'choice': [...]}` with the call"
                    )
                found[key] = await self._choices(key)
        return found

    async def problems(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Return episodes with replies outside their call's choices: ids and reasons."""
        found = {}
        for trajectory in trajectories:
            try:
                choices = await self.of([trajectory])
            except InvalidRequest as error:  # or GrammarRefused: a bound was reached by a reply that was not sampled
                found[trajectory.episode.episode_id] = f"the choices of a call can't be found: {error}"
                continue
            for chat in trajectory.chats:
                if chat.policy == self._policy and tuple(chat.completion_ids.tolist()) not in choices[choice_key(chat)]:
                    found[trajectory.episode.episode_id] = (
                        f"the reply of call {chat.index} is none of those that its grammar allows"
                    )
        return found

    async def _choices(self, key: tuple[str, int]) -> tuple[tuple[int, ...], ...]:
        if key not in self._known:
            grammar, max_tokens = key
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = await self._trainer.choices(self._policy, grammar, max_tokens, MOST_CHOICES)
        return self._known[key]
