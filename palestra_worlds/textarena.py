"""Environment `textarena`: games of TextArena, which are played in free text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.envs.catalog import imported
from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, decided
from palestra.errors import ConfigError
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage


class TextArenaEnvironment(MultiAgentEnvironment):
    """A game of TextArena; the roles are `player-0`, `player-1`, …

    A player sees TextArena's text, and replies with any text: the game itself judges unreadable moves. Rewards are
    TextArena's, from -1 to 1.
    """

    reusable = True
    forfeits = frozenset({Fault.ILLEGAL})

    def __init__(self, *, id: str = "TicTacToe-v0", players: int = 2, clock: Clock | None = None) -> None:
        """Create the game.

        Args:
            id: TextArena's name of the game.
            players: how many agents play it.
            clock: source of observation times; None: the system's clock.

        Raises:
            ConfigError: TextArena is not installed, or the game cannot be made here.
        """
        super().__init__(clock)
        self.roles = tuple(f"player-{number}" for number in range(players))
        self._make, self._id = imported("textarena", "'palestra[games]'").make, id
        self._new_game()

    def _new_game(self) -> Any:
        try:
            return self._make(self._id)
        except Exception as error:
            raise ConfigError(f"TextArena can't make {self._id!r}: {type(error).__name__}: {error}") from error

    def begin(self, task: Mapping[str, Any]) -> None:
        """Begin a game with the task's seed."""
        self._game = self._new_game()
        self._game.reset(num_players=len(self.roles), seed=int(task.get("seed", 0)))
        self._player, self._shown_text = self._game.get_observation()

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return that the game names the next player."""
        return decided(lambda: (self.roles[self._player],))

    def view(self, role: str) -> str:
        """Return TextArena's text for the player since its last turn."""
        return str(self._shown_text)

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Give TextArena the player's text."""
        ((_, action),) = actions.items()
        done, info = self._game.step(action.text)
        if not done:
            self._player, self._shown_text = self._game.get_observation()
            return None
        rewards, _ = self._game.close()
        paid = {self.roles[player]: float(reward) for player, reward in rewards.items()}
        return Outcome(rewards=paid, over=True, info={"result": str(info.get("reason", ""))} if info else {})

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return the lowest reward for a player whose text breaks the game; no player wins."""
        rewards = {other: -1.0 if other == role else 0.0 for other in self.roles}
        return Outcome(rewards=rewards, over=True, info={"result": f"{role}: {fault}"})
