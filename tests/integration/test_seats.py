"""Two workers play the seats of one episode: over HTTP, each with a key of its own, whoever of them dies."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from palestra import AsyncClient, Client, JobConfig, RolloutSpec
from palestra.envs import ConcurrentEnvironment, MultiAgentEnvironment, Outcome, TimeLimit
from palestra.errors import ConfigError, Conflict, EpisodeLeaseExpired, NotFound
from palestra.runtime.local import local_job
from palestra.store.key_files import seat_key
from palestra.types.messages import text_message
from palestra.types.records import Task

pytestmark = pytest.mark.ci

TASKS = [{"id": f"t{n}", "secret": f"only the world knows {n}"} for n in range(5)]


def score(*texts: str) -> float:
    """Any number in [0, 1) that differs between replies."""
    return zlib.crc32("\0".join(texts).encode()) / 2**32


class Talk(ConcurrentEnvironment):
    """White and black speak in turns, twice each, and see a secret of their own and what the other said last."""

    reusable = True

    async def start(self, task):
        self.said: list[str] = []
        self._show("white", "begin")

    def _show(self, name: str, text: str, *parents: str) -> None:
        self.emit(name, (text_message("user", f"secret of {name}: {text}"),), parents=parents)

    async def on_action(self, observation, action):
        self.said.append(action.text)
        if len(self.said) < 4:
            self._show("black" if observation.agent == "white" else "white", action.text, observation.id)
            return
        reward = score(*self.said)
        for name, earned in (("white", reward), ("black", -reward)):
            seen = (text_message("user", f"{name} has earned {earned:.3f}"),)
            self.emit(name, seen, parents=(observation.id,), reward=earned, terminated=True)


def config(folder: Path, **changes: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "seats",
            "steps": 1,
            "run_dir": folder,
            "server": {"port": 0},
            "engine": {"kind": "fake", "reply_tokens": 6},
            "policies": {"w": {}, "b": {"frozen": True}},
            "roles": {"white": "w", "black": "b"},
            "seats": {"roles": ["white", "black"]},
            "rollout": {"group_size": 2, "groups_per_step": 1, "lease_seconds": 60.0},
            "evaluation": {"every_steps": 0},
        }
        | changes
    )


@asynccontextmanager
async def running(folder: Path, environment: Any = Talk, **changes: Any):
    """A job of two seats, with its tasks."""
    settings = config(folder, **changes)
    async with local_job(settings, lambda kind, data: None, RolloutSpec(environment=environment)) as job:
        await job.plane.store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in TASKS], "c")
        await job.plane.store.tasks.seal()
        work = asyncio.ensure_future(job.run())
        try:
            yield job
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def reply_of(seat: Any, observation: Any, **more: Any) -> str:
    """One call of the model by a seat's base URL and key alone."""
    async with openai.AsyncOpenAI(base_url=seat.policy.base_url, api_key=seat.policy.api_key, max_retries=0) as ai:
        said = [{"role": "user", "content": message.text} for message in observation.content]
        answer = await ai.chat.completions.create(model="any-name", messages=said, **more)
    return answer.choices[0].message.content or ""


async def play(job: Any, role: str) -> list[tuple[Any, list[str]]]:
    """Play a seat of all episodes; return each seat as it ended, and what it was shown."""
    played = []
    async with AsyncClient(job.url, job.api_key, worker_id=role) as client:
        while True:
            async with client.seat(role) as seat:
                if seat is None:
                    return played
                seen = []
                async for observation in seat:
                    seen.append(observation.content[0].text)
                    await seat.act(await reply_of(seat, observation))
                played.append((seat, seen))


