"""Time limits of seats in virtual time: the clock of a turn runs while a worker has the seat and knows its turn."""

from __future__ import annotations

import asyncio

import pytest

from palestra.config import SeatsConfig
from palestra.envs import ConcurrentEnvironment, Fault, MultiAgentEnvironment, Outcome, TimeLimit
from palestra.envs.continuous import LoopClock, run_virtual
from palestra.errors import Conflict, EpisodeOver, RolloutFailed
from palestra.runners.runner import _pace
from palestra.session.seat_table import SeatTable
from palestra.store.leases import LeaseBook
from palestra.types.messages import text_message
from unit.building import make_episode

ROLES = ("white", "black")
LIMIT = 10.0


class Asks(MultiAgentEnvironment):
    """White and black say two things each, in turns; both earn 1 for each of their own."""

    roles = ROLES
    time_limits = {"white": TimeLimit(seconds=LIMIT, default="pass")}  # noqa: RUF012

    def begin(self, task):
        self.record = []

    def view(self, role):
        return " ".join(self.record) or "-"

    def apply(self, actions):
        self.record += [action.text for action in actions.values()]
        return Outcome(rewards=dict.fromkeys(actions, 1.0), over=len(self.record) == 4)

    def forfeit(self, role, fault):
        return Outcome(rewards={role: -5.0}, over=True, info={"fault": fault.value})


class Forfeits(Asks):
    time_limits = {"white": TimeLimit(seconds=LIMIT)}  # noqa: RUF012
    forfeits = frozenset({Fault.LATE, Fault.LEFT})


class Game:
    """An episode whose seats are played by tests; `run` does what the server's runner does."""

    def __init__(self, environment: MultiAgentEnvironment, **seats) -> None:
        self.environment, self.clock = environment, LoopClock()
        config = SeatsConfig.model_validate({"roles": list(ROLES), "wait_seconds": 100.0} | seats)
        self.leases = LeaseBook(self.clock, 36000.0)
        self.table = SeatTable(make_episode(), config, self.leases, 3, self.clock)
        self.rewards: dict[str, float] = {}
        self.info: dict[str, object] = {}
        self.at: list[tuple[str, float]] = []  # who has acted, and when
        self.policy_seconds = 1.0

    async def run(self) -> None:
        environment, turns, number = self.environment, {}, 0
        _pace(environment, ROLES, self.table)
        await environment.reset({})
        try:
            while True:
                observation = await environment.observe()
                before = turns.get(observation.agent)
                if before is not None:
                    before.cancel()
                if observation.reward is not None:
                    self.rewards[observation.agent] = self.rewards.get(observation.agent, 0.0) + observation.reward
                self.info |= observation.info
                self.table.show(observation, None if observation.is_last else number)
                if not observation.is_last:
                    turns[observation.agent] = asyncio.ensure_future(self._turn(observation))
                    number += 1
        except EpisodeOver:
            return
        finally:
            for turn in turns.values():
                turn.cancel()
            failed = [each for each in await asyncio.gather(*turns.values(), return_exceptions=True) if each]
            self.failures = [each for each in failed if isinstance(each, RolloutFailed)]
            await environment.abandon()

    async def _turn(self, observation) -> None:
        action = await self.table.ask(observation)
        if action is None:
            await asyncio.sleep(self.policy_seconds)
            action = text_message("assistant", "policy")
        if not self.environment.is_withdrawn(observation.id):
            self.at.append((observation.agent, asyncio.get_running_loop().time()))
            self.environment.act(observation.id, action)

    async def look(self, role: str, fence: int):
        """Observe a seat until it has to act."""
        while (answer := self.table.view(role, fence, 0)).observation is None:
            await asyncio.sleep(0.1)
        return answer.observation

    async def plays(self, role: str, fence: int, text: str, thinks: float = 0.5) -> bool:
        observation = await self.look(role, fence)
        await asyncio.sleep(thinks)
        return self.table.act(role, fence, observation.observation_id, text_message("assistant", text))

    def take(self, role: str) -> int:
        return self.table.take(role, f"worker of {role}", 36000.0)


