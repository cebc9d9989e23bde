"""The model calls of an episode's seats, and which of them led to an action."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

POLICY = 0  # the fence under which the policy of a role acts; those of workers are larger
ENVIRONMENT = -1  # the fence under which the environment acts in a seat's place


@dataclass(kw_only=True, slots=True)
class _Call:
    """A model call of a seat. `forget` frees its seed; None: it was freed, or the episode is over."""

    role: str
    number: int
    fences: set[int]  # of the workers that asked for it
    forget: Callable[[], None] | None


class SeatCalls:
    """Knows who has made each call, and who has given the action of each TimeStep.

    A call of a worker that is gone, and that led to no action, must not be trained. Its seed is free again, so that the
    next worker that makes the same call gets the same tokens: a worker's death changes nothing of what is trained.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}  # by index of the Chat
        self._acted_by: dict[int, int] = {}  # TimeStep -> fence of the seat under which its action was given

    def note(self, role: str, fence: int, number: int, index: int, forget: Callable[[], None]) -> None:
        """Note who has made a call, before it is sampled.

        Args:
            forget: frees its seed; called if its worker leaves before it acts, also while the call is being written.
        """
        call = _Call(role=role, number=number, fences=set(), forget=forget)
        self._calls.setdefault(index, call).fences.add(fence)

    def note_action(self, number: int, fence: int) -> None:
        """Note that the action of a TimeStep was given.

        Args:
            fence: of the worker that gave it, or POLICY, or ENVIRONMENT, where no one has given one in time.
        """
        self._acted_by[number] = fence

    def free_seeds(self, role: str) -> None:
        """Free the seeds of a seat's calls that have led to no action, because their worker is gone."""
        for call in self._calls.values():
            if call.role == role and call.number not in self._acted_by and call.forget is not None:
                call.forget()
                call.forget = None  # another call may have the seed by now

    def unused(self, present: Mapping[str, int]) -> list[int]:
        """Return the calls of workers that are gone which led to no action, by index.

        The action of their TimeStep was given by another worker, by the policy, or not at all.

        Args:
            present: by role, the fence of the worker that holds the seat now, or POLICY.
        """
        return [
            index
            for index, call in sorted(self._calls.items())
            if self._acted_by.get(call.number, present[call.role]) not in call.fences
        ]

    def close(self) -> None:
        """Keep no seed, and nothing that could free one: it holds the episode's session."""
        for call in self._calls.values():
            call.forget = None
