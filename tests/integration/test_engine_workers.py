"""Inference workers are processes: killed and stopped at any moment, they cost time, and no reply."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outcome import assert_same_metrics
from safetensors.numpy import load_file
from servers import KEY, SCRIPTED, Job, Plane, Process, until
from servers import TINY as TRAINED
from unit.building import engine_request

from palestra.config import JobConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.errors import ModelError, PalestraError
from palestra.models.weights import LocalWeights
from palestra.pictures.blobs import Blobs, StoredPictures
from palestra.pictures.pixels import encode_picture
from palestra.renderers import select_renderer
from palestra.runtime.parts import pooled_parts
from palestra.types.calls import PolicyVersion, SamplingParams
from palestra.types.messages import ImagePart

PROMPT = np.arange(40, 104, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
FAKE = {"kind": "fake", "replicas": 2, "delay_seconds": 0.05}
TINY = {"dtype": "float32", "threads": 1, "replicas": 2}


@contextlib.asynccontextmanager
async def pool_of(deterministic=False, **engine):
    """An engine with worker processes."""
    async with parts_of(deterministic=deterministic, engine=engine) as parts:
        yield parts.engine


@contextlib.asynccontextmanager
async def parts_of(model="tiny-random", pictures=None, **settings):
    """The parts of a job with worker processes."""
    config = JobConfig.model_validate({"model": model} | settings)
    parts = await asyncio.wait_for(pooled_parts(config, {}, pictures), 120)
    try:
        yield parts
    finally:
        await asyncio.wait_for(parts.engine.close(), 30)


async def reply_of(engine, seed=3):
    """Ids and logprobs of a reply, and the versions of its tokens."""
    pieces = [piece async for piece in engine.generate(engine_request(PROMPT, replace(SAMPLING, seed=seed)))]
    ids = [token for piece in pieces for token in piece.ids]
    return ids, [p for piece in pieces for p in piece.logprobs], {piece.version for piece in pieces}


async def replies_of(engine, count=12):
    return await asyncio.wait_for(asyncio.gather(*(reply_of(engine, seed) for seed in range(count))), 120)


async def until_ready(engine):
    async with asyncio.timeout(120):
        while any(worker.state != "ready" for worker in engine.load().workers):
            await asyncio.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether there is such a process that has not ended; one that waits for its parent to ask has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_replies_of_a_worker_that_is_killed_come_from_another_one():
    async with pool_of(**FAKE) as engine:
        undisturbed = await replies_of(engine)
        first, second = (worker.process for worker in engine.load().workers)
        calls = asyncio.ensure_future(replies_of(engine))
        await asyncio.sleep(0.02)
        os.kill(first, signal.SIGKILL)
        assert await calls == undisturbed
    async with asyncio.timeout(10):
        while is_alive(first) or is_alive(second):
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_worker_that_is_stopped_is_replaced_and_its_replies_come_from_another_one():
    async with pool_of(**FAKE, stuck_seconds=1.0) as engine:
        undisturbed = await replies_of(engine)
        stopped = engine.load().workers[0].process
        os.kill(stopped, signal.SIGSTOP)
        assert await replies_of(engine) == undisturbed
        os.kill(engine.load().workers[1].process, signal.SIGSTOP)  # while the first one starts again, or serves
        assert await replies_of(engine) == undisturbed
        await until_ready(engine)
        assert not is_alive(stopped)
        await asyncio.wait_for(engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(())), 30)
        assert engine.version("policy") == PolicyVersion(0, 1)


@pytest.mark.slow
async def test_pictures_reach_the_workers_and_have_the_logprobs_of_one_engine(tmp_path):
    import torch
    from unit.vision.seeing import noise, user

    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.loading import LoadedModels

    blobs = Blobs(tmp_path / "pictures")
    pictures = StoredPictures(blobs)
    parts = [ImagePart(digest=blobs.put(encode_picture(noise(40, 30, seed)))) for seed in range(3)]
    model, _ = LoadedModels(pictures=pictures).frozen("tiny-random-vision", torch.float32, torch.device("cpu"))
    policy = PolicyModel(model=model, stop_ids=frozenset((258,)))
    one = EmbeddedEngine({"policy": policy}, EmbeddedEngineConfig(dtype="float32", threads=1))
    async with parts_of("tiny-random-vision", pictures, engine=TINY, kind="inference") as job:
        renderer = job.policies.runtime("policy").renderer
        assert renderer.takes_images
        prompts = [renderer.render([user("look", part, *parts[:1])]) for part in parts]
        scored = [await one.score("policy", prompt) for prompt in prompts]
        assert scored[0] != pytest.approx(scored[1], abs=1e-5)
        for _ in range(2):  # the second time, a worker may have the embeddings
            found = await asyncio.gather(*(job.engine.score("policy", prompt) for prompt in prompts))
            for ours, theirs in zip(found, scored, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
        gone = prompts[0]._replace(media=tuple(span._replace(digest="0" * 64) for span in prompts[0].media))
        with pytest.raises(PalestraError, match="no picture"):
            await job.engine.score("policy", gone)
        assert await job.engine.score("policy", prompts[0]) == pytest.approx(scored[0], abs=1e-4)
    await one.close()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.long), True])
async def test_replies_are_those_of_one_engine_and_weights_reach_every_worker(deterministic):
    import torch

    from palestra.engine.embedded.engine import EmbeddedEngine
    from palestra.engine.embedded.model_runner import PolicyModel
    from palestra.models.causal_lm import load_causal_lm, load_tokenizer
    from palestra.models.device import reproducible_products

    if deterministic:
        reproducible_products()
    model = load_causal_lm("tiny-random", torch.float32)
    stop_ids = select_renderer(load_tokenizer("tiny-random")).stop_ids
    weights = LocalWeights([(name, p.detach() * 2) for name, p in model.named_parameters()])
    settings = EmbeddedEngineConfig(dtype="float32", threads=1)
    one = EmbeddedEngine({"policy": PolicyModel(model=model, stop_ids=frozenset(stop_ids))}, settings, deterministic)
    async with pool_of(deterministic, **TINY) as pool:
        for version in (None, PolicyVersion(0, 1)):
            if version is not None:
                for engine in (pool, one):
                    await engine.sync_weights("policy", version, weights)
            expected, found = await replies_of(one), await replies_of(pool)
            if deterministic:
                assert found == expected
            else:
                assert [ids for ids, _, _ in found] == [ids for ids, _, _ in expected]
            assert {v for _, _, versions in found for v in versions} == {version or PolicyVersion(0, 0)}
        first = pool.load().workers[0].process
        os.kill(first, signal.SIGKILL)
        second = pool.load().workers[1].process
        await until_ready(pool)
        os.kill(second, signal.SIGKILL)  # now only the replaced one is left, and has the present weights
        found = await replies_of(pool)
        assert {v for _, _, versions in found for v in versions} == {PolicyVersion(0, 1)}
        assert [ids for ids, _, _ in found] == [ids for ids, _, _ in await replies_of(one)]
        with pytest.raises(ModelError):
            await pool.sync_weights("policy", PolicyVersion(0, 2), LocalWeights([("other", torch.zeros(2, 2))]))
        assert pool.version("policy") == PolicyVersion(0, 1)
    await one.close()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.002, 0.01])
async def test_a_worker_that_is_killed_while_it_takes_weights_does_not_hold_up_the_others(moment):
    async with pool_of(**FAKE) as engine:
        update = asyncio.ensure_future(engine.sync_weights("policy", PolicyVersion(0, 1), LocalWeights(())))
        await asyncio.sleep(moment)
        os.kill(engine.load().workers[1].process, signal.SIGKILL)
        await asyncio.wait_for(update, 30)
        assert {v for _, _, versions in await replies_of(engine) for v in versions} == {PolicyVersion(0, 1)}
        await until_ready(engine)
        assert [worker.versions for worker in engine.load().workers] == [{"policy": "0.1"}] * 2


GAMES = SCRIPTED | {
    "engine": {"kind": "fake", "reply_tokens": 3, "replicas": 2, "delay_seconds": 0.01, "stuck_seconds": 1.0},
    "environment": {
        "name": "frozen-lake",
        "settings": {"impossible_reward": -1.0},
        "train_tasks": 9,
        "validation_tasks": 3,
    },
    "rollout": {"group_size": 8, "groups_per_step": 2},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same job with its engine in its own process."""
    settings = GAMES | {"engine": {"kind": "fake", "reply_tokens": 3}}
    with Job(tmp_path_factory.mktemp("undisturbed"), settings, tasks=(), validation=()) as job:
        job.start()
        job.finish()
        yield job


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_whose_workers_are_hurt_ends_as_one_with_one_engine_that_is_not(tmp_path, undisturbed, number):
    with Job(tmp_path, GAMES, tasks=(), validation=()) as job:
        job.start()
        draw, hurt = random.Random(int(number)), set[int]()
        with Plane(job.url) as plane:

            def is_over() -> bool:
                status = plane.status()
                workers = {each["process"] for each in status["engine_workers"] if each["state"] == "ready"} - hurt
                if len(workers) == 2:
                    chosen = draw.choice(sorted(workers))
                    os.kill(chosen, number)
                    hurt.add(chosen)
                return status["state"] == "completed" or len(hurt) == 3

            until(is_over, "three workers are hurt", 120)
        job.finish(120)
        assert hurt
        lost = [
            json.loads(row["data"]) for row in job.query("SELECT data FROM events WHERE kind = 'engine_worker_lost'")
        ]
        assert 2 <= len(lost) <= len(hurt)  # the job may be over before it has noticed the last one
        assert all("inference worker" in each["text"] and each["step"] >= 0 for each in lost)
        trained = Counter(episode for episodes in job.manifests().values() for episode in episodes)
        assert set(trained.values()) == {1}
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_workers_end_with_a_job_that_is_killed_also_one_that_stands_still(tmp_path):
    with Job(tmp_path, GAMES | {"steps": 1000}, tasks=(), validation=()) as job:
        server = job.start()
        with Plane(job.url) as plane:
            processes = [worker["process"] for worker in plane.status()["engine_workers"]]
        os.kill(processes[0], signal.SIGSTOP)
        server.send(signal.SIGKILL)
        server.wait(20)
        until(lambda: not any(map(is_alive, processes)), "the workers have ended", 20)


