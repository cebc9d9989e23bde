"""Protocols of agents: who may act when, as objects with three methods that a `Coordinator` calls.

turns(order) one after another, forever or for some rounds simultaneous(roles) all at the same time; a barrier reveals
their actions together free(roles) no order: each agent acts as often as it can phases([a, b, ...]) one protocol after
another, with a barrier between them decided(next_roles) the world's rules name the next role, as in most libraries of
games
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of a protocol, for drawings and checks.

    Attributes:
        kind: the rule's name: `turns`, `simultaneous`, `free`, `decided`, or your own.
        roles: who acts in it, in this order; (): every role.
        rounds: how often each acts before the stage is over; None: until the episode ends.
        repeats: whether the first stage follows this one.
    """

    kind: str
    roles: tuple[str, ...] = ()
    rounds: int | None = None
    repeats: bool = False


class AgentProtocol(ABC):
    """Decides who acts first and who acts next. An object serves one episode.

    Attributes:
        together: whether agents asked at the same time act at the same time: their actions are applied when all have
            arrived, and none has seen another's. False: each action is applied alone, and its agent may be asked again
            before others have answered.
        present_stage: index of the present stage in `stages`, for drawings.
    """

    together: bool = True
    present_stage: int = 0

    @abstractmethod
    def begin(self, playing: Collection[str]) -> Sequence[str]:
        """Return the roles that act first.

        Args:
            playing: all roles, in order.
        """

    @abstractmethod
    def following(self, acted: Sequence[str], playing: Collection[str], pending: Collection[str]) -> Sequence[str]:
        """Return the roles to ask now; empty without pending roles: the protocol is over.

        Args:
            acted: the roles whose actions were just applied.
            playing: the roles that are not done, in order; only these may be asked.
            pending: roles whose actions were not applied yet; they must not be asked. Always empty if `together`.
        """

    @abstractmethod
    def stages(self) -> tuple[Stage, ...]:
        """Return the parts of the protocol, for drawings and checks."""


def turns(order: Sequence[str], rounds: int | None = None) -> AgentProtocol:
    """Return the protocol in which one role acts after another.

    Args:
        order: the roles in the order in which they act; a role may be named more than once.
        rounds: how often all of `order` act; None: until the episode ends.

    Raises:
        ValueError: `order` is empty, or `rounds` is below 1.
    """
    return _Turns(order, rounds)


def simultaneous(roles: Sequence[str] = (), rounds: int | None = None) -> AgentProtocol:
    """Return the protocol in which roles act at the same time, round after round.

    Args:
        roles: who acts; (): every role.
        rounds: how many rounds; None: until the episode ends.

    Raises:
        ValueError: a role is named twice, or `rounds` is below 1.
    """
    return _Simultaneous(roles, rounds)


def free(roles: Sequence[str] = (), actions: int | None = None) -> AgentProtocol:
    """Return the protocol without an order: each role acts again as soon as its last action was applied.

    Args:
        roles: who acts; (): every role.
        actions: how often each acts; None: until the episode ends.

    Raises:
        ValueError: a role is named twice, or `actions` is below 1.
    """
    return _Free(roles, actions)


def phases(parts: Sequence[AgentProtocol], repeat: bool = False) -> AgentProtocol:
    """Return a protocol of several phases with barriers between them.

    Args:
        parts: the protocols of the phases. Only the last may be endless, and only if `repeat` is False.
        repeat: whether the first phase follows after the last.

    Raises:
        ValueError: there are no parts, or a phase follows an endless one.
    """
    return _Phases(parts, repeat)


def decided(next_roles: Callable[[], Sequence[str]]) -> AgentProtocol:
    """Return the protocol of a world whose rules name the next role.

    Args:
        next_roles: returns the roles to act in the world's present state; several act at the same time.
    """
    return _Decided(next_roles)


def _checked(roles: Sequence[str], rounds: int | None) -> tuple[str, ...]:
    if repeated := [role for role, count in Counter(roles).items() if count > 1]:
        raise ValueError(f"{repeated[0]!r} is named twice among roles that act at the same time")
    _check_rounds(rounds)
    return tuple(roles)


def _check_rounds(rounds: int | None) -> None:
    if rounds is not None and rounds < 1:
        raise ValueError(f"a protocol has at least one round, not {rounds}")


