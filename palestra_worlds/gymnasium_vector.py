"""Vector environments of Gymnasium: several copies of a world that make their steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.client.plain_values import checked_count
from palestra.envs.catalog import imported
from palestra.envs.multi_agent import MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, decided
from palestra.errors import ConfigError, InvalidEnvironment
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage
from palestra_worlds.gymnasium_spaces import NoText, action_of, instruction, observation_text


class GymnasiumVector(MultiAgentEnvironment):
    """A vector environment of Gymnasium with one agent for each copy of its world; the roles are `world-0`, …

    Use it for worlds that compute many copies at once, for example on a GPU. All copies step together, so a step waits
    for the slowest agent; the episode is over when all copies have ended. A task may have the keys `seed`, from which
    each copy gets its own, and `options`. If a reply has no valid action, a random action is taken, drawn by the task's
    seed; the agent's reward is min(reward, 0) - 1. With `impossible_reward` its copy ends instead.
    """

    reusable = True

    def __init__(
        self,
        name: str,
        *,
        worlds: int = 4,
        features: Sequence[str] = (),
        rules: str = "",
        impossible_reward: float | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> None:
        """Create the worlds with `gymnasium.make_vec`.

        Args:
            name: Gymnasium's name of the environment, for example `CartPole-v1`.
            worlds: number of copies, each with its own agent.
            features: names for the numbers of a one-dimensional observation, in order; empty: numbers are shown without
                names.
            rules: text before the first observation of each agent; empty: a description of valid replies.
            impossible_reward: reward of a reply without a valid action, which then ends its copy; None: another action
                replaces it, see the class.
            clock: source of observation times; None: the system's clock.
            **settings: arguments for `gymnasium.make_vec`.

        Raises:
            ConfigError: Gymnasium is not installed, or has no such environment, or its actions cannot be said.
        """
        super().__init__(clock)
        gymnasium = imported("gymnasium", "gymnasium")
        count = checked_count("worlds", worlds)
        try:
            self._worlds: Any = gymnasium.make_vec(name, num_envs=count, **settings)
            told = instruction(self._worlds.single_action_space)
        except gymnasium.error.Error as error:
            raise ConfigError(f"Gymnasium can't make {name!r} as a vector: {error}") from error
        except NoText as error:
            raise ConfigError(f"{name!r} can't be played: {error}") from error
        self.roles = tuple(f"world-{number}" for number in range(count))
        self._rules, self._features, self._impossible = rules or told, tuple(features), impossible_reward
        self._seen: Any = None
        self._playing: tuple[str, ...] = ()

    async def close(self) -> None:
        """End the episode's work and close the worlds."""
        await self.abandon()
        self._worlds.close()

    def begin(self, task: Mapping[str, Any]) -> None:
        """Begin an episode in every world, with seeds derived from the task's."""
        seed = task.get("seed")
        self._seen, _ = self._worlds.reset(seed=seed, options=task.get("options"))
        space = self._worlds.single_action_space
        space.seed(seed or 0)
        self._playing = self.roles

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return that the agents of running worlds act at the same time."""
        return decided(lambda: self._playing)

    def rules(self, role: str) -> str:
        """Return the text before a role's first observation."""
        return self._rules

    def view(self, role: str) -> str:
        """Return a role's observation as text.

        Raises:
            InvalidEnvironment: the observation is a picture, or another large array.
        """
        try:
            return observation_text(_part(self._seen, self.roles.index(role)), self._features)
        except NoText as error:
            raise InvalidEnvironment(f"an observation of {self._worlds}: {error}") from error

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome:
        """Step every world, and collect the results of running ones."""
        gymnasium = imported("gymnasium", "gymnasium")
        space = self._worlds.single_action_space
        said = {role: action_of(space, action.text) for role, action in actions.items()}
        # Worlds that have ended take steps, too, which are not looked at.
        taken = [space.sample() if said.get(role) is None else said[role] for role in self.roles]
        batch = gymnasium.vector.utils.concatenate(
            space, taken, gymnasium.vector.utils.create_empty_array(space, n=len(taken))
        )
        self._seen, rewards, terminated, truncated, _ = self._worlds.step(batch)
        paid: dict[str, float] = {}
        cut: list[str] = []
        ended: list[str] = []
        for role in actions:
            place = self.roles.index(role)
            impossible = said[role] is None
            paid[role] = float(rewards[place])
            if impossible:
                paid[role] = min(paid[role], 0.0) - 1.0 if self._impossible is None else self._impossible
            if terminated[place] or (impossible and self._impossible is not None):
                ended.append(role)
            elif truncated[place]:
                cut.append(role)
        done = (*ended, *cut)
        self._playing = tuple(role for role in self._playing if role not in done)
        return Outcome(rewards=paid, done=done, over=not self._playing, truncated=bool(cut) and not ended)


def _part(batch: Any, place: int) -> Any:
    """Return one world's observation from a batch."""
    if isinstance(batch, dict):
        return {name: _part(part, place) for name, part in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "shape"):
        return tuple(_part(part, place) for part in batch)
    return batch[place]
