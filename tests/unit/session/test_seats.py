"""The book of all seats: which episodes are begun, who gets which seat, and what ends a wait."""

from __future__ import annotations

import asyncio
import weakref
from itertools import count

import pytest

from palestra.config import RolloutConfig, SeatsConfig
from palestra.errors import (
    Conflict,
    EpisodeEnded,
    EpisodeLeaseExpired,
    InvalidRequest,
    NotFound,
    RolloutFailed,
    ServerStopping,
    TooManyRequests,
)
from palestra.session import SeatBook
from palestra.store.lifecycle import EpisodeEnd
from palestra.types.messages import Observation, text_message
from unit.building import TASK, FakeClock, open_store

ROLES = ["white", "black"]
LEASE = 60.0
REQUESTS = map("request-{}".format, count())


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(tmp_path, clock):
    with open_store(tmp_path, clock, max_attempts=2) as opened:
        yield opened


@pytest.fixture
def book(store, clock):
    return make_book(store, clock)


def make_book(store, clock, limit=100, **seats) -> SeatBook:
    rollout = RolloutConfig(lease_seconds=LEASE, max_attempts=2)
    config = SeatsConfig.model_validate({"roles": ROLES, "wait_seconds": 500.0} | seats)
    return SeatBook(config, rollout, store.episodes, clock, limit)


async def begin(store, book, number=1):
    """Episodes that the server has claimed."""
    await store.groups.register("train", 0, 1, TASK, number)
    return [book.open(episode) for episode in await store.episodes.claim_many("runner", "r", number)]


async def take(book, role, worker="", request="", wait=0.0):
    return await book.claim(role, worker or role, request or next(REQUESTS), None, None, wait, lambda: False)


def show(table, name, number=0, agent="white"):
    observation = Observation(id=name, parents=(), agent=agent, content=(text_message("user", name),))
    table.show(observation, number)
    return asyncio.ensure_future(table.ask(observation))


async def test_an_episode_is_wanted_for_each_worker_that_waits_and_finds_no_free_seat(store, book):
    told = []
    book.on_wanted.append(lambda: told.append(book.wanted))
    waiting = [asyncio.ensure_future(take(book, "white", f"w{n}", wait=9.0)) for n in range(3)]
    waiting.append(asyncio.ensure_future(take(book, "black", "b", wait=9.0)))
    await asyncio.sleep(0)
    assert (told, book.wanted) == ([1, 2, 3, 3], 3)
    first, second = await begin(store, book, 2)
    await asyncio.sleep(0.01)
    assert book.wanted == 1
    claims = [task.result() for task in waiting if task.done()]
    assert [(claim.table, claim.key.role) for claim in claims] == [
        (first, "white"),
        (second, "white"),
        (first, "black"),
    ], "the first episode first"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert book.wanted == 0, "one that does not wait any more wants nothing"


async def test_a_claim_that_is_sent_again_gets_the_same_seat_until_it_is_lost(store, book):
    (table,) = await begin(store, book)
    claim = await take(book, "white", "w", "again")
    assert await take(book, "white", "w", "again") == claim
    assert await take(book, "white", "other", "late") is None
    book.leave(claim.key)
    heir = await take(book, "white", "w", "again")
    assert (heir.table, heir.key.seat_fence) == (table, 2)
    with pytest.raises(EpisodeLeaseExpired, match=r"white.*train-000000-00"):
        book.leave(claim.key)


async def test_a_worker_holds_one_seat_of_an_episode_and_one_of_each_of_several(store, book):
    first, second = await begin(store, book, 2)
    assert (await take(book, "white", "me")).table is first
    assert (await take(book, "black", "me")).table is second
    with pytest.raises(NotFound, match=r"'red'.*'white'.*'black'"):
        await take(book, "red", "me")
    assert (await take(book, "black", "you")).table is first
    with pytest.raises(Conflict, match=r"black.*train-000000-01.*white"):
        await take(book, "white", "me")


async def test_a_seat_whose_lease_runs_out_is_free_and_its_requests_renew_it(store, book, clock):
    lost = []
    book.on_seat_over.append(lambda lease, fence, gone: lost.append((lease.split()[-1], fence, gone)))
    (table,) = await begin(store, book)
    white, black = await take(book, "white"), await take(book, "black")
    clock.advance(LEASE - 1)
    assert (await book.observe(black.key, 0, 0.0)).status == "waiting"
    clock.advance(2)
    book.expire()
    assert (table.holds("white", 1), table.holds("black", 1), lost) == (False, True, [("white", 1, True)])
    with pytest.raises(EpisodeLeaseExpired):
        await book.observe(white.key, 0, 0.0)
    answer = await book.observe(black.key, 2, 0.0)
    assert [(event.kind, event.role) for event in answer.events] == [("seat_left", "white")]