class _Turns(AgentProtocol):
    def __init__(self, order: Sequence[str], rounds: int | None) -> None:
        if not order:
            raise ValueError("turns need at least one role")
        _check_rounds(rounds)
        self._order, self._rounds = tuple(order), rounds
        self._place = 0  # turns so far, those of roles that are done included

    def begin(self, playing: Collection[str]) -> Sequence[str]:
        self._place = 0
        return self._next(playing)

    def following(self, acted: Sequence[str], playing: Collection[str], pending: Collection[str]) -> Sequence[str]:
        return self._next(playing)

    def _next(self, playing: Collection[str]) -> Sequence[str]:
        """Return the next role of the order that is not done."""
        for _ in self._order:
            if self._rounds is not None and self._place >= self._rounds * len(self._order):
                return ()
            role = self._order[self._place % len(self._order)]
            self._place += 1
            if role in playing:
                return (role,)
        return ()

    def stages(self) -> tuple[Stage, ...]:
        return (Stage(kind="turns", roles=self._order, rounds=self._rounds),)


class _Simultaneous(AgentProtocol):
    def __init__(self, roles: Sequence[str], rounds: int | None) -> None:
        self._roles, self._rounds = _checked(roles, rounds), rounds
        self._round = 0

    def begin(self, playing: Collection[str]) -> Sequence[str]:
        self._round = 0
        return self._next(playing)

    def following(self, acted: Sequence[str], playing: Collection[str], pending: Collection[str]) -> Sequence[str]:
        return self._next(playing)

    def _next(self, playing: Collection[str]) -> Sequence[str]:
        if self._round == self._rounds:
            return ()
        self._round += 1
        return [role for role in self._roles if role in playing] if self._roles else list(playing)

    def stages(self) -> tuple[Stage, ...]:
        return (Stage(kind="simultaneous", roles=self._roles, rounds=self._rounds),)


class _Free(AgentProtocol):
    together = False

    def __init__(self, roles: Sequence[str], actions: int | None) -> None:
        self._roles, self._actions = _checked(roles, actions), actions
        self._acted: Counter[str] = Counter()

    def begin(self, playing: Collection[str]) -> Sequence[str]:
        self._acted.clear()
        return [role for role in self._roles if role in playing] if self._roles else list(playing)

    def following(self, acted: Sequence[str], playing: Collection[str], pending: Collection[str]) -> Sequence[str]:
        self._acted.update(acted)
        return [role for role in acted if role in playing and self._acted[role] != self._actions]

    def stages(self) -> tuple[Stage, ...]:
        return (Stage(kind="free", roles=self._roles, rounds=self._actions),)


class _Phases(AgentProtocol):
    def __init__(self, parts: Sequence[AgentProtocol], repeat: bool) -> None:
        if not parts:
            raise ValueError("phases need at least one protocol")
        for number, part in enumerate(parts[: None if repeat else -1], start=1):
            if part.stages()[-1].rounds is None:
                raise ValueError(f"phase {number} of {len(parts)} never ends, so the one after it never begins")
        self._parts, self._repeat = tuple(parts), repeat
        self._number = 0

    @property
    def together(self) -> bool:  # type: ignore[override]  # of the present phase
        return self._parts[self._number].together

    @property
    def present_stage(self) -> int:  # type: ignore[override]
        before = sum(len(part.stages()) for part in self._parts[: self._number])
        return before + self._parts[self._number].present_stage

    def begin(self, playing: Collection[str]) -> Sequence[str]:
        self._number = 0
        return self._parts[0].begin(playing) or self._next(playing)

    def following(self, acted: Sequence[str], playing: Collection[str], pending: Collection[str]) -> Sequence[str]:
        asked = self._parts[self._number].following(acted, playing, pending)
        return asked if asked or pending else self._next(playing)

    def _next(self, playing: Collection[str]) -> Sequence[str]:
        """Begin the next phase in which any role acts."""
        for _ in self._parts:
            if self._number + 1 == len(self._parts) and not self._repeat:
                return ()
            self._number = (self._number + 1) % len(self._parts)
            if asked := self._parts[self._number].begin(playing):
                return asked
        return ()

    def stages(self) -> tuple[Stage, ...]:
        *first, last = [stage for part in self._parts for stage in part.stages()]
        if self._repeat:
            last = Stage(kind=last.kind, roles=last.roles, rounds=last.rounds, repeats=True)
        return (*first, last)


class _Decided(AgentProtocol):
    def __init__(self, next_roles: Callable[[], Sequence[str]]) -> None:
        self._next = next_roles

    def begin(self, playing: Collection[str]) -> Sequence[str]:
        return self._next()

    def following(self, acted: Sequence[str], playing: Collection[str], pending: Collection[str]) -> Sequence[str]:
        return self._next()

    def stages(self) -> tuple[Stage, ...]:
        return (Stage(kind="decided"),)