POOLED = TRAINED | {
    "engine": {"threads": 1, "replicas": 2},
    "checkpoint": {"every_steps": 1},
    "evaluation": {"every_steps": 0},
}


def recorded(job: Job, episodes: set[str]) -> dict[tuple[str, int], tuple]:
    """What was sampled in the accepted attempt at each of these episodes, call by call, with each token's version."""
    calls = job.query(
        "SELECT chats.* FROM chats JOIN episodes USING (episode_id, fence) WHERE episodes.state = 'completed'"
    )
    return {
        (row["episode_id"], row["idx"]): (row["completion"], row["logprobs"], row["versions"], row["reply"])
        for row in calls
        if row["episode_id"] in episodes
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_that_come_and_go_while_a_model_is_trained_change_no_reply_and_no_weight(tmp_path):
    """The job trains until all has been asked for; then one whose workers stay makes as many steps."""
    with Job(tmp_path / "scaled", POOLED | {"steps": 10_000}) as job, Plane(job.url) as plane:
        server = start(job)
        job.work("--threads", "4")
        trained = 0
        for count in (3, 1, 2):
            until(lambda: step_of(job) > trained, "it has trained", 120)  # noqa: B023
            answer = plane.http.post(
                f"{job.url}/engine/replicas",
                json={"replicas": count},
                headers={"authorization": f"Bearer {KEY}"},
                timeout=120,
            )
            assert (answer.status_code, answer.json()) == (200, {"replicas": count}), answer.text
            assert [worker["state"] for worker in plane.status()["engine_workers"]] == ["ready"] * count
            trained = step_of(job)
        until(lambda: step_of(job) > trained, "it has trained with the last ones", 120)
        server.send(signal.SIGINT)
        server.wait(120)
        steps = step_of(job)
    with Job(tmp_path / "calm", POOLED | {"steps": steps}) as calm:
        start(calm)
        calm.work("--threads", "4")
        calm.finish(180)
    ours, theirs = job.manifests(), calm.manifests()
    assert {step: ours[step] for step in theirs} == theirs
    episodes = {episode for each in theirs.values() for episode in each}
    assert recorded(job, episodes) == recorded(calm, episodes)
    found, wanted = (load_file(one.checkpoints()[-1] / "model.safetensors") for one in (job, calm))
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted), "bit for bit"
    stored = {row["episode_id"] for row in job.query("SELECT episode_id FROM episodes WHERE state = 'completed'")}
    accepted = [entry["episode"] for entry in job.worker_log("ended")]
    assert len(set(accepted)) == len(accepted)
    assert set(accepted) <= stored, "nothing that was accepted is lost"
    assert set(Counter(episode for each in ours.values() for episode in each).values()) == {1}


def start(job: Job) -> Process:
    """Start a server whose workers load a model first, each for itself, and wait until it listens."""
    server = job.serve()
    until(lambda: "data plane at" in server.output or server.popen.poll() is not None, "it listens", 180)
    assert "data plane at" in server.output, server.output
    return server


def step_of(job: Job) -> int:
    """The newest step that is saved; 0: none is."""
    return max((int(path.name.removeprefix("step-")) for path in job.checkpoints()), default=0)