async def test_after_as_many_workers_as_an_episode_has_attempts_it_is_given_back(store, book):
    (table,) = await begin(store, book)
    asked = show(table, "o0")
    for number in range(2):
        assert table.failure is None
        book.leave((await take(book, "white", f"w{number}")).key)
    with pytest.raises(RolloutFailed, match=r"white.*2") as failed:
        await asked
    assert failed.value.termination == "seat_lost"
    assert not table.can_take("white")


@pytest.mark.parametrize(("comes", "termination"), [("white", "seat_lost"), ("black", "seat_unclaimed")])
async def test_a_seat_that_has_to_act_waits_so_long_for_a_worker(store, book, clock, comes, termination):
    (table,) = await begin(store, book)
    claim = await take(book, comes)
    if comes == "white":
        book.leave(claim.key)
    clock.advance(1000.0)
    asked = show(table, "o0")
    await asyncio.sleep(0)
    book.expire()
    assert not asked.done(), "the time counts from the observation"
    clock.advance(501.0)
    book.expire()
    with pytest.raises(RolloutFailed, match=r"white.*500") as failed:
        await asked
    assert failed.value.termination == termination


async def test_an_episode_that_no_worker_has_come_to_is_not_played_by_policies_alone(store, clock):
    book = make_book(store, clock, takeover="policy")
    (table,) = await begin(store, book)
    asked = show(table, "o0")
    await asyncio.sleep(0)
    clock.advance(501.0)
    book.expire()
    with pytest.raises(RolloutFailed) as failed:
        await asked
    assert failed.value.termination == "seat_unclaimed"


async def test_the_end_is_told_when_the_rewards_are_on_disk_and_also_by_another_process(store, book, clock):
    (table,) = await begin(store, book)
    white = await take(book, "white")
    waiting = asyncio.ensure_future(book.observe(white.key, 1, 60.0))
    await asyncio.sleep(0)
    episode = table.episode
    await store.episodes.end(episode.episode_id, episode.fence, EpisodeEnd(rewards={"white": 0.25, "black": 0.75}))
    over = await waiting
    assert (over.status, over.reward) == ("over", 0.25)
    assert (await make_book(store, clock).observe(white.key, 0, 0.0)).reward == 0.25
    with pytest.raises(EpisodeEnded, match="is completed"):
        await make_book(store, clock).act(white.key, "o0", text_message("assistant", "late"))


@pytest.mark.parametrize("discard", [False, True])
async def test_an_episode_that_was_given_back_is_told_so(store, book, discard):
    (table,) = await begin(store, book)
    white, asked = await take(book, "white"), show(table, "o0")
    waiting = asyncio.ensure_future(book.observe(white.key, 1, 60.0))
    await asyncio.sleep(0.01)
    assert waiting.result().observation.observation_id == "o0"
    await store.episodes.abort(table.episode.episode_id, table.episode.fence, "why", discard)
    with pytest.raises(EpisodeLeaseExpired):
        await asked
    with pytest.raises(EpisodeEnded if discard else EpisodeLeaseExpired, match="claim"):
        await book.observe(white.key, 1, 60.0)


async def test_so_many_requests_wait_and_all_hear_that_the_server_stops(store, clock):
    book = make_book(store, clock, limit=2)
    (_,) = await begin(store, book)
    white = await take(book, "white")
    waiting = [
        asyncio.ensure_future(book.observe(white.key, 1, 60.0)),
        asyncio.ensure_future(take(book, "white", wait=9.0)),
    ]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match=r"2.*requests"):
        await book.observe(white.key, 1, 60.0)
    book.stop(ServerStopping("the server is going down"))
    for task in waiting:
        with pytest.raises(ServerStopping):
            await task


async def test_a_claim_that_waits_hears_that_the_job_is_over(store, book):
    over = []
    claim = book.claim("white", "w", "r", None, None, 60.0, lambda: bool(over))
    waiting = asyncio.ensure_future(claim)
    await asyncio.sleep(0)
    over.append(True)
    book.wake()
    assert await waiting is None


