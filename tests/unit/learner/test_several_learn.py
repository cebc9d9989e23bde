"""Two policies that are trained in one job: what each learns, when it is updated, what is published and saved."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections import defaultdict
from contextlib import asynccontextmanager

import pytest

from palestra.errors import CheckpointError, ConfigError
from palestra.types.calls import PolicyVersion
from palestra.types.metrics import row_of_policy
from unit.building import metric_names, open_store
from unit.learner.scripted_job import Crash, ScriptedJob, config

pytestmark = pytest.mark.ci

BOTH = {"white": {}, "black": {}}
ROLES = {"opponent": "black"}


def two(white=None, black=None, **changes):
    return config(policies={"white": white or {}, "black": black or {}}, roles=ROLES, **changes)


def rows(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Watched:
    """What a job asks of its trainer, and which weights its engine gets, in order."""

    def __init__(self, job: ScriptedJob) -> None:
        self.calls: list[tuple[str, str]] = []
        self.rows: defaultdict[str, list] = defaultdict(list)
        trainer, engine = job.trainer, job.engine
        for name in ("untrainable", "forward", "forward_backward", "optim_step", "weights"):
            setattr(trainer, name, self._watch(name, getattr(trainer, name)))
        engine.sync_weights = self._watch("publish", engine.sync_weights)

    def _watch(self, name, method):
        async def watched(policy, *arguments, **named):
            self.calls.append((name, policy))
            if name == "forward_backward":
                self.rows[policy] += arguments[0]
            return await method(policy, *arguments, **named)

        return watched

    def of(self, policy: str) -> list[str]:
        return [name for name, whose in self.calls if whose == policy]


async def test_each_learns_its_own_tokens_and_its_own_rewards(tmp_path):
    job = ScriptedJob(tmp_path, two())
    seen = Watched(job)
    await job.run()
    played = [await _trajectories(tmp_path, step) for step in (1, 2, 3)]
    for policy, agent in (("white", "agent"), ("black", "opponent")):
        for row, trajectories in zip(rows(tmp_path)[1:], played, strict=True):
            rewards = [t.episode.rewards[agent] for t in trajectories]
            assert row[f"{policy}/train/reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
            assert row[f"{policy}/train/episodes"] == len(trajectories)
        trained = {(row.episode_id, int(call)) for row in seen.rows[policy] for call in row.calls[row.loss_mask]}
        sampled = {(c.episode_id, c.index) for ts in played for t in ts for c in t.chats if c.policy == policy}
        assert trained <= sampled
        assert {row.policy for row in seen.rows[policy]} == {policy}
    assert job.trainer.digest("white") != job.trainer.digest("black")


async def test_metrics_have_the_names_of_their_policies(tmp_path):
    job = ScriptedJob(tmp_path, two(black={"algorithm": {"name": "ppo"}}))
    await job.run()
    for row in rows(tmp_path):
        assert "validation/reward_mean" not in row
        for policy in BOTH:
            agents = {"rollout/reward/agent", "rollout/reward/opponent"}  # rollout/reward/AGENT of the table
            assert row_of_policy(row, policy, ("white", "black")).keys() <= metric_names() | agents
        assert row["version"] == row["white/version"] == row["black/version"] == row["step"]
    newest = rows(tmp_path)[-1]
    assert {"white/train/reward_mean", "white/train/trained_tokens", "white/rollout/staleness_max"} <= newest.keys()
    assert {"black/train/critic_loss", "black/validation/reward_mean", "black/time/train_seconds"} <= newest.keys()
    assert not [name for name in newest if name.startswith("white/train/critic")]
    assert {
        "train/groups_dropped",
        "rollout/completion_tokens",
        "time/train_seconds",
        "validation/scored",
    } <= newest.keys()
    # Each name belongs either to a policy or to the job.
    assert not {name for name in newest if f"white/{name}" in newest} - {"version", "time/train_seconds"}


@pytest.mark.slow
async def test_the_order_of_the_policies_changes_no_update(tmp_path):
    """The first policy plays the agent without a role, so that here both have one, and neither's seed depends on it."""
    found = []
    for name, order in (("one", ("white", "black")), ("other", ("black", "white"))):
        settings = config(policies={each: {} for each in order}, roles=ROLES | {"agent": "white"})
        job = ScriptedJob(tmp_path / name, settings)
        seen = Watched(job)
        await job.run()
        order_of_calls = [call for call in seen.calls if call[0] in ("untrainable", "optim_step")][:4]
        # All batches are made before the first update.
        assert [call for call, _ in order_of_calls] == ["untrainable", "untrainable", "optim_step", "optim_step"]
        found.append(seen)
    assert found[0].of("white").count("optim_step") == found[1].of("white").count("optim_step") == 3