@pytest.mark.slow
async def test_two_workers_play_an_episode_and_each_sees_its_own_side(tmp_path):
    async with running(tmp_path / "run") as job:
        white, black = await asyncio.wait_for(asyncio.gather(play(job, "white"), play(job, "black")), 30)
        assert len(white) == len(black) == 2
        for played, role in ((white, "white"), (black, "black")):
            for seat, seen in played:
                assert len(seen) == 2
                assert all(text.startswith(f"secret of {role}") for text in seen)
                assert [message.text for message in seat.last] == [f"{role} has earned {seat.reward:.3f}"]
                assert (seat.episode.task, seat.over, seat.truncated) == ({}, True, False)
        manifest = await job.plane.store.log.manifest(1)
        trajectories = await job.plane.store.calls.trajectories(manifest.episode_ids)
        rewards = {seat.episode.episode_id: seat.reward for seat, _ in white}
        for trajectory in trajectories:
            chats = trajectory.chats
            assert [(chat.agent, chat.policy) for chat in chats] == [("white", "w"), ("black", "b")] * 2
            assert [chat.time_step for chat in chats] == [0, 1, 2, 3]
            assert trajectory.episode.rewards["white"] == rewards[trajectory.episode.episode_id]
            assert trajectory.episode.rewards["black"] == -trajectory.episode.rewards["white"]
            assert trajectory.episode.rewards["white"] == score(*(chat.reply.text for chat in chats))
        (row,) = await job.plane.store.log.metrics()
        trained = sum(len(c.completion_ids) for t in trajectories for c in t.chats if c.policy == "w")
        assert (row["train/trained_tokens"], row["train/calls_abandoned"]) == (trained, 0)


class Timed(MultiAgentEnvironment):
    """White and black speak once each; white has little time, and what it has not said in time is `pass`."""

    roles = ("white", "black")
    reusable = True
    time_limits = {"white": TimeLimit(seconds=0.5, default="pass")}  # noqa: RUF012

    def begin(self, task):
        self.said: list[str] = []

    def view(self, role):
        return " ".join(self.said) or "begin"

    def apply(self, actions):
        self.said += [action.text for action in actions.values()]
        earned = float(self.said[0] == "pass")
        over = len(self.said) == 2
        return Outcome(rewards={"white": -earned, "black": earned} if over else {}, over=over)


@pytest.mark.slow
async def test_a_worker_without_time_left_is_told_and_what_it_sampled_is_not_trained(tmp_path):
    """In every second episode white thinks too long; a seat whose worker comes late has its whole time then."""

    async def white(job, thinks):
        taken = []
        async with AsyncClient(job.url, job.api_key, worker_id="white") as client:
            while True:
                async with client.seat("white") as seat:
                    if seat is None:
                        return taken
                    async for observation in seat:
                        said = await reply_of(seat, observation)
                        await asyncio.sleep(next(thinks))
                        taken.append((seat.episode.episode_id, await seat.act(said)))

    async with running(tmp_path / "run", Timed) as job:
        black = asyncio.ensure_future(play(job, "black"))
        await asyncio.sleep(0.8)  # longer than white's limit: its clock does not run while it has no worker
        taken = await asyncio.wait_for(white(job, iter([0.0, 0.8, 0.0, 0.8])), 30)
        await asyncio.wait_for(black, 30)
        assert [in_time for _, in_time in taken] == [True, False]
        (row,) = await job.plane.store.log.metrics()
        assert row["train/calls_abandoned"] == 1
        manifest = await job.plane.store.log.manifest(1)
        for trajectory in await job.plane.store.calls.trajectories(manifest.episode_ids):
            in_time = dict(taken)[trajectory.episode.episode_id]
            assert trajectory.episode.rewards == (
                {"white": 0.0, "black": 0.0} if in_time else {"white": -1.0, "black": 1.0}
            )
            shown = next(chat for chat in trajectory.chats if chat.agent == "black").messages[-1].text
            assert (shown == "pass") == (not in_time)


REQUESTS = map("request-{}".format, count())