async def test_two_workers_do_not_wait_for_each_other_in_two_episodes(store, book):
    """One lost its partner, and the partner's heir came before the lease ran out, and began another episode."""
    first, second = await begin(store, book, 2)
    gone, left = await take(book, "white", "gone"), await take(book, "black", "left")
    heir = await take(book, "white", "heir")
    assert (left.key.episode_id, heir.table) == (first.episode.episode_id, second)
    asked = show(second, "o0", agent="black")
    await asyncio.sleep(0)
    book.expire()
    assert not asked.done(), "as long as no worker is missed elsewhere, it waits"
    book.leave(gone.key)
    book.expire()
    with pytest.raises(RolloutFailed, match=r"white.*missed.*train-000000-00") as failed:
        await asked
    assert failed.value.termination == "seat_unclaimed"
    assert (await take(book, "white", "again")).table is first


async def test_a_seat_whose_part_is_over_is_not_offered_and_leaving_it_ends_nothing(store, clock):
    for takeover in ("worker", "replay", "policy"):
        book = make_book(store, clock, takeover=takeover)
        await store.groups.register("train", 0, 1, TASK, 3)
        (episode,) = await store.episodes.claim_many("runner", takeover, 1)
        table = book.open(episode)
        white, black = await take(book, "white"), await take(book, "black")
        asked = show(table, "o1", agent="black")
        table.show(Observation(id="o2", parents=(), agent="white", content=(), terminated=True), None)
        book.leave(white.key)
        assert await take(book, "white", "heir") is None
        await asyncio.sleep(0)
        assert not asked.done(), "black plays on"
        await book.act(black.key, "o1", text_message("assistant", "a"))
        assert (await asked).text == "a"


async def test_an_action_that_comes_after_the_end_hears_of_the_end_and_one_sent_again_is_taken(store, book):
    (table,) = await begin(store, book)
    white, black = await take(book, "white"), await take(book, "black")
    asked = show(table, "o0")
    show(table, "o1", agent="black")
    await asyncio.sleep(0)
    action = text_message("assistant", "a")
    await book.act(white.key, "o0", action)
    assert await asked == action
    await store.episodes.end(
        table.episode.episode_id, table.episode.fence, EpisodeEnd(rewards={"white": 1.0, "black": 0.0})
    )
    await book.act(white.key, "o0", action)
    with pytest.raises(EpisodeEnded, match="completed; observe"):
        await book.act(black.key, "o1", action)
    assert (await book.observe(black.key, 0, 0.0)).reward == 0.0


async def test_the_end_is_told_to_those_who_held_their_seats_and_not_to_former_workers(store, book):
    (table,) = await begin(store, book)
    former = await take(book, "white", "former")
    book.leave(former.key)
    heir = await take(book, "white", "heir")
    await store.episodes.end(
        table.episode.episode_id, table.episode.fence, EpisodeEnd(rewards={"white": 1.0, "black": 0.0})
    )
    assert (await book.observe(heir.key, 0, 0.0)).reward == 1.0
    with pytest.raises(EpisodeLeaseExpired, match="seat again"):
        await book.observe(former.key, 0, 0.0)


async def test_claims_of_one_seat_leave_room_for_the_others_and_for_observations(store, clock):
    book = make_book(store, clock, limit=8)
    waiting = [asyncio.ensure_future(take(book, "white", f"w{number}", wait=9.0)) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match=r"2.*white"):
        await take(book, "white", "late", wait=9.0)
    (_,) = await begin(store, book)
    black = await take(book, "black")
    assert (await book.observe(black.key, 0, 0.0)).status == "waiting"
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_episode_that_is_over_keeps_no_session_in_memory(store, book):
    class Session:
        def free_seed(self) -> None:
            raise AssertionError("the worker has not left")

    session = Session()
    kept = weakref.ref(session)
    (table,) = await begin(store, book)
    white = await take(book, "white")
    table.calls.note("white", white.key.seat_fence, 0, 0, session.free_seed)
    await store.episodes.end(table.episode.episode_id, table.episode.fence, EpisodeEnd(rewards={"white": 1.0}))
    del session
    assert kept() is None
    assert book.was_held(table.episode)


