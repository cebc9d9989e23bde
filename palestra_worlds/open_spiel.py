"""Environment `open-spiel`: the games of OpenSpiel, each player an agent."""

from __future__ import annotations

import difflib
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from palestra.envs.catalog import imported
from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, decided
from palestra.errors import ConfigError
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage


class OpenSpielEnvironment(MultiAgentEnvironment):
    """A game of OpenSpiel; the roles are `player-0`, `player-1`, …

    A player sees its information state, or the observation if the game has none. The task's `seed` determines chance;
    players that act at the same time do not see each other's move. Rewards are the game's returns. An illegal or late
    reply ends the game with the game's lowest return for its player and 0 for the others or, in a game with a constant
    sum, equal parts of the rest.
    """

    reusable = True
    gives_choices = True
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(
        self,
        *,
        game: str = "tic_tac_toe",
        actions: Literal["names", "numbers"] = "names",
        view: Literal["information", "observation"] = "information",
        files: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Load the game.

        Args:
            game: OpenSpiel's name, with parameters if it has some: `goofspiel(num_cards=4)`.
            actions: whether moves are the game's names or its numbers. Names that are not unique among the legal moves
                are replaced by numbers.
            view: the player's information state, or its observation, which omits the past.
            files: whether parameters may name files of this machine, such as `filename` of `efg_game`, whose contents
                the game then shows.
            clock: source of observation times; None: the system's clock.

        Raises:
            ConfigError: OpenSpiel is not installed, or the game does not exist, cannot be played, or would read a file.
        """
        super().__init__(clock)
        spiel = imported("pyspiel", "'palestra[games]'")
        # OpenSpiel would write the names of all its games to standard error, one a line.
        name, games = game.partition("(")[0], spiel.registered_names()
        if name not in games:
            near = difflib.get_close_matches(name.lower(), games, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(games)}"
            raise ConfigError(f"OpenSpiel has no game {name!r}; {hint}")
        try:
            parameters = spiel.game_parameters_from_string(game)
            if not files and (named := _named_file(parameters)):
                raise ConfigError(f"{game!r} would read a file, by its parameter {named!r}; name a game without one")
            self._game = spiel.load_game(game)
        except spiel.SpielError as error:
            raise ConfigError(f"OpenSpiel can't load {game!r}: {str(error).splitlines()[0]:.200}") from None
        kind = self._game.get_type()
        if kind.dynamics == spiel.GameType.Dynamics.MEAN_FIELD:
            raise ConfigError(f"{game!r} is a mean-field game, which has no players to be agents")
        # Some games draw chance themselves, where the seed has to be a parameter of theirs.
        self._seeded = kind.chance_mode == spiel.GameType.ChanceMode.SAMPLED_STOCHASTIC
        if self._seeded and "rng_seed" not in kind.parameter_specification:
            raise ConfigError(f"{game!r} draws chance by itself, and takes no seed, so that no episode can be repeated")
        self._load = spiel.load_game
        self.roles = tuple(f"player-{number}" for number in range(self._game.num_players()))
        self.zero_sum = kind.utility in (spiel.GameType.Utility.ZERO_SUM, spiel.GameType.Utility.CONSTANT_SUM)
        self.total = float(self._game.utility_sum()) if self.zero_sum else 0.0
        self._names, self._information = actions == "names", view == "information"
        self._informed, self._observed = kind.provides_information_state_string, kind.provides_observation_string

    def begin(self, task: Mapping[str, Any]) -> None:
        """Begin the game with chance from the task's seed."""
        seed = int(task.get("seed", 0))
        self._source = random.Random(seed)
        if self._seeded:
            name, parameters = self._game.get_type().short_name, self._game.get_parameters()
            self._game = self._load(name, parameters | {"rng_seed": seed % 2**31})
        self._state = self._game.new_initial_state()
        self._draw_chance()

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return that the rules name the next player."""
        return decided(self._next)

    def view(self, role: str) -> str:
        """Return the player's information state or observation."""
        player = self.roles.index(role)
        if self._informed and (self._information or not self._observed):
            return str(self._state.information_state_string(player)) or "-"
        return (str(self._state.observation_string(player)) if self._observed else str(self._state)) or "-"

    def legal(self, role: str) -> Sequence[str]:
        """Return the texts of the legal moves."""
        return tuple(self._moves(role))

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome | None:
        """Make the moves, draw chance, and pay if the game is over."""
        chosen = {role: self._moves(role)[action.text] for role, action in actions.items()}
        if self._state.is_simultaneous_node():
            # A player without a legal move has to give one as well; OpenSpiel ignores it.
            self._state.apply_actions([chosen.get(role, 0) for role in self.roles])
        else:
            self._state.apply_action(*chosen.values())
        self._draw_chance()
        if not self._state.is_terminal():
            return None
        return Outcome(rewards=dict(zip(self.roles, map(float, self._state.returns()), strict=True)), over=True)

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return the game's lowest return for the player."""
        lost = float(self._game.min_utility())
        rest = (self.total - lost) / (len(self.roles) - 1) if self.zero_sum and len(self.roles) > 1 else 0.0
        rewards = {other: lost if other == role else rest for other in self.roles}
        return Outcome(rewards=rewards, over=True, info={"result": f"{role}: {fault}"})

    def _next(self) -> Sequence[str]:
        state = self._state
        if state.is_simultaneous_node():
            return [role for player, role in enumerate(self.roles) if state.legal_actions(player)]
        return (self.roles[state.current_player()],)

    def _moves(self, role: str) -> dict[str, int]:
        """Return the legal moves of a player, by text."""
        player = self.roles.index(role)
        legal = self._state.legal_actions(player)
        if self._names:
            named = {str(self._state.action_to_string(player, move)): move for move in legal}
            if len(named) == len(legal):
                return named
        return {str(move): move for move in legal}

    def _draw_chance(self) -> None:
        while self._state.is_chance_node():
            moves, weights = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._source.choices(moves, weights)[0])


def _named_file(parameters: Mapping[str, Any]) -> str | None:
    """Return the parameter that names a file, in a game or a nested game, or None."""
    for name, value in parameters.items():
        if "file" in name:
            return name
        if isinstance(value, Mapping) and (inner := _named_file(value)):
            return inner
    return None