class Http:
    """Raw requests to a job, for what no well-behaved client sends."""

    def __init__(self, job: Any) -> None:
        self.http, self.key = httpx2.AsyncClient(base_url=job.url, timeout=30), job.api_key

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def post(self, path: str, key: str | None = None, **body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {key or self.key}"})

    async def claim(self, role: str, worker: str = "", **more: Any) -> httpx2.Response:
        body = {"worker_id": worker or role, "request_id": next(REQUESTS), "wait_seconds": 5} | more
        return await self.post("/claim_episode", role=role, **body)

    async def seat(self, role: str, worker: str = "", **more: Any) -> dict[str, Any]:
        answer = await self.claim(role, worker, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()["episode"]

    async def observe(self, seat: dict[str, Any], wait: float = 5.0, events: int = 0) -> httpx2.Response:
        """`events`: 9 is more than there are, so that none ends the wait."""
        name = seat["episode_id"]
        return await self.post("/observe_seat", seat["api_key"], episode_id=name, wait_seconds=wait, events_seen=events)

    async def act(self, seat: dict[str, Any], observation: str, text: str = "x", **more: Any) -> httpx2.Response:
        body = {"observation_id": observation, "content": text} | more
        return await self.post("/act_seat", seat["api_key"], episode_id=seat["episode_id"], **body)

    async def chat(self, seat: dict[str, Any], text: str = "hello", **headers: str) -> httpx2.Response:
        body = {"model": "any", "messages": [{"role": "user", "content": text}]}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {seat['api_key']}"} | named
        )


def said(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


async def test_a_seat_opens_its_own_side_and_nothing_of_the_other(tmp_path):
    async with running(tmp_path / "run") as job, Http(job) as http:
        white, black = await http.seat("white"), await http.seat("black")
        assert white["episode_id"] == black["episode_id"]
        assert (white["model"], white["policies"], white["task"]) == ("w", {"w": "0.0"}, {})
        first = (await http.observe(white, events=9)).json()
        assert first["observation"]["content"][0]["content"][0]["text"] == "secret of white: begin"
        waiting = (await http.observe(black, wait=0.0)).json()
        assert (waiting["status"], waiting["observation"], waiting["to_act"]) == ("waiting", None, ["white"])
        assert "secret of white" not in str(waiting)
        # The key of one seat opens no request of the other, nor of the episode or the job.
        name = white["episode_id"]
        foreign = await http.post("/act_seat", black["api_key"], episode_id=name, observation_id="o0", content="x")
        assert said(foreign, 409) == "observation o0 does not wait for an action of black; to act: white"
        for path, body in (
            ("/end_episode", {"episode_id": name, "reward": 1.0}),
            ("/claim_episode", {"request_id": "r", "role": "black"}),
            ("/claim_episode", {"request_id": "r"}),
            ("/register_episode", {"task": {"data": {}}, "request_id": "r"}),
            ("/observe_seat", {"episode_id": "train-000000-01"}),
        ):
            assert (await http.post(path, white["api_key"], **body)).status_code == 403
        forged = white["api_key"].replace(".0.", ".1.", 1) if ".0." in white["api_key"] else white["api_key"] + "0"
        assert (await http.post("/observe_seat", forged, episode_id=name)).status_code == 401
        # A model call is the seat's, whatever it names; out of turn there is none.
        reply = await http.chat(white, x_palestra_agent="white/helper", x_palestra_step="7")
        assert (reply.status_code, reply.json()["model"]) == (200, "w")
        assert said(await http.chat(white, x_palestra_agent="black"), 403).startswith("this key plays the seat 'white'")
        assert said(await http.chat(black), 409).startswith("black has nothing to answer now; to act: white")
        trajectory = (await job.plane.store.calls.trajectories([name]))[0]
        assert [(c.agent, c.policy, c.time_step) for c in trajectory.chats] == [("white/helper", "w", 0)]


async def test_what_makes_no_sense_is_answered_with_a_sentence(tmp_path):
    async with running(tmp_path / "run") as job, Http(job) as http:
        assert said(await http.claim("red"), 404) == "this job has no seat 'red'; its seats are 'white', 'black'"
        assert (await http.claim("white", "me", episode_id="train-000009-00")).status_code == 404
        white = await http.seat("white", "me")
        both = await http.claim("black", "me")
        assert "the worker 'me' holds the seat white of episode train-000000-00" in said(both, 409)
        assert (await http.claim("white", "long", allow_discard_timeout=1e9)).status_code == 422
        seen = (await http.observe(white, events=9)).json()["observation"]["observation_id"]
        assert (await http.observe(white)).json()["observation"]["observation_id"] == seen, "until it is answered"
        assert said(await http.act(white, seen, "x" * 70_000), 422).startswith("content")
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "y" * 40_000}}
        assert "at most 65536 characters" in said(await http.act(white, seen, "x" * 40_000, tool_calls=[call]), 422)
        for _ in range(2):
            assert (await http.act(white, seen, "hi")).status_code == 200, "sent again, it changes nothing"
        assert said(await http.act(white, seen, "ho"), 409).startswith("another action was given for observation")
        assert "does not wait for an action of white; to act: black" in said(await http.act(white, "o1"), 409)