async def test_a_worker_that_does_not_act_loses_its_seat(store, clock, caplog):
    book = make_book(store, clock, wait_seconds=30.0)
    (table,) = await begin(store, book)
    white, black = await take(book, "white", "slow"), await take(book, "black")
    asked = show(table, "o0")
    await asyncio.sleep(0)
    clock.advance(29.0)
    book.expire()
    assert (await book.observe(white.key, 0, 0.0)).status == "act"
    clock.advance(2.0)
    book.expire()
    assert "the worker 'slow' of the seat white has not acted for 30 s (seats.wait_seconds)" in caplog.text
    with pytest.raises(EpisodeLeaseExpired):
        await book.observe(white.key, 0, 0.0)
    (event,) = [e for e in (await book.observe(black.key, 0, 0.0)).events if e.kind == "seat_left"]
    assert event.role == "white"
    heir = await take(book, "white", "heir")
    clock.advance(29.0)
    book.expire()
    await book.act(heir.key, "o0", text_message("assistant", "a"))
    assert (await asked).text == "a", "the time of the next worker begins when it comes"


async def test_observations_of_one_seat_leave_room_for_those_of_another_and_keep_its_lease(store, clock):
    book = make_book(store, clock, limit=1000)
    await begin(store, book)
    white, black = await take(book, "white"), await take(book, "black")
    clock.advance(LEASE - 1)
    flood = [asyncio.ensure_future(book.observe(black.key, 9, 5.0)) for _ in range(20)]
    await asyncio.sleep(0.05)
    refused = [one for one in flood if one.done()]
    assert len(refused) == 12
    for one in refused:
        with pytest.raises(TooManyRequests, match=r"8.*observe"):
            one.result()
    assert (await book.observe(white.key, 9, 0.0)).status == "waiting"
    for one in flood:
        one.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_refused_observation_renews_the_lease(store, clock):
    book = make_book(store, clock, limit=0)
    (episode,) = await begin(store, book)
    key = (await asyncio.wait_for(take_without_limit(book, "white"), 5)).key
    clock.advance(LEASE - 1)
    with pytest.raises(TooManyRequests):
        await book.observe(key, 0, 0.0)
    clock.advance(LEASE - 1)
    book.expire()
    assert episode.holds("white", key.seat_fence)


async def take_without_limit(book, role):
    most, book._max_observers = book._max_observers, 100
    try:
        return await take(book, role)
    finally:
        book._max_observers = most


async def test_the_same_request_id_for_two_seats_is_two_claims(store, book):
    await begin(store, book)
    white, black = await take(book, "white", "a", "same"), await take(book, "black", "b", "same")
    assert (await take(book, "white", "a", "same")).key == white.key
    assert (await take(book, "black", "b", "same")).key == black.key


async def test_each_event_is_given_once_to_a_worker_that_counts_none(store, book):
    (table,) = await begin(store, book)
    white, black = await take(book, "white"), await take(book, "black")
    assert [e.kind for e in (await book.observe(white.key, None, 0.0)).events] == ["seat_claimed"]
    assert (await book.observe(white.key, None, 0.0)).events == ()
    book.leave(black.key)
    assert [e.kind for e in (await book.observe(white.key, None, 0.0)).events] == ["seat_left"]
    assert [e.kind for e in (await book.observe(white.key, 2, 0.0)).events] == ["seat_left"]
    book.leave(white.key)
    heir = await take(book, "white", "heir")
    assert [e.kind for e in (await book.observe(heir.key, None, 0.0)).events] == ["seat_claimed", "seat_left"]
    assert table.failure is None


async def test_an_action_that_is_none_of_the_choices_is_refused_and_can_be_given_again(store, book):
    class Strict:
        forfeits_lost_seats = scores_illegal = False

        def run_clock(self, observation_id):
            pass

    (table,) = await begin(store, book)
    table.world = Strict()
    white = await take(book, "white")
    content = (text_message("user", "?"),)
    observation = Observation(id="o0", parents=(), agent="white", content=content, choices=("1", "2"))
    table.show(observation, 0)
    asked = asyncio.ensure_future(table.ask(observation))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest, match=r"'7'.*1.*2"):
        await book.act(white.key, "o0", text_message("assistant", "7"))
    assert not asked.done()
    await book.act(white.key, "o0", text_message("assistant", "2"))
    assert (await asked).text == "2"


async def test_thoughts_of_a_worker_stay_its_own(store, book):
    (table,) = await begin(store, book)
    white = await take(book, "white")
    asked = show(table, "o0")
    await asyncio.sleep(0)
    action = text_message("assistant", "p").model_copy(update={"reasoning_content": "long " * 1000})
    await book.act(white.key, "o0", action)
    assert (await asked).reasoning_content is None
    assert table.history("white")["white"][-1] == action, "the next worker goes on with them"
