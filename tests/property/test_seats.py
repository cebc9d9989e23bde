"""The seats of an episode, whatever its workers do: each observation is answered at most once, by its own seat."""

from __future__ import annotations

import asyncio
from typing import Any

from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import FakeClock, make_episode

from palestra.config import SeatsConfig
from palestra.errors import Conflict, EpisodeLeaseExpired, IllegalTransition, RolloutFailed
from palestra.session.seat_table import SeatTable
from palestra.store.leases import LeaseBook
from palestra.types.messages import Observation, text_message
from palestra.types.states import SEAT_LOST, SEAT_UNCLAIMED

ROLES = ("white", "black")
WORKERS = 3  # that a seat may lose
roles = st.sampled_from(ROLES)
ACTS = st.one_of(
    st.tuples(st.just("ask"), roles),
    st.tuples(st.just("claim"), roles),
    st.tuples(st.just("act"), roles, st.integers(0, 3), st.integers(0, 12), st.sampled_from("xyz")),
    st.tuples(st.just("call"), roles, st.integers(0, 3)),
    st.tuples(st.just("leave"), roles, st.integers(0, 3)),
    st.tuples(st.just("withdraw"), st.integers(0, 12)),
    st.tuples(st.just("time"), st.sampled_from([1.0, 40.0, 130.0])),
)


