"""A teacher on another server: what is asked, what is accepted of its answers, and what becomes of its failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest

from palestra.config import JobConfig, TeacherServerConfig, parse_config
from palestra.errors import ConfigError, TeacherFailed
from palestra.learner import teacher as module
from palestra.learner.teacher import PROBE, ServedTeacher
from palestra.renderers import ByteTokenizer
from palestra.renderers.vocabulary import Vocabulary
from palestra.store.ledger import Ledger, Limits
from palestra.store.spending import ServerMeter, Used
from palestra.types.records import GrammarSpan, TrainSample
from unit.building import make_sample

STUDENT = SimpleNamespace(
    renderer=SimpleNamespace(vocabulary=Vocabulary(ByteTokenizer())), config=SimpleNamespace(model="student")
)
Answer = Callable[[dict], httpx2.Response]


def echo(body: dict, *, text: str | None = None, **changes) -> httpx2.Response:
    """The answer of a server that finds each token less probable the larger it is."""
    ids = body["prompt"]
    logprobs = {
        "tokens": [chr(token) for token in ids] + ["x"],
        "token_logprobs": [None, *(-token / 100 for token in ids[1:]), -0.5],
    }
    choice = {"text": "".join(map(chr, ids)) + "x" if text is None else text, "logprobs": logprobs | changes}
    return httpx2.Response(200, json={"choices": [choice]})


class Server:
    """A server behind a transport of the test's own."""

    def __init__(self, answer: Answer = echo, models=("big",)) -> None:
        self.answer, self.models = answer, models
        self.bodies: list[dict] = []
        self.headers: list[httpx2.Headers] = []
        self.running = self.most = 0

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": name} for name in self.models]})
        assert request.url.path == "/v1/completions"
        self.bodies.append(body := json.loads(request.content))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return self.answer(body)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


def teacher(server: Server, **settings) -> ServedTeacher:
    made = ServedTeacher(TeacherServerConfig(**{"url": "http://there"} | settings), STUDENT)
    made._http = httpx2.AsyncClient(transport=httpx2.MockTransport(server), headers=made._http.headers)
    return made


def rows(count: int = 3) -> list[TrainSample]:
    return [make_sample([65 + n, 66, 67, 68, 69 + n, 70], [2, 4]) for n in range(count)]


async def test_each_trained_token_gets_what_the_server_says_of_it():
    server = Server()
    asked = teacher(server)
    await asked.check()
    server.bodies.clear()
    found = await asked.logprobs(rows())
    for column, sample in zip(found, rows(), strict=True):
        wanted = np.where(sample.loss_mask, -sample.ids / 100, np.nan).astype(np.float32)
        np.testing.assert_array_equal(column, wanted)
    assert [body["prompt"] for body in server.bodies] == [row.ids[:5].tolist() for row in rows()]
    rest = {"model": "big", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 1.0}
    assert all({name: body[name] for name in body if name != "prompt"} == rest for body in server.bodies)


async def test_only_so_many_rows_are_asked_for_at_a_time():
    server = Server()
    await teacher(server, model="big", max_concurrency=3).logprobs(rows(20))
    assert (len(server.bodies), server.most) == (20, 3)


async def test_the_key_is_that_of_the_variable_and_in_no_configuration(monkeypatch):
    monkeypatch.setenv("TEACHERS_KEY", "secret\n")
    server = Server()
    config = TeacherServerConfig(url="http://there", key_variable="TEACHERS_KEY")
    await teacher(server, key_variable="TEACHERS_KEY").check()
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert "secret" not in config.model_dump_json()
    monkeypatch.delenv("TEACHERS_KEY")
    with pytest.raises(ConfigError, match="'TEACHERS_KEY'"):
        teacher(server, key_variable="TEACHERS_KEY")