async def test_a_job_without_seats_says_so(tmp_path):
    async with running(tmp_path / "run", seats={}) as job, Http(job) as http:
        assert said(await http.claim("white"), 409).startswith("this job has no seats: its configuration names none")
    for wrong, text in (
        ({"roles": ["white", "white"]}, "named twice"),
        ({"roles": ["white/helper"]}, "'white/helper' is a subagent"),
        ({"takeover": "nobody"}, "takeover"),
    ):
        with pytest.raises(Exception, match=text):
            config(tmp_path / "wrong", seats=wrong)
    with pytest.raises(ConfigError, match="server plays"):
        async with local_job(config(tmp_path / "none"), lambda kind, data: None):
            pass
    wrong = config(tmp_path / "other", seats={"roles": ["white", "red"]})
    with pytest.raises(ConfigError, match=r"seats\.roles.*'red'"):
        async with local_job(wrong, lambda kind, data: None, RolloutSpec(environment=Timed)):
            pass


@pytest.mark.slow
async def test_another_worker_continues_where_one_has_left_and_the_other_seat_is_told(tmp_path):
    async with running(tmp_path / "run") as job, Http(job) as http:
        white, black = await http.seat("white", "first"), await http.seat("black")
        name = white["episode_id"]
        for seat in (white, black):
            seen = (await http.observe(seat, events=9)).json()["observation"]
            assert (await http.chat(seat)).status_code == 200
            assert (await http.act(seat, seen["observation_id"], f"{seat['role']} speaks")).status_code == 200
        open_one = (await http.observe(white, events=9)).json()["observation"]
        lost = (await http.chat(white, "a draft")).json()["choices"][0]["message"]["content"]
        told = asyncio.ensure_future(http.observe(black, wait=10.0, events=2))
        assert (await http.post("/abort_episode", white["api_key"], episode_id=name)).status_code == 200
        events = (await told).json()["events"]
        assert [(event["kind"], event["role"]) for event in events] == [("seat_left", "white")]
        for request in (http.observe(white), http.act(white, open_one["observation_id"]), http.chat(white)):
            assert "is no longer yours" in said(await request, 409)
        heir = await http.seat("white", "second")
        assert heir["episode_id"] == name
        texts = ["".join(part["text"] for part in message["content"]) for message in heir["history"]["white"]]
        assert texts == ["secret of white: begin", "white speaks"]
        assert (await http.observe(heir)).json()["observation"] == open_one
        again = (await http.chat(heir, "a draft")).json()["choices"][0]["message"]["content"]
        assert again == lost, "the same call is the same sample"
        assert (await http.act(heir, open_one["observation_id"], "on")).status_code == 200
        last = (await http.observe(black, events=9)).json()["observation"]["observation_id"]
        assert (await http.act(black, last, "end")).status_code == 200
        over = (await http.observe(black, events=9)).json()
        assert (over["status"], over["reward"]) == ("over", -score("white speaks", "black speaks", "on", "end"))
        assert (await http.act(black, last, "end")).status_code == 200, "sent again after the end"
        trajectory = (await job.plane.store.calls.trajectories([name]))[0]
        assert [chat.time_step for chat in trajectory.chats] == [0, 1, 2, 2]
        assert trajectory.episode.unused_calls == {2}
        # The other game of the group ends in the same way, and the step trains what led to an action.
        players = [asyncio.ensure_future(play(job, role)) for role in ("white", "black")]
        await asyncio.wait_for(asyncio.gather(*players), 30)
        (row,) = await job.plane.store.log.metrics()
        trajectories = await job.plane.store.calls.trajectories((await job.plane.store.log.manifest(1)).episode_ids)
        used = [c for t in trajectories for c in t.chats if c.policy == "w" and c.index not in t.episode.unused_calls]
        assert row["train/calls_abandoned"] == 1
        assert row["train/trained_tokens"] == sum(len(chat.completion_ids) for chat in used)