async def black_plays(game: Game) -> None:
    fence = game.take("black")
    for _ in range(2):
        await game.plays("black", fence, "b")


def play(environment, white, **seats) -> Game:
    """Play with a black that always answers; returns when the episode is over."""

    async def whole() -> Game:
        game = Game(environment, **seats)
        running, black = asyncio.ensure_future(game.run()), asyncio.ensure_future(black_plays(game))
        await white(game)
        await asyncio.wait_for(running, 3600)
        black.cancel()
        await asyncio.gather(black, return_exceptions=True)
        return game

    return run_virtual(whole())


def test_a_worker_that_is_late_is_told_and_its_default_action_is_taken_and_remembered():
    told = []

    async def white(game):
        fence = game.take("white")
        first = await game.look("white", fence)
        await asyncio.sleep(LIMIT + 1)
        told.append(game.table.act("white", fence, first.observation_id, text_message("assistant", "late")))
        told.append(game.table.act("white", fence, first.observation_id, text_message("assistant", "again")))
        game.table.calls.note("white", fence, 0, 7, lambda: None)
        told.append(game.table.unused_calls)
        told.append([message.text for message in game.table.history("white")["white"]])
        told.append(await game.plays("white", fence, "w"))

    game = play(Asks(), white)
    assert game.environment.record == ["pass", "b", "w", "b"]
    assert told == [False, False, [7], ["-", "pass"], True]
    assert game.rewards == {"white": 2.0, "black": 2.0}


def test_a_worker_in_time_is_not_late():
    async def white(game):
        fence = game.take("white")
        for text in ("one", "two"):
            assert await game.plays("white", fence, text, LIMIT - 0.5)

    assert play(Asks(), white).environment.record == ["one", "b", "two", "b"]


def test_the_clock_does_not_run_while_the_seat_has_no_worker():
    """Nobody comes for longer than the limit, and a worker dies in its turn: the others have what is left."""

    async def white(game):
        await asyncio.sleep(5 * LIMIT)
        fence = game.take("white")
        await game.look("white", fence)
        await asyncio.sleep(0.7 * LIMIT)
        game.table.leave("white", fence)
        await asyncio.sleep(5 * LIMIT)
        fence = game.take("white")
        assert await game.plays("white", fence, "second worker", 0.2 * LIMIT)
        assert await game.plays("white", fence, "w", 0.9 * LIMIT)

    assert play(Asks(), white).environment.record == ["second worker", "b", "w", "b"]


def test_the_second_worker_has_what_the_first_has_left_and_no_more():
    async def white(game):
        fence = game.take("white")
        await game.look("white", fence)
        await asyncio.sleep(0.7 * LIMIT)
        game.table.leave("white", fence)
        fence = game.take("white")
        assert not await game.plays("white", fence, "late", 0.4 * LIMIT)
        assert await game.plays("white", fence, "w")

    assert play(Asks(), white).environment.record == ["pass", "b", "w", "b"]


def test_a_worker_that_does_not_look_has_the_time_of_an_unclaimed_seat_and_then_its_limit():
    async def white(game):
        fence = game.take("white")
        for _ in range(60):
            await asyncio.sleep(5.0)
            game.table.check_waiting()
            if len(game.environment.record) == 4:
                return
        assert fence

    game = play(Asks(), white)
    assert game.environment.record == ["pass", "b", "pass", "b"]
    assert game.at[0][0] == "black"
    assert 100.0 + LIMIT <= game.at[0][1] <= 100.0 + LIMIT + 6.0


def test_the_policy_that_plays_a_left_seat_has_the_time_that_is_left():
    async def white(game):
        game.policy_seconds = 0.5 * LIMIT
        fence = game.take("white")
        await game.look("white", fence)
        await asyncio.sleep(0.7 * LIMIT)
        game.table.leave("white", fence)

    game = play(Asks(), white, takeover="policy")
    assert game.environment.record == ["pass", "b", "policy", "b"]


