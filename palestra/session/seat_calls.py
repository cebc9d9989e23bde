"""The model calls of an episode's external players, and the actions that they led to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

POLICY = 0  # the fence under which the policy of a role acts; those of workers are larger
ENVIRONMENT = -1  # the fence under which the environment acts in a seat's place


@dataclass(kw_only=True, slots=True)
class _Call:
    """A model call of an external player. `forget` frees its seed; None: it was freed, or the episode is over."""

    role: str
    number: int
    fences: set[int]  # of the workers that asked for it
    forget: Callable[[], None] | None


class SeatCalls:
    """Records which worker made each call, and who gave the action of each TimeStep.

    A lost worker's calls without an action must not be trained. Their seeds are freed, so that the next worker's equal
    calls get the same tokens: a worker's death does not change the training data.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}  # by index of the Chat
        self._acted_by: dict[int, int] = {}  # TimeStep -> fence of the seat under which its action was given

    def note(self, role: str, fence: int, number: int, index: int, forget: Callable[[], None]) -> None:
        """Record the worker of a call before it is sampled. `forget` frees the call's seed; it is called if its worker
        leaves before it acts, even while the call is in writing.
        """
        call = _Call(role=role, number=number, fences=set(), forget=forget)
        self._calls.setdefault(index, call).fences.add(fence)

    def note_action(self, number: int, fence: int) -> None:
        """Record that the action of a TimeStep was given. `fence` is that of the worker; or POLICY, or ENVIRONMENT
        after a timeout.
        """
        self._acted_by[number] = fence

    def free_seeds(self, role: str) -> None:
        """Free the seeds of a lost worker's calls that led to no action."""
        for call in self._calls.values():
            if call.role == role and call.number not in self._acted_by and call.forget is not None:
                call.forget()
                call.forget = None  # another call may have the seed by now

    def unused(self, present: Mapping[str, int]) -> list[int]:
        """Return the indices of lost workers' calls that led to no action: another worker or the policy acted, or the
        turn is open. `present` is, by role, the fence of its present worker, or POLICY.
        """
        return [
            index
            for index, call in sorted(self._calls.items())
            if self._acted_by.get(call.number, present[call.role]) not in call.fences
        ]

    def close(self) -> None:
        """Drop all seeds and their callbacks, which refer to the episode's session."""
        for call in self._calls.values():
            call.forget = None