async def test_a_seat_that_its_worker_leaves_is_played_by_its_policy_where_the_job_wants_that(tmp_path):
    async with running(tmp_path / "run", seats={"roles": ["white", "black"], "takeover": "policy"}) as job:
        async with Http(job) as http:
            white, black = await http.seat("white"), await http.seat("black")
            await http.observe(white, events=9)
            await http.chat(white)
            await http.post("/abort_episode", white["api_key"], episode_id=white["episode_id"])
            assert "its policy plays it now" in said(await http.observe(white), 409)
            for _ in range(2):
                while (seen := (await http.observe(black, events=9)).json())["status"] == "waiting":
                    pass
                assert (await http.act(black, seen["observation"]["observation_id"])).status_code == 200
            assert (await http.observe(black, events=9)).json()["status"] == "over"
        trajectory = (await job.plane.store.calls.trajectories([white["episode_id"]]))[0]
        assert [(chat.agent, chat.time_step) for chat in trajectory.chats] == [("white", 0), ("white", 0), ("white", 2)]
        assert trajectory.episode.unused_calls == {0}


@pytest.mark.slow
@pytest.mark.parametrize("takeover", ["replay", "worker"])
async def test_a_game_that_can_not_go_on_is_given_back_and_both_claim_again(tmp_path, takeover):
    seats = {"roles": ["white", "black"], "takeover": takeover, "wait_seconds": 0.5}
    async with running(tmp_path / "run", seats=seats) as job:
        async with Http(job) as http:
            white, black = await http.seat("white"), await http.seat("black")
            await http.observe(white, events=9)
            await http.post("/abort_episode", white["api_key"], episode_id=white["episode_id"])
            answer = await http.observe(black, events=9)
            while answer.status_code == 200:  # the server looks every half second
                answer = await http.observe(black, events=9)
            why = "is gone, and the episode is played again" if takeover == "replay" else "has claimed the seat white"
            assert why in said(answer, 409)
            assert "claim a seat again" in said(answer, 409)
        episode = await job.plane.store.episodes.get(white["episode_id"])
        assert (episode.state, episode.attempts) == ("registered", 0)  # it says nothing about the episode
        players = [asyncio.ensure_future(play(job, role)) for role in ("white", "black")]
        await asyncio.wait_for(asyncio.gather(*players), 30)


