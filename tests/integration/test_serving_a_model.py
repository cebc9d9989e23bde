"""Inference jobs: a model behind the same API, with the job's key, and nothing trained or recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from in_process import parts_of, serving
from servers import KEY, Job, Plane, until
from sqlalchemy import text
from test_dialect import CALL, TOOLS, asks, joined, reply
from test_dialect import until as until_here
from test_other_dialects import anthropic_of

from palestra.config import parse_config
from palestra.engine.fake import FakeEngine
from palestra.errors import ConfigError
from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.runtime.local import local_job
from palestra.runtime.local_job import LocalJob

pytestmark = pytest.mark.ci

EPISODE_ROUTES = ("tasks", "register_episode", "claim_episode", "heartbeat_episode", "end_episode", "abort_episode")


@asynccontextmanager
async def served(
    folder: Path, server: dict[str, Any] | None = None, **engine: Any
) -> AsyncIterator[tuple[LocalJob, FakeEngine, openai.AsyncOpenAI]]:
    """A job that serves what `reply` says, its engine, and a client with the job's key."""
    tokenizer = ByteTokenizer()
    parts = parts_of(ChatMLRenderer(tokenizer), tokenizer, reply, **{"piece_tokens": 1} | engine)
    parts = dataclasses.replace(parts, trainer=None)
    assert isinstance(parts.engine, FakeEngine)
    settings: dict[str, Any] = {"kind": "inference", "policies": {"policy": {"max_context": 8192}}}
    async with serving(folder, parts, **settings, server={"port": 0} | (server or {})) as job:
        running = asyncio.ensure_future(job.run())
        while not await job.plane.store.log.events(0):  # `serving`, and nothing more until it is stopped
            await asyncio.sleep(0.005)
        async with openai.AsyncOpenAI(base_url=f"{job.url}/v1", api_key=job.api_key, max_retries=0) as ai:
            yield job, parts.engine, ai
        job.stop()
        await running


async def rows(job: LocalJob) -> dict[str, int]:
    """How many there are in each table of the run store."""

    def count(connection: Any) -> dict[str, int]:
        names = connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars().all()
        return {name: connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}

    return await job.plane.store.db.read(count)


async def test_all_dialects_are_answered_with_the_jobs_key_and_nothing_is_recorded(tmp_path):
    async with served(tmp_path) as (job, _, ai), anthropic_of(ai) as claude:
        assert [model.id for model in (await ai.models.list()).data] == ["policy"]
        before = await rows(job)
        chat = await ai.chat.completions.create(**asks("text", logprobs=True, n=2))
        completion = await ai.completions.create(model="policy", prompt="<|im_start|>user\ntext<|im_end|>")
        response = await ai.responses.create(model="policy", input="text")
        message = await claude.messages.create(
            model="policy", max_tokens=100, messages=[{"role": "user", "content": "text"}]
        )
        after = await rows(job)
        counts = job.plane.sessions.context.counts
    said = "Good day – 漢字 👩‍💻"
    assert [choice.message.content for choice in chat.choices] == [said, said]
    assert chat.choices[0].logprobs is not None
    assert completion.choices[0].text
    assert response.output_text == said
    assert message.content[0].text == said
    assert after == before
    assert before["chats"] == 0
    assert counts["calls"] == 5


@pytest.mark.parametrize("name", ["text", "thought", "calls"])
async def test_a_stream_put_together_is_the_reply_without_streaming(tmp_path, name):
    async with served(tmp_path) as (_, _, ai):
        ask = asks(name, tools=TOOLS)
        whole = (await ai.chat.completions.create(**ask)).choices[0].message.model_dump(exclude_unset=True)
        message = joined([chunk async for chunk in await ai.chat.completions.create(**ask, stream=True)])
    for call in (*whole.get("tool_calls", ()), *message.get("tool_calls", ())):
        del call["id"]  # of each sample its own
    assert message == whole


async def test_anthropics_stream_and_tools_and_stop_strings(tmp_path):
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    async with served(tmp_path) as (_, _, ai), anthropic_of(ai) as claude:
        ask: Any = {"model": "policy", "max_tokens": 500}
        async with claude.messages.stream(**ask, messages=[{"role": "user", "content": "text"}]) as stream:
            streamed = await stream.get_final_text()
        called = await claude.messages.create(**ask, tools=[tool], messages=[{"role": "user", "content": "call"}])
        cut = await ai.chat.completions.create(**asks("text", stop=["day"]))
    assert streamed == "Good day – 漢字 👩‍💻"
    assert called.content[-1].name == "add"
    assert called.content[-1].input == json.loads(CALL.split('arguments": ')[1].rpartition("}\n")[0])
    assert cut.choices[0].message.content == "Good "