async def test_one_that_is_not_due_is_not_asked_for_anything_and_keeps_its_version(tmp_path):
    job = ScriptedJob(tmp_path, two(white={"updates": {"every_steps": 2}}, black={"updates": {"every_steps": 2}}))
    seen = Watched(job)
    await job.run()
    published = [policy for name, policy in seen.calls if name == "publish"]
    # Both at the start, then one a step.
    assert published == ["white", "black", "white", "black", "white"]
    updates = [policy for name, policy in seen.calls if name == "optim_step"]
    assert updates == ["white", "black", "white"]
    assert [policy for name, policy in seen.calls if name == "untrainable"] == updates
    assert [policy for name, policy in seen.calls if name == "forward_backward"] == updates
    assert [row["white/version"] for row in rows(tmp_path)] == [0, 1, 1, 2]
    assert [row["black/version"] for row in rows(tmp_path)] == [0, 0, 1, 1]
    assert ["white/train/rows" in row for row in rows(tmp_path)] == [False, True, False, True]
    assert all("white/train/reward_mean" in row and "black/train/reward_mean" in row for row in rows(tmp_path)[1:])
    assert all(row["rollout/completion_tokens"] > 0 for row in rows(tmp_path)[1:])
    with open_store(tmp_path) as store:
        versions = [(await store.log.manifest(step)).versions for step in (1, 2, 3)]
    assert [{name: v.n for name, v in found.items()} for found in versions] == [
        {"white": 0, "black": 0},
        {"white": 1, "black": 0},
        {"white": 1, "black": 1},
    ]


async def test_checkpoints_have_a_folder_for_each_policy(tmp_path):
    job = ScriptedJob(tmp_path, two())
    await job.run()
    for policy in BOTH:
        folder = tmp_path / "checkpoints" / policy
        assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000003"]
    saved = [data["policy"] for kind, data in job.events if kind == "saved"]
    assert saved == ["white", "black"] * 2


@pytest.mark.parametrize("gone", ["white/step-000003", "black/step-000003"])
async def test_a_resumed_job_goes_on_from_the_newest_step_that_all_have(tmp_path, gone):
    whole = await ScriptedJob(tmp_path / "whole", two()).run()
    first = ScriptedJob(tmp_path / "run", two())
    await first.run()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / gone)
    job = ScriptedJob(tmp_path / "run", two())
    assert await job.run() == whole
    assert next(data["step"] for kind, data in job.events if kind == "running") == 2
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]


async def test_a_damaged_checkpoint_of_one_policy_is_one_of_the_step(tmp_path):
    whole = await ScriptedJob(tmp_path / "whole", two()).run()
    first = ScriptedJob(tmp_path / "run", two())
    await first.run()
    (tmp_path / "run" / "checkpoints" / "black" / "step-000003" / "weights.txt").write_text("damaged")
    job = ScriptedJob(tmp_path / "run", two())
    assert await job.run() == whole
    assert next(data["step"] for kind, data in job.events if kind == "running") == 2
    assert [data["step"] for kind, data in job.events if data.get("code") == "checkpoint_damaged"] == [2]


