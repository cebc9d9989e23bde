"""The episode store against a model of a few lines: any order of claims, ends, aborts, expiries and restarts.

At most one worker holds an episode, what is completed never changes, an episode is played at most `max_attempts`
times, nobody with a former fence gets anything in, and the counts add up.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from drawing import drawn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from unit.building import TASK, FakeClock, make_chat, open_store

from palestra.errors import Conflict, EpisodeEnded, EpisodeLeaseExpired, IllegalTransition
from palestra.store.lifecycle import EpisodeEnd

LEASE, LONGEST, ATTEMPTS = 60.0, 200.0, 2
rewards = st.sampled_from([0.0, 0.5, 1.0])


@dataclass
class Model:
    """What one episode should be."""

    order: int
    state: str = "registered"
    fence: int = 0
    attempts: int = 0
    request: str | None = None
    reward: float | None = None
    expires: float = 0.0
    deadline: float = 0.0
    chats: dict[int, int] = field(default_factory=dict)  # fence -> calls recorded

    def give_back(self, discard: bool = False) -> None:
        self.state = "discarded" if discard or self.attempts >= ATTEMPTS else "registered"


class EpisodeLifecycle(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.Runner()
        self.clock = FakeClock()
        self.over: list[tuple[str, int]] = []
        self.open()
        self.episodes: dict[str, Model] = {}
        self.requests = 0
        self.groups = 0
        self.history: list[tuple[str, int]] = []  # every (episode, fence) that was ever handed out

    def open(self) -> None:
        self.store = open_store(
            Path(self.folder.name),
            self.clock,
            lease_seconds=LEASE,
            max_attempts=ATTEMPTS,
            timeout_seconds=LONGEST,
        )
        self.store.episodes.on_lease_over.append(lambda e, f: self.over.append((e, f)))

    def teardown(self) -> None:
        self.store.close()
        self.loop.close()
        self.folder.cleanup()

    def run(self, work):
        return self.loop.run(work)

    def refused(self, work, *kinds: type[Exception]) -> None:
        with pytest.raises(kinds):
            self.run(work)

    def anyone(self, data) -> tuple[str, int]:
        """An episode and a fence that some worker has, had, or makes up."""
        holders = [(name, m.fence) for name, m in self.episodes.items() if m.state == "claimed"]
        made_up = st.tuples(st.sampled_from(sorted(self.episodes)), st.integers(0, 4))
        choices = [st.sampled_from(pairs) for pairs in (holders, self.history) if pairs]
        return data.draw(st.one_of(*choices, made_up))

    def holds(self, episode: str, fence: int) -> bool:
        model = self.episodes[episode]
        return model.state == "claimed" and model.fence == fence

    def kinds(self, episode: str, fence: int) -> tuple[type[Exception], ...]:
        """How one who does not hold the episode is refused."""
        model = self.episodes[episode]
        stale = model.fence != fence or model.state == "registered"
        return (EpisodeLeaseExpired,) if stale else (EpisodeEnded,)

    def touch(self, model: Model) -> None:
        model.expires = self.clock.ticks + LEASE

    @initialize()
    def begin(self) -> None:
        self.register(2)

    @precondition(lambda self: self.groups < 4)
    @rule(size=st.integers(1, 3))
    def register(self, size: int) -> None:
        for _ in range(2):  # the second is a no-op
            self.run(self.store.groups.register("train", self.groups, 1, TASK, size))
        for sample in range(size):
            self.episodes[f"train-{self.groups:06d}-{sample:02d}"] = Model(order=len(self.episodes))
        self.groups += 1

    @rule()
    def claim(self) -> None:
        self.requests += 1
        request = f"r{self.requests}"
        free = [name for name, m in self.episodes.items() if m.state == "registered"]
        found = self.run(self.store.episodes.claim("w", request, None))
        if not free:
            assert found is None
            return
        first = min(free, key=lambda name: self.episodes[name].order)
        model = self.episodes[first]
        model.state, model.fence, model.attempts = "claimed", model.fence + 1, model.attempts + 1
        model.request, model.deadline = request, self.clock.ticks + LONGEST
        self.touch(model)
        assert (found.episode_id, found.fence, found.attempts) == (
            first,
            model.fence,
            model.attempts,
        )
        assert (first, model.fence) not in self.history
        self.history.append((first, model.fence))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def claim_again(self, data) -> None:
        """A retry of a claim whose answer was lost; requests that another claim has replaced are not sent again."""
        known = {m.request: name for name, m in self.episodes.items() if m.request}
        if not known:
            return
        request = data.draw(st.sampled_from(sorted(known)))
        name = known[request]
        model = self.episodes[name]
        if model.state != "claimed":
            self.refused(self.store.episodes.claim("w", request, None), Conflict)
            return
        found = self.run(self.store.episodes.claim("w", request, None))
        assert (found.episode_id, found.fence) == (name, model.fence)
        self.touch(model)

    @rule(data=st.data())
    def claim_by_name(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.episodes)))
        model = self.episodes[name]
        if model.state != "registered":
            self.requests += 1
            self.refused(self.store.episodes.claim("w", f"r{self.requests}", None, name), IllegalTransition)

    @rule(data=st.data(), reward=rewards)
    def end(self, data, reward: float) -> None:
        name, fence = self.anyone(data)
        model = self.episodes[name]
        work = self.store.episodes.end(name, fence, EpisodeEnd(rewards={"agent": reward}))
        if self.holds(name, fence):
            assert self.run(work) is True
            model.state, model.reward = "completed", reward
            assert self.over.pop() == (name, fence)
        elif model.state == "completed" and model.fence == fence:
            if model.reward == reward:
                assert self.run(work) is False
            else:
                self.refused(work, Conflict)
        else:
            self.refused(work, *self.kinds(name, fence))

    @rule(data=st.data(), discard=st.booleans())
    def abort(self, data, discard: bool) -> None:
        name, fence = self.anyone(data)
        work = self.store.episodes.abort(name, fence, "why", discard)
        if self.holds(name, fence):
            self.run(work)
            self.episodes[name].give_back(discard)
            assert self.over.pop() == (name, fence)
        else:
            self.refused(work, *self.kinds(name, fence))

    @rule(data=st.data())
    def call(self, data) -> None:
        """A call renews the lease and is recorded; of one who does not hold the episode neither happens."""
        name, fence = self.anyone(data)
        model = self.episodes[name]
        index = model.chats.get(fence, 0)
        chat = make_chat(episode_id=name, fence=fence, index=index)
        if self.holds(name, fence):
            self.run(self.store.episodes.renew(name, fence))
            self.run(self.append(chat))
            model.chats[fence] = index + 1
            self.touch(model)
        else:
            self.refused(self.store.episodes.renew(name, fence), *self.kinds(name, fence))
            self.refused(self.append(chat), *self.kinds(name, fence))

    async def append(self, chat) -> None:
        await self.store.calls.append(chat)

    @rule(seconds=st.sampled_from([1.0, 30.0, 59.0, 60.0, 150.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        late = {
            name: m.fence
            for name, m in self.episodes.items()
            if m.state == "claimed" and self.clock.ticks >= min(m.expires, m.deadline)
        }
        assert self.run(self.store.episodes.expire_leases()) == len(late)
        assert sorted(self.over) == sorted(late.items())
        self.over.clear()
        for name in late:
            self.episodes[name].give_back()

    @rule(years=st.sampled_from([-40, 40]))
    def the_calendar_jumps(self, years: int) -> None:
        self.clock.wall += years * 365 * 86400.0
        assert self.run(self.store.episodes.expire_leases()) == 0

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.clock = FakeClock()
        self.open()
        for model in self.episodes.values():
            if model.state == "claimed":
                model.deadline = self.clock.ticks + LONGEST
                self.touch(model)

    @invariant()
    def every_episode_is_what_it_should_be(self) -> None:
        for name, model in self.episodes.items():
            found = self.run(self.store.episodes.get(name))
            assert (found.state.value, found.fence, found.attempts) == (model.state, model.fence, model.attempts)
            assert found.reward == (model.reward if model.state == "completed" else None)
            assert model.attempts <= ATTEMPTS

    @invariant()
    def only_the_calls_of_the_last_lease_are_in_the_trajectory(self) -> None:
        for trajectory in self.run(self.store.calls.trajectories(sorted(self.episodes))):
            model = self.episodes[trajectory.episode.episode_id]
            assert len(trajectory.chats) == model.chats.get(model.fence, 0)
            assert all(chat.fence == model.fence for chat in trajectory.chats)

    @invariant()
    def the_counts_add_up(self) -> None:
        counts = self.run(self.store.episodes.counts())
        for state in ("registered", "claimed", "completed", "discarded"):
            assert getattr(counts, state) == sum(m.state == state for m in self.episodes.values())
        assert len(self.store.leases) == counts.claimed
        assert self.over == []


TestEpisodeLifecycle = pytest.mark.more_examples(EpisodeLifecycle.TestCase)
TestEpisodeLifecycle.settings = settings(max_examples=drawn(5, 20), stateful_step_count=40)
