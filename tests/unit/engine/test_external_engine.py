"""An engine whose model is in a server: what is sent to it, what is believed of it, how its weights are replaced."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
import torch
from aiohttp import web

from palestra.config import JobConfig
from palestra.engine.base import Engine, EngineRequest
from palestra.engine.external import bounded
from palestra.engine.external import engine as module
from palestra.engine.external.connection import Address, EngineConnection
from palestra.engine.external.sample_text import tokenized
from palestra.engine.external.stillness import Stillness
from palestra.errors import ConfigError, EngineFailure, InvalidRequest, ModelError
from palestra.models.weights import LocalWeights
from palestra.renderers import ByteTokenizer
from palestra.runtime.served_models import read_served_models
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from unit.building import engine_request
from unit.engine.engine_servers import STOP, ScriptedSglang, ScriptedVllm, on_server

PROMPT = np.arange(40, 44, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)
NEW = LocalWeights([("model.norm.weight", torch.arange(4.0))])
UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.fixture
def vllm():
    return ScriptedVllm()


@pytest.fixture(params=[ScriptedVllm, ScriptedSglang])
def server(request):
    return request.param()


async def pieces_of(engine: Engine, **sampling):
    params = SamplingParams(**({"temperature": 1.0, "max_tokens": 6, "seed": 3} | sampling))
    return [piece async for piece in engine.generate(engine_request(PROMPT, params))]


async def test_a_reply_has_the_ids_logprobs_and_versions_that_the_server_says(server, tmp_path):
    async with on_server(server, tmp_path) as engine:
        pieces = await pieces_of(engine, top_logprobs=1)
    assert [token for piece in pieces for token in piece.ids] == [100, 101, 102, 103, 104, 105]
    assert [logprob for piece in pieces for logprob in piece.logprobs] == [-1.0] * 6
    assert {piece.version for piece in pieces} == {FIRST}
    assert [top for piece in pieces for top in piece.top] == [((7, -0.25),)] * 6


async def test_an_sglang_server_may_send_only_what_is_new(tmp_path):
    server = ScriptedSglang()
    server.incremental = True
    async with on_server(server, tmp_path) as engine:
        pieces = await pieces_of(engine)
    assert [token for piece in pieces for token in piece.ids] == [100, 101, 102, 103, 104, 105]


async def test_tokens_arrive_one_by_one_and_a_call_that_is_given_up_is_closed(server, tmp_path):
    async with on_server(server, tmp_path) as engine:
        stream = engine.generate(engine_request(PROMPT, SAMPLING))
        server.lie = lambda number, event: server.gate.clear() or event if number == 1 else event
        assert (await anext(stream)).ids == (100,)
        assert (await anext(stream)).ids == (101,)
        assert engine.load().running == server.open == 1
        await stream.aclose()
        assert engine.load().running == 0
        server.gate.set()
        async with asyncio.timeout(5):
            while server.open:
                await asyncio.sleep(0.01)


async def test_what_is_sent_to_vllm(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        bias = ((65, 2.5),)
        await pieces_of(engine, temperature=0.5, top_p=0.9, top_k=7, stop_ids=(9,), min_tokens=2, logit_bias=bias)
        await pieces_of(engine, grammar='start: "a"', presence_penalty=0.5)
        await pieces_of(engine, grammar='{"grammars": [{"json_schema": {"type": "null"}}]}')
    first, second, third = (body["sampling_params"] for body in vllm.bodies)
    assert vllm.bodies[0]["token_ids"] == PROMPT.tolist()
    assert (first["temperature"], first["top_p"], first["top_k"], first["min_tokens"]) == (0.5, 0.9, 7, 2)
    assert first["stop_token_ids"] == [9, STOP]
    assert first["ignore_eos"]
    assert first["logit_bias"] == {"65": 2.5}
    assert "seed" not in first
    assert "structured_outputs" not in first
    assert second["structured_outputs"] == {"grammar": 'start: "a"'}
    assert second["presence_penalty"] == 0.5
    assert third["structured_outputs"] == {"json": '{"type": "null"}'}


async def test_what_is_sent_to_sglang(tmp_path):
    server = ScriptedSglang()
    async with on_server(server, tmp_path) as engine:
        await pieces_of(engine, temperature=0.5, stop_ids=(9,), min_tokens=2, frequency_penalty=0.5)
    (body,) = server.bodies
    params = body["sampling_params"]
    assert body["input_ids"] == PROMPT.tolist()
    assert body["return_logprob"]
    assert (params["temperature"], params["min_new_tokens"], params["max_new_tokens"]) == (0.5, 2, 6)
    assert params["stop_token_ids"] == [9, STOP]
    assert params["frequency_penalty"] == 0.5


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"logit_bias": ((65, 1.0),)}, "logit_bias"),
        ({"grammar": 'start: "a"'}, "response_format"),
    ],
)
async def test_what_sglang_does_in_another_way_is_refused_before_anything_is_sampled(tmp_path, sampling, field):
    server = ScriptedSglang()
    async with on_server(server, tmp_path) as engine:
        with pytest.raises(InvalidRequest) as raised:
            await pieces_of(engine, **sampling)
    assert raised.value.field == field
    assert not server.bodies


async def test_a_prompt_is_scored(server, tmp_path):
    async with on_server(server, tmp_path) as engine:
        assert await engine.score("policy", TokenSequence(PROMPT)) == [-0.41, -0.42, -0.43]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "at least one token"), ([259], "from 0 to 258"), ([-1], "from 0 to 258"), ([1] * 64, "less than 64")],
)
async def test_a_prompt_that_the_model_can_not_read_is_not_sent(vllm, tmp_path, prompt, said):
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(InvalidRequest, match=said):
            _ = [piece async for piece in engine.generate(engine_request(np.array(prompt, np.int32), SAMPLING))]
    assert not vllm.bodies


# New weights


async def test_an_update_pauses_the_server_and_brings_it_a_file(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        await pieces_of(engine)
        vllm.asked.clear()
        await engine.sync_weights("policy", SECOND, NEW)
        assert [path for path, _ in vllm.asked] == UPDATE
        assert vllm.asked[0][1] == {"mode": "keep"}
        assert vllm.asked[3][1] == {"weight_version": "0.1"}
        assert vllm.read["model.norm.weight"].tolist() == [0, 1, 2, 3]
        assert list((tmp_path / "weights").iterdir()) == []  # no copy of the weights is left
        assert {piece.version for piece in await pieces_of(engine)} == {SECOND}
        assert engine.version("policy") == SECOND


async def test_an_update_of_sglang_brings_a_whole_folder(tmp_path):
    server = ScriptedSglang()
    async with on_server(server, tmp_path) as engine:
        await engine.sync_weights("policy", SECOND, NEW)
        paths = [path for path, _ in server.asked]
        begun = ["/continue_generation"]  # a job before may have left the server paused
        assert paths == [*begun, "/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert server.asked[2][1]["weight_version"] == "0.1"
        assert server.read["model.norm.weight"].tolist() == [0, 1, 2, 3]
        assert list((tmp_path / "weights").iterdir()) == []


async def stopped_at(server, engine, number):
    """A call whose first `number` tokens have arrived, and the task that waits for the rest."""
    reached = asyncio.Event()

    def lie(place, event):
        if place == number - 1:
            server.gate.clear()
            reached.set()
        return event

    server.lie = lie
    call = asyncio.create_task(pieces_of(engine))
    await reached.wait()
    server.lie = lambda place, event: event
    return call


async def test_each_token_of_a_reply_has_the_version_that_sampled_it(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        call = await stopped_at(vllm, engine, 2)
        await engine.sync_weights("policy", SECOND, NEW)
        vllm.gate.set()
        pieces = await call
    assert [(piece.version, token) for piece in pieces for token in piece.ids] == [
        *((FIRST, token) for token in (100, 101)),
        *((SECOND, token) for token in (102, 103, 104, 105)),
    ]


@pytest.mark.parametrize("kind", [ScriptedVllm, ScriptedSglang])
async def test_new_weights_may_wait_for_replies_and_then_keep_others_from_beginning(kind, tmp_path):
    """SGLang does not say which version has sampled a token, so that it always does."""
    server = kind()
    async with on_server(server, tmp_path, finish=kind is ScriptedVllm) as engine:
        call = await stopped_at(server, engine, 2)
        asked = len(server.asked)
        update = asyncio.create_task(engine.sync_weights("policy", SECOND, NEW))
        await asyncio.sleep(0.2)
        late = asyncio.create_task(pieces_of(engine))
        await asyncio.sleep(0.1)
        assert len(server.asked) == asked
        assert len(server.bodies) == 1
        server.gate.set()
        assert {piece.version for piece in await call} == {FIRST}
        await update
        assert {piece.version for piece in await late} == {SECOND}


async def test_a_server_that_a_job_before_has_left_paused_is_checked_and_goes_on(vllm, tmp_path):
    vllm.paused = True
    async with on_server(vllm, tmp_path) as engine:
        assert len(await asyncio.wait_for(pieces_of(engine), 10)) == 6
    assert not vllm.paused


async def test_an_update_of_a_paused_engine_leaves_it_paused(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        await engine.pause()
        vllm.asked.clear()
        await engine.sync_weights("policy", SECOND, NEW)
        assert [path for path, _ in vllm.asked] == UPDATE[1:-1]
        call = asyncio.create_task(pieces_of(engine))
        await asyncio.sleep(0.1)
        assert not vllm.bodies
        assert engine.load().waiting == 1
        await engine.resume()
        assert {piece.version for piece in await call} == {SECOND}


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([], r"no new weights were given for model\.norm\.weight"),
        ([("model.norm.weight", torch.ones(3))], r"no weight model\.norm\.weight of shape \(3,\)"),
        ([*NEW.named, ("other", torch.ones(1))], r"no weight other of shape \(1,\)"),
    ],
)
async def test_weights_that_do_not_fit_never_reach_the_server(vllm, tmp_path, weights, said):
    async with on_server(vllm, tmp_path) as engine:
        await pieces_of(engine)
        vllm.asked.clear()
        with pytest.raises(ModelError, match=said):
            await engine.sync_weights("policy", SECOND, LocalWeights(weights))
        assert vllm.asked == []
        assert engine.version("policy") == FIRST


async def test_an_engine_that_fails_in_an_update_has_failed(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        await pieces_of(engine)
        vllm.answers["/update_weights"] = (500, {"detail": "RuntimeError: no such file"})
        failure = asyncio.create_task(engine.failure())
        with pytest.raises(EngineFailure, match=r"while it got version 0\.1: .* answered 500: RuntimeError"):
            await engine.sync_weights("policy", SECOND, NEW)
        assert "has failed while it got version 0.1" in await asyncio.wait_for(failure, 5)
        assert engine.version("policy") == FIRST


async def test_other_policies_can_not_be_added(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(ModelError, match="the whole weights of one model"):
            await engine.add_policy("past", "policy", SECOND, NEW)
        await engine.remove_policy("past")
        with pytest.raises(ModelError, match="has the policies 'policy', not 'past'"):
            engine.version("past")


# What is not believed


def change(**values):
    return lambda number, event: {"choices": [event["choices"][0] | values]} if number == 2 else event


def _logprobs(token):
    return {"content": [{"token_id": token, "logprob": -1.0, "top_logprobs": []}]}


def logprob(value, token=102):
    return change(logprobs={"content": [{"token_id": token, "logprob": value, "top_logprobs": []}]})


def spans(*found):
    named = [{"version": version, "start": start, "end": end} for version, start, end in found]
    return lambda number, event: (
        {"choices": [event["choices"][0] | {"weight_versions": named}]} if number == 5 else event
    )


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (change(token_ids=[102, 103], logprobs=None), "logprobs of other tokens"),
        (logprob(-1.0, token=9), "logprobs of other tokens"),
        (logprob(0.5), "logprob of token 102 is 0.5"),
        (logprob(float("nan")), "logprob of token 102 is nan"),
        (
            change(token_ids=[259], logprobs={"content": [{"token_id": 259, "logprob": -1.0, "top_logprobs": []}]}),
            "sampled token 259, and the policy's model has 259",
        ),
        (change(finish_reason="abort"), "after 3 of at most 6 tokens for the reason 'abort'"),
        (change(finish_reason="stop"), "after 3 of at most 6 tokens for the reason 'stop'"),
        (change(finish_reason="length"), "after 3 of at most 6 tokens for the reason 'length'"),
        (lambda number, event: {"choices": [event["choices"][0] | {"finish_reason": None}]}, "without saying why"),
        (
            lambda number, event: {"choices": event["choices"] * 2} if number == 4 else event,
            "more than the 6 tokens|without saying why|went on after",
        ),
        (lambda number, event: {"choices": event["choices"] * 2}, "more than the 6 tokens"),
        (change(token_ids="abc"), "can't be read|other tokens"),
        (lambda number, event: {"text": "hello"}, "without choices"),
        (lambda number, event: {"error": {"message": "EngineCore died"}}, "EngineCore died"),
        (spans(("0.0", 0, 5)), "versions of other than the reply's 6 tokens"),
        (spans(("0.0", 0, 3), ("0.1", 4, 6)), "overlap or leave gaps"),
        (spans(("0.1", 0, 6)), r"version 0\.1 has sampled what was sampled from 0\.0"),
        (spans(("default", 0, 6)), "can't be read"),
        (spans(("0.0", 0, 5), ("0.9", 5, 6)), r"version 0\.9, which it did not have"),
        (change(token_ids=[1.5], logprobs=_logprobs(1.5)), r"sampled token 1\.5"),
        (change(token_ids=[True], logprobs=_logprobs(True)), "sampled token True"),
        (change(logprobs=[1]), "can't be read"),
        (logprob(-(10**400)), "can't be read"),
    ],
)
async def test_a_reply_that_can_not_be_true_fails(vllm, tmp_path, lie, said):
    await assert_refused(vllm, tmp_path, lie, said)


async def assert_refused(server, folder, lie, said):
    async with on_server(server, folder) as engine:
        server.lie = lie
        with pytest.raises(EngineFailure, match=said):
            await pieces_of(engine)
        assert engine.load().running == 0


def meta(**values):
    """A lie of SGLang about the third token."""
    return lambda number, event: {"meta_info": event["meta_info"] | values} if number == 2 else event


def token(*said):
    """A lie of SGLang: another third token, or none, as (logprob, id)."""
    first = [[-1.0, 100, None], [-1.0, 101, None]]
    return meta(output_token_logprobs=[*first, *([*each, None] for each in said)])


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (token((0.5, 102)), "logprob of token 102 is 0.5"),
        (token((float("nan"), 102)), "logprob of token 102 is nan"),
        (token((float("-inf"), 102)), "logprob of token 102 is -inf"),
        (token((None, 102)), "can't be read"),
        (token((-(10**400), 102)), "can't be read"),
        (token((-1.0, 259)), "sampled token 259, and the policy's model has 259"),
        (token((-1.0, -1)), "sampled token -1"),
        (token((-1.0, 1.5)), r"sampled token 1\.5"),
        (token((-1.0, True)), "sampled token True"),
        (token((-1.0, "a")), "sampled token a"),
        (token(), "sent 2 tokens after 2, and says that there are 3"),
        (token((-1.0, 102), (-1.0, 103)), "sent 4 tokens after 2, and says that there are 3"),
        (meta(completion_tokens=9), "sent 3 tokens after 2, and says that there are 9"),
        (meta(completion_tokens="x"), "can't be read|says that there are x"),
        (meta(output_token_logprobs=7), "can't be read"),
        (meta(output_token_logprobs=[1]), "can't be read|says that there are 3"),
        (meta(finish_reason={"type": "abort"}), "after 3 of at most 6 tokens for the reason 'abort'"),
        (meta(finish_reason={"type": "stop"}), "after 3 of at most 6 tokens for the reason 'stop'"),
        (meta(finish_reason={"type": "length"}), "after 3 of at most 6 tokens for the reason 'length'"),
        (meta(finish_reason="length"), "can't be read"),
        (lambda number, event: {"meta_info": event["meta_info"] | {"finish_reason": None}}, "without saying why"),
        (
            lambda number, event: (
                {
                    "meta_info": event["meta_info"]
                    | {"completion_tokens": 7, "output_token_logprobs": [[-1.0, 9, None]] * 7}
                }
                if number == 5
                else event
            ),
            "more than the 6 tokens",
        ),
        (lambda number, event: {"text": "hello"}, "can't be read"),
        (lambda number, event: {"error": {"message": "scheduler died"}}, "scheduler died"),
        (meta(prompt_tokens=5), "another prompt than the one that it was sent"),
        (lambda number, event: event | {"prompt_token_ids": [1, 2, 3, 4]}, "another prompt than the one"),
    ],
)
async def test_a_reply_of_sglang_that_can_not_be_true_fails(tmp_path, lie, said):
    await assert_refused(ScriptedSglang(), tmp_path, lie, said)


@pytest.mark.parametrize("pair", [(259, -1.0), (7, float("nan")), (7, 0.5), (10**30, -1.0)])
async def test_probable_tokens_that_can_not_be_fail(server, tmp_path, pair):
    async with on_server(server, tmp_path) as engine:
        top = [{"token_id": pair[0], "logprob": pair[1]}]
        content = [{"token_id": 102, "logprob": -1.0, "top_logprobs": top}]
        of_vllm = change(logprobs={"content": content})
        server.lie = (
            of_vllm if isinstance(server, ScriptedVllm) else meta(output_top_logprobs=[[[*pair[::-1], None]]] * 3)
        )
        with pytest.raises(EngineFailure, match="probable token"):
            await pieces_of(engine, top_logprobs=1)


@pytest.mark.parametrize("score", [float("nan"), float("-inf"), 0.5, "x"])
async def test_scores_that_can_not_be_fail(server, tmp_path, score):
    async with on_server(server, tmp_path) as engine:
        await pieces_of(engine)
        said = [None, *({str(token): {"logprob": score}} for token in PROMPT[1:].tolist())]
        server.answers["/inference/v1/generate"] = (200, {"prompt_logprobs": said, "choices": []})
        scores = [[None, 40, None], *([score, token, None] for token in PROMPT[1:].tolist())]
        server.answers["/generate"] = (200, {"meta_info": {"input_token_logprobs": scores}})
        with pytest.raises(EngineFailure):
            await engine.score("policy", TokenSequence(PROMPT))


async def test_a_score_of_another_prompt_fails(server, tmp_path):
    async with on_server(server, tmp_path) as engine:
        await pieces_of(engine)
        scores = [None, *({str(token): {"logprob": -1.0}} for token in PROMPT[1:].tolist())]
        body = {"prompt_logprobs": scores, "choices": [], "prompt_token_ids": [9, *PROMPT[1:].tolist()]}
        server.answers["/inference/v1/generate"] = (200, body)
        of_sglang = [[None, 9, None], *([-1.0, token, None] for token in PROMPT[1:].tolist())]
        server.answers["/generate"] = (200, {"meta_info": {"input_token_logprobs": of_sglang}})
        with pytest.raises(EngineFailure, match=r"another prompt than the one|scored other tokens"):
            await engine.score("policy", TokenSequence(PROMPT))


async def test_a_reply_of_vllm_to_another_prompt_fails(vllm, tmp_path):
    await assert_refused(vllm, tmp_path, lambda number, event: event | {"prompt_token_ids": [1, 2]}, "another prompt")


async def test_a_server_that_reads_other_tokens_than_it_is_sent_is_found_before_the_first_call(vllm, tmp_path):
    generate = vllm.generate

    async def shifted(request, body):
        return await generate(request, body | {"token_ids": [token - 1 for token in body["token_ids"]]})

    vllm.generate = shifted
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(EngineFailure, match="answers to another prompt than the one that it was sent"):
            await pieces_of(engine)
    assert not vllm.bodies


async def test_a_stream_that_is_cut_fails(server, tmp_path):
    async with on_server(server, tmp_path) as engine:
        server.cut_after = 3
        with pytest.raises(EngineFailure):
            await pieces_of(engine)


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (400, {"error": {"message": "top_p must be in (0, 1]"}}, InvalidRequest, r"refuses this request: top_p must"),
        (422, {"detail": "a field is missing"}, InvalidRequest, "a field is missing"),
        (500, {"error": {"message": "EngineDeadError"}}, EngineFailure, "answered 500: EngineDeadError"),
        (503, "busy", EngineFailure, "answered 503: busy"),
    ],
)
async def test_an_error_of_the_server_is_one_line(vllm, tmp_path, status, body, error, said):
    async with on_server(vllm, tmp_path) as engine:
        await pieces_of(engine)
        vllm.answers["/inference/v1/generate"] = (status, body)
        with pytest.raises(error, match=said):
            await pieces_of(engine)


async def test_a_stream_that_begins_with_a_refusal_is_one(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        vllm.lie = lambda number, event: {"error": {"message": "out-of-vocab token ids", "code": 400}}
        with pytest.raises(InvalidRequest, match="refuses this request: out-of-vocab token ids"):
            await pieces_of(engine)


@pytest.mark.parametrize(
    ("status", "page", "said"),
    [
        (404, "<!DOCTYPE HTML>\n<html>no such file</html>", r"GET {route}: 404 Not Found\); start {program} there"),
        (404, "Not Found", r"GET {route}: Not Found\)"),
        (200, "<html>hello</html>", r"GET {route}: '<html>hello</html>', which is no JSON\)"),
    ],
)
async def test_another_program_at_the_address_is_told_from_the_engines_server(server, tmp_path, status, page, said):
    async def answer(request):
        return web.Response(status=status, text=page, content_type="text/html")

    server.route = answer
    program, route = ("vLLM", "/version") if isinstance(server, ScriptedVllm) else ("SGLang", "/get_model_info")
    async with on_server(server, tmp_path) as engine:
        with pytest.raises(ConfigError, match=said.format(program=program, route=route)) as raised:
            await pieces_of(engine)
    assert re.match(rf"http://\S+ answers, but is no {program} server", str(raised.value))
    assert "or correct engine.url" in str(raised.value)


async def test_a_wrong_key_is_said(vllm, tmp_path):
    async with on_server(vllm, tmp_path, key="another") as engine:
        with pytest.raises(EngineFailure, match=r"answered 401: Unauthorized; engine\.key_variable has to name"):
            await pieces_of(engine)


async def test_an_address_without_a_server_is_said_with_its_key_of_the_configuration():
    with socket.socket() as bound:  # bound and not listening, so that connections are refused
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        connection = EngineConnection(Address(url=f"http://127.0.0.1:{port}"))
        with pytest.raises(EngineFailure, match=rf":{port}/version: ConnectError.*no server listens at engine\.url"):
            await connection.get("/version", 5.0)
        await connection.close()


@asynccontextmanager
async def program(answer):
    """The address of a program that answers every connection with bytes, one piece after another."""

    tasks = []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            for piece in answer:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        connection = EngineConnection(Address(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        yield connection
        await connection.close()
        await asyncio.gather(*tasks)


PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n<html></html>"
LONG = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([b"220 mail.example ESMTP\r\n"], "/version: RemoteProtocolError"),
        ([PAGE], "/version answered with no JSON: '<html></html>'"),
        ([LONG, *[b"1"] * 1000], r"/version has not answered within 0\.5 s"),
        ([b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", *[b"[" * 60_000] * 5], "/version answered with no JSON"),
        ([b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"[" * 3_000_000], "more than 2,000,000 bytes"),
        ([b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"], "answered 302: Found"),
    ],
    ids=["mail", "page", "dribble", "nested", "endless", "redirect"],
)
async def test_another_program_at_the_port_is_one_line_in_time(monkeypatch, answer, said):
    monkeypatch.setattr(bounded, "MOST_BYTES", 2_000_000)
    async with program(answer) as connection, asyncio.timeout(3):
        with pytest.raises(EngineFailure, match=said) as raised:
            await connection.get("/version", 0.5)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


async def test_a_line_without_an_end_is_not_kept(server, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "MOST_BYTES", 2_000_000)
    async with on_server(server, tmp_path) as engine:
        server.noise = b"data: " + b"[" * 3_000_000
        with pytest.raises(EngineFailure, match="a line of more than 2,000,000 bytes"):
            await pieces_of(engine)
        server.noise = b"data: " + b"[" * 1_000_000 + b"\n"
        with pytest.raises(EngineFailure, match="an event that is no JSON"):
            await pieces_of(engine)
        server.noise = b": a remark\r\n\r\n" * 1000
        assert len(await pieces_of(engine)) == 6


async def test_lines_are_the_same_however_they_are_cut():
    whole = b"data: 1\r\n\r\ndata: 2\n\ndata: [3,\xc3\xa4]"
    expected = [b"data: 1", b"", b"data: 2", b"", b"data: [3,\xc3\xa4]"]
    for size in range(1, len(whole) + 1):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]

        class Answer:
            async def aiter_bytes(self, pieces=pieces):
                for piece in pieces:
                    yield piece

        assert [line async for line in bounded.read_lines(Answer(), "there")] == expected


@pytest.mark.parametrize("text", ["vllm:prompt_tokens_total{a} many", "vllm:iteration_tokens_total_count{a} NaN"])
async def test_metrics_that_can_not_be_read_are_no_health(vllm, tmp_path, text):
    async with on_server(vllm, tmp_path) as engine:
        vllm.metrics = text
        with pytest.raises(EngineFailure, match="where a number is expected"):
            await engine._policies["policy"].api.counters()


@pytest.mark.parametrize("info", [None, {}, {"model_config": {}}, {"model_config": 3}])
async def test_settings_that_can_not_be_read_are_one_line(vllm, tmp_path, info):
    vllm.info = info
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(ConfigError, match="describes itself in a way that can't be read"):
            await pieces_of(engine)


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("number", "0.31.1", r"vLLM 0\.31\.1; 0\.32 or newer is needed"),
        ("info", {"model_config": {"logprobs_mode": "raw_logprobs"}}, "needs --logprobs-mode processed_logprobs"),
        ("info", ScriptedVllm.info | {"weight_transfer_config": None}, "needs --weight-transfer-config"),
        (
            "info",
            ScriptedVllm.info | {"model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 32}},
            "max_context is 64, and the engine's server has --max-model-len 32",
        ),
        (
            "info",
            {**ScriptedVllm.info, "model_config": ScriptedVllm.info["model_config"] | {"max_model_len": math.nan}},
            "has a --max-model-len of nan",
        ),
        (
            "info",
            {**ScriptedVllm.info, "model_config": ScriptedVllm.info["model_config"] | {"dtype": "torch.bfloat16"}},
            r"engine\.dtype is 'float32', and the engine's server computes in bfloat16; start it with --dtype float32",
        ),
        ("number", "0.²", r"is vLLM 0\.²; 0\.32 or newer is needed"),
        ("number", "0." + "9" * 5000, r"is vLLM 0\.9{190,}…; 0\.32 or newer is needed"),
        ("number", "x\n\x1b[2Jy", r"is vLLM x ␛\[2Jy; 0\.32 or newer is needed"),
    ],
)
async def test_a_vllm_server_that_does_not_fit_is_refused_before_the_first_call(vllm, tmp_path, attribute, value, said):
    setattr(vllm, attribute, value)
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(ConfigError, match=said):
            await pieces_of(engine)
    assert not vllm.bodies


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"version": "0.4.10.post2"}, r"SGLang 0\.4\.10\.post2; 0\.5 or newer is needed"),
        ({}, r"SGLang \(unknown\); 0\.5 or newer is needed"),
        (
            {"version": "0.5.7", "context_length": 63},
            "max_context is 64, and the engine's server has context_length 63",
        ),
        ({"version": "0.5.7", "max_total_num_tokens": 32}, "the engine's server has max_total_num_tokens 32"),
        ({"version": "0.5.7", "max_req_input_len": 57}, "the engine's server has max_req_input_len 57"),
        (None, "describes itself in a way that can't be read"),
    ],
)
async def test_an_sglang_server_that_does_not_fit_is_refused_before_the_first_call(tmp_path, info, said):
    server = ScriptedSglang()
    server.info = info
    async with on_server(server, tmp_path) as engine:
        with pytest.raises(ConfigError, match=said):
            await pieces_of(engine)
    assert not server.bodies


async def test_a_model_that_does_not_generate_is_refused(tmp_path):
    server = ScriptedSglang()
    server.answers["/get_model_info"] = (200, {"is_generation": False})
    async with on_server(server, tmp_path) as engine:
        with pytest.raises(ConfigError, match="a model that does not generate"):
            await pieces_of(engine)


@pytest.mark.parametrize("info", [{"version": "0.5.0"}, {"version": "0.6.1", "max_req_input_len": 58}])
async def test_an_sglang_server_that_fits_is_taken_by_either_name_of_the_route(tmp_path, info):
    server = ScriptedSglang()
    server.answers |= {"/get_server_info": (404, "Not Found"), "/server_info": (200, info)}
    async with on_server(server, tmp_path) as engine:
        assert await pieces_of(engine)


@pytest.mark.parametrize(
    ("size", "said"), [(258, "another vocabulary"), (260, "more tokens than the 259.*correct engine.url")]
)
async def test_another_vocabulary_is_found(server, tmp_path, monkeypatch, size, said):
    monkeypatch.setattr("unit.engine.engine_servers.VOCABULARY", size)
    async with on_server(server, tmp_path) as engine:
        with pytest.raises(ConfigError, match=said):
            await pieces_of(engine)
    assert not server.bodies


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (
            lambda text: [*text.encode()][1:],
            r"another tokenizer than the policy's model: it makes \d+ other tokens of a",
        ),
        (lambda text: [token + 1 for token in text.encode()], "another tokenizer than the policy's model"),
        (lambda text: None, "it makes no tokens of a text"),
    ],
)
async def test_another_tokenizer_is_found(server, tmp_path, tokens, said):
    server.tokens = tokens
    async with on_server(server, tmp_path, sample=tokenized(ByteTokenizer())) as engine:
        with pytest.raises(ConfigError, match=said):
            await pieces_of(engine)
    assert not server.bodies


@pytest.mark.parametrize("answer", [None, (404, "Not Found"), (400, {"error": {"message": "there is no tokenizer"}})])
async def test_the_same_tokenizer_is_taken_and_so_is_a_server_without_one(server, tmp_path, answer):
    server.answers |= {} if answer is None else {"/tokenize": answer}
    async with on_server(server, tmp_path, sample=tokenized(ByteTokenizer())) as engine:
        assert await pieces_of(engine)


# Ends


async def test_a_reply_that_is_not_streamed_comes_in_larger_pieces(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        for streamed in (True, False):
            request = EngineRequest(policy="policy", prompt=TokenSequence(PROMPT), sampling=SAMPLING, streamed=streamed)
            assert [token async for piece in engine.generate(request) for token in piece.ids]
    assert [body["sampling_params"]["stream_interval"] for body in vllm.bodies] == [1, 16]


async def test_a_server_that_answers_and_computes_nothing_has_failed(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    async with on_server(vllm, tmp_path, stuck_seconds=0.4) as engine:
        failure = asyncio.create_task(engine.failure())
        await asyncio.sleep(0.8)
        assert not failure.done(), "it has no requests"
        call = await stopped_at(vllm, engine, 2)
        said = await asyncio.wait_for(failure, 30)
        vllm.gate.set()
        await call
    assert said == ("the engine of 'policy' has 1 request and has computed nothing for 0.4 s (engine.stuck_seconds)")


def test_a_server_stands_still_only_while_it_could_move():
    stillness = Stillness(10.0, (0, 0, 0))
    assert stillness.seconds(12.0, (0, 0, 0), True) == 2.0
    assert stillness.seconds(13.0, (0, 0, 1), True) == 0.0
    assert stillness.seconds(20.0, (0, 0, 1), True) == 7.0
    assert stillness.seconds(21.0, (0, 0, 1), False) == 0.0, "paused, or without requests"
    assert stillness.seconds(25.0, (0, 0, 1), True) == 4.0
    assert stillness.seconds(26.0, (0, 0, 0), True) == 0.0, "a server that was started again"


async def test_a_server_that_is_silent_has_failed(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    async with on_server(vllm, tmp_path) as engine:
        failure = asyncio.create_task(engine.failure())
        await asyncio.sleep(0.3)
        assert not failure.done()
        assert engine.load().kv_bytes_used == 250
        assert engine.load().prefilled_tokens == 12
        vllm.answers["/health"] = (500, {"error": {"message": "EngineDeadError"}})
        said = await asyncio.wait_for(failure, 5)
    assert "the engine of 'policy' has not answered" in said
    assert "EngineDeadError" in said


async def test_closing_fails_the_calls_that_are_open_and_those_that_wait(server, tmp_path):
    async with on_server(server, tmp_path) as engine:
        failure = asyncio.create_task(engine.failure())
        call = await stopped_at(server, engine, 2)
        await engine.pause()
        waits = asyncio.create_task(pieces_of(engine))
        await asyncio.sleep(0.05)
        await engine.close()
        for each in (call, waits):
            with pytest.raises(EngineFailure, match="the engine was stopped"):
                await asyncio.wait_for(each, 5)
        with pytest.raises(EngineFailure):
            await engine.sync_weights("policy", SECOND, NEW)
        assert not failure.done()
        failure.cancel()
        server.gate.set()


@pytest.mark.parametrize(
    ("kind", "policy", "said"),
    [
        (
            "sglang",
            {},
            "sees pictures, and engine.kind = 'sglang' is for models that read text only",
        ),
        ("vllm", {"adapter": {"rank": 4}}, "adapters of models that see are not supported; leave `adapter` out"),
        ("vllm", {"model": "tiny-random", "vision": "trained"}, "tiny-random reads text only; leave `vision` out"),
    ],
)
def test_what_a_server_can_not_have_of_models_that_see_is_refused_before_it_is_asked(kind, policy, said):
    settings = {
        "policies": {"policy": {"model": "tiny-random-vision"} | policy},
        "engine": {"kind": kind, "url": "http://127.0.0.1:1"},
    }
    with pytest.raises(ConfigError, match=said):
        read_served_models(JobConfig.model_validate(settings), {}, None)


async def test_metrics_that_no_server_can_have_are_bounded(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        vllm.metrics = "vllm:prompt_tokens_total{} 1e308\n" * 2 + "vllm:kv_cache_usage_perc{} 1e308\n"
        found = await engine._policies["policy"].api.counters()
        assert found.kv_share == 1.0
        assert found.prefilled_tokens == 10**18


async def test_a_server_can_not_fill_the_console(vllm, tmp_path):
    vllm.info = {"model_config": "x" * 10**6}
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(ConfigError) as refused:
            await pieces_of(engine)
    assert len(str(refused.value)) < 400


async def test_a_server_that_has_loaded_another_model_than_it_was_started_with_is_refused(vllm, tmp_path):
    vllm.info = vllm.info | {"model_config": vllm.info["model_config"] | {"model": "/models/of/another/tenant"}}
    async with on_server(vllm, tmp_path) as engine:
        engine._policies["policy"].api._folder = tmp_path
        with pytest.raises(ConfigError, match="has loaded /models/of/another/tenant, and not the model in"):
            await pieces_of(engine)