@pytest.mark.slow
async def test_a_game_to_which_only_one_comes_does_not_count_as_an_attempt(tmp_path):
    async with running(tmp_path / "run", seats={"roles": ["white", "black"], "wait_seconds": 0.3}) as job:
        async with AsyncClient(job.url, job.api_key, worker_id="alone") as client:
            names: list[str] = []

            async with client.seat("white") as seat:
                names.append(seat.episode.episode_id)
                async for _ in seat:
                    await seat.act("hello?")
            assert (seat.lost, seat.over, seat.reward) == (True, False, None)
            with pytest.raises(EpisodeLeaseExpired, match=r"black.*0\.3"):
                await client.heartbeat(seat.episode)
        episode = await job.plane.store.episodes.get(names[0])
        assert (episode.state, episode.attempts) == ("registered", 0)


async def lose(job: Any, seat: Any) -> None:
    """Give a seat back behind its worker's back, as the end of its lease does."""
    async with Http(job) as http:
        left = await http.post("/abort_episode", seat.episode.api_key, episode_id=seat.episode.episode_id)
        assert left.status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("noticed", ["observation", "action", "call", "anthropic", "group"])
async def test_a_lost_seat_ends_its_block_and_its_worker_claims_again(tmp_path, noticed):
    async with running(tmp_path / "run") as job, AsyncClient(job.url, job.api_key, worker_id="w") as client:
        async with client.seat("white") as seat:
            async for observation in seat:
                await lose(job, seat)
                if noticed == "call":
                    await reply_of(seat, observation)
                elif noticed == "group":
                    async with asyncio.TaskGroup() as group:
                        group.create_task(reply_of(seat, observation))
                elif noticed == "anthropic":
                    async with anthropic.AsyncAnthropic(
                        base_url=seat.policy.anthropic_url, api_key=seat.policy.api_key, max_retries=0
                    ) as ai:
                        await ai.messages.create(model="any", max_tokens=4, messages=[{"role": "user", "content": "?"}])
                elif noticed == "action":
                    assert await seat.act("too late") is False
        assert (seat.lost, seat.over) == (True, False)
        async with client.seat("white") as again:
            assert again.episode.episode_id == seat.episode.episode_id, "the seat is free"
            assert again.lost is False


def test_a_script_notices_in_the_same_way_that_its_seat_is_lost(tmp_path):
    async def main() -> None:
        async with running(tmp_path / "run") as job:
            await asyncio.to_thread(script, job, asyncio.get_running_loop())

    def script(job: Any, loop: asyncio.AbstractEventLoop) -> None:
        with Client(job.url, job.api_key, worker_id="w") as client:
            for called in (True, False):
                with client.seat("white") as seat:
                    for _ in seat:
                        asyncio.run_coroutine_threadsafe(lose(job, seat), loop).result(30)
                        if called:
                            with openai.OpenAI(
                                base_url=seat.policy.base_url, api_key=seat.policy.api_key, max_retries=0
                            ) as ai:
                                ai.chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
                        assert seat.act("too late") is False
                assert seat.lost

    asyncio.run(main())


async def test_other_errors_are_raised_from_the_block_of_a_seat(tmp_path):
    async with running(tmp_path / "run") as job, AsyncClient(job.url, job.api_key, worker_id="w") as client:
        held: list[Any] = []

        async def fail(how: Any) -> None:
            async with client.seat("white") as seat:
                held.append(seat)
                await how(seat)

        async def loses_and_divides(seat: Any) -> None:
            await lose(job, seat)
            raise ZeroDivisionError

        async def renews_another(_: Any) -> None:
            await client.heartbeat(held[0].episode)

        async def asks_wrongly(seat: Any) -> None:
            async for observation in seat:
                await reply_of(seat, observation, temperature=-1.0)

        with pytest.raises(ZeroDivisionError):
            await fail(loses_and_divides)
        with pytest.raises(EpisodeLeaseExpired):  # of a seat that is not this block's
            await fail(renews_another)
        with pytest.raises(openai.UnprocessableEntityError):
            await fail(asks_wrongly)
        assert not any(seat.lost for seat in held[1:])


