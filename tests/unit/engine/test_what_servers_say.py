"""What is believed of an engine's server, and what is refused: replies, scores, settings, metrics, tokenizers."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from palestra.errors import ConfigError, EngineFailure, InvalidRequest
from palestra.renderers import ByteTokenizer
from palestra.types.calls import TokenSequence
from palestra_engines.external import connection as bounded
from palestra_engines.external.connection import Address, EngineConnection, tokenized
from unit.engine.engine_servers import OWNER, PROMPT, ScriptedSglang, ScriptedVllm, listening, on_server, pieces_of

pytestmark = pytest.mark.ci


def change(**values):
    return lambda number, event: {"choices": [event["choices"][0] | values]} if number == 2 else event


def _logprobs(token):
    return {"content": [{"token_id": token, "logprob": -1.0, "top_logprobs": []}]}


def logprob(value, token=102):
    return change(logprobs={"content": [{"token_id": token, "logprob": value, "top_logprobs": []}]})


def spans(*found):
    named = [{"version": version.format(OWNER), "start": start, "end": end} for version, start, end in found]
    return lambda number, event: (
        {"choices": [event["choices"][0] | {"weight_versions": named}]} if number == 5 else event
    )


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (change(token_ids=[102, 103], logprobs=None), r"logprobs.*other"),
        (logprob(-1.0, token=9), r"logprobs.*other"),
        (logprob(0.5), r"102.*0.5"),
        (logprob(float("nan")), r"102.*nan"),
        (
            change(token_ids=[259], logprobs={"content": [{"token_id": 259, "logprob": -1.0, "top_logprobs": []}]}),
            r"sampled.*259.*259",
        ),
        (change(finish_reason="abort"), r"3.*6.*'abort'"),
        (change(finish_reason="stop"), r"3.*6.*'stop'"),
        (change(finish_reason="length"), r"3.*6.*'length'"),
        (lambda number, event: {"choices": [event["choices"][0] | {"finish_reason": None}]}, "saying why"),
        (
            lambda number, event: {"choices": event["choices"] * 2} if number == 4 else event,
            "more than the 6 tokens|without saying why|went on after",
        ),
        (lambda number, event: {"choices": event["choices"] * 2}, r"more.*6"),
        (change(token_ids="abc"), "can't be read|other tokens"),
        (lambda number, event: {"text": "hello"}, "without choices"),
        (lambda number, event: {"error": {"message": "EngineCore died"}}, "EngineCore died"),
        (spans(("0.0-{}", 0, 5)), r"versions.*6"),
        (spans(("0.0-{}", 0, 3), ("0.1-{}", 4, 6)), "leave gaps"),
        (spans(("0.1-{}", 0, 6)), r"0\.1.*sampled.*sampled.*0\.0"),
        (spans(("default", 0, 6)), r"uses.*engine.url"),
        (spans(("0.0-{}", 0, 3), ("0.0-feed", 3, 6)), r"uses.*engine.url"),
        (spans(("0-{}", 0, 6)), "be read"),
        (spans(("0.0-{}", 0, 5), ("0.9-{}", 5, 6)), r"0\.9"),
        (change(token_ids=[1.5], logprobs=_logprobs(1.5)), r"1\.5"),
        (change(token_ids=[True], logprobs=_logprobs(True)), "token True"),
        (change(logprobs=[1]), "be read"),
        (logprob(-(10**400)), "be read"),
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
        (token((0.5, 102)), r"102.*0.5"),
        (token((float("nan"), 102)), r"102.*nan"),
        (token((float("-inf"), 102)), r"102.*-inf"),
        (token((None, 102)), "be read"),
        (token((-(10**400), 102)), "be read"),
        (token((-1.0, 259)), r"sampled.*259.*259"),
        (token((-1.0, -1)), r"sampled.*-1"),
        (token((-1.0, 1.5)), r"1\.5"),
        (token((-1.0, True)), "token True"),
        (token((-1.0, "a")), "token a"),
        (token(), r"2.*2.*says.*3"),
        (token((-1.0, 102), (-1.0, 103)), r"4.*2.*3"),
        (meta(completion_tokens=9), r"3.*2.*9"),
        (meta(completion_tokens="x"), "can't be read|says that there are x"),
        (meta(output_token_logprobs=7), "be read"),
        (meta(output_token_logprobs=[1]), "can't be read|says that there are 3"),
        (meta(finish_reason={"type": "abort"}), r"3.*6.*'abort'"),
        (meta(finish_reason={"type": "stop"}), r"3.*6.*'stop'"),
        (meta(finish_reason={"type": "length"}), r"3.*6.*'length'"),
        (meta(finish_reason="length"), "be read"),
        (lambda number, event: {"meta_info": event["meta_info"] | {"finish_reason": None}}, "saying why"),
        (
            lambda number, event: (
                {
                    "meta_info": event["meta_info"]
                    | {"completion_tokens": 7, "output_token_logprobs": [[-1.0, 9, None]] * 7}
                }
                if number == 5
                else event
            ),
            r"more.*6",
        ),
        (lambda number, event: {"text": "hello"}, "be read"),
        (lambda number, event: {"error": {"message": "scheduler died"}}, "scheduler died"),
        (meta(prompt_tokens=5), "another prompt"),
        (lambda number, event: event | {"prompt_token_ids": [1, 2, 3, 4]}, "another prompt"),
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
        with pytest.raises(EngineFailure, match="another prompt"):
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
        (400, {"error": {"message": "top_p must be in (0, 1]"}}, InvalidRequest, "top_p"),
        (422, {"detail": "a field is missing"}, InvalidRequest, r"field.*missing"),
        (500, {"error": {"message": "EngineDeadError"}}, EngineFailure, r"500.*EngineDeadError"),
        (503, "busy", EngineFailure, "503"),
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
        with pytest.raises(InvalidRequest, match="token ids"):
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
        with pytest.raises(ConfigError, match=r"401.*engine\.key_variable"):
            await pieces_of(engine)


async def test_an_address_without_a_server_is_said_with_its_key_of_the_configuration():
    with socket.socket() as bound:  # bound and not listening, so that connections are refused
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        connection = EngineConnection(Address(url=f"http://127.0.0.1:{port}"))
        with pytest.raises(EngineFailure, match=rf":{port}/version.*ConnectError.*listens.*engine\.url"):
            await connection.get("/version", 5.0)
        await connection.close()


async def test_a_machine_that_has_no_such_name_is_not_taken_for_one_without_a_server():
    connection = EngineConnection(Address(url="http://no-such-machine.invalid:8000"))
    with pytest.raises(EngineFailure, match=r"invalid:8000/version.*ConnectError.*engine\.url"):
        await connection.get("/version", 5.0)
    await connection.close()


async def test_a_server_that_speaks_plain_http_is_told_from_none(vllm):
    async with listening(vllm) as port:
        connection = EngineConnection(Address(url=f"https://127.0.0.1:{port}"))
        with pytest.raises(EngineFailure, match=r"/version.*ConnectError.*HTTP.*http://"):
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
        ([PAGE], r"/version.*JSON.*'<html></html>'"),
        ([LONG, *[b"1"] * 1000], r"/version.*0\.5"),
        ([b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", *[b"[" * 60_000] * 5], r"/version.*JSON"),
        ([b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"[" * 3_000_000], "2,000,000"),
        ([b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"], "302"),
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
        with pytest.raises(EngineFailure, match=r"line.*2,000,000"):
            await pieces_of(engine)
        server.noise = b"data: " + b"[" * 1_000_000 + b"\n"
        with pytest.raises(EngineFailure, match=r"event.*JSON"):
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
        with pytest.raises(EngineFailure, match=r"where.*expected"):
            await engine._policies["policy"].api.counters()


@pytest.mark.parametrize("info", [None, {}, {"model_config": {}}, {"model_config": 3}])
async def test_settings_that_can_not_be_read_are_one_line(vllm, tmp_path, info):
    vllm.info = info
    async with on_server(vllm, tmp_path) as engine:
        with pytest.raises(ConfigError, match="describes itself"):
            await pieces_of(engine)


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("number", "0.31.1", r"vLLM.*0\.31\.1.*0\.32"),
        ("info", {"model_config": {"logprobs_mode": "raw_logprobs"}}, r"--logprobs-mode.*processed_logprobs"),
        ("info", ScriptedVllm.info | {"weight_transfer_config": None}, "needs --weight-transfer-config"),
        (
            "info",
            ScriptedVllm.info | {"model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 32}},
            r"max_context.*64.*--max-model-len.*32",
        ),
        (
            "info",
            {**ScriptedVllm.info, "model_config": ScriptedVllm.info["model_config"] | {"max_model_len": math.nan}},
            r"--max-model-len.*nan",
        ),
        (
            "info",
            {**ScriptedVllm.info, "model_config": ScriptedVllm.info["model_config"] | {"dtype": "torch.bfloat16"}},
            r"engine\.dtype.*'float32'.*bfloat16.*--dtype.*float32",
        ),
        ("number", "0.²", r"vLLM.*0\.².*0\.32"),
        ("number", "0." + "9" * 5000, r"vLLM.*0\.9{190,}….*0\.32"),
        ("number", "x\n\x1b[2Jy", r"vLLM.*␛\[2Jy.*0\.32"),
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
        ({"version": "0.4.10.post2"}, r"SGLang.*0\.4\.10\.post2.*0\.5"),
        ({}, r"SGLang.*unknown.*0\.5"),
        (
            {"version": "0.5.7", "context_length": 63},
            r"max_context.*64.*context_length.*63",
        ),
        ({"version": "0.5.7", "max_total_num_tokens": 32}, r"max_total_num_tokens.*32"),
        ({"version": "0.5.7", "max_req_input_len": 57}, r"max_req_input_len.*57"),
        (None, "describes itself"),
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
        with pytest.raises(ConfigError, match=r"model.*generate"):
            await pieces_of(engine)


@pytest.mark.parametrize("info", [{"version": "0.5.0"}, {"version": "0.6.1", "max_req_input_len": 58}])
async def test_an_sglang_server_that_fits_is_taken_by_either_name_of_the_route(tmp_path, info):
    server = ScriptedSglang()
    server.answers |= {"/get_server_info": (404, "Not Found"), "/server_info": (200, info)}
    async with on_server(server, tmp_path) as engine:
        assert await pieces_of(engine)


@pytest.mark.parametrize(("size", "said"), [(258, "another vocabulary"), (260, r"259.*engine.url")])
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
            r"makes \d+",
        ),
        (lambda text: [token + 1 for token in text.encode()], r"tokenizer.*policy's"),
        (lambda text: None, "makes no"),
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
        with pytest.raises(ConfigError, match="/models/of/another/tenant"):
            await pieces_of(engine)