async def test_a_caller_chooses_the_sampling_and_equal_calls_differ_without_a_seed(tmp_path):
    async with served(tmp_path) as (_, _, ai):
        create = ai.chat.completions.create
        free = {(await create(**asks("seed"))).choices[0].message.content for _ in range(4)}
        fixed = [choice.message.content for choice in (await create(**asks("seed", seed=7, n=2))).choices]
        raw = await ai.chat.completions.with_raw_response.create(
            **asks("text", temperature=0.5, top_p=0.5, presence_penalty=1.0, max_tokens=4), extra_body={"top_k": 3}
        )
    assert len(free) == 4
    assert fixed == ["seed 7", "seed 8"]
    assert "x-palestra-sampling" not in raw.headers
    assert raw.parse().choices[0].message.content == "Good"


async def test_episodes_are_refused_on_every_route_and_only_to_who_has_a_key(tmp_path):
    async with served(tmp_path) as (job, _, _), httpx2.AsyncClient(base_url=job.url) as http:
        for route in EPISODE_ROUTES:
            for body in ({}, {"request_id": "r", "episode_id": "e", "chunk_id": "c", "tasks": []}):
                key = {"authorization": f"Bearer {job.api_key}"}
                refused = await http.post(f"/{route}", json=body, headers=key)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict"), route
                assert "serves a model and has no episodes" in refused.json()["error"]["message"]
                assert (await http.post(f"/{route}", json=body)).status_code == 401
        for route in ("chat/completions", "completions", "responses", "messages"):
            for headers in ({}, {"authorization": "Bearer pj-wrong"}):
                assert (await http.post(f"/v1/{route}", json={}, headers=headers)).status_code == 401
            of_episode = {"authorization": f"Bearer {job.plane.keys.episode_key('e', 1)}"}
            assert (await http.post(f"/v1/{route}", json={}, headers=of_episode)).status_code == 403


async def test_the_key_of_a_job_that_trains_opens_no_model(tmp_path):
    async with serving(tmp_path) as job, httpx2.AsyncClient(base_url=job.url) as http:
        for route in ("chat/completions", "completions", "responses", "messages"):
            headers = {"authorization": f"Bearer {job.api_key}"}
            refused = await http.post(f"/v1/{route}", json={}, headers=headers)
            assert refused.status_code == 403, route
            assert "claim one" in refused.text


async def test_what_is_too_much_is_429_and_who_goes_away_cancels(tmp_path):
    async with served(tmp_path, {"max_waiting_calls": 1}) as (job, engine, ai):
        await engine.pause()
        waiting = asyncio.ensure_future(ai.chat.completions.create(**asks("text")))
        await until_here(lambda: job.plane.sessions.in_flight == 1)
        with pytest.raises(openai.RateLimitError):
            await ai.chat.completions.create(**asks("text"))
        waiting.cancel()
        await until_here(lambda: job.plane.sessions.in_flight == 0)
        stream = asyncio.ensure_future(ai.chat.completions.create(**asks("text", stream=True)))
        await until_here(lambda: job.plane.sessions.in_flight == 1)
        stream.cancel()
        await until_here(lambda: job.plane.sessions.in_flight == 0)
        assert job.plane.sessions.context.counts["calls_incomplete"] == 2
        assert job.plane.sessions._stateless == set()
        await engine.resume()
        assert (await ai.chat.completions.create(**asks("text"))).choices[0].message.content


async def test_status_and_metrics_say_what_is_served_and_how_fast(tmp_path):
    async with served(tmp_path) as (job, _, ai), httpx2.AsyncClient(base_url=job.url) as http:
        await ai.chat.completions.create(**asks("text"))
        headers = {"authorization": f"Bearer {job.api_key}"}
        status = (await http.get("/status", headers=headers)).json()
        metrics = (await http.get("/metrics", headers=headers)).text
    assert (status["kind"], status["state"]) == ("inference", "running")
    assert status["phase"] == "serving SmolLM2-135M-Instruct"
    assert status["calls"]["calls"] == 1
    assert status["tokens_per_second"] > 0
    assert 'palestra_calls_total{what="calls"} 1.0' in metrics
    assert "palestra_tokens_per_second" in metrics