async def test_the_clients_give_a_seat_back_and_raise_what_is_wrong(tmp_path):
    async with running(tmp_path / "run") as job, AsyncClient(job.url, job.api_key, worker_id="w") as client:
        with pytest.raises(NotFound, match=r"seats.*'white'.*'black'"):
            async with client.seat("red"):
                pass
        with pytest.raises(ZeroDivisionError):
            async with client.seat("white") as seat:
                raise ZeroDivisionError
        async with client.seat("white") as again:
            assert again.episode.episode_id == seat.episode.episode_id, "it was given back and is free"
            with pytest.raises(Conflict, match="seat white"):
                async with client.seat("black"):
                    pass


@pytest.mark.slow
@pytest.mark.parametrize("takeover", ["replay", "worker"])
async def test_whoever_has_the_key_of_one_seat_can_not_end_the_job_by_leaving(tmp_path, takeover):
    seats = {"roles": ["white", "black"], "takeover": takeover}
    rollout = {"group_size": 2, "groups_per_step": 1, "lease_seconds": 60.0, "max_attempts": 2}
    async with running(tmp_path / "run", seats=seats, rollout=rollout) as job, Http(job) as http:
        for _ in range(12):  # more often than all episodes together have attempts
            left = await http.seat("white")
            gone = await http.post("/abort_episode", left["api_key"], episode_id=left["episode_id"], reason="left")
            assert gone.status_code == 200, gone.text
            await asyncio.sleep(0.02)
        white, black = await asyncio.wait_for(asyncio.gather(play(job, "white"), play(job, "black")), 60)
        counts = await job.plane.store.episodes.counts()
        assert (counts.completed, counts.discarded) == (2, 0)
        assert len(white) == len(black) == 2


async def test_a_context_that_a_worker_has_filled_before_it_left_is_no_end_without_a_loss(tmp_path, caplog):
    seats = {"roles": ["white", "black"], "takeover": "policy"}
    policies = {"w": {}, "b": {"frozen": True, "max_context": 200}}
    settings = config(tmp_path / "run", seats=seats, policies=policies)
    async with local_job(settings, lambda kind, data: None, RolloutSpec(environment=Talk)) as job:
        await job.plane.store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in TASKS], "c")
        await job.plane.store.tasks.seal()
        work = asyncio.ensure_future(job.run())
        async with Http(job) as http:
            white, black = await http.seat("white"), await http.seat("black")
            shown = (await http.observe(white, events=9)).json()["observation"]["observation_id"]
            await http.act(white, shown, "a")
            shown = (await http.observe(black, events=9)).json()["observation"]["observation_id"]
            assert (await http.act(black, shown, "much to say " * 100)).status_code == 200
            await http.post("/abort_episode", black["api_key"], episode_id=black["episode_id"], reason="left")
            shown = (await http.observe(white, events=9)).json()["observation"]["observation_id"]
            await http.act(white, shown, "b")
            lost = await http.observe(white, wait=20.0, events=9)
            assert lost.status_code == 409, lost.text
            episode = await job.plane.store.episodes.get(white["episode_id"])
            assert episode.rewards is None
            async with asyncio.timeout(10):
                while "seat_lost: black, whose worker is gone: ContextOverflow" not in caplog.text:
                    await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_workers_of_two_people_may_have_the_same_name(tmp_path):
    async with running(tmp_path / "run") as job, Http(job) as http:
        keys = {role: seat_key(job.plane.keys.secret(), "seats", role) for role in ("white", "black")}
        seats = {}
        for role, key in keys.items():
            body = {"worker_id": "host-1", "request_id": "same", "wait_seconds": 5, "role": role}
            answer = await http.post("/claim_episode", key, **body)
            assert answer.status_code == 200, answer.text
            seats[role] = answer.json()["episode"]
        assert seats["white"]["episode_id"] == seats["black"]["episode_id"]
        assert (await http.observe(seats["white"], events=9)).json()["status"] == "act"