@pytest.mark.parametrize("takeover", ["worker", "replay"])
def test_a_late_seat_is_a_forfeit_where_the_environment_says_so(takeover):
    async def white(game):
        await game.look("white", game.take("white"))

    game = play(Forfeits(), white, takeover=takeover)
    assert game.rewards == {"white": -5.0, "black": 0.0}
    assert game.info == {"fault": "late"}


def test_a_late_seat_fails_the_episode_where_it_does_not():
    class Strict(Asks):
        time_limits = {"white": TimeLimit(seconds=LIMIT)}  # noqa: RUF012

    async def white(game):
        await game.look("white", game.take("white"))

    with pytest.raises(RolloutFailed, match=r"'white'.*10"):
        play(Strict(), white)


def test_a_lost_seat_is_a_forfeit_where_the_environment_says_so_and_else_fails_the_episode():
    async def leaves(game):
        fence = game.take("white")
        await game.look("white", fence)
        game.table.leave("white", fence)

    game = play(Forfeits(), leaves, takeover="replay")
    assert game.rewards == {"white": -5.0, "black": 0.0}
    assert game.info == {"fault": "left"}
    assert game.table.failure is None
    assert not game.table.can_take("white")
    kinds = [event.kind for event in game.table.view("black", 1, 0).events]
    assert kinds == ["seat_claimed", "seat_left", "seat_lost"]

    async def failed() -> Game:
        game = Game(Asks(), takeover="replay")
        running = asyncio.ensure_future(game.run())
        await leaves(game)
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return game

    assert str(run_virtual(failed()).table.failure).startswith("the worker of the seat white is gone")


def test_a_seat_that_is_lost_between_its_turns_forfeits_the_next_one():
    async def white(game):
        fence = game.take("white")
        await game.plays("white", fence, "w")
        game.table.leave("white", fence)

    game = play(Forfeits(), white, takeover="replay")
    assert game.environment.record == ["w", "b"]
    assert game.rewards == {"white": -4.0, "black": 1.0}


def test_a_seat_that_no_second_worker_comes_to_is_a_forfeit_and_one_that_no_worker_came_to_is_not():
    async def white(game):
        fence = game.take("white")
        await game.look("white", fence)
        game.table.leave("white", fence)
        await asyncio.sleep(101.0)
        game.table.check_waiting()

    assert play(Forfeits(), white).info == {"fault": "left"}

    async def never() -> Game:
        game = Game(Forfeits())
        running = asyncio.ensure_future(game.run())
        await asyncio.sleep(101.0)
        game.table.check_waiting()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return game

    assert "no worker has claimed the seat white" in str(run_virtual(never()).table.failure)


def test_the_same_workers_bring_the_same_game():
    async def white(game):
        fence = game.take("white")
        await game.plays("white", fence, "w", LIMIT + 1)
        game.table.leave("white", fence)
        await game.plays("white", game.take("white"), "v", LIMIT - 1)

    one, other = play(Asks(), white), play(Asks(), white)
    assert (one.environment.record, one.at) == (other.environment.record, other.at)


def test_clocks_of_an_environment_of_its_own_kind_are_refused_for_seats():
    class Own(ConcurrentEnvironment):
        time_limits = {"white": 3.0}  # noqa: RUF012

        async def start(self, task): ...

        async def on_action(self, observation, action): ...

    table = run_virtual(_table())
    with pytest.raises(RolloutFailed, match=r"time.*white"):
        _pace(Own(), ROLES, table)


async def _table() -> SeatTable:
    return Game(Asks()).table


def test_an_action_of_another_observation_is_still_out_of_turn():
    async def white(game):
        fence = game.take("white")
        await game.look("white", fence)
        with pytest.raises(Conflict, match=r"wait.*white"):
            game.table.act("white", fence, "o99", text_message("assistant", "x"))
        for text in ("a", "b"):
            await game.plays("white", fence, text)

    play(Asks(), white)