@pytest.mark.parametrize("step", ["step-000002", "step-000003"])
async def test_without_a_common_step_the_job_does_not_go_on(tmp_path, step):
    await ScriptedJob(tmp_path, two()).run()
    other = {"step-000002": "step-000003", "step-000003": "step-000002"}[step]
    shutil.rmtree(tmp_path / "checkpoints" / "white" / step)
    shutil.rmtree(tmp_path / "checkpoints" / "black" / other)
    shutil.copytree(tmp_path / "checkpoints" / "black" / step, tmp_path / "checkpoints" / "black" / "step-000009")
    with pytest.raises(BaseExceptionGroup) as caught:
        await ScriptedJob(tmp_path, two()).run()
    (error,) = caught.value.exceptions
    assert isinstance(error, CheckpointError)
    assert "there is no step of which all policies have a checkpoint" in str(error)


@pytest.mark.slow
async def test_a_death_between_the_first_two_saves_begins_anew(tmp_path):
    whole = await ScriptedJob(tmp_path / "whole", two()).run()
    first = ScriptedJob(tmp_path / "run", two())
    save = first.trainer.save

    async def dies(policy, *arguments):
        if policy == "black":
            first.dead.set()
            raise Crash
        return await save(policy, *arguments)

    first.trainer.save = dies
    with pytest.raises(Crash):
        await first.run()
    assert [path.name for path in (tmp_path / "run" / "checkpoints" / "white").iterdir()] == ["step-000002"]
    assert await ScriptedJob(tmp_path / "run", two()).run() == whole


async def test_weights_are_handed_over_together_under_the_lock(tmp_path):
    """No episode that waits for both can begin between the two publications."""
    job = ScriptedJob(tmp_path, two(rollout={"weight_sync": "between_episodes"}))
    seen = Watched(job)
    open_ = []

    lock = job.store.episodes.sync_lock
    acquire = lock.acquire_weight_sync

    @asynccontextmanager
    async def watched():
        async with acquire():
            open_.append(len(seen.calls))
            yield
            open_.append(len(seen.calls))

    lock.acquire_weight_sync = watched
    await job.run()
    spans = list(zip(open_[::2], open_[1::2], strict=True))
    inside = [[call for call in seen.calls[a:b] if call[0] == "publish"] for a, b in spans]
    assert inside == [[("publish", "white"), ("publish", "black")]] * 3


async def test_the_engine_has_all_new_weights_at_the_same_time(tmp_path):
    """One that takes weights over between two of its turns would need a turn for each policy otherwise."""
    job = ScriptedJob(tmp_path, two(steps=1))
    both, sync = asyncio.Barrier(2), job.engine.sync_weights

    async def waits_for_the_other(*arguments):
        await asyncio.wait_for(both.wait(), 5)
        await sync(*arguments)

    job.engine.sync_weights = waits_for_the_other
    await job.run()


SAMPLING = {"algorithm": {"name": "grpo", "dynamic_sampling": 2}}
MOST = 2 * 2  # groups that are replaced in a step: twice those of a step


def settled(folder, steps) -> dict[str, list[list[dict[str, float]]]]:
    """The rewards of the episodes of each group of some steps, by the state of the group."""
    found = defaultdict(list)
    with sqlite3.connect(folder / "run.db") as db:
        wanted = "SELECT group_index, state FROM groups WHERE kind = 'train' AND step = ? ORDER BY group_index"
        for step in steps:
            for group, state in db.execute(wanted, (step,)).fetchall():
                played = "SELECT rewards FROM episodes WHERE kind = 'train' AND group_index = ?"
                found[state].append([json.loads(rewards) for (rewards,) in db.execute(played, (group,))])
    return found


def differ(group: list[dict[str, float]], agent: str) -> bool:
    return len({rewards[agent] for rewards in group if agent in rewards}) > 1


def skipped(folder) -> list[float]:
    return [row["train/groups_skipped"] for row in rows(folder)[1:]]


