"""Environment `prisoners-dilemma`: two agents choose at the same time, round after round (Axelrod 1984)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.envs.multi_agent import Fault, MultiAgentEnvironment, Outcome
from palestra.envs.protocols import AgentProtocol, simultaneous
from palestra.types.clock import Clock
from palestra.types.messages import ChatMessage

COOPERATE, DEFECT, NOTHING = "c", "d", "?"
PAYOFF = {(COOPERATE, COOPERATE): 3.0, (COOPERATE, DEFECT): 0.0, (DEFECT, COOPERATE): 5.0, (DEFECT, DEFECT): 1.0}
_RULES = (
    "You and another player choose at the same time, {rounds} times: c cooperates, d defects. Both c: 3 each; both d: "
    "1 each; else d gets 5 and c nothing. You see your last choice and the other's. Reply c or d."
)


class PrisonersDilemma(MultiAgentEnvironment):
    """Each player sees its own last choice and the other's, as in `cd`, and `-` at first; each round is paid at its
    end.

    After an illegal or late reply, its player gets 0 in this round, and the other the reward of mutual cooperation; the
    other sees `?`.
    """

    reusable = True
    roles = ("first", "second")
    gives_choices = True
    moves = (COOPERATE, DEFECT)
    forfeits = frozenset({Fault.ILLEGAL, Fault.LATE})

    def __init__(self, *, rounds: int = 5, rules: bool = False, clock: Clock | None = None) -> None:
        """Create the environment.

        Args:
            rounds: number of choices of each, if the task has no `rounds`.
            rules: whether a player reads the rules before its first choice.
            clock: source of observation times; None: the system's clock.

        Raises:
            ValueError: `rounds` is below 1.
        """
        super().__init__(clock)
        self._rounds, self._rules = rounds, rules
        simultaneous(rounds=rounds)

    def begin(self, task: Mapping[str, Any]) -> None:
        """Forget the choices."""
        self._left = int(task.get("rounds", self._rounds))
        self._last: dict[str, str] = {}

    def protocol(self, task: Mapping[str, Any]) -> AgentProtocol:
        """Return that both choose at the same time."""
        return simultaneous(rounds=self._left)

    def rules(self, role: str) -> str:
        """Return the rules, if configured."""
        return _RULES.format(rounds=self._left) if self._rules else ""

    def view(self, role: str) -> str:
        """Return the last choices: the role's own, and the other's."""
        if not self._last:
            return "-"
        first, second = self._last.values()
        return first + second if role == "first" else second + first

    def legal(self, role: str) -> Sequence[str]:
        """Return both choices."""
        return self.moves

    def apply(self, actions: Mapping[str, ChatMessage]) -> Outcome:
        """Pay both for their choices."""
        self._last = {role: actions[role].text if role in actions else NOTHING for role in self.roles}
        first, second = self._last.values()
        if NOTHING in (first, second):
            return Outcome(rewards={role: PAYOFF[COOPERATE, COOPERATE] for role in actions})
        return Outcome(rewards={"first": PAYOFF[first, second], "second": PAYOFF[second, first]})

    def forfeit(self, role: str, fault: Fault) -> Outcome:
        """Return 0 for a role without a choice in this round."""
        self._last = dict.fromkeys(self.roles, NOTHING)
        return Outcome(rewards={role: 0.0})
