from __future__ import annotations

import asyncio

import httpx2
import pytest

from palestra import AsyncClient, RolloutResult
from palestra.config import JobConfig
from palestra.runtime.local import local_job
from palestra.types.calls import PolicyVersion
from unit.building import TASK

pytestmark = pytest.mark.ci


async def test_a_claim_names_the_policy_and_the_version_that_the_engine_samples_from(tmp_path):
    config = JobConfig.model_validate(
        {"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}, "policies": {"actor": {}}}
    )
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        engine = job.plane.sessions.context.policies.runtime("actor").engine
        async with httpx2.AsyncClient(base_url=job.url, headers={"Authorization": f"Bearer {job.api_key}"}) as http:
            for number, version in enumerate([PolicyVersion(0, 0), PolicyVersion(1, 7)]):
                await engine.sync_weights("actor", version, None)
                answer = await http.post("/claim_episode", json={"worker_id": "w", "request_id": f"r{number}"})
                episode = answer.json()["episode"]
                assert (episode["model"], episode["version"]) == ("actor", str(version))
                assert episode["policies"] == {"actor": str(version)}


async def test_named_rewards_are_weighed_added_up_and_kept(tmp_path):
    config = JobConfig.model_validate(
        {
            "run_dir": tmp_path,
            "server": {"port": 0},
            "engine": {"kind": "fake"},
            "algorithm": {"reward_weights": {"short": 0.25, "heavy": 1e6}},
        }
    )
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        async with httpx2.AsyncClient(base_url=job.url) as http:

            async def send(path, key, **body):
                return await http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

            claimed = await send("/claim_episode", job.api_key, worker_id="w", request_id="r")
            episode = claimed.json()["episode"]
            name, key = episode["episode_id"], episode["api_key"]
            named = {"right": 1.0, "short": 8, "style": None}
            for wrong, said in (
                ({"named_rewards": {"right": None}}, "no named reward is scored"),
                ({"named_rewards": named, "reward": 1.0}, "give either reward, rewards or named_rewards"),
                ({}, "give either reward, rewards or named_rewards"),
                ({"named_rewards": {"a/b": 1.0}}, "named_rewards"),
                ({"named_rewards": {}}, "named_rewards"),
                ({"named_rewards": {"heavy": 1001.0}}, "is 1.001e+09, and a reward is from -1,000,000,000 to"),
            ):
                answer = await send("/end_episode", key, episode_id=name, **wrong)
                assert answer.status_code == 422
                assert said in answer.text
            for _ in range(2):  # sent again, the same body gets the same answer
                answer = await send("/end_episode", key, episode_id=name, named_rewards=named)
                assert (answer.status_code, answer.json()["state"]) == (200, "completed")
            answer = await send("/end_episode", key, episode_id=name, named_rewards=named | {"style": 0.0})
            assert answer.status_code == 409, "not scored is not 0"
        ((_, (first, _)),) = await job.plane.store.groups.of_step("train", 1)
        assert (first.reward, first.named_rewards) == (3.0, {"right": 1.0, "short": 8.0, "style": None})


async def test_a_task_that_sft_can_not_learn_from_is_refused_when_it_is_pushed(tmp_path):
    config = JobConfig.model_validate(
        {"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}, "algorithm": {"name": "sft"}}
    )
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    async with local_job(config, lambda kind, data: None) as job:
        headers = {"Authorization": f"Bearer {job.api_key}"}
        async with httpx2.AsyncClient(base_url=job.url, headers=headers) as http:

            async def push(chunk, split, *data):
                body = {"chunk_id": chunk, "split": split, "tasks": [{"data": each} for each in data]}
                return await http.post("/tasks", json=body)

            for place, bad in enumerate(({"reward": "nan"}, {"reward": True}, {"tools": [{}]}, {"messages": []})):
                answer = await push(f"c{place}", "train", talk, talk | bad)
                assert answer.status_code == 422, answer.text
                assert answer.json()["error"]["param"] == "tasks.1.data"
            assert list(await job.plane.store.tasks.stored("train")) == [], "nothing of a refused chunk is stored"
            assert (await push("c", "train", talk)).status_code == 200
            assert (await push("v", "validation", {"prompt": "agents play these"})).status_code == 200


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [({"name": "ppo"}, True), ({"credit": "step"}, True), ({"credit": "team-step"}, False), ({}, False)],
)
async def test_rewards_of_timesteps_say_whose_they_are_where_agents_are_credited_with_their_own(
    tmp_path, algorithm, refused
):
    config = JobConfig.model_validate(
        {"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}, "algorithm": algorithm}
    )
    two, steps = {"a": 2.0, "b": -1.0}, [1.0, 0.0]
    earned = [[0, "a", 2.0], [0, "b", -1.0]]
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 5)
        async with httpx2.AsyncClient(base_url=job.url) as http:

            async def send(path, key, **body):
                return await http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

            answers = []
            for number, ended in enumerate(
                (
                    {"rewards": two, "step_rewards": steps},
                    {"rewards": two, "step_rewards": steps, "agent_step_rewards": earned},
                    {"rewards": two},
                    {"rewards": {"a": 2.0}, "step_rewards": steps},
                    {"reward": 2.0, "step_rewards": steps},
                )
            ):
                claimed = await send("/claim_episode", job.api_key, worker_id="w", request_id=f"r{number}")
                episode = claimed.json()["episode"]
                answers.append(
                    await send("/end_episode", episode["api_key"], episode_id=episode["episode_id"], **ended)
                )
        assert [answer.status_code for answer in answers] == [422 if refused else 200, *[200] * 4]
        assert ("agent_step_rewards" in answers[0].text) is refused
        ((_, episodes),) = await job.plane.store.groups.of_step("train", 1)
        assert episodes[1].agent_step_rewards == ((0, "a", 2.0), (0, "b", -1.0))


async def test_a_workers_metadata_means_nothing_to_training_whatever_its_keys(tmp_path):
    config = JobConfig.model_validate({"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}})
    given = {
        "termination": "max_steps",
        "context_full": ["agent"],
        "without_policy": ["agent"],
        "unused_calls": [0],
        "facts": {"termination": "max_steps"},
        "id": 7,
    }
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        async with AsyncClient(job.url, job.api_key) as client:
            for cut in (False, True):
                episode = await client.begin_episode()
                await client.end_episode(episode, 0.5, metadata=given, truncated=cut)
        ((_, played),) = await job.plane.store.groups.of_step("train", 1)
        assert [one.truncated for one in played] == [False, True]
        for one in played:
            assert one.metadata == given
            assert one.rewards_by_policies == {"agent": 0.5}
            assert (one.full_contexts, one.unused_calls) == ((), frozenset())


async def test_a_whole_result_ends_an_episode_in_each_way_of_a_client(tmp_path):
    config = JobConfig.model_validate({"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}})
    whole = RolloutResult(reward=0.5, metadata={"x": 1}, truncated=True)
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        async with AsyncClient(job.url, job.api_key) as client:
            await client.end_episode(await client.begin_episode(), whole)
            async with client.episode() as episode:
                episode.reward = whole
        ((_, played),) = await job.plane.store.groups.of_step("train", 1)
    for one in played:
        assert (one.rewards_by_policies, one.truncated) == ({"agent": 0.5}, True)
        assert one.metadata["x"] == 1


async def test_a_worker_gets_no_episode_while_weights_change(tmp_path):
    config = JobConfig.model_validate({"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}})
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        async with AsyncClient(job.url, job.api_key) as client:
            async with job.plane.store.episodes.sync_lock.acquire_weight_sync():
                claiming = asyncio.ensure_future(client.begin_episode())
                await asyncio.wait((claiming,), timeout=0.3)
                assert not claiming.done()
            await client.end_episode(await asyncio.wait_for(claiming, 10), 1.0)
