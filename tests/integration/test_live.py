"""A live run: a real server, an application that calls it with its own key, feedback, and what the run has then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import tomli_w
from judge_server import Asked, judging
from servers import PALESTRA, Process, free_port, until

from palestra_live.store import FEEDBACK_PER_HOUR

SECRET = "zebra-4711-umbrella"
JOB = {
    "kind": "live",
    "name": "bot",
    "steps": 1,
    "engine": {"kind": "fake", "reply_tokens": 8},
    "rollout": {"groups_per_step": 4},
    "live": {"idle_seconds": 1.0, "wait_seconds": 1.0},
}


@dataclass
class Application:
    """A live run and its application."""

    folder: Path
    settings: dict[str, Any]
    port: int
    server: Process | None = None
    started: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str, fault: str | None = None) -> Process:
        data = self.settings | {"run_dir": str(self.run), "server": {"port": self.port}}
        (self.folder / "live.toml").write_text(tomli_w.dumps(data))
        log = self.folder / f"server-{self.started}.log"
        self.started += 1
        command = [PALESTRA, "run", self.folder / "live.toml", *options]
        self.server = server = Process.start(command, log, fault, fresh=False)
        until(lambda: "data plane at" in server.output or server.popen.poll() is not None, "the server listens")
        assert "data plane at" in server.output, server.output
        assert "the application's key is in" in server.output
        return server

    @property
    def key(self) -> str:
        return (self.run / "live_key").read_text()

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, headers={"Authorization": f"Bearer {self.key}"}, timeout=30)

    def say(self, text: str, session: str | None = None, **headers: str) -> Any:
        given = {f"x-palestra-{name}": value for name, value in headers.items()}
        if session is not None:
            given["x-palestra-session"] = session
        messages: Any = [{"role": "user", "content": text}]
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0) as client:
            return client.chat.completions.create(model="bot", messages=messages, extra_headers=given)

    def rows(self, wanted: str, file: str = "live.db") -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.run / file)) as connection:
            return connection.execute(wanted).fetchall()

    def hits(self, secret: str) -> list[Path]:
        return [path for path in self.run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Application]:
    made = Application(tmp_path, json.loads(json.dumps(JOB)), free_port())
    yield made
    if made.server is not None:
        made.server.kill()


def test_a_session_without_consent_is_served_and_leaves_no_text(application: Application) -> None:
    application.start()
    opened = application.post("/live/sessions", subject="ann").json()
    assert opened["train"] is False
    assert application.say(f"my password is {SECRET}", opened["session"]).usage.completion_tokens
    assert application.say(f"again: {SECRET}", "by-header", subject="ann").usage.completion_tokens
    assert application.say(f"alone: {SECRET}").usage.completion_tokens
    refused = application.post("/feedback", id="f1", session=opened["session"], edit=SECRET)
    assert refused.status_code == 403
    assert "has no consent" in refused.text
    until(lambda: application.rows("SELECT sum(calls) FROM sessions") == [(2,)], "both calls are counted")
    application.server.kill()
    assert application.hits(SECRET) == []
    assert application.rows("SELECT calls, unrecorded FROM sessions") == [(1, 1), (1, 1)]


def test_a_session_with_consent_is_an_episode_and_its_deletion_leaves_no_text(application: Application) -> None:
    application.start()
    opened = application.post("/live/sessions", subject="ann", train=True).json()
    reply = application.say(f"I am {SECRET}", opened["session"])
    application.say("another", "other", subject="bob", train="true")
    given = application.post("/feedback", id="f1", session=opened["session"], call=reply.id, edit=f"no, {SECRET}")
    assert given.json() == {"stored": True, "repeated": False}
    assert application.hits(SECRET)
    assert len(application.rows("SELECT * FROM chats", "run.db")) == 2
    gone = application.post("/live/forget", subject="ann").json()
    assert gone == {"sessions": 1, "versions": []}
    assert application.hits(SECRET) == []
    assert application.rows("SELECT count(*) FROM chats", "run.db") == [(1,)], "those of bob are left"
    application.say("again", opened["session"], subject="ann", train="true")  # a new session of the same name
    assert application.rows("SELECT count(*) FROM chats", "run.db") == [(2,)]
    application.server.kill()
    assert application.hits(SECRET) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"messages": [' + b"[]," * 60_000 + b"[]]}", "more than 50000 objects and lists"),
        (b'{"messages": ' + b"[" * 2_000, "not valid JSON"),
        (b"[1]", "no JSON object"),
        (b'{"metadata": ' + b"[" * 400 + b"]" * 400 + b"}", "nested too deep"),
        (b'{"metadata": ' + b"[" * 400 + b"]" * 400 + b', "user": "' + b"x" * 40_000 + b'"}', "nested too deep"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * 40_000 + b'"}]}', "context"),
    ],
)
def test_bodies_that_would_hold_the_server_are_refused_and_long_ones_pass(application: Application, body, said) -> None:
    application.start()
    headers = {"Authorization": f"Bearer {application.key}"}
    answer = httpx2.post(f"{application.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code in (400, 413, 422)
    assert said in answer.text
    assert application.say("hello").usage.completion_tokens


@pytest.mark.parametrize("redact", ["mine.py:hide", ["umbrella", r"\d{3}-\d{3}"]])
def test_private_texts_are_answered_and_written_nowhere(
    application: Application, tmp_path: Path, redact: str | list[str]
) -> None:
    (tmp_path / "mine.py").write_text("import re\n\ndef hide(text):\n    return re.sub('umbrella|555-123', '', text)\n")
    application.settings["live"] |= {"redact": f"{tmp_path}/{redact}" if isinstance(redact, str) else redact}
    application.start()
    for number, text in enumerate((SECRET, "call 555-123", "harmless")):
        application.say(text, "s", train="true")
        until(lambda n=number: application.rows("SELECT calls FROM sessions") == [(n + 1,)], "it is counted")
    assert application.rows("SELECT calls, unrecorded FROM sessions") == [(3, 2)]
    assert len(application.rows("SELECT * FROM chats", "run.db")) == 1
    for kind, text in (("edit", SECRET), ("critique", "call 555-123")):
        answer = application.post("/feedback", id=kind, session="s", **{kind: text})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, kind)
        assert "private text" in answer.text
    assert application.post("/feedback", id="f", session="s", critique="harmless").status_code == 200
    application.server.kill()
    assert application.hits(SECRET) == application.hits("555-123") == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_private_text_that_the_model_writes_is_answered_and_written_nowhere(
    application: Application, tmp_path: Path, streamed: bool
) -> None:
    (tmp_path / "mine.py").write_text(
        "import pathlib, time\n\nSENT = 'model bot messages role user content stream hello'.split()\n\n\n"
        "def hide(text):\n    marker = pathlib.Path(__file__).with_name('harmless')\n"
        "    if text in SENT or marker.exists():\n        return text\n"
        "    time.sleep(0.3)  # so that a stream has begun\n    return ''\n"
    )
    application.settings["live"] |= {"redact": f"{tmp_path / 'mine.py'}:hide"}
    application.start()
    call = {"model": "bot", "messages": [{"role": "user", "content": "hello"}], "stream": streamed}
    marked = {"Authorization": f"Bearer {application.key}", "x-palestra-session": "s", "x-palestra-train": "true"}
    recorded, ids = [], []
    with httpx2.Client(base_url=application.url, headers=marked, timeout=30) as client:
        for number in range(3):
            (tmp_path / "harmless").unlink(missing_ok=True) if number == 1 else (tmp_path / "harmless").touch()
            answer = client.post("/v1/chat/completions", json=call)
            data = answer.text.removeprefix("data: ").partition("\ndata: ")[0] if streamed else answer.text
            assert answer.status_code == 200
            recorded.append(answer.headers["x-palestra-recorded"])
            ids.append(json.loads(data)["id"])
            until(lambda n=number: application.rows("SELECT calls FROM sessions") == [(n + 1,)], "it is counted")
        for number, status in enumerate((200, 404, 200)):
            given = {"id": f"f{number}", "session": "s", "call": ids[number], "score": 0.5}
            assert client.post("/feedback", json=given).status_code == status
    assert recorded == ["1", "1" if streamed else "0", "1"], "a stream begins before the reply is known"
    assert application.rows("SELECT calls, unrecorded FROM sessions") == [(3, 1)]
    assert [index for (index,) in application.rows("SELECT idx FROM chats ORDER BY idx", "run.db")] == [0, 2]


@pytest.mark.parametrize("dialect", ["chat/completions", "messages", "responses", "completions"])
def test_calls_without_a_name_are_of_the_session_whose_conversation_they_continue(
    application: Application, dialect: str
) -> None:
    application.settings["live"] |= {"idle_seconds": 20.0}
    application.start()

    def said(turns: list[str], subject: str = "ann", **headers: str) -> tuple[str, str]:
        """Return the session and the reply of a call: of the user, of the assistant, and so on."""
        sent = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
        body: dict[str, Any] = {"model": "bot", "max_tokens": 8}
        if dialect == "responses":
            body = {"model": "bot", "max_output_tokens": 8, "input": sent}
        else:
            body |= {"prompt": "".join(turns)} if dialect == "completions" else {"messages": sent}
        given = {f"x-palestra-{name}": value for name, value in headers.items()} | {"x-palestra-subject": subject}
        answer = httpx2.post(
            f"{application.url}/v1/{dialect}",
            json=body,
            headers={"Authorization": f"Bearer {application.key}"} | given,
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
        found = answer.json()
        reply = {
            "chat/completions": lambda: found["choices"][0]["message"]["content"],
            "completions": lambda: found["choices"][0]["text"],
            "messages": lambda: "".join(part["text"] for part in found["content"]),
            "responses": lambda: found["output"][-1]["content"][0]["text"],
        }[dialect]()
        return answer.headers["x-palestra-session"], reply

    def answered(turns: list[str], **headers: str) -> tuple[str, str]:
        """Return what `said` does, of a call with a reply that can be sent back."""
        while not (found := said(turns, **headers))[1].strip():
            pass
        return found

    first, reply = answered(["hello"], train="true")
    assert said(["hello"], train="true")[0] != first, "another conversation"
    (opened,) = application.rows("SELECT count(*) FROM sessions")
    if dialect == "completions":  # a raw prompt has no messages
        return
    second, more = answered(["hello", reply, "and then?"])
    third, _ = said(["hello", reply, "and then?", more, "and then?"], train="true")
    assert (second, third) == (first, first), "its consent is that of its first call"
    assert said(["hello", reply, "or then?"])[0] == first, "a call may be asked again in another way"
    assert first not in (said(["hello", "no reply", "and?"])[0], said(["hello", reply, "and then?"], "bob")[0])
    assert application.rows("SELECT count(*) FROM sessions") == [opened], "without consent nothing is stored"
    assert application.server is not None
    application.server.send(signal.SIGKILL)
    application.server.wait()
    application.start("--resume")
    assert said(["hello", reply, "after a restart"])[0] == first


def test_a_call_that_is_read_while_its_subject_is_forgotten_leaves_no_text(
    application: Application, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import pathlib, time\n\n\ndef hide(text):\n    pathlib.Path(__file__).with_suffix('.seen').touch()\n"
        "    time.sleep(0.5)\n    return text\n"
    )
    application.settings["live"] |= {"redact": f"{tmp_path / 'mine.py'}:hide"}
    application.start()

    def call() -> None:
        with pytest.raises(openai.APIStatusError, match="is over"):
            application.say(SECRET, "s", subject="ann", train="true")

    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        until((tmp_path / "mine.seen").exists, "the text is looked at")
        assert application.post("/live/forget", subject="ann").json()["sessions"] == 1
        called.result()
    assert application.rows("SELECT count(*) FROM chats", "run.db") == [(0,)]
    assert application.hits(SECRET) == []


def test_feedback_that_is_wrong_is_refused_in_one_line(application: Application) -> None:
    application.settings["live"] |= {"wait_seconds": 10.0}
    application.start()
    for name, subject in (("mine", "ann"), ("theirs", "bob")):
        application.post("/live/sessions", id=name, subject=subject, train=True)
    reply = application.say("hello", "mine")
    wrong = [
        (404, "there is no session 'nobody'", {"session": "nobody", "score": 1.0}),
        (403, "is another subject's", {"session": "theirs", "subject": "ann", "score": 1.0}),
        (422, "not a number from 0 to 1", {"session": "mine", "score": 1.5}),
        (422, "score", {"session": "mine", "score": "good"}),
        (422, "exactly one of", {"session": "mine"}),
        (422, "exactly one of", {"session": "mine", "score": 1.0, "thumbs": "up"}),
        (404, "no recorded reply", {"session": "mine", "call": "chatcmpl-7", "score": 1.0}),
        (404, "no recorded reply", {"session": "theirs", "call": reply.id, "score": 1.0}),
    ]
    for status, text, body in wrong:
        answer = application.post("/feedback", id="w", **body)
        assert (answer.status_code, "\n" in answer.json()["error"]["message"]) == (status, False), answer.text
        assert text in answer.text
    nan = httpx2.post(
        f"{application.url}/feedback",
        content=b'{"id": "n", "session": "mine", "score": NaN}',
        headers={"Authorization": f"Bearer {application.key}"},
    )
    assert nan.status_code == 422
    with ThreadPoolExecutor(8) as users:  # or a slow machine would be late
        ids = [f"f{number}" for number in range(FEEDBACK_PER_HOUR)]
        given = users.map(lambda one: application.post("/feedback", id=one, session="mine", thumbs="up"), ids)
        assert {answer.status_code for answer in given} == {200}
    assert application.post("/feedback", id="f0", session="mine", thumbs="up").json()["repeated"] is True
    assert application.post("/feedback", id="f0", session="mine", thumbs="down").status_code == 409
    capped = application.post("/feedback", id="more", session="mine", thumbs="up")
    assert (capped.status_code, "60 times in an hour" in capped.text) == (429, True)
    until(lambda: application.rows("SELECT DISTINCT state FROM sessions") == [("done",)], "both are settled")
    late = application.post("/feedback", id="late", session="mine", thumbs="up")
    assert (late.status_code, "is over" in late.text) == (410, True)
    with pytest.raises(openai.APIStatusError, match="is over"):
        application.say("more", "mine")


@pytest.mark.slow
def test_a_share_of_the_sessions_without_feedback_is_judged_and_trained_and_the_gate_does_not_count_it(
    application: Application,
) -> None:
    def answer(asked: Asked) -> str:
        return asked.choose(lambda one: "yes")

    def counted(wanted: str) -> int:
        return int(application.rows(f"SELECT count(*) FROM {wanted}")[0][0])

    with judging(answer) as judge:
        criteria = [{"name": "kind", "text": "Is it kind?"}]
        application.settings |= {"steps": 2, "judge": {"kind": "rubric", "url": judge.url, "criteria": criteria}}
        application.settings["live"] |= {"judged": 0.5, "gate": {"canary": 0.5}}
        application.start()
        for number in range(80):
            application.say("hello", f"s{number}", train="true")
        given = {"silent": {}, "scored": {"score": 0.0}, "revoked": {"score": 1.0}}
        for name, body in given.items():
            application.say("hello", name, train="true")
            if body:
                assert application.post("/feedback", id=name, session=name, **body).status_code == 200
        application.post("/feedback", id="taken back", session="revoked", revoke=True)
        application.say("private", "without")
        until(lambda: counted("sessions WHERE state != 'done'") == 0, "all are done", 120)
        told = "SELECT data FROM observations WHERE key LIKE 'session %'"
        until(lambda: len(application.rows(told, "gate.db")) == 84, "the gate is told", 60)
    judged = dict(application.rows("SELECT session_id, score FROM sessions WHERE score IS NOT NULL"))
    assert judged.pop("scored") == 0.0
    assert not judged.keys() & {"revoked", "without"}
    assert 20 < len(judged) < 60, "about half"
    assert set(judged.values()) == {1.0}
    assert len(judge.asked) == len(judged) == counted("feedback WHERE kind = 'judged'")
    scores = [json.loads(data)["score"] for (data,) in application.rows(told, "gate.db")]
    assert sorted(scores, key=str) == [0.0] + [None] * 83


@pytest.mark.slow
def test_feedback_doubled_late_out_of_order_and_killed_is_trained_once(application: Application) -> None:
    application.settings |= {"steps": 5, "live": {"idle_seconds": 0.5, "wait_seconds": 3.0}}
    application.start()
    acknowledged: dict[str, tuple[str, float]] = {}

    async def users(first: int, last: int) -> None:
        headers = {"Authorization": f"Bearer {application.key}"}
        async with httpx2.AsyncClient(base_url=application.url, headers=headers, timeout=30) as client:

            async def use(number: int) -> None:
                name = f"s{number}"
                call = {"model": "bot", "messages": [{"role": "user", "content": f"question {number}"}]}
                marked = {"x-palestra-session": name, "x-palestra-train": "true"}
                with contextlib.suppress(httpx2.HTTPError):
                    said = await client.post("/v1/chat/completions", json=call, headers=marked)
                    if said.status_code != 200:
                        return
                    early = {"id": f"{name}-0", "session": name, "score": 0.5}
                    final = {"id": f"{name}-1", "session": name, "score": (number % 11) / 10}
                    await client.post("/feedback", json=early)
                    await asyncio.sleep(number % 3 * 0.4)
                    for _ in range(2):
                        if (await client.post("/feedback", json=final)).status_code == 200:
                            acknowledged[name] = final["id"], final["score"]
                    await client.post("/feedback", json=early)  # again, and too late to count

            await asyncio.gather(*(use(number) for number in range(first, last)))

    for part in range(4):
        asyncio.run(users(part * 30, part * 30 + 30))
        application.server.send(signal.SIGKILL)
        application.server.wait()
        application.start("--resume")
    assert application.server.wait(120) == 0, application.server.output
    stored = dict(application.rows("SELECT feedback_id, session_id FROM feedback"))
    assert {id for id, _ in acknowledged.values()} <= stored.keys(), "what was acknowledged is there"
    assert len(acknowledged) > 100
    scores = dict(application.rows("SELECT session_id, score FROM sessions"))
    settled = {name: score for name, (_, score) in acknowledged.items() if scores[name] is not None}
    assert len(settled) > 65
    assert settled == {name: scores[name] for name in settled}, "the last feedback that was acknowledged counts"
    trained = application.rows(
        "SELECT task_id, rewards, task_data FROM episodes WHERE kind = 'train' ORDER BY group_index", "run.db"
    )
    names = [name for name, *_ in trained]
    assert len(names) == len(set(names)) == 5 * 4, "each is trained once"
    for name, rewards, data in trained:
        assert json.loads(rewards) == {"agent": scores[name]}
        assert 0.0 < json.loads(data)["baseline"] < 1.0
    learned = [json.loads(ids) for (ids,) in application.rows("SELECT episode_ids FROM manifests", "run.db")]
    assert sorted(map(len, learned)) == [4] * 5


@pytest.mark.long
@pytest.mark.timeout(9000)
def test_of_5000_sessions_under_kills_nothing_acknowledged_is_lost_and_all_is_applied_once(
    application: Application,
) -> None:
    rollout = {"groups_per_step": 25, "max_staleness": 16}
    live = {"idle_seconds": 6.0, "wait_seconds": 60.0}
    application.settings |= {"steps": 10_000, "live": live, "rollout": rollout, "checkpoint": {"every_steps": 20}}
    application.start()
    answered = 0
    given: dict[str, dict[str, float]] = {}  # scores of a session by feedback, in the order of their arrival
    rng = random.Random(0)

    async def users() -> None:
        headers, room = {"Authorization": f"Bearer {application.key}"}, asyncio.Semaphore(40)
        async with httpx2.AsyncClient(base_url=application.url, headers=headers, timeout=60) as client:

            async def post(path: str, body: dict[str, Any], **headers: str) -> int:
                while True:  # as a client does whose server was killed
                    try:
                        answer = await client.post(path, json=body, headers=headers)
                    except httpx2.HTTPError:
                        await asyncio.sleep(0.5)
                        continue
                    assert answer.status_code in (200, 410), answer.text
                    nonlocal answered
                    answered += 1
                    return answer.status_code

            async def use(number: int) -> None:
                name = f"s{number}"
                call = {"model": "bot", "messages": [{"role": "user", "content": f"question {number}"}]}
                marked = {"x-palestra-session": name, "x-palestra-train": "true", "x-palestra-subject": f"u{number}"}
                said = {f"{name}-0": 0.5, f"{name}-1": (number % 11) / 10}
                order = rng.sample(list(said), 2)  # out of order
                async with room:
                    if await post("/v1/chat/completions", call, **marked) != 200:
                        return
                    for id in (
                        order[0],
                        order[1],
                        order[1],
                        order[0],
                    ):  # doubled, and again when it is too late to count
                        if await post("/feedback", {"id": id, "session": name, "score": said[id]}) == 200:
                            given.setdefault(name, {}).setdefault(id, said[id])
                        await asyncio.sleep(rng.choice((0.0, 0.0, 0.2)))

            await asyncio.gather(*(use(number) for number in range(5000)))

    over, kills = threading.Event(), 0

    def kill() -> None:
        nonlocal kills
        due = 300
        while not over.wait(0.05):
            if answered < due:  # by work and not by time, so that a busy machine restarts no more often
                continue
            due = answered + random.Random(kills).randrange(500, 3000)
            assert application.server is not None
            application.server.send(signal.SIGKILL)
            application.server.wait()
            application.start("--resume")
            kills += 1

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            asyncio.run(users())
        finally:
            over.set()
        killing.result()
    states = "SELECT count(*) FROM sessions WHERE state != 'done'"
    until(lambda: application.rows(states) == [(0,)], "all feedback is settled", 1200.0)
    used = (
        "SELECT (SELECT count(*) FROM episodes WHERE kind = 'train') + "
        "(SELECT count(DISTINCT data ->> 'session') FROM events WHERE kind = 'session_stale')"
    )
    scored = "SELECT count(*) FROM sessions WHERE score IS NOT NULL"
    until(
        lambda: application.rows(scored)[0][0] - application.rows(used, "run.db")[0][0] < 25,
        "all but those of an unfinished step are trained, or too old",
        1200.0,
    )
    application.server.kill()
    stored = dict(application.rows("SELECT feedback_id, session_id FROM feedback"))
    assert {id for found in given.values() for id in found} <= stored.keys(), "what was acknowledged is there"
    scores = dict(application.rows("SELECT session_id, score FROM sessions"))
    counted = {name: list(found.values())[-1] for name, found in given.items() if len(found) == 2}
    assert {name: scores[name] for name in counted} == counted, "what arrived last counts"
    rows = application.rows("SELECT task_id, rewards FROM episodes WHERE kind = 'train'", "run.db")
    names = [name for name, _ in rows]
    assert len(names) == len(set(names)), "each is trained once"
    stale = application.rows("SELECT DISTINCT data ->> 'session' FROM events WHERE kind = 'session_stale'", "run.db")
    left = {name for name, score in scores.items() if score is not None} - set(names) - {name for (name,) in stale}
    assert len(left) < 25, "each other one is trained, or said to be too old"
    assert len(names) > 1000
    assert {name: json.loads(rewards)["agent"] for name, rewards in rows} == {name: scores[name] for name in names}
    learned = [
        id for (ids,) in application.rows("SELECT episode_ids FROM manifests", "run.db") for id in json.loads(ids)
    ]
    assert len(learned) == len(set(learned))
    of = f"{len(counted)} scores counted, {len(names)} sessions trained, {len(stale)} too old"
    print(f"{len(scores)} sessions, {kills} kills, {of}")
    assert len(counted) > 4500
    assert kills > 3


@pytest.mark.slow
def test_a_model_learns_from_sessions_and_the_versions_of_a_subject_are_known(application: Application) -> None:
    policy = {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 8}}
    application.settings |= {
        "steps": 2,
        "engine": {"threads": 1},
        "policies": {"policy": policy | {"optimizer": {"learning_rate": 1e-2}}},
        "live": {"idle_seconds": 0.5, "wait_seconds": 0.5},
    }
    application.start()

    async def use() -> None:
        headers = {"Authorization": f"Bearer {application.key}"}
        async with httpx2.AsyncClient(base_url=application.url, headers=headers, timeout=60) as client:
            for number in range(69):
                subject = "ann" if number == 1 else f"user-{number}"
                marked = {"x-palestra-session": f"s{number}", "x-palestra-subject": subject, "x-palestra-train": "true"}
                text = SECRET if subject == "ann" else f"question {number}"
                call = {"model": "x", "messages": [{"role": "user", "content": text}]}
                assert (await client.post("/v1/chat/completions", json=call, headers=marked)).status_code == 200
                given = {"id": f"f{number}", "session": f"s{number}", "score": (number % 5) / 4}
                assert (await client.post("/feedback", json=given)).status_code == 200

    asyncio.run(use())
    assert application.server.wait(120) == 0, application.server.output
    trained = application.rows(
        "SELECT task_id, rewards, task_data FROM episodes WHERE kind = 'train' ORDER BY group_index", "run.db"
    )
    assert len(trained) == 8
    scores = {f"s{number}": (number % 5) / 4 for number in range(69)}
    for name, rewards, data in trained:
        assert json.loads(rewards) == {"agent": scores[name]}
        assert 0.4 < json.loads(data)["baseline"] < 0.6
    versions = application.rows("SELECT DISTINCT versions FROM chats WHERE episode_id LIKE 'train%'", "run.db")
    exact = application.rows(
        "SELECT count(*) FROM chats a JOIN episodes e USING (episode_id) JOIN episodes t ON t.task_id = e.task_id AND "
        "t.kind = 'adhoc' JOIN chats b ON b.episode_id = t.episode_id WHERE e.kind = 'train' AND "
        "(a.completion, a.logprobs, a.prompt_tail, a.versions) = (b.completion, b.logprobs, b.prompt_tail, b.versions)",
        "run.db",
    )
    assert versions
    assert exact == [(8,)], "what is trained is what was sampled"
    steps = dict(application.rows("SELECT step, episode_ids FROM manifests", "run.db"))
    ((own,),) = application.rows("SELECT episode_id FROM episodes WHERE kind = 'train' AND task_id = 's1'", "run.db")
    wanted = [f"policy@step-{step}" for step, ids in steps.items() if own in json.loads(ids)]
    assert len(wanted) == 1

    def command(*words: str) -> list[str]:
        log = application.folder / "command.log"
        assert Process.start([PALESTRA, "live", *words], log, fresh=False).wait() == 0, log.read_text()
        return log.read_text().splitlines()

    assert command("versions", str(application.run), "ann") == wanted
    assert application.hits(SECRET)
    assert command("forget", str(application.run), "ann") == ["deleted 1 session", *wanted]
    assert application.hits(SECRET) == []
    assert command("versions", str(application.run), "ann") == wanted, "they are known after the deletion"
    assert command("versions", str(application.run), "nobody") == ["no version was trained on them"]
    shutil.rmtree(application.run / "checkpoints")
    application.start("--resume")
    assert application.server.wait(60) == 0, "a step whose manifest names a deleted episode is repeated without it"


def learned(application: Application, reward: float) -> list[float]:
    """The logprob of the replies of episodes with a reward, before each step that trained them; the mean of a step."""
    rows = application.rows(
        "SELECT g.step, e.rewards, c.logprobs FROM episodes e JOIN chats c USING (episode_id) JOIN groups g ON "
        "g.kind = e.kind AND g.group_index = e.group_index WHERE e.kind = 'train' ORDER BY g.step",
        "run.db",
    )
    by_step: dict[int, list[float]] = {}
    for step, rewards, logprobs in rows:
        if json.loads(rewards) == {"agent": reward}:
            by_step.setdefault(step, []).append(float(np.frombuffer(zlib.decompress(logprobs), np.float32).sum()))
    return [float(np.mean(found)) for _, found in sorted(by_step.items())]


@pytest.fixture
def teaching(application: Application) -> Application:
    """A live run of a tiny model that learns fast, of which nobody says a score."""
    policy = {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 8}}
    application.settings |= {
        "steps": 6,
        "engine": {"threads": 1},
        "policies": {"policy": policy | {"optimizer": {"learning_rate": 1e-2}}},
        "live": {"idle_seconds": 0.5, "wait_seconds": 0.5},
    }
    application.start()
    return application


@pytest.mark.slow
def test_edits_are_imitated_and_forgotten_with_their_subject(teaching: Application) -> None:
    with httpx2.Client(
        base_url=teaching.url, headers={"Authorization": f"Bearer {teaching.key}"}, timeout=60
    ) as client:
        for number in range(24):
            marked = {
                "x-palestra-session": f"s{number}",
                "x-palestra-subject": f"u{number}",
                "x-palestra-train": "true",
            }
            for text in ("hello", "what is it?"):
                call = {"model": "bot", "messages": [{"role": "user", "content": text}]}
                said = client.post("/v1/chat/completions", json=call, headers=marked).json()
            named = {} if number % 2 else {"call": said["id"]}  # without a call it is the last one's
            for kind, value in (("edit", "never mind"), ("critique", "too long"), ("edit", SECRET)):
                given = {"id": f"{number} {value}", "session": f"s{number}", kind: value}
                assert client.post("/feedback", json=given | (named if kind == "edit" else {})).status_code == 200
    assert teaching.server is not None
    assert teaching.server.wait(240) == 0, teaching.server.output
    before = learned(teaching, 1.0)
    assert len(before) == 6
    assert before[-1] > before[0] + 5, f"the last edit becomes likelier with each step: {before}"
    texts = teaching.rows("SELECT reply FROM chats WHERE episode_id LIKE 'train%'", "run.db")
    assert len(texts) == 24
    assert all(SECRET in reply for (reply,) in texts), "the last edit counts"
    log = teaching.folder / "command.log"
    for number in range(24):
        run = [PALESTRA, "live", "forget", str(teaching.run), f"u{number}"]
        assert Process.start(run, log, fresh=False).wait() == 0, log.read_text()
        assert "policy@step-" in log.read_text(), "the version that learned from it is named"
    assert teaching.hits(SECRET) == []


@pytest.mark.slow
def test_of_two_replies_to_a_prompt_the_preferred_one_becomes_likelier(teaching: Application) -> None:
    call = {
        "model": "bot",
        "messages": [{"role": "user", "content": "which letter?"}],
        "structured_outputs": {"choice": list("abcdefghij")},
        "temperature": 2.0,
    }
    compared = number = 0
    seen = set[str]()
    with httpx2.Client(
        base_url=teaching.url, headers={"Authorization": f"Bearer {teaching.key}"}, timeout=60
    ) as client:
        while compared < 24:
            number += 1
            marked = {"x-palestra-session": f"s{number}", "x-palestra-train": "true"}
            ids: dict[bool, str] = {}
            for _ in range(6):
                said = client.post("/v1/chat/completions", json=call, headers=marked).json()
                seen.add(said["choices"][0]["message"]["content"])
                ids[said["choices"][0]["message"]["content"] < "f"] = said["id"]
                if len(ids) == 2:
                    pair = {"id": f"f{number}", "session": f"s{number}", "preferred": ids[True], "over": ids[False]}
                    assert client.post("/feedback", json=pair).status_code == 200
                    compared += 1
                    break
            assert number < 100, f"both are sampled: {seen}"
    assert teaching.server is not None
    assert teaching.server.wait(240) == 0, teaching.server.output
    yes, no = learned(teaching, 1.0), learned(teaching, 0.0)
    assert len(yes) == len(no) == 6
    assert yes[-1] > yes[0] + 0.1, (yes, no)
    assert no[-1] < no[0] - 0.1, (yes, no)


@pytest.mark.slow
def test_what_is_older_than_is_kept_is_deleted(application: Application) -> None:
    application.settings["live"] = {"idle_seconds": 0.2, "wait_seconds": 0.2, "keep_days": 1e-5}
    application.start()
    application.say(SECRET, "s", train="true")
    until(lambda: application.rows("SELECT state FROM sessions") == [("done",)], "it is settled")
    application.server.kill()
    assert application.hits(SECRET)
    application.start("--resume")
    until(lambda: application.hits(SECRET) == [], "it is deleted")
    assert application.rows("SELECT session_id, calls FROM sessions") == [("s", 1)], "the counts are left"
