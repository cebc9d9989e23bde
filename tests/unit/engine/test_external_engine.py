"""An engine whose model is in a server: what is sent to it, how its weights are replaced, how it ends."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from palestra.config import JobConfig
from palestra.engine.base import EngineRequest
from palestra.engine.driver import EngineJob
from palestra.errors import ConfigError, EngineFailure, InvalidRequest, ModelError
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion, TokenSequence
from palestra_engines.external import engine as module
from palestra_engines.external.process import ProgressClock
from palestra_engines.external.served_models import read_served_models
from palestra_engines.vllm.driver import VllmDriver
from unit.building import engine_request
from unit.engine.engine_servers import OWNER, PROMPT, SAMPLING, STOP, ScriptedSglang, ScriptedVllm, on_server, pieces_of

pytestmark = pytest.mark.ci

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
    "prompt",
    [[], [259], [-1], [1] * 64, [[1, 2], [3, 4]]],
)
async def test_a_prompt_that_the_model_can_not_read_is_not_sent(vllm, tmp_path, prompt):
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(InvalidRequest, match=r"1.*63.*0.*258"):
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
        assert vllm.asked[3][1] == {"weight_version": f"0.1-{OWNER}"}
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
        ([], r"new.*model\.norm\.weight"),
        ([("model.norm.weight", torch.ones(3))], r"model\.norm\.weight.*3"),
        ([*NEW.named, ("other", torch.ones(1))], r"other.*\(1,\)"),
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
        with pytest.raises(EngineFailure, match=r"0\.1.*500.*RuntimeError"):
            await engine.sync_weights("policy", SECOND, NEW)
        assert "has failed while it got version 0.1" in await asyncio.wait_for(failure, 5)
        assert engine.version("policy") == FIRST


async def test_other_policies_can_not_be_added(vllm, tmp_path):
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(ModelError, match="whole weights"):
            await engine.add_policy("past", "policy", SECOND, NEW)
        await engine.remove_policy("past")
        with pytest.raises(ModelError, match="not 'past'"):
            engine.version("past")


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
    clock = ProgressClock(10.0, (0, 0, 0))
    assert clock.seconds(12.0, (0, 0, 0), True) == 2.0
    assert clock.seconds(13.0, (0, 0, 1), True) == 0.0
    assert clock.seconds(20.0, (0, 0, 1), True) == 7.0
    assert clock.seconds(21.0, (0, 0, 1), False) == 0.0, "paused, or without requests"
    assert clock.seconds(25.0, (0, 0, 1), True) == 4.0
    assert clock.seconds(26.0, (0, 0, 0), True) == 0.0, "a server that was started again"


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
            with pytest.raises(EngineFailure, match=r"engine.*stopped"):
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
            r"engine.kind.*'sglang'",
        ),
        ("vllm", {"adapter": {"rank": 4}}, r"`adapter`.*out"),
        ("vllm", {"model": "tiny-random", "vision": "trained"}, r"tiny-random.*`vision`"),
    ],
)
def test_what_a_server_can_not_have_of_models_that_see_is_refused_before_it_is_asked(kind, policy, said):
    settings = {
        "policies": {"policy": {"model": "tiny-random-vision"} | policy},
        "engine": {"kind": kind, "url": "http://127.0.0.1:1"},
    }
    with pytest.raises(ConfigError, match=said):
        read_served_models(EngineJob(config=JobConfig.model_validate(settings)), VllmDriver().images)