async def test_the_run_of_a_job_that_trains_is_not_served(tmp_path):
    async with serving(tmp_path, steps=1) as job:
        running = asyncio.ensure_future(job.run())
        await until_here(lambda: job.progress.state.value == "running")
        job.stop()
        await running
    config = parse_config({"kind": "inference", "run_dir": str(tmp_path), "server": {"port": 0}, "engine": SCRIPTED})
    async with local_job(config, lambda kind, data: None) as job:
        with pytest.raises(ConfigError, match=r"name.*checkpoint"):
            await job.run()


SCRIPTED = {"kind": "fake"}


@pytest.mark.slow
def test_palestra_run_serves_until_it_is_stopped_and_can_go_on(tmp_path):
    settings = {"kind": "inference", "engine": SCRIPTED | {"delay_seconds": 1000.0}}
    with Job(tmp_path, settings, tasks=(), validation=()) as job, Plane(job.url) as plane:
        server = job.start()
        assert "job: serving SmolLM2-135M-Instruct" in server.output
        until(lambda: plane.status()["state"] == "running", "it serves")
        with openai.OpenAI(base_url=f"{job.url}/v1", api_key=KEY, max_retries=0) as ai:
            ended = asyncio.run(_stopped_in_a_call(ai, plane, server))
        assert getattr(ended, "status_code", 503) == 503  # where the answer took too long there is none
        assert server.wait() == 0, server.output
        assert "served 0 calls" in server.output
        assert not (job.run_dir / "checkpoints").exists()
        job.start("--resume")
        with Plane(job.url) as again:
            assert again.status()["kind"] == "inference"


async def _stopped_in_a_call(ai: openai.OpenAI, plane: Plane, server: Any) -> openai.APIError:
    call = asyncio.create_task(asyncio.to_thread(ai.chat.completions.create, **asks("hello")))
    await asyncio.to_thread(until, lambda: plane.status()["calls"]["in_flight"] == 1, "the call is in flight")
    server.send(signal.SIGTERM)
    with pytest.raises(openai.APIError) as caught:
        await call
    return caught.value


# With a real model


@pytest.mark.parametrize("model", ["tiny-random", pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.model)])
async def test_a_checkpoint_is_served_from_its_folder_and_loaded_once(tmp_path, monkeypatch, model):
    import torch

    from palestra.config import TrainerConfig
    from palestra.models import causal_lm, loading
    from palestra.models.loading import LoadedModels
    from palestra.trainer.base import PolicySpec
    from palestra.trainer.torch_trainer import TorchTrainer

    load = causal_lm.load_causal_lm
    trained = load(model, torch.float32)
    with torch.no_grad():
        for _, parameter in trained.named_parameters():
            parameter.mul_(1.01)  # so that these are not the weights of the catalog
    tokenizer = causal_lm.load_tokenizer(model)
    trainer = TorchTrainer(TrainerConfig(), 2, LoadedModels(lambda model, dtype, device: (trained, tokenizer)))
    await trainer.create("policy", PolicySpec(model=model))
    folder = await trainer.save("policy", tmp_path / "checkpoints", {"step": 1}, "save")
    await trainer.close()
    wanted = {  # the weights of norms stay float32
        name: parameter if parameter.ndim < 2 else parameter.to(torch.bfloat16)
        for name, parameter in trained.named_parameters()
    }
    loaded = []

    def noted(name: str, dtype: Any, device: Any = None) -> Any:
        loaded.append(load(name, dtype, device))
        return loaded[-1]

    monkeypatch.setattr(loading, "load_causal_lm", noted)
    policies = {"policy": {"model": str(folder), "max_context": 256, "sampling": {"max_tokens": 16}}}
    engine = {"kind": "embedded", "threads": 1}
    run = tmp_path / "run"
    run.mkdir()
    async with serving(run, kind="inference", policies=policies, engine=engine) as job:
        running = asyncio.ensure_future(job.run())
        async with openai.AsyncOpenAI(base_url=f"{job.url}/v1", api_key=job.api_key) as ai:
            ask = asks("hello", temperature=0.0)
            first, second = [(await ai.chat.completions.create(**ask)).choices[0].message.content for _ in range(2)]
        job.stop()
        await running
    assert first == second
    assert len(loaded) == 1, "the weights are in memory once: nothing is trained"
    for name, parameter in loaded[0].named_parameters():
        assert torch.equal(parameter, wanted[name]), name