@pytest.mark.parametrize("white", [{}, {"updates": {"every_steps": 9}}])
async def test_dynamic_sampling_asks_those_that_are_due(tmp_path, white):
    """White's rewards are all equal, so that black alone decides, whether white is due or not."""
    job = ScriptedJob(tmp_path, two(white, steps=6, **SAMPLING), equal_rewards=True)
    await job.run()
    found = settled(tmp_path, range(2, 7))
    assert not any(differ(group, "opponent") for group in found["skipped"])
    assert all(differ(group, "opponent") for group in found["ready"])
    assert 0 < len(found["skipped"]) == sum(skipped(tmp_path)[1:])


async def test_dynamic_sampling_does_not_ask_those_that_are_not_due(tmp_path):
    """Only white is due from step 2 on: every group is replaced, also where black differs, as often as is allowed."""
    job = ScriptedJob(tmp_path, two(black={"updates": {"every_steps": 9}}, steps=4, **SAMPLING), equal_rewards=True)
    await job.run()
    assert skipped(tmp_path)[1:] == [MOST] * 3
    assert any(differ(group, "opponent") for group in settled(tmp_path, range(2, 5))["skipped"])


async def test_dynamic_sampling_asks_a_due_rival_that_has_played_nothing(tmp_path):
    """Black has no part in every second group: white alone decides there, and both in the others."""
    job = ScriptedJob(tmp_path, two(steps=6, **SAMPLING))
    job.silent = lambda group, agent: bool(group % 2)
    await job.run()
    found = settled(tmp_path, range(1, 7))
    apart = [group for state in found.values() for group in state if "opponent" not in group[0]]
    assert 0 < len(apart) < sum(map(len, found.values()))
    assert not any(differ(group, agent) for group in found["skipped"] for agent in ("agent", "opponent"))
    assert all(differ(group, "agent") or differ(group, "opponent") for group in found["ready"])
    assert len(found["skipped"]) == sum(skipped(tmp_path))


@pytest.mark.slow
async def test_a_due_rival_that_has_played_nothing_at_all_has_no_update_and_no_sign(tmp_path):
    job = ScriptedJob(tmp_path, two(steps=4, **SAMPLING))
    job.silent = lambda group, agent: True
    await job.run()
    found = settled(tmp_path, range(1, 5))
    assert not any(differ(group, "agent") for group in found["skipped"])
    for row in rows(tmp_path)[1:]:
        assert row["black/train/episodes"] == 0
        assert "black/train/loss" not in row
        assert row["white/train/episodes"] == 4
    assert job.trainer.version("black") == PolicyVersion(0, 0)
    assert {data["policy"] for kind, data in job.events if kind == "warning"} <= {"white", ""}


async def test_recorded_episodes_of_a_users_algorithm_are_refused_for_several(tmp_path):
    job = ScriptedJob(tmp_path, two())
    job.algorithms["black"].recorded = object()
    with pytest.raises(ConfigError, match=r"'black'.*'white'"):
        type(job.learner)(job.opened, job.trainer, job.algorithms)
    job.store.close()


@pytest.mark.slow
async def test_warnings_say_whose_they_are_and_stay_while_a_policy_waits(tmp_path):
    """White's rewards are all equal."""
    job = ScriptedJob(tmp_path, two(white={"updates": {"every_steps": 2}}, steps=6), equal_rewards=True)
    await job.run()
    said = [data for kind, data in job.events if kind == "warning"]
    assert {(data["policy"], data["code"]) for data in said} >= {("white", "equal_rewards")}
    assert all(data["text"].startswith(f"policy {data['policy']}: ") for data in said if data["policy"])
    assert [data["policy"] for data in said if data["code"] == "equal_rewards"] == ["white"]


def test_versions_are_of_each_policy(tmp_path):
    async def run():
        job = ScriptedJob(tmp_path, two(black={"updates": {"every_steps": 2}}))
        await job.run()
        return {name: job.engine.version(name) for name in BOTH}

    assert asyncio.run(run()) == {"white": PolicyVersion(0, 3), "black": PolicyVersion(0, 2)}


async def _trajectories(folder, step):
    with open_store(folder) as store:
        manifest = await store.log.manifest(step)
        return await store.calls.trajectories(manifest.episode_ids)
