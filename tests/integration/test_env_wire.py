"""An environment behind a socket: the same as in process, whatever connections do, and closed to strangers."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import httpx2
import pytest
from env_servers import KEY, CuttingProxy, EnvServer, Ledger, played

from palestra import JobConfig, train
from palestra.config import parse_config
from palestra.envs import (
    ConcurrentEnvironment,
    Environment,
    FrozenLake,
    Gomoku,
    GomokuDuel,
    KuhnPoker,
    PrisonersDilemma,
    SerialEnvironment,
    SplitSum,
    check_environment,
)
from palestra.envs.calculator import CalculatorEnvironment, calculator_tasks
from palestra.envs.remote import RemoteEnvironment
from palestra.envs.split_sum import split_sum_tasks
from palestra.errors import (
    ConfigError,
    Conflict,
    ConnectionLost,
    EnvironmentFailed,
    EpisodeForfeited,
    InvalidEnvironment,
    NotScored,
    TooManyRequests,
    Unauthorized,
)
from palestra.runtime.checking import check_job
from palestra.store.browsing import read_episodes
from palestra.types.messages import text_message

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
    assert len(server.table) == 0


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


async def through(proxy: CuttingProxy, server: EnvServer, **more) -> list[tuple]:
    environment = server.remote(proxy.url, **more)
    await environment.setup()
    try:
        return await played(environment, {"name": "x"}, ACTIONS)
    finally:
        await environment.close()


async def frames_of_an_episode() -> dict[str, int]:
    with EnvServer(Ledger) as server, CuttingProxy(server.url) as proxy:
        assert await through(proxy, server) == WHOLE
        return dict(proxy.frames)


async def cut_everywhere(places) -> None:
    with EnvServer(Ledger) as server:
        for place in places:
            before = len(Ledger.books)
            with CuttingProxy(server.url, place) as proxy:
                assert await through(proxy, server) == WHOLE, place
                assert proxy.cuts == 1, place
            # One episode, each action once and in order: nothing is lost, and nothing is doubled.
            assert Ledger.books[before:] == [list(ACTIONS)], place


async def test_a_connection_that_is_cut_in_the_middle_loses_and_doubles_nothing():
    await cut_everywhere([("up", 3, False), ("up", 3, True), ("down", 3, False), ("down", 3, True)])


@pytest.mark.slow
async def test_a_connection_that_is_cut_at_any_message_loses_and_doubles_nothing():
    frames = await frames_of_an_episode()
    # The frames of an undisturbed episode but the last ones, which say that the session is closed.
    places = [(way, number, passed) for way in frames for number in range(frames[way] - 2) for passed in (False, True)]
    assert len(places) >= 24
    await cut_everywhere(places)


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
    with EnvServer(Ledger, lease_seconds=30) as server:
        environment = server.remote()
        await environment.setup()
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        (session,) = server.table._sessions.values()
        server.loop.call_soon_threadsafe(server.table.end, session)
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
            made = {"request_id": "r1", "protocols": [1]}
            refused = await http.post(f"{server.url}/v1/sessions", json=made)
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
        with pytest.raises(TooManyRequests, match="none has become free"):
            await server.remote(wait_seconds=0.2).setup()
        await first.close()


@pytest.mark.slow
async def test_sessions_end_when_their_clients_are_gone_and_not_before():
    with EnvServer(Ledger, lease_seconds=0.4) as server:
        environment = server.remote()
        await environment.setup()
        await environment.reset({"name": "x"})
        await asyncio.sleep(0.9)  # its link renews the lease
        assert len(server.table) == 1
        await environment._link.close()  # as if its process had died
        for _ in range(50):
            if not len(server.table):
                break
            await asyncio.sleep(0.1)
        assert len(server.table) == 0


@pytest.mark.slow
async def test_an_idle_session_ends_and_its_client_plays_on_in_another():
    with EnvServer(Ledger, idle_seconds=0.3, lease_seconds=0.8) as server:
        environment = server.remote()
        await environment.setup()
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        await asyncio.sleep(0.8)  # its link has renewed the lease, and has asked for nothing
        assert len(server.table) == 0
        assert await played(environment, {"name": "x"}, ACTIONS) == WHOLE
        await environment.close()


class Http:
    """The protocol without WebSocket, as a client in another language may speak it."""

    def __init__(self, server: EnvServer) -> None:
        self._http = httpx2.Client(base_url=server.url, timeout=10)
        self.received, self.number = 0, 0

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, body, key: str = KEY) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._http.post(path, content=content, headers={"authorization": f"Bearer {key}"})

    def create(self, **more) -> httpx2.Response:
        return self.post("/v1/sessions", {"request_id": "r1", "protocols": [1]} | more)

    def begin(self) -> None:
        self.session = self.create().json()["session"]

    def exchange(self, *messages, **more) -> httpx2.Response:
        numbered = []
        for message in messages:
            self.number += 1
            numbered.append({"number": self.number, **message})
        body = {"ack": self.received, "messages": numbered, "wait_seconds": 5} | more
        answer = self.post(f"/v1/sessions/{self.session['session_id']}/exchange", body, self.session["key"])
        if answer.status_code == 200 and answer.json()["messages"]:
            self.received = answer.json()["messages"][-1]["number"]
        return answer


def test_an_episode_over_plain_http_is_the_same_and_a_request_sent_twice_changes_nothing():
    with EnvServer(Ledger) as server, Http(server) as http:
        http.begin()
        assert http.create().json()["session"] == http.session  # the same request gets the same session
        shown: list[dict] = []

        def until(kind: str, found: list[dict]) -> None:
            shown.extend(found)
            while not any(message["type"] == kind for message in shown):
                shown.extend(http.exchange().json()["messages"])

        until("observation", http.exchange({"type": "reset", "task": {"name": "x"}}).json()["messages"])
        for action in ACTIONS:
            last = [message for message in shown if message["type"] == "observation"][-1]
            act = {"type": "act", "observation_id": last["id"], "action": {"role": "assistant", "content": action}}
            shown.clear()
            body = {"ack": http.received, "messages": [{"number": http.number + 1, **act}]}
            path = f"/v1/sessions/{http.session['session_id']}/exchange"
            assert http.post(path, body, http.session["key"]).status_code == 200  # its answer is lost
            until("observation", http.exchange(act).json()["messages"])
        assert (shown[0]["reward"], shown[0]["terminated"]) == (4.0, True)
        assert [m["text"] for m in shown[0]["content"][0]["content"]] == ["a; b; c; d"]
        until("over", [])
        assert Ledger.books[-1] == list(ACTIONS)


def test_bad_requests_are_refused_with_their_reason():
    with EnvServer(Ledger, max_message_bytes=2000) as server, Http(server) as http:
        assert http.post("/v1/sessions", {}, "wrong").status_code == 401
        mismatch = http.create(protocols=[7, 8])
        assert (mismatch.status_code, mismatch.json()["error"]["code"]) == (400, "protocol_mismatch")
        assert http.create(colour="red").status_code == 422
        assert http.post("/v1/sessions", b"{").status_code == 422
        http.begin()
        name = http.session["session_id"]
        path = f"/v1/sessions/{name}/exchange"
        assert http.post(path, {"ack": 0}).status_code == 401  # the server's key is not the session's
        assert http.post("/v1/sessions/s0/exchange", {"ack": 0}, http.session["key"]).status_code == 404
        assert http.post(path, b"x" * 80_000, http.session["key"]).status_code == 413
        assert http.exchange(ack=9).status_code == 422  # a message that was never sent
        gap = {"ack": 0, "messages": [{"number": 5, "type": "abandon"}]}
        assert http.post(path, gap, http.session["key"]).status_code == 422
        http.exchange({"type": "reset", "task": {"name": "x"}})
        act = {"type": "act", "observation_id": "o77", "action": {"role": "assistant", "content": "a"}}
        while True:
            failed = [m for m in http.exchange(act).json()["messages"] if m["type"] == "failed"]
            if failed:
                break
        assert (failed[0]["status"], failed[0]["code"]) == (409, "conflict")
        for wanted, key, session in ((401, KEY, name), (404, http.session["key"], "s0")):
            headers = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13",
                       "sec-websocket-key": "x3JJHMbDL1EzLkh9GBhXDw==", "authorization": f"Bearer {key}"}  # fmt: skip
            answer = httpx2.get(f"{server.url}/v1/sessions/{session}/stream", headers=headers)
            assert answer.status_code == wanted


async def test_what_a_client_can_not_send_or_answer_is_refused_where_it_is_said():
    with EnvServer(Ledger, max_message_bytes=2000) as server:
        environment = server.remote()
        await environment.setup()
        with pytest.raises(Exception, match="over the limit"):
            await environment.reset({"name": "x" * 3000})
        await environment.reset({"name": "x"})
        first = await environment.observe()
        with pytest.raises(Conflict, match="does not wait"):
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


def test_the_page_shows_nothing_without_a_key_and_loads_nothing_from_elsewhere():
    with EnvServer(Ledger) as server, Http(server) as http:
        page = httpx2.get(server.url)
        assert page.status_code == 200
        assert "<table" in page.text
        assert "src=" not in page.text
        assert "://" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert httpx2.get(f"{server.url}/v1/sessions").status_code == 401
        http.begin()
        listed = httpx2.get(f"{server.url}/v1/sessions", headers={"authorization": f"Bearer {KEY}"}).json()
        assert [line["state"] for line in listed["sessions"]] == ["idle"]
        assert listed["environment"] == "Ledger"
        assert "key" not in listed["sessions"][0]


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