@pytest.mark.parametrize(
    ("server", "settings", "said"),
    [
        (Server(models=("a", "b")), {}, r"names.*http://there"),
        (Server(models=("a", "b")), {"model": "c"}, r"model.*'c'"),
        (Server(lambda body: echo(body, text="other", tokens=[])), {}, r"another.*'student'"),
        (Server(lambda body: echo(body, text="", tokens=["other"] * 400)), {}, r"another.*'student'"),
        (
            Server(lambda body: echo(body, token_logprobs=[None, -1.0])),
            {},
            r"gave.*2",
        ),
        (Server(lambda body: httpx2.Response(200, json={"choices": [{"text": "x"}]})), {}, "no log-prob"),
        (Server(lambda body: httpx2.Response(400, json={"error": {"message": "no echo", "code": 1}})), {}, "no echo"),
    ],
)
async def test_a_server_that_can_not_teach_is_refused_at_the_start(server, settings, said):
    with pytest.raises(ConfigError, match=said):
        await teacher(server, **settings).check()


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: echo(body, tokens=[f"token_id:{token}" for token in body["prompt"]], text=""),
        lambda body: echo(body, tokens=[], text=""),
        lambda body: echo(body, tokens=[chr(token).strip() for token in body["prompt"]], text="y"),
        lambda body: echo(body, tokens=[]),
    ],
    ids=["ids", "nothing", "without white space", "text"],
)
async def test_servers_show_their_tokens_in_several_ways(answer):
    await teacher(Server(answer)).check()
    assert PROBE.isascii()  # so that no token is a part of a character


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda body: httpx2.Response(500, text="out of memory"), "of memory"),
        (lambda body: httpx2.Response(200, text="<html>"), "no answer"),
        (lambda body: httpx2.Response(200, json={"choices": []}), "no answer"),
        (lambda body: echo(body, token_logprobs=[None, -1.0, None, -1.0, -1.0]), "finite number"),
        (lambda body: echo(body, token_logprobs=[None] * 5), "finite number"),
        (lambda body: echo(body, token_logprobs=[-1.0] * 9), r"9.*5"),
    ],
)
async def test_an_answer_that_is_none_fails_the_step(answer, said):
    with pytest.raises(TeacherFailed, match=said):
        await teacher(Server(answer), model="big").logprobs(rows(2))


async def test_each_row_is_charged_also_if_it_is_broken_off_or_gets_no_answer():
    ledger, recorded = Ledger(limits=Limits(), monotonic=lambda: 0.0), []

    async def add(used: Used) -> None:
        recorded.append(used.prompt_tokens + used.reply_tokens)

    answers = iter([echo, echo, lambda body: httpx2.Response(400)])
    server = Server(lambda body: next(answers, echo)(body))
    asked = teacher(server, model="big", max_concurrency=5)
    asked._meter = ServerMeter(ledger, SimpleNamespace(add=add), "teacher", "the teacher")
    with pytest.raises(TeacherFailed):
        await asked.logprobs(rows(9))
    await asyncio.sleep(0)
    assert len(server.bodies) >= 5
    assert sum(recorded) == ledger.total.tokens == 6 * len(server.bodies)
    assert ledger._held_tokens == 0


async def test_a_server_that_is_busy_or_restarts_is_asked_again(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 30.0)
    failures = iter([503, 429, 502])

    def answer(body: dict) -> httpx2.Response:
        status = next(failures, None)
        return echo(body) if status is None else httpx2.Response(status)

    found = await teacher(Server(answer), model="big").logprobs(rows(2))
    assert np.isfinite(found[0][[2, 4]]).all()


async def test_rows_of_which_the_server_can_not_tell_are_named():
    plain, warm, held = rows()
    warm = replace(warm, episode_id="warm", temperatures=np.where(warm.loss_mask, 0.7, 1.0).astype(np.float32))
    held = replace(held, episode_id="held", grammars=(GrammarSpan(2, 3, "digits"),))
    found = teacher(Server()).unanswerable([plain, warm, held])
    assert found == {
        "warm": "a reply was sampled at another temperature than the teacher's, which is 1",
        "held": "a reply was held to a grammar, which the teacher's server does not know",
    }


def job(**more) -> JobConfig:
    algorithm = {"name": "distill", "teacher_server": {"url": "http://there:1"}}
    return parse_config({"algorithm": algorithm} | more)


def test_a_job_that_a_server_can_not_teach_is_refused_when_it_is_read():
    assert job().teacher_of("policy") is None
    with pytest.raises(ConfigError, match=r"teacher_server.*teachers"):
        job(algorithm={"name": "distill", "teacher": "a", "teacher_server": {"url": "http://there:1"}})
    with pytest.raises(ConfigError, match=r"true.*promise"):
        job(deterministic=True)
    with pytest.raises(ConfigError, match=r"temperature.*0\.7"):
        job(policies={"p": {"sampling": {"temperature": 0.7}}})


def test_the_server_may_move_and_its_model_may_not_change():
    def digest(**server) -> str:
        algorithm = {"name": "distill", "teacher_server": {"url": "http://there:1", "model": "big"} | server}
        return parse_config({"algorithm": algorithm}).digest()

    assert digest() == digest(url="http://here:2", key_variable="KEY", max_concurrency=2, timeout_seconds=3)
    assert digest() != digest(model="small")
