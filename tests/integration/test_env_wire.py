"""An environment behind a socket: the same as in process, whatever connections do, and closed to strangers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial

import httpx2
import pytest
from env_servers import KEY, CuttingProxy, EnvServer, Ledger, played
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from palestra import JobConfig, train
from palestra.config import parse_config
from palestra.envs import ConcurrentEnvironment, Environment, SerialEnvironment
from palestra.envs.arithmetic import CalculatorEnvironment, calculator_tasks
from palestra.errors import (
    ConfigError,
    Conflict,
    ConnectionLost,
    EnvironmentFailed,
    EpisodeForfeited,
    InvalidEnvironment,
    InvalidRequest,
    NotScored,
    TooManyRequests,
    Unauthorized,
)
from palestra.store.browsing import read_episodes
from palestra.types.messages import text_message
from palestra_inspect.checking import check_job
from palestra_inspect.environment_check import check_environment
from palestra_remote import RemoteEnvironment
from palestra_remote.wire import CLOSE_ENDED, CLOSE_REFUSED
from palestra_worlds import FrozenLake, Gomoku, GomokuDuel, KuhnPoker, PrisonersDilemma, SplitSum
from palestra_worlds.split_sum import split_sum_tasks

pytestmark = pytest.mark.ci

ACTIONS = ("a", "b", "c", "d")
WHOLE = [
    ("agent", ("begin x",), None, False, False),
    ("agent", ("a",), 1.0, False, False),
    ("agent", ("a; b",), 2.0, False, False),
    ("agent", ("a; b; c",), 3.0, False, False),
    ("agent", ("a; b; c; d",), 4.0, True, False),
]


@pytest.mark.parametrize(
    ("make", "tasks"),
    [
        (Gomoku, [{}, {"size": 3, "opponent": "greedy", "seed": 4}]),
        (KuhnPoker, [{"seed": 1}, {"cards": [2, 0]}]),
        (CalculatorEnvironment, calculator_tasks("train", 1, 0)),
        pytest.param(PrisonersDilemma, [{"seed": 1}], marks=pytest.mark.slow),
        pytest.param(FrozenLake, [{"seed": 1}, {}], marks=pytest.mark.slow),
        pytest.param(GomokuDuel, [{}], marks=pytest.mark.slow),
        pytest.param(SplitSum, split_sum_tasks("train", 2, 0), marks=pytest.mark.slow),
    ],
)
def test_what_passes_the_check_in_process_passes_it_over_a_socket(make, tasks):
    with EnvServer(make) as server:
        check_environment(server.remote(), tasks)
        check_environment(server.remote, tasks[:1], ["p", "1 1"] if make is not CalculatorEnvironment else ["5"])
        asyncio.run(empty(server))


@pytest.mark.parametrize(
    ("make", "task"), [(KuhnPoker, {"seed": 3}), (PrisonersDilemma, {"seed": 1}), (Gomoku, {"size": 3})]
)
async def test_an_episode_is_the_same_as_in_process(make, task):
    actions = ["p", "b", "cooperate", "1 1", "2 2", "3 3", "1 2", "2 1"] * 20
    made = make()
    own = await played(SerialEnvironment(made) if isinstance(made, Environment) else made, task, actions)
    with EnvServer(make) as server:
        environment = server.remote()
        await environment.setup()
        try:
            assert await played(environment, task, actions) == own
            assert environment.roles == tuple(getattr(made, "roles", ()))
        finally:
            await environment.close()


async def cut_at(server: EnvServer, cut: tuple[str, int, bool] | None) -> int:
    """Play until an episode has been whole, with one cut; return how many frames the server has sent until then."""
    before = len(Ledger.books)
    with CuttingProxy(server.url, cut) as proxy:
        environment = server.remote(proxy.url)
        seen = None
        while seen is None:
            try:
                await environment.setup()
                seen = await asyncio.wait_for(played(environment, {"name": "x"}, ACTIONS), 10)
            except EnvironmentFailed:  # and not EpisodeForfeited: no agent is to blame
                assert proxy.cuts == 1, cut
                await environment.close()
        assert seen == WHOLE, cut
        assert proxy.cuts == (cut is not None), cut
        frames = proxy.frames["down"]
        await environment.close()
    # No action is lost, doubled or misplaced in any attempt.
    assert all(book == list(ACTIONS[: len(book)]) for book in Ledger.books[before:]), cut
    assert Ledger.books[-1] == list(ACTIONS)
    return frames


async def test_a_connection_that_is_cut_in_the_middle_fails_the_attempt_and_loses_no_episode():
    with EnvServer(Ledger) as server:
        for place in [("up", 3, False), ("up", 3, True), ("down", 3, False), ("down", 3, True)]:
            await cut_at(server, place)


@pytest.mark.slow
async def test_a_connection_that_is_cut_at_any_message_fails_the_attempt_and_loses_no_episode():
    with EnvServer(Ledger) as server:
        frames = await cut_at(server, None)
        assert frames == 8  # opened, begun, five observations, over
        # "over" is lost with the connection before it, but not with one after it.
        for number in range(frames - 1):
            for passed in (False, True):
                await cut_at(server, ("down", number, passed))
        for number in range(6):  # open, reset, four actions
            for passed in (False, True):
                await cut_at(server, ("up", number, passed))


async def test_a_server_that_stays_away_fails_the_attempt_and_gives_no_reward():
    with EnvServer(Ledger) as server, CuttingProxy(server.url) as proxy:
        environment = server.remote(proxy.url, retry_seconds=0.3)
        await environment.setup()
        await environment.reset({"name": "x"})
        first = await environment.observe()
    environment.act(first.id, text_message("assistant", "a"))
    with pytest.raises((ConnectionLost, EnvironmentFailed), match=r"can't be reached|restarted|has ended"):
        await asyncio.wait_for(environment.observe(), 10)
    await environment.close()


async def test_a_session_that_ends_between_two_episodes_is_followed_by_another():
    with EnvServer(Ledger) as server:
        environment = server.remote()
        await environment.setup()
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        (session,) = server.table._sessions
        server.loop.call_soon_threadsafe(session.ended.set)
        await asyncio.sleep(0.1)
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        assert server.table.list().opened == 2
        await environment.close()


class Broken(Environment):
    blocking = False

    def __init__(self, what: str) -> None:
        self._what = what

    def reset(self, task):
        if self._what == "reset":
            raise RuntimeError("no world today")
        return "begin", {}

    def step(self, action):
        if self._what == "raises":
            raise RuntimeError("the world broke")
        if self._what == "hangs":
            return asyncio.sleep(60)
        reward = {"nan": float("nan"), "none": None}.get(self._what, 1.0)
        return (3 if self._what == "no text" else "seen"), reward, True, False, {}


class NaNReward(ConcurrentEnvironment):
    async def start(self, task):
        self.emit("a", (text_message("user", "begin"),))

    async def on_action(self, observation, action):
        self.emit("a", (), reward=float("nan"), terminated=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (partial(Broken, "raises"), EpisodeForfeited, "RuntimeError: the world broke"),
        (partial(Broken, "reset"), EnvironmentFailed, "no world today"),
        (partial(Broken, "nan"), InvalidEnvironment, "finite"),
        (partial(Broken, "no text"), InvalidEnvironment, "an observation is text"),
        (partial(Broken, "none"), NotScored, "None for its reward"),
        (partial(Broken, "hangs"), EpisodeForfeited, "nothing was shown"),
        (NaNReward, InvalidEnvironment, "finite"),
    ],
)
async def test_an_environment_that_fails_fails_the_attempt_with_its_own_words(make, kind, said):
    with EnvServer(make, hang_seconds=0.3) as server:
        environment = server.remote()
        await environment.setup()
        with pytest.raises(kind, match=said):
            await asyncio.wait_for(played(environment, {}, ["x"]), 10)
        await environment.close()


async def test_more_clients_than_sessions_wait_and_all_of_them_play():
    with EnvServer(Ledger, sessions=2) as server:

        async def one() -> list[tuple]:
            environment = server.remote(wait_seconds=20)
            await environment.setup()
            try:
                return await played(environment, {"name": "x"}, ACTIONS)
            finally:
                await environment.close()

        assert await asyncio.gather(*(one() for _ in range(8))) == [WHOLE] * 8
        # Clients that keep their sessions give way between episodes.
        kept = [server.remote(wait_seconds=20) for _ in range(4)]

        async def twice(environment: RemoteEnvironment) -> list[tuple]:
            await environment.setup()
            await played(environment, {"name": "x"}, ACTIONS)
            return await played(environment, {"name": "x"}, ACTIONS)

        assert await asyncio.gather(*map(twice, kept)) == [WHOLE] * 4
        for environment in kept:
            await environment.close()


async def test_a_server_that_drains_plays_its_episodes_to_the_end_and_takes_no_more_sessions():
    with EnvServer(Ledger) as server:
        idle, playing = server.remote(), server.remote(retry_seconds=0.2)
        for environment in (idle, playing):
            await environment.setup()
        assert await played(idle, {"name": "x"}, ACTIONS) == WHOLE
        await playing.reset({"name": "x"})
        first = await playing.observe()
        draining = asyncio.run_coroutine_threadsafe(server.table.drain(20), server.loop)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
            while not (shown := (await http.get(f"{server.url}/v1/sessions")).json())["draining"]:
                await asyncio.sleep(0.01)
            assert len(shown["sessions"]) == 1, "the session between two episodes has ended"
            refused = await http.get(f"{server.url}/v1/session", headers=UPGRADE)
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        for action in ACTIONS:
            playing.act(first.id, text_message("assistant", action))
            first = await playing.observe()
        assert (first.reward, first.terminated) == (4.0, True)
        await playing.abandon()
        assert await asyncio.wrap_future(draining)
        with pytest.raises(ConnectionLost, match="draining"):
            await playing.reset({"name": "x"})
        for environment in (idle, playing):
            await environment.close()


async def test_a_drain_ends_when_its_time_is_over():
    with EnvServer(Ledger) as server:
        environment = server.remote(retry_seconds=0.2)
        await environment.setup()
        await environment.reset({"name": "x"})
        draining = asyncio.run_coroutine_threadsafe(server.table.drain(0.1), server.loop)
        assert not await asyncio.wrap_future(draining)
        assert len(server.table) == 1
        await environment.close()


async def test_a_client_that_waits_too_long_is_told():
    with EnvServer(Ledger, sessions=1) as server:
        first = server.remote()
        await first.setup()
        with pytest.raises(TooManyRequests, match="become free"):
            await server.remote(wait_seconds=0.2).setup()
        await first.close()


async def empty(server: EnvServer) -> None:
    async with asyncio.timeout(10):
        while len(server.table):
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_sessions_end_when_their_clients_are_gone():
    with EnvServer(Ledger) as server:
        environment = server.remote()
        await environment.setup()
        await environment.reset({"name": "x"})
        environment._link._socket.transport.abort()  # as if its process had died
        await empty(server)


@pytest.mark.slow
async def test_an_idle_session_ends_and_its_client_plays_on_in_another():
    with EnvServer(Ledger, idle_seconds=0.3) as server:
        environment = server.remote()
        await environment.setup()
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        await empty(server)
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        await environment.close()


UPGRADE = {
    "upgrade": "websocket",
    "connection": "upgrade",
    "sec-websocket-version": "13",
    "sec-websocket-key": "x3JJHMbDL1EzLkh9GBhXDw==",
}


class Client:
    """The protocol by hand, as a client in another language may speak it."""

    def __init__(self, server: EnvServer) -> None:
        url = server.url.replace("http", "ws") + "/v1/session"
        self._connecting = connect(url, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None)

    async def __aenter__(self) -> Client:
        self._socket = await self._connecting
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def send(self, message: dict | str) -> None:
        await self._socket.send(message if isinstance(message, str) else json.dumps(message))

    async def until(self, kind: str) -> dict:
        while (message := json.loads(await asyncio.wait_for(self._socket.recv(), 10)))["type"] != kind:
            pass
        return message

    async def closed(self) -> int:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.wait_for(self._socket.recv(), 10)
        return self._socket.close_code


OPEN = {"type": "open", "protocol": 2}


async def test_an_episode_by_hand():
    with EnvServer(Ledger) as server:
        async with Client(server) as client:
            await client.send(OPEN)
            assert (await client.until("opened"))["environment"]["name"] == "Ledger"
            await client.send({"type": "reset", "episode": 7, "task": {"name": "x"}})
            for action in ACTIONS:
                shown = await client.until("observation")
                said = {"role": "assistant", "content": action}
                await client.send({"type": "act", "observation_id": shown["id"], "action": said})
            shown = await client.until("observation")
            assert (shown["episode"], shown["reward"], shown["terminated"]) == (7, 4.0, True)
            assert [m["text"] for m in shown["content"][0]["content"]] == ["a; b; c; d"]
            await client.until("over")
            assert Ledger.books[-1] == list(ACTIONS)


@pytest.mark.parametrize(
    ("first", "code"),
    [
        (OPEN | {"protocol": 1}, "protocol_mismatch"),
        ({"type": "abandon"}, InvalidRequest("").code),
        (OPEN | {"system": "you are"}, None),
    ],
)
async def test_a_session_that_can_not_begin_says_why(first, code):
    with EnvServer(Ledger) as server:
        async with Client(server) as client:
            await client.send(first)
            if code is None:
                await client.until("opened")
            else:
                assert (await client.until("failed"))["code"] == code
                assert await client.closed() == CLOSE_ENDED
        await empty(server)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", CLOSE_REFUSED),
        ({"type": "act", "colour": "red"}, CLOSE_REFUSED),
        ({"type": "reset", "episode": 1, "task": {"name": "x" * 3000}}, 1009),
        (OPEN, CLOSE_ENDED),
    ],
)
async def test_a_message_that_is_none_ends_the_session(message, code):
    with EnvServer(Ledger, max_message_bytes=2000) as server:
        async with Client(server) as client:
            await client.send(OPEN)
            await client.until("opened")
            await client.send(message)
            assert await client.closed() == code
        await empty(server)


async def test_every_route_needs_the_key_and_an_action_has_to_fit():
    with EnvServer(Ledger) as server:
        for path, more in (("environment", {}), ("sessions", {}), ("session", UPGRADE)):
            for key in ({}, {"authorization": "Bearer wrong"}):
                assert httpx2.get(f"{server.url}/v1/{path}", headers=more | key).status_code == 401
        async with Client(server) as client:
            await client.send(OPEN)
            await client.send({"type": "reset", "episode": 1, "task": {"name": "x"}})
            await client.until("observation")
            await client.send({"type": "act", "observation_id": "o77", "action": {"role": "assistant", "content": "a"}})
            assert (await client.until("failed"))["code"] == "conflict"


async def test_what_a_client_can_not_send_or_answer_is_refused_where_it_is_said():
    with EnvServer(Ledger, max_message_bytes=2000) as server:
        environment = server.remote()
        await environment.setup()
        with pytest.raises(Exception, match="the limit"):
            await environment.reset({"name": "x" * 3000})
        await environment.reset({"name": "x"})
        first = await environment.observe()
        with pytest.raises(Conflict, match="not wait"):
            environment.act("o9", text_message("assistant", "a"))
        environment.act(first.id, text_message("assistant", "a"))
        environment.act(first.id, text_message("assistant", "a"))  # the same again is no other action
        with pytest.raises(Conflict, match="another action"):
            environment.act(first.id, text_message("assistant", "b"))
        await environment.close()
        with pytest.raises(Unauthorized):
            await RemoteEnvironment(server.url, "wrong").setup()
    with pytest.raises(ConfigError, match="http"):
        RemoteEnvironment("ftp://somewhere", KEY)


async def test_the_page_shows_nothing_without_a_key_and_loads_nothing_from_elsewhere():
    with EnvServer(Ledger) as server:
        page = httpx2.get(server.url)
        assert page.status_code == 200
        assert "<table" in page.text
        assert "src=" not in page.text
        assert "://" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert httpx2.get(f"{server.url}/v1/sessions").status_code == 401
        environment = server.remote()
        await environment.setup()
        listed = httpx2.get(f"{server.url}/v1/sessions", headers={"authorization": f"Bearer {KEY}"}).json()
        await environment.close()
        assert [line["state"] for line in listed["sessions"]] == ["idle"]
        assert listed["environment"] == "Ledger"


TASKS = [{"id": f"t{number}", "name": f"n{number}"} for number in range(4)]


def job(folder, **more) -> JobConfig:
    groups = {"group_size": 2, "groups_per_step": 2}
    return parse_config({"engine": {"kind": "fake"}, "steps": 2, "run_dir": str(folder), "rollout": groups} | more)


def rewards(folder) -> list[float]:
    return [episode.reward for episode in read_episodes(folder) if episode.kind == "train"]


@pytest.mark.parametrize("way", ["argument", pytest.param("configuration", marks=pytest.mark.slow)])
def test_a_job_trains_on_a_remote_environment(tmp_path, monkeypatch, way):
    monkeypatch.setenv("PALESTRA_ENVIRONMENT_KEY", KEY)
    with EnvServer(Ledger) as server:
        named = {"url": server.url} if way == "configuration" else {}
        config = job(tmp_path / "run", environment=named)
        train(environment=None if named else server.remote(), tasks=TASKS, config=config, quiet=True)
    assert rewards(tmp_path / "run") == [10.0] * 8  # the rewards of the steps are 1, 2, 3 and 4


@pytest.mark.slow
def test_the_check_command_plays_the_environment_of_a_server(tmp_path, monkeypatch):
    config = {"engine": {"kind": "fake"}, "tasks": {"train": str(tmp_path / "tasks.jsonl")}}
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "name": "x"}\n')
    monkeypatch.delenv("PALESTRA_ENVIRONMENT_KEY", raising=False)
    with EnvServer(Ledger) as server, EnvServer(partial(Broken, "nan")) as broken:

        def said(url: str) -> str:
            found = check_job(parse_config(config | {"environment": {"url": url}}))
            return "; ".join(finding.text for finding in found if finding.key == "environment.url")

        assert "PALESTRA_ENVIRONMENT_KEY" in said(server.url)
        monkeypatch.setenv("PALESTRA_ENVIRONMENT_KEY", "wrong")
        assert "key" in said(server.url)
        monkeypatch.setenv("PALESTRA_ENVIRONMENT_KEY", KEY)
        assert said(server.url) == ""
        assert "finite" in said(broken.url)


def test_a_job_names_one_environment():
    with pytest.raises(ConfigError, match=r"environment.url"):
        parse_config({"environment": {"name": "gomoku", "url": "http://127.0.0.1:7500"}})
