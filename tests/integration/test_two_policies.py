"""Two models in one job, of which one is frozen: rollouts in process and over HTTP, training, kills."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import openai
import pytest
import safetensors.torch
from outcome import assert_complete, assert_same_metrics
from servers import SCRIPTED, TINY, Job, Plane, run_through

import palestra
from palestra import JobConfig, RolloutSpec
from palestra.config import parse_config
from palestra.envs import ConcurrentEnvironment
from palestra.runtime.local import local_job
from palestra.types.messages import text_message
from palestra.types.records import Task

TWO = {"white": {}, "black": {"frozen": True}}
ROLES = {"opponent": "black"}
FAULTS = ["after_chat_commit:20", "before_manifest_commit:1", "before_step:1", "after_end_commit:3"]


def score(*texts: str) -> float:
    """Any number in [0, 1) that differs between replies."""
    return zlib.crc32("\0".join(texts).encode()) / 2**32


class Talk(ConcurrentEnvironment):
    """The agent speaks, the opponent answers, the agent has the last word; what the agent earns the opponent loses."""

    reusable = True

    async def start(self, task):
        self.said: list[str] = []
        self.emit("agent", (text_message("user", task["text"]),))

    async def on_action(self, observation, action):
        self.said.append(action.text)
        if len(self.said) == 3:
            reward = score(*self.said)
            self.emit("agent", (), parents=(observation.id,), reward=reward, terminated=True)
            self.emit("opponent", (), parents=(observation.id,), reward=-reward, terminated=True)
        else:
            name = "opponent" if observation.agent == "agent" else "agent"
            self.emit(name, (text_message("user", action.text or "?"),), parents=(observation.id,))


TASKS = [{"id": f"t{n}", "text": f"say {n}"} for n in range(5)]


def config(folder: Path, policies: dict[str, Any], roles: dict[str, str], **changes: Any) -> JobConfig:
    white = {"model": "tiny-random", "max_context": 256, "sampling": {"max_tokens": 8}}
    optimizer = {"optimizer": {"learning_rate": 1e-2}}
    return JobConfig.model_validate(
        {
            "name": "two",
            "steps": 2,
            "deterministic": True,
            "run_dir": folder,
            "server": {"port": 0},
            "policies": {"white": white | optimizer} | {name: white | changed for name, changed in policies.items()},
            "roles": roles,
            "rollout": {"group_size": 3, "groups_per_step": 2},
            "evaluation": {"every_steps": 0},
            "engine": {"threads": 1},
            "trainer": {"threads": 1},
        }
        | changes
    )


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> str:
    """tiny-random with other weights."""
    from palestra.models.catalog import model_folder

    folder = tmp_path_factory.mktemp("other")
    for path in Path(model_folder("tiny-random")).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({name: 1.5 * one for name, one in weights.items()}, folder / "model.safetensors")
    return str(folder)


def digest_of(engine: Any, policy: str) -> str:
    """All weights that an engine samples a policy from, in one hash."""
    digest = hashlib.sha256()
    for name, one in engine._core.policies[policy].model.named_parameters():
        digest.update(name.encode() + one.detach().contiguous().view(-1).view(dtype=_bits(one)).numpy().tobytes())
    return digest.hexdigest()


def _bits(tensor: Any) -> Any:
    import torch

    return {2: torch.int16, 4: torch.int32}[tensor.element_size()]


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.model)])
async def test_one_learns_and_the_other_stays_as_it_is_bit_by_bit(tmp_path, other_model, model):
    settings = config(tmp_path / "run", {"black": {"model": model or other_model, "frozen": True}}, ROLES)
    async with local_job(settings, lambda kind, data: None, RolloutSpec(environment=Talk)) as job:
        await job.plane.store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in TASKS], "c")
        await job.plane.store.tasks.seal()
        before = {name: digest_of(job.opened.engine, name) for name in TWO}
        await job.run()
        after = {name: digest_of(job.opened.engine, name) for name in TWO}
        assert after["black"] == before["black"]
        assert after["white"] != before["white"]
        versions = {name: str(version) for name, version in job.plane.sessions.context.policies.versions.items()}
        assert versions == {"white": "0.2", "black": "0.0"}
        rows = await job.plane.store.log.metrics()
        manifests = [await job.plane.store.log.manifest(step) for step in (1, 2)]
        trajectories = [await job.plane.store.calls.trajectories(one.episode_ids) for one in manifests]
    assert [list(one.versions) for one in manifests] == [["white"], ["white"]]
    for row, played in zip(rows, trajectories, strict=True):
        chats = [chat for trajectory in played for chat in trajectory.chats]
        tokens = {name: sum(len(c.completion_ids) for c in chats if c.policy == name) for name in TWO}
        assert [chat.policy for chat in played[0].chats] == ["white", "black", "white"]
        assert [chat.agent for chat in played[0].chats] == ["agent", "opponent", "agent"]
        assert (row["train/trained_tokens"], row["train/tokens_frozen"]) == (tokens["white"], tokens["black"])
        assert row["train/calls_frozen"] == len(chats) / 3
        assert row["rollout/completion_tokens"] == sum(tokens.values())
        assert row["train/grad_norm"] > 0  # the sums of both rewards are all 0
        assert row["train/reward_mean"] == pytest.approx(
            sum(trajectory.episode.rewards["agent"] for trajectory in played) / len(played)
        )
        for trajectory in played:
            assert sum(trajectory.episode.step_rewards) == trajectory.episode.rewards["agent"]
        for chat in chats:
            assert chat.parent is None or chat.parent.policy == chat.policy


@pytest.mark.slow
def test_a_frozen_policy_that_no_one_calls_changes_no_bit(tmp_path, other_model):
    async def rollout(task, endpoint):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": task["text"]}], max_tokens=8
            )
        return score(reply.choices[0].message.content or "")

    folders = {}
    for name, policies in (("alone", {}), ("beside", {"black": {"model": other_model, "frozen": True}})):
        settings = config(tmp_path / name, policies, {"opponent": "black"} if policies else {})
        folders[name] = palestra.train(rollout, TASKS, settings, quiet=True).checkpoint
    assert (folders["alone"] / "model.safetensors").read_bytes() == (
        folders["beside"] / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_over_http_a_role_a_name_and_an_endpoint_choose_the_policy(tmp_path):
    seen = []

    async def rollout(task, endpoint):
        answered = []
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            for model, headers in (
                (endpoint.model, {}),
                (endpoint.model, endpoint.headers(agent="opponent")),
                (endpoint.of("black").model, {}),
                ("black", endpoint.headers(agent="judge")),
            ):
                ask: Any = {"messages": [{"role": "user", "content": task["text"]}], "extra_headers": headers}
                whole = await client.chat.completions.create(model=model, **ask)
                chunks = [c async for c in await client.chat.completions.create(model=model, stream=True, **ask)]
                answered.append((whole.model, *{chunk.model for chunk in chunks}))
            with pytest.raises(openai.NotFoundError, match=r"'white'.*'black'"):
                await client.chat.completions.create(model="gpt", **ask)
            models = [model.id async for model in client.models.list()]
        assert models == ["white", "black"]
        assert list(endpoint.policies) == models
        assert (endpoint.of("black").version, endpoint.of("white")) == ("0.0", endpoint)
        seen.append(answered)
        return {"agent": 1.0, "opponent": 0.0}

    settings = config(
        tmp_path / "run",
        {"black": {"frozen": True}},
        ROLES,
        steps=1,
        engine={"kind": "fake", "reply_tokens": 6},
        rollout={"group_size": 2, "groups_per_step": 1},
    )
    palestra.train(rollout, TASKS, settings, quiet=True)
    assert seen == [[("white", "white"), ("black", "black"), ("black", "black"), ("black", "black")]] * 2


@pytest.mark.slow
def test_an_evaluation_plays_all_roles_and_counts_what_the_trained_one_earned(tmp_path, other_model):
    settings = config(tmp_path / "run", {"black": {"model": other_model, "frozen": True}}, ROLES)
    found = palestra.evaluate(RolloutSpec(environment=Talk), TASKS, settings, trajectories=True, quiet=True)
    for outcome in found.outcomes:
        rewards = outcome.trajectory.episode.rewards
        assert outcome.reward == rewards["agent"] == -rewards["opponent"]
        assert [chat.policy for chat in outcome.trajectory.chats] == ["white", "black", "white"]
        assert {chat.sampling.temperature for chat in outcome.trajectory.chats} == {0.0}


async def test_several_models_are_served_each_by_its_name_or_by_a_role(tmp_path):
    settings = parse_config(
        {
            "kind": "inference",
            "run_dir": str(tmp_path / "run"),
            "server": {"port": 0},
            "engine": {"kind": "fake", "reply_tokens": 4},
            "policies": {"a": {}, "b": {}, "c": {"frozen": True}},
            "roles": {"judge": "c"},
        }
    )
    async with (
        local_job(settings, lambda kind, data: None) as job,
        openai.AsyncOpenAI(base_url=f"{job.url}/v1", api_key=job.api_key, max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["a", "b", "c"]
        for model, agent, answers in (("a", "x", "a"), ("b", "x", "b"), ("a", "judge", "c"), ("b", "judge", "b")):
            reply = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "?"}],
                extra_headers={"x-palestra-agent": agent},
            )
            assert reply.model == answers


SCRIPTED_TWO = SCRIPTED | {"policies": TWO, "roles": ROLES}


@pytest.fixture(scope="module")
def undisturbed_two(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-two"), SCRIPTED_TWO) as job:
        run_through(job, [], "--opponent")
        assert_complete(job)
        yield job


@pytest.mark.slow
def test_a_job_of_two_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path, undisturbed_two):
    rows = undisturbed_two.metrics()
    assert all(row["train/tokens_frozen"] > 0 for row in rows[1:])
    for row in undisturbed_two.query("SELECT * FROM manifests"):
        assert json.loads(row["versions"]) == {"white": [0, row["step"] - 1]}
    saved = undisturbed_two.query("SELECT data FROM events WHERE kind = 'saved'")
    assert {json.loads(row["data"])["policy"] for row in saved} == {"white"}
    with Job(tmp_path, SCRIPTED_TWO) as job:
        run_through(job, FAULTS, "--opponent", "--threads", "2")
        assert_complete(job)
        assert_same_metrics(job, undisturbed_two)
        assert job.weights() == undisturbed_two.weights()


@pytest.mark.slow
def test_status_and_claims_name_all_policies(tmp_path):
    with Job(tmp_path, SCRIPTED_TWO) as job, Plane(job.url) as plane:
        job.start()
        status = plane.status()
        assert (status["policies"], status["versions"]) == (["white", "black"], {"white": "0.0", "black": "0.0"})
        claimed = plane.claim()
        assert (claimed["model"], claimed["policies"]) == ("white", {"white": "0.0", "black": "0.0"})
        assert plane.chat(claimed, headers={"x-palestra-agent": "opponent"}).json()["model"] == "black"
        metrics = plane.get("/metrics").text
        assert 'palestra_policy_version{policy="black"} 0.0' in metrics
        assert "white: SmolLM2-135M-Instruct, black: SmolLM2-135M-Instruct (frozen), 3 steps" in job.servers[0].output


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-random", pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.long)])
def test_weights_are_bit_identical_after_a_kill_beside_a_frozen_model(tmp_path, model):
    black = {"model": model, "frozen": True, "max_context": 256, "sampling": {"max_tokens": 8}}
    settings = TINY | {
        "policies": {"white": TINY["policies"]["policy"], "black": black},
        "roles": ROLES,
        "checkpoint": {"every_steps": 2},
        "evaluation": {"every_steps": 3},
    }
    found = []
    for name, faults, threads in (("undisturbed", [], "3"), ("killed", ["before_step:2", "after_end_commit:4"], "1")):
        with Job(tmp_path / name, settings) as job:
            run_through(job, faults, "--opponent", "--threads", threads)
            found.append(safetensors.torch.load_file(job.checkpoints()[-1] / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(found[0][name].equal(found[1][name]) for name in found[0])