class World:
    """A table beside a model of it that knows nothing of leases, futures or notifications."""

    def __init__(self, takeover: str) -> None:
        self.clock, self.takeover = FakeClock(), takeover
        config = SeatsConfig(roles=list(ROLES), takeover=takeover, wait_seconds=100.0)
        self.leases = LeaseBook(self.clock, 3600.0)
        self.table = SeatTable(make_episode(), config, self.leases, WORKERS, self.clock)
        self.fence = dict.fromkeys(ROLES, 0)  # of the last claim
        self.held = dict.fromkeys(ROLES, False)
        self.played = dict.fromkeys(ROLES, False)
        self.asked: list[tuple[str, Observation, asyncio.Task[Any]]] = []
        self.answers: dict[str, tuple[int, str]] = {}  # the accepted action of each observation, with its fence
        self.withdrawn: set[str] = set()
        self.calls: dict[int, tuple[str, int, int]] = {}  # index -> seat, TimeStep, fence

    async def settle(self) -> None:
        """Let tasks that were woken run, and compare what both say of them."""
        for _ in range(4):
            await asyncio.sleep(0)
        for role, observation, task in self.asked:
            answered = self.answers.get(observation.id)
            if not task.done():
                assert answered is None
                assert not self.played[role]
                assert self.table.failure is None
            elif task.cancelled():
                assert observation.id in self.withdrawn
            elif task.exception() is not None:
                assert isinstance(task.exception(), RolloutFailed)
                assert answered is None
            elif task.result() is None:
                assert self.played[role]
                assert answered is None
            else:
                assert answered is not None
                assert task.result().text == answered[1]

    def open_of(self, role: str) -> list[Observation]:
        return [o for r, o, task in self.asked if r == role and not task.done() and o.id not in self.answers]

    async def ask(self, role: str) -> None:
        observation = Observation(
            id=f"o{len(self.asked)}", parents=(), agent=role, content=(text_message("user", f"for {role}"),)
        )
        self.table.show(observation, len(self.asked))
        self.asked.append((role, observation, asyncio.ensure_future(self.table.ask(observation))))

    async def claim(self, role: str) -> None:
        free = not self.held[role] and not self.played[role] and self.table.failure is None
        assert self.table.can_take(role) == free
        if not free:
            if self.held[role] or self.played[role]:
                try:
                    self.table.take(role, "w", 60.0)
                except IllegalTransition:
                    return
                raise AssertionError("two workers hold one seat")
            return
        self.fence[role] += 1
        assert self.table.take(role, f"{role}-{self.fence[role]}", 60.0) == self.fence[role]
        self.held[role] = True

    def of_past(self, role: str, back: int) -> tuple[int, bool]:
        """Return the fence of one of the last claims, and whether its worker holds the seat."""
        fence = self.fence[role] - back
        return fence, back == 0 and self.held[role]

    async def act(self, role: str, back: int, number: int, text: str) -> None:
        (fence, holds), name, action = self.of_past(role, back), f"o{number}", text_message("assistant", text)
        before, is_open = self.answers.get(name), any(o.id == name for o in self.open_of(role))
        mine = number < len(self.asked) and self.asked[number][0] == role
        try:
            self.table.act(role, fence, name, action)
        except EpisodeLeaseExpired:
            assert not holds
        except Conflict:
            assert holds
            assert not is_open
            assert before is None or not mine or before[1] != text
        else:
            if before is None:
                assert holds
                assert is_open
                self.answers[name] = (fence, text)
            else:
                assert mine
                assert before[1] == text, "another action was taken for an observation that has one"

    async def call(self, role: str, back: int) -> None:
        fence, holds = self.of_past(role, back)
        waiting = self.open_of(role)
        try:
            number = self.table.turn(role, fence, role)
        except EpisodeLeaseExpired:
            assert not holds
        except Conflict:
            assert holds
            assert not waiting
        else:
            assert holds
            assert waiting[0].id == f"o{number}"
            self.table.calls.note(role, fence, number, len(self.calls), lambda: None)
            self.calls[len(self.calls)] = (role, number, fence)

    async def leave(self, role: str, back: int) -> None:
        fence, holds = self.of_past(role, back)
        try:
            self.table.leave(role, fence)
        except EpisodeLeaseExpired:
            assert not holds
        else:
            assert holds
            self.left(role)

    def left(self, role: str) -> None:
        self.held[role] = False
        self.played[role] = self.takeover == "policy"

    async def withdraw(self, number: int) -> None:
        if number >= len(self.asked):
            return
        _, observation, task = self.asked[number]
        if not task.done() and observation.id not in self.answers:
            self.withdrawn.add(observation.id)
            task.cancel()

    async def time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for lease, fence in self.leases.expired():
            for role in ROLES:
                if lease == self.table.lease_of(role) and self.table.holds(role, fence):
                    assert self.held[role]
                    self.table.leave(role, fence)
                    self.left(role)
        waited = {role: self.open_of(role) and not self.held[role] for role in ROLES}
        self.table.check_waiting()
        for role in ROLES:
            if self.takeover == "policy" and waited[role] and seconds > 100.0 and any(self.fence.values()):
                self.played[role] = True

    def check(self) -> None:
        """What holds at any time."""
        unused = set(self.table.unused_calls)
        for index, (role, number, fence) in self.calls.items():
            answered = self.answers.get(f"o{number}")
            if answered is not None:
                assert (index in unused) == (answered[0] != fence)
            elif self.held[role] and self.fence[role] == fence and not self.played[role]:
                assert index not in unused
            else:
                assert index in unused
        for role in ROLES:
            if self.held[role]:
                seen = self.table.view(role, self.fence[role], 0)
                waiting = self.open_of(role)
                assert (seen.observation is None) == (not waiting)
                if seen.observation is not None:
                    assert seen.observation.content[0].text == f"for {role}", "a seat sees another's observation"
                assert all(event.role != role for event in seen.events)
                said = [message.text for message in self.table.history(role).get(role, ())]
                assert f"for {next(other for other in ROLES if other != role)}" not in said


@given(st.sampled_from(["worker", "policy", "replay"]), st.lists(ACTS, max_size=30))
@examples(quick=60, full=600)
def test_each_observation_is_answered_at_most_once_and_by_its_own_seat(takeover, acts):
    asyncio.run(played(takeover, acts))


async def played(takeover: str, acts: list[tuple[Any, ...]]) -> None:
    world = World(takeover)
    for name, *arguments in acts:
        await getattr(world, name)(*arguments)
        await world.settle()
        world.check()
    if isinstance(failure := world.table.failure, RolloutFailed):
        assert failure.termination in (SEAT_LOST, SEAT_UNCLAIMED)
        assert any(world.fence.values()) or failure.termination == SEAT_UNCLAIMED
    # Nothing waits for ever: when the episode's lease is over, all that waits is told so.
    world.table.close(EpisodeLeaseExpired("the episode was given back"))
    await asyncio.gather(*(task for _, _, task in world.asked), return_exceptions=True)
    for role in ROLES:
        assert not world.table.holds(role, world.fence[role])
