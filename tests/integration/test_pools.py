"""A policy that plays against its own past: which versions play, kills, and what is learned."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from outcome import assert_same_metrics
from servers import SCRIPTED, Job, Plane, run_through
from test_two_policies import TASKS, Talk, config, digest_of, score

import palestra
from palestra import JobConfig, RolloutSpec
from palestra.config import PoolConfig
from palestra.errors import CheckpointError
from palestra.learner.pools import Pools
from palestra.runtime.local import local_job
from palestra.types.records import Task

POOL = {"opponent": {"policy": "white", "pool": {"every_steps": 1, "size": 2}}}
FAULTS = ["after_chat_commit:20", "after_end_commit:3", "before_pool_rename:2", "after_pool_rename:1", "before_step:1"]


def against_its_past(folder: Path, pool: dict[str, Any] | None = None, **changes: Any) -> JobConfig:
    roles = {"opponent": {"policy": "white", "pool": {"every_steps": 1, "size": 2} | (pool or {})}}
    return config(folder, {}, roles, **{"steps": 4} | changes)


async def trained(settings: JobConfig, report: Any = lambda kind, data: None) -> Any:
    """Run a job of `Talk`, and return what is to be looked at of it."""
    async with local_job(settings, report, RolloutSpec(environment=Talk)) as job:
        store = job.plane.store
        await store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in TASKS], "c")
        await store.tasks.seal()
        await job.run()
        rows = [row for row in await store.log.metrics() if row["step"]]
        manifests = [await store.log.manifest(step) for step in range(1, settings.steps + 1)]
        played = [await store.calls.trajectories(one.episode_ids) for one in manifests]
        policies = job.plane.sessions.context.policies
        digests = {name: digest_of(job.opened.engine, name) for name in policies.names}
        versions = {name: str(version) for name, version in policies.versions.items()}
    return rows, played, digests, versions


@pytest.mark.slow
async def test_past_versions_play_and_are_never_trained(tmp_path):
    settings = against_its_past(tmp_path / "run")
    rows, played, digests, versions = await trained(settings)
    assert list(versions) == ["white", "white@3", "white@4"]  # two stay, the newest
    assert versions == {"white": "0.4", "white@3": "0.3", "white@4": "0.4"}
    assert digests["white@4"] == digests["white"] != digests["white@3"]
    assert sorted(path.name for path in (tmp_path / "run" / "pool").iterdir()) == ["white@3", "white@4"]
    for step, (row, episodes) in enumerate(zip(rows, played, strict=True), 1):
        there = PoolConfig(every_steps=1, size=2).versions(step - 1)
        met = Counter(trajectory.episode.players["opponent"] for trajectory in episodes)
        assert set(met) <= {f"white@{version}" for version in there}
        assert {f"rollout/pool/{name}/episodes" for name in met} <= row.keys()
        chats = [chat for trajectory in episodes for chat in trajectory.chats]
        tokens = Counter()
        for trajectory in episodes:
            version = trajectory.episode.players["opponent"]
            assert [chat.policy for chat in trajectory.chats] == ["white", version, "white"]
            assert [chat.agent for chat in trajectory.chats] == ["agent", "opponent", "agent"]
            assert sum(trajectory.episode.step_rewards) == trajectory.episode.rewards["agent"]
            _, past = version.split("@")
            assert {str(span.version) for span in trajectory.chats[1].versions} == {f"0.{past}"}
        for chat in chats:
            tokens[chat.agent] += len(chat.completion_ids)
            assert chat.parent is None or chat.parent.policy == chat.policy
        assert (row["train/trained_tokens"], row["train/tokens_frozen"]) == (tokens["agent"], tokens["opponent"])
        assert row["train/calls_frozen"] == len(chats) / 3
        assert row["train/grad_norm"] > 0  # the sums of both rewards are all 0
        earned = [trajectory.episode.rewards["agent"] for trajectory in episodes]
        assert row["train/reward_mean"] == pytest.approx(sum(earned) / len(earned))
        assert row["rollout/reward/agent"] == pytest.approx(-row["rollout/reward/opponent"])
    of_group = {}
    for trajectory in (one for episodes in played for one in episodes):
        episode = trajectory.episode
        assert of_group.setdefault(episode.group_index, episode.players) == episode.players


@pytest.mark.slow
async def test_the_same_job_plays_the_same_versions_and_trains_the_same_bits(tmp_path):
    first = await trained(against_its_past(tmp_path / "a", {"choice": "prioritized"}))
    again = await trained(against_its_past(tmp_path / "b", {"choice": "prioritized"}))
    assert first[2:] == again[2:]
    assert [[t.episode.players for t in step] for step in first[1]] == [
        [t.episode.players for t in step] for step in again[1]
    ]
    other = await trained(against_its_past(tmp_path / "c", {"choice": "prioritized"}, seed=1))
    assert other[2]["white"] != first[2]["white"]


class Killed(BaseException):
    """Ends a job as if it were killed, in this process."""


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("point", ["before it is written", "before it is loaded", "after it is loaded"])
async def test_a_run_that_ends_at_any_point_of_a_new_version_goes_on_with_the_same_pool(
    tmp_path, monkeypatch, step, point
):
    settings = against_its_past(tmp_path / "undisturbed", checkpoint={"every_steps": 3})
    undisturbed = await trained(settings)
    settings = against_its_past(tmp_path / "killed", checkpoint={"every_steps": 3})
    method = {"before it is written": "_write", "before it is loaded": "_load", "after it is loaded": "add"}[point]
    known = getattr(Pools, method)

    async def dies(self, *arguments):
        if point == "after it is loaded":
            await known(self, *arguments)
        if arguments[-1] == step:
            raise Killed
        if point != "after it is loaded":
            await known(self, *arguments)

    monkeypatch.setattr(Pools, method, dies)
    with pytest.raises(Killed):
        await trained(settings)
    monkeypatch.setattr(Pools, method, known)
    found = await trained(settings)
    assert found[2:] == undisturbed[2:]
    assert [[t.episode.players for t in one] for one in found[1]] == [
        [t.episode.players for t in one] for one in undisturbed[1]
    ]


@pytest.mark.slow
async def test_a_version_that_is_gone_from_the_disk_is_a_clear_error(tmp_path):
    settings = against_its_past(tmp_path / "run", {"size": 8}, checkpoint={"every_steps": 2})
    await trained(settings)
    (tmp_path / "run" / "pool" / "white@2" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="pool/white@2"):
        await trained(settings.model_copy(update={"steps": 6}))


@pytest.mark.slow
async def test_versions_that_are_played_ahead_stay_as_long_as_they_are_needed(tmp_path):
    settings = against_its_past(
        tmp_path / "run",
        deterministic=False,
        steps=6,
        rollout={"group_size": 2, "groups_per_step": 2, "max_staleness": 2},
    )
    _, played, _, versions = await trained(settings)
    for step, episodes in enumerate(played, 1):
        there = PoolConfig(every_steps=1, size=2).versions(max(step - 3, 0))
        assert {t.episode.players["opponent"] for t in episodes} <= {f"white@{version}" for version in there}
    assert list(versions) == ["white", "white@3", "white@4", "white@5", "white@6"]


@pytest.mark.slow
async def test_the_newest_weights_learn_in_the_groups_in_which_they_play_the_role(tmp_path):
    settings = against_its_past(tmp_path / "run", {"latest_share": 0.5}, algorithm={"credit": "agent"}, steps=4, seed=2)
    rows, played, _, _ = await trained(settings)
    met = [trajectory.episode.players["opponent"] for episodes in played for trajectory in episodes]
    assert {"white"} < set(met)
    for row, episodes in zip(rows, played, strict=True):
        own = [chat for t in episodes for chat in t.chats if chat.policy == "white"]
        assert row["train/trained_tokens"] == sum(len(chat.completion_ids) for chat in own)
        assert row["train/calls_frozen"] == sum(chat.policy != "white" for t in episodes for chat in t.chats)


@pytest.mark.slow
async def test_a_second_trained_policy_learns_where_its_newest_weights_play_and_not_where_its_past_does(tmp_path):
    pool = {"every_steps": 1, "size": 2, "latest_share": 0.5}
    roles = {"opponent": {"policy": "black", "pool": pool}}
    optimizer = {"optimizer": {"learning_rate": 1e-2}}
    settings = config(tmp_path / "run", {"black": optimizer}, roles, steps=4, algorithm={"name": "rae"})
    rows, played, digests, versions = await trained(settings)
    assert list(versions) == ["white", "black", "black@3", "black@4"]
    assert len(set(digests.values())) == 3
    assert digests["black@4"] == digests["black"]
    met = [t.episode.players["opponent"] for step in played for t in step]
    assert "black" in met
    assert any(name.startswith("black@") for name in met)
    for row, episodes in zip(rows, played, strict=True):
        tokens = Counter()
        for chat in (chat for trajectory in episodes for chat in trajectory.chats):
            tokens[chat.policy] += len(chat.completion_ids)
        assert row["white/train/trained_tokens"] == tokens["white"]
        assert row.get("black/train/trained_tokens", 0.0) == tokens["black"]
        assert row["train/tokens_frozen"] == sum(n for name, n in tokens.items() if "@" in name)


def test_an_evaluation_plays_against_the_weights_that_are_scored(tmp_path):
    found = palestra.evaluate(
        RolloutSpec(environment=Talk), TASKS, against_its_past(tmp_path / "run"), trajectories=True, quiet=True
    )
    for outcome in found.outcomes:
        rewards = outcome.trajectory.episode.rewards
        assert outcome.reward == rewards["agent"] == -rewards["opponent"]
        assert [chat.policy for chat in outcome.trajectory.chats] == ["white", "white@0", "white"]


@pytest.mark.slow
def test_over_http_a_role_is_played_by_the_version_of_the_episode(tmp_path):
    seen: list[tuple[str, ...]] = []

    async def rollout(task, endpoint):
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            ask: Any = {"messages": [{"role": "user", "content": task["text"]}], "max_tokens": 4}
            agent = await client.chat.completions.create(model=endpoint.model, **ask)
            opponent = await client.chat.completions.create(
                model=endpoint.model, extra_headers=endpoint.headers(agent="opponent"), **ask
            )
            models = [model.id async for model in client.models.list()]
        seen.append((agent.model, opponent.model, *models))
        value = score(agent.choices[0].message.content or "", opponent.choices[0].message.content or "")
        return {"agent": value, "opponent": -value}

    settings = against_its_past(tmp_path / "run")
    palestra.train(rollout, TASKS, settings, quiet=True)
    with sqlite3.connect(tmp_path / "run" / "run.db") as connection:
        players = [json.loads(text)["opponent"] for (text,) in connection.execute("SELECT players FROM episodes")]
    assert Counter(players) == Counter(opponent for _, opponent, *_ in seen)
    for agent, opponent, *models in seen:
        assert agent == "white"
        assert opponent in models
        assert opponent.startswith("white@")
        assert models[0] == "white"


SCRIPTED_POOL = SCRIPTED | {"policies": {"white": {}}, "roles": POOL}


@pytest.fixture(scope="module")
def undisturbed_pool(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-pool"), SCRIPTED_POOL) as job:
        run_through(job, [], "--opponent")
        yield job


def players_of(job: Job) -> dict[str, str]:
    return {row["episode_id"]: row["players"] for row in job.query("SELECT episode_id, players FROM episodes")}


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again_ends_with_the_same_versions_and_weights(tmp_path, undisturbed_pool):
    assert len(set(players_of(undisturbed_pool).values())) > 2
    with Job(tmp_path, SCRIPTED_POOL) as job:
        run_through(job, FAULTS, "--opponent", "--threads", "2")
        assert_same_metrics(job, undisturbed_pool)
        assert job.weights() == undisturbed_pool.weights()
        assert players_of(job) == players_of(undisturbed_pool)
        names = sorted(path.name for path in (job.run_dir / "pool").iterdir())
        assert names == ["white@2", "white@3"]
        for name in names:
            for file in (job.run_dir / "pool" / name).iterdir():
                assert file.read_bytes() == (undisturbed_pool.run_dir / "pool" / name / file.name).read_bytes()


@pytest.mark.slow
def test_claims_and_status_name_past_versions(tmp_path):
    with Job(tmp_path, SCRIPTED_POOL) as job, Plane(job.url) as plane:
        job.start()
        assert plane.status()["versions"] == {"white": "0.0", "white@0": "0.0"}
        claimed = plane.claim()
        assert claimed["players"] == {"opponent": "white@0"}
        assert claimed["policies"] == {"white": "0.0", "white@0": "0.0"}
        assert plane.chat(claimed, headers={"x-palestra-agent": "opponent"}).json()["model"] == "white@0"
        assert plane.chat(claimed).json()["model"] == "white"
        assert 'palestra_policy_version{policy="white@0"} 0.0' in plane.get("/metrics").text


@pytest.mark.slow
async def test_past_versions_of_an_adapter_stand_on_the_same_weights(tmp_path):
    settings = against_its_past(tmp_path / "run")
    white = settings.policies["white"].model_dump(exclude_unset=True) | {"adapter": {"rank": 4}}
    data = settings.model_dump(exclude_unset=True) | {"policies": {"white": white}}
    settings = JobConfig.model_validate(data)
    async with local_job(settings, lambda kind, found: None, RolloutSpec(environment=Talk)) as job:
        await job.plane.store.tasks.push("train", [Task(task_id=t["id"], data=t) for t in TASKS], "c")
        await job.plane.store.tasks.seal()
        await job.run()
        models = {name: job.opened.engine._core.policies[name].model for name in ("white", "white@3", "white@4")}
        bases = {name: dict(model.named_parameters())["model.norm.weight"].data_ptr() for name, model in models.items()}
        own = {name: dict(model.own_parameters()) for name, model in models.items()}
        assert len(set(bases.values())) == 1
        first = next(iter(own["white"]))
        assert len({weights[first].data_ptr() for weights in own.values()}) == 3
        for name, weight in own["white"].items():
            assert weight.equal(own["white@4"][name])
        assert any(not weight.equal(own["white@3"][name]) for name, weight in own["white"].items())
        assert (tmp_path / "run" / "pool" / "white@3" / "adapter_model.safetensors").is_file()
