"""The protocol of an environment's agents as a text drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.envs.coordinator import Coordinator
from palestra.envs.protocols import AgentProtocol, Stage

_ACTS, _ANY_TIME, _WAITS = "●", "○", "─"
_TOGETHER, _PHASE = "┃", "║"
_MOST_ROLES, _LONGEST_NAME = 16, 20
_LEGEND = {
    _ACTS: "acts",
    _ANY_TIME: "acts when it wants to",
    _TOGETHER: "barrier: actions are revealed together",
    _PHASE: "barrier between phases",
}


@dataclass(frozen=True, slots=True)
class _Moment:
    """Roles asked together, and their stage of the protocol."""

    roles: tuple[str, ...]
    stage: int
    together: bool


def draw_protocol(roles: Sequence[str], protocol: AgentProtocol, width: int = 80) -> str:
    """Return a text drawing of a protocol, assuming that no role's part ends early; the legend comes last. `protocol`:
    a new object, not used in an episode. A protocol decided by the world is described in words.
    """
    stages = protocol.stages()
    said = [_in_words(stage) for stage in stages]
    words = said[0] if len(said) == 1 else "\n".join(f"{number}. {line}" for number, line in enumerate(said, start=1))
    if any(stage.kind == "decided" for stage in stages):
        return words
    shown = list(roles[:_MOST_ROLES])
    margin = min(max(map(len, shown)), _LONGEST_NAME) + 2
    moments, goes_on = _rehearsed(roles, protocol, (width - margin - 2) // 4)
    lines = [f"{_short(role):<{margin}}" for role in shown]
    header = " " * margin
    for number, moment in enumerate(moments):
        following = moments[number + 1] if number + 1 < len(moments) else None
        begins = number == 0 or moments[number - 1].stage != moment.stage
        header += f"{moment.stage + 1:<4}" if len(stages) > 1 and begins else "    "
        edge = _edge(moment, following)
        for place, role in enumerate(shown):
            mark = (_ACTS if moment.together else _ANY_TIME) if role in moment.roles else _WAITS
            lines[place] += f"{_WAITS}{mark}{_WAITS}{edge}"
    end = " …" if goes_on else ""
    picture = [header.rstrip(), *(f"{line}{end}" for line in lines)]
    if len(roles) > len(shown):
        picture.append(f"… and {len(roles) - len(shown)} more roles")
    legend = [f"{mark} {text}" for mark, text in _LEGEND.items() if any(mark in line for line in lines)]
    pairs = ["   ".join(legend[start : start + 2]) for start in range(0, len(legend), 2)]
    return "\n".join([words, "", *(line for line in picture if line), "", *pairs])


def _edge(moment: _Moment, following: _Moment | None) -> str:
    """Return the separator between two moments."""
    if following is not None and following.stage != moment.stage:
        return _PHASE
    return _TOGETHER if moment.together and len(moment.roles) > 1 else _WAITS


def _rehearsed(roles: Sequence[str], protocol: AgentProtocol, most: int) -> tuple[list[_Moment], bool]:
    """Return the first moments of a protocol in which all roles answer, and whether there are more."""
    coordinator: Coordinator[None] = Coordinator(roles, protocol)
    asked = coordinator.begin()
    found: list[_Moment] = []
    while asked and len(found) < most:
        found.append(_Moment(asked, protocol.present_stage, protocol.together))
        for role in coordinator.to_act:
            coordinator.answer(role, None)
        following: list[str] = []
        while actions := coordinator.take():
            following += coordinator.advance(tuple(actions))
        asked = tuple(following)
    return found, bool(asked)


def _in_words(stage: Stage) -> str:
    who = ", ".join(map(_short, stage.roles[:_MOST_ROLES])) or "every role"
    more = f" and {len(stage.roles) - _MOST_ROLES} more" if len(stage.roles) > _MOST_ROLES else ""
    rounds = (
        "until the episode ends" if stage.rounds is None else "once" if stage.rounds == 1 else f"{stage.rounds} times"
    )
    how = {
        "turns": f"one after another: {who}{more}, {rounds}",
        "simultaneous": f"at the same time: {who}{more}, {rounds}",
        "free": f"without an order: {who}{more}, {rounds}",
        "decided": "the rules of the world say who is next",
    }.get(stage.kind, f"{stage.kind}: {who}{more}, {rounds}")
    return f"{how}; then from the beginning" if stage.repeats else how


def _short(role: str) -> str:
    return role if len(role) <= _LONGEST_NAME else f"{role[: _LONGEST_NAME - 1]}…"
