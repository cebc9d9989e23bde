from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from palestra.algorithms.losses import TwinValueLoss, build_loss
from palestra.algorithms.policy_gradient import IMPORTANCE_METRICS, PolicyGradient
from palestra.algorithms.preference import DPO
from palestra.algorithms.registry import ALGORITHMS, create_algorithm
from palestra.algorithms.sac import SAC
from palestra.config import dump_config
from palestra.dashboard.runs import Run
from palestra.engine.fake import FakeEngine, digits_script
from palestra.errors import ConfigError, StoreError
from palestra.learner.learner import Learner
from palestra.learner.metrics import ENVIRONMENT_METRICS, SPENT_METRICS, metric_tables
from palestra.learner.reporting import ROLE_METRICS
from palestra.store.run_log import readable_metrics
from palestra.threads import SHORT_TURN_SECONDS
from palestra.trainer.base import PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra.types.calls import PolicyVersion
from palestra.types.states import JobState
from unit.building import metric_names, open_store
from unit.learner.scripted_job import Crash, ScriptedJob, config

pytestmark = pytest.mark.ci

# Metrics of algorithms with a critic, and of a reference.
WITH_A_CRITIC = tuple(
    f"train/{name}" for name in ("critic_", "explained_variance", "return_mean", "advantage_std", "reference_", "kl_")
)
WITH_A_JUDGE = ("judge/", "audit/", "time/audit_seconds", "validation/win_rate")


class TrainerBroken(Exception):
    """A defect."""


def rows(folder) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
async def test_every_metric_that_is_written_is_in_the_table_and_every_one_of_the_table_is_written(tmp_path):
    """Of the metrics of losses, those of the losses that an algorithm names."""
    named = set()
    for name in (name for name, algorithm in ALGORITHMS.items() if issubclass(algorithm, PolicyGradient)):
        for mode in ("none", "token-mask"):
            algorithm = {"name": name, "importance_sampling": mode, "clip_low": 0.1}
            job = ScriptedJob(tmp_path / f"{name} {mode}", config(algorithm=algorithm, steps=2))
            await job.run()
            made = create_algorithm(job.config.algorithm)
            own = {metric.name for metric in (*made.metrics, *build_loss(made.loss()).metrics)}
            own -= {metric.name for metric in IMPORTANCE_METRICS} if mode == "none" else set()
            expected = {metric.name for metric in metric_tables()["Every run"]} | {f"train/{name}" for name in own}
            expected -= {"train/rewards/NAME", "validation/rewards/NAME"}  # of jobs with named rewards
            expected -= {name for name in expected if name.startswith(WITH_A_JUDGE)}
            assert set().union(*rows(tmp_path / f"{name} {mode}")) == expected
            named |= expected
    unused = {"nll", "log_ratio_squared"}  # of losses of the Tinker API that no policy gradient names
    beside = {name for name in metric_names() if name.startswith((*WITH_A_CRITIC, *WITH_A_JUDGE, "train/teacher_kl"))}
    beside |= {metric.name for metric in ROLE_METRICS}  # where several agents are rewarded
    beside |= {metric.name for metric in (*ENVIRONMENT_METRICS, *SPENT_METRICS)}  # with several, or a budget
    beside |= {f"train/{metric.name}" for metric in (*SAC.metrics, *TwinValueLoss.metrics, *DPO.metrics)}
    unused |= {"rewards/NAME"}
    assert named == metric_names() - {f"train/{name}" for name in unused} - {"validation/rewards/NAME"} - beside


async def test_a_step_frees_nothing_on_the_event_loop_and_computes_in_short_turns(tmp_path, monkeypatch):
    job, here, freed_by = ScriptedJob(tmp_path, config(steps=2)), threading.get_ident(), list[int]()
    turns, usual = list[float](), sys.getswitchinterval()
    algorithm = job.algorithms["policy"]
    really = algorithm.advantages

    def note(array: np.ndarray) -> None:
        weakref.finalize(array, lambda: freed_by.append(threading.get_ident()))

    def advantages(groups, forward):
        turns.append(sys.getswitchinterval())
        for group in groups:
            for array in (chat.logprobs for trajectory in group.trajectories for chat in trajectory.chats):
                note(array)
            for row in group.rows:
                note(row.ids)
        return really(groups, forward)

    monkeypatch.setattr(algorithm, "advantages", advantages)
    await job.run()
    assert len(freed_by) > 16  # two calls an episode, and rows
    assert here not in freed_by
    assert turns == pytest.approx([SHORT_TURN_SECONDS] * 2)
    assert sys.getswitchinterval() == usual


async def test_an_algorithm_may_keep_the_groups_of_a_step(tmp_path, monkeypatch):
    job, kept = ScriptedJob(tmp_path, config(steps=2)), []
    algorithm = job.algorithms["policy"]
    really = algorithm.advantages

    def advantages(groups, forward):
        kept.append(groups)
        return really(groups, forward)

    monkeypatch.setattr(algorithm, "advantages", advantages)
    await job.run()
    assert [len(groups) for groups in kept] == [2, 2]


@pytest.mark.parametrize("name", ["ppo", "a2c"])
async def test_a_critic_and_a_reference_write_their_metrics(tmp_path, name):
    job = ScriptedJob(tmp_path, config(algorithm={"name": name, "kl": {"coefficient": 0.5, "target": 1.0}}))
    await job.run()
    for row in rows(tmp_path)[1:]:
        assert row.keys() <= metric_names()
        assert {"train/critic_loss", "train/critic_grad_norm", "train/critic_updates_skipped"} <= row.keys()
        assert {
            "train/return_mean",
            "train/advantage_std",
            "train/kl_coefficient",
            "train/kl_at_sampling",
        } <= row.keys()
    # The fake reference is the policy, so the divergence is 0, and the coefficient falls by 0.1 x 0.2 a step.
    assert [row["train/kl_coefficient"] for row in rows(tmp_path)[1:]] == pytest.approx([0.5, 0.49, 0.4802])


async def test_a_teacher_is_measured(tmp_path):
    policies = {"policy": {}, "big": {"frozen": True}}
    job = ScriptedJob(tmp_path, config(algorithm={"name": "distill"}, policies=policies))
    await job.run()
    for row in rows(tmp_path)[1:]:
        assert row.keys() <= metric_names()
        assert row["train/teacher_kl"] == 0.0  # the fake teacher says what was sampled


async def test_in_warmup_steps_the_critic_alone_is_trained(tmp_path):
    job = ScriptedJob(tmp_path, config(algorithm={"name": "ppo", "critic": {"warmup_steps": 2}}))
    await job.run()
    assert [row["version"] for row in rows(tmp_path)] == [0, 0, 0, 1]
    assert ["train/loss" in row for row in rows(tmp_path)] == [False, False, False, True]
    assert ["train/critic_loss" in row for row in rows(tmp_path)] == [False, True, True, True]
    assert job.engine.version("policy") == PolicyVersion(0, 1)


async def test_warmup_counts_the_updates_of_the_policy_and_not_the_steps_of_the_job(tmp_path):
    """The policy is due in steps 1, 3, 5 and 7: the critic alone is trained in 1 and 3."""
    algorithm = {"name": "ppo", "critic": {"warmup_steps": 2}}
    policies = {"policy": {"updates": {"every_steps": 2}}}
    job = ScriptedJob(tmp_path, config(algorithm=algorithm, policies=policies, steps=7))
    await job.run()
    assert [row["version"] for row in rows(tmp_path)] == [0, 0, 0, 0, 0, 1, 1, 2]
    critic = [row["step"] for row in rows(tmp_path) if "train/critic_loss" in row]
    assert critic == [1, 3, 5, 7]


async def test_ppo_learns_from_groups_of_one(tmp_path):
    small = {"group_size": 1, "groups_per_step": 2, "lease_seconds": 60}
    job = ScriptedJob(tmp_path, config(algorithm={"name": "ppo"}, rollout=small))
    await job.run()
    assert [row["version"] for row in rows(tmp_path)] == [0, 1, 2, 3]


async def test_a_job_runs_to_its_end(tmp_path):
    job = ScriptedJob(tmp_path, config(), draw=True)
    await job.run()
    assert job.progress.state is JobState.COMPLETED
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    assert [row["version"] for row in rows(tmp_path)] == [0, 1, 2, 3]
    assert ["validation/reward_mean" in row for row in rows(tmp_path)] == [True, False, True, True]
    assert all("train/reward_mean" not in row for row in rows(tmp_path)[:1])
    assert sorted(p.name for p in (job.folder.path / "checkpoints").iterdir()) == ["best", "step-000002", "step-000003"]
    assert job.engine.version("policy") == PolicyVersion(0, 3)
    assert [kind for kind, _ in job.events if kind in ("running", "completed")] == ["running", "completed"]
    assert (tmp_path / "curve.png").is_file()


async def test_every_accepted_episode_is_in_exactly_one_manifest(tmp_path):
    job = ScriptedJob(tmp_path, config())
    await job.run()
    with open_store(tmp_path) as store:
        manifests = [await store.log.manifest(step) for step in (1, 2, 3)]
        trained = [e for m in manifests for e in m.episode_ids]
        groups = [g for step in (1, 2, 3) for g in await store.groups.of_step("train", step)]
    completed = [e.episode_id for _, members in groups for e in members if e.reward is not None]
    assert trained == completed == sorted(set(trained))
    assert [m.versions for m in manifests] == [{"policy": PolicyVersion(0, n)} for n in range(3)]
    assert {m.seed for m in manifests} == {0}
    assert {m.config_digest for m in manifests} == {config().digest()}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2, 5])
async def test_episodes_are_played_ahead_and_are_never_staler_than_allowed(tmp_path, staleness):
    settings = {"steps": 6, "deterministic": False}
    settings["rollout"] = config().rollout.model_copy(update={"max_staleness": staleness}).model_dump()
    job = ScriptedJob(tmp_path, config(**settings))
    furthest = []

    def look(kind, data):
        if kind == "step":
            furthest.append((int(data["step"]), job.registered_up_to))

    job.on_event = look
    await job.run()
    stale = [row["rollout/staleness_max"] for row in rows(tmp_path)[1:]]
    assert max(stale) <= staleness
    assert max(stale) > 0
    assert all(step <= min(done + staleness, 6) for done, step in furthest)
    with open_store(tmp_path) as store:
        trained = [e for step in range(1, 7) for e in (await store.log.manifest(step)).episode_ids]
        groups = [g for step in range(1, 7) for g in await store.groups.of_step("train", step)]
    completed = {e.episode_id for _, members in groups for e in members if e.reward is not None}
    assert len(trained) == len(set(trained)) == len(completed) == 6 * 4


async def test_equal_jobs_end_with_equal_weights_and_another_seed_with_others(tmp_path):
    found = [
        await ScriptedJob(tmp_path / name, config(seed=seed)).run() for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


async def test_a_job_that_is_stopped_saves_and_goes_on_to_the_same_end(tmp_path):
    whole = await ScriptedJob(tmp_path / "whole", config()).run()
    first = ScriptedJob(tmp_path / "run", config())
    first.on_event = lambda kind, data: first.learner.stop() if (kind, data.get("step")) == ("step", 1.0) else None
    await first.run()
    assert first.progress.state is JobState.RUNNING
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]
    assert sorted(p.name for p in (first.folder.path / "checkpoints").iterdir()) == ["step-000001"]
    second = ScriptedJob(tmp_path / "run", config())
    assert await second.run() == whole
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]
    assert second.progress.version == "0.3"


async def test_the_rate_of_a_step_that_a_restart_may_have_cut_in_two_is_left_out(tmp_path):
    """Its episodes may have been played before: the time that this process waited for them says nothing of them."""
    first = ScriptedJob(tmp_path, config())
    first.on_event = lambda kind, data: first.learner.stop() if (kind, data.get("step")) == ("step", 1.0) else None
    await first.run()
    await ScriptedJob(tmp_path, config()).run()
    found = ["rollout/tokens_per_second" in row for row in rows(tmp_path)]
    assert found == [False, True, False, True]


@pytest.mark.parametrize("problem", [None, "the disk is full"])
async def test_an_error_while_a_checkpoint_is_written_waits_for_it_and_tells_if_that_failed_too(
    tmp_path, caplog, problem
):
    job, saving, order = ScriptedJob(tmp_path, config(checkpoint={"every_steps": 1})), asyncio.Event(), []
    save, train = job.trainer.save, job.trainer.forward_backward

    async def slow(*arguments):
        saving.set()
        await asyncio.sleep(0.1)
        order.append("saved")
        if problem is not None:
            raise StoreError(problem)
        return await save(*arguments)

    async def broken(*arguments):
        if not saving.is_set():
            return await train(*arguments)
        raise TrainerBroken

    job.trainer.save, job.trainer.forward_backward = slow, broken

    async def run() -> None:
        try:
            await type(job.learner).run(job.learner)
        finally:
            order.append("over")

    job.learner.run = run
    with pytest.raises(ExceptionGroup) as caught:
        await job.run()
    assert caught.group_contains(TrainerBroken)
    assert order == ["saved", "over"]
    told = [record.getMessage() for record in caplog.records if record.name == "palestra.learner"]
    assert told == ([] if problem is None else [f"a checkpoint could not be written: StoreError: {problem}"])


async def test_without_deterministic_a_restart_begins_a_new_incarnation(tmp_path):
    first = ScriptedJob(tmp_path, config(deterministic=False))
    first.on_event = lambda kind, data: first.learner.stop() if (kind, data.get("step")) == ("step", 1.0) else None
    await first.run()
    second = ScriptedJob(tmp_path, config(deterministic=False))
    await second.run()
    assert second.progress.version == "1.3"
    assert second.engine.version("policy") == PolicyVersion(1, 3)


async def test_a_run_can_not_go_on_with_another_configuration_of_what_is_trained(tmp_path):
    await ScriptedJob(tmp_path, config()).run()
    changed = config(seed=1, algorithm={"clip_low": 0.3}, checkpoint={"every_steps": 5})
    other = ScriptedJob(tmp_path, changed)
    await other.create_policy()
    named = r"0.*1.*algorithm.clip_low.*0.2.*0.3"
    with pytest.raises(ConfigError, match=named):
        await other.learner.run()
    other.store.close()
    saved = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(dump_config(changed))  # edited: the values of the start are gone
    edited = ScriptedJob(tmp_path, changed)
    await edited.create_policy()
    with pytest.raises(ConfigError, match=r"config\.toml.*more"):
        await edited.learner.run()
    edited.store.close()
    (tmp_path / "config.toml").write_text(saved)
    longer = ScriptedJob(tmp_path, config(steps=4, evaluation={"every_steps": 1}))
    await longer.run()
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]


async def test_a_job_without_training_tasks_says_so(tmp_path):
    job = ScriptedJob(tmp_path, config())
    await job.create_policy()
    await job.store.tasks.seal()
    with pytest.raises(ConfigError, match="training tasks"):
        await job.learner.run()
    job.store.close()


async def test_a_step_in_which_nothing_can_be_learned_changes_no_weight_and_is_counted(tmp_path):
    job = ScriptedJob(tmp_path, config(), equal_rewards=True)
    untrained = FakeTrainer(2)
    await untrained.create("policy", PolicySpec(model="none"))
    assert await job.run() == untrained.digest("policy")
    for row in rows(tmp_path)[1:]:
        assert (row["train/groups_zero_variance"], row["train/trained_tokens"], row["version"]) == (2, 0, 0)
        assert "train/loss" not in row


async def test_several_epochs_are_several_updates_of_one_batch(tmp_path):
    job = ScriptedJob(tmp_path, config(algorithm={"epochs": 3}))
    updates, real = [], job.trainer.optim_step

    async def counted(*arguments):
        updates.append(arguments)
        return await real(*arguments)

    job.trainer.optim_step = counted
    await job.run()
    assert len(updates) == 9
    assert [row["version"] for row in rows(tmp_path)] == [0, 1, 2, 3]


async def test_several_minibatches_are_several_updates_of_one_version_each_with_whole_groups(tmp_path):
    job = ScriptedJob(tmp_path, config(algorithm={"epochs": 2, "minibatches": 2}))
    batches, real = [], job.trainer.forward_backward

    async def watched(policy, batch, loss, request_id, logprobs):
        batches.append((request_id, [sample.episode_id for sample in batch]))
        return await real(policy, batch, loss, request_id, logprobs)

    job.trainer.forward_backward = watched
    await job.run()
    for step, row in enumerate(rows(tmp_path)[1:], 1):
        made = [names for request, names in batches if request.startswith(f"step {step} ")]
        assert len(made) == 4 - 2 * int(row["train/groups_zero_variance"])  # two parts in each of two epochs
        assert sum(map(len, made)) == 2 * row["train/rows"]
        assert all(len({name[:12] for name in names}) == 1 for names in made)
    assert [row["version"] for row in rows(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"epochs": 2, "minibatches": 2}, id="minibatches"),
        pytest.param({"name": "rae"}, id="rae", marks=pytest.mark.slow),
        pytest.param({"name": "dapo", "dynamic_sampling": 1}, id="dapo"),
        pytest.param({"name": "gspo"}, id="gspo", marks=pytest.mark.slow),
    ],
)
async def test_a_job_that_dies_ends_with_the_weights_of_one_that_does_not(tmp_path, algorithm):
    undisturbed = ScriptedJob(tmp_path / "undisturbed", config(algorithm=algorithm))
    wanted = await undisturbed.run()
    for part in (0.25, 0.45, 0.6, 0.75):  # of a busy machine, whose commits are fewer
        folder = tmp_path / str(part)
        with pytest.raises(Crash):
            await ScriptedJob(folder, config(algorithm=algorithm), crash_at=int(part * undisturbed.commits)).run()
        assert await ScriptedJob(folder, config(algorithm=algorithm)).run() == wanted


async def test_groups_that_teach_nothing_are_replaced_as_often_as_is_allowed(tmp_path):
    job = ScriptedJob(tmp_path, config(algorithm={"name": "dapo", "dynamic_sampling": 2}), equal_rewards=True)
    await job.run()
    for row in rows(tmp_path)[1:]:
        assert (row["train/groups_skipped"], row["train/groups_zero_variance"], row["train/episodes"]) == (4, 2, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_numbers_that_are_not_finite_stay_out_of_the_metrics(tmp_path, value):
    """They would be null in the store, break a restart, and be no JSON in the file."""
    job = ScriptedJob(tmp_path, config(steps=1))
    real = job.trainer.forward_backward

    async def overflows(*arguments):
        report = await real(*arguments)
        return replace(report, metrics=report.metrics | {"ratio_mean": value, "loss": value})

    job.trainer.forward_backward = overflows
    await job.run()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert None not in rows(tmp_path)[-1].values()
    assert "train/ratio_mean" not in rows(tmp_path)[-1]
    again = ScriptedJob(tmp_path, config(steps=2))
    await again.run()
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


async def test_a_row_is_there_for_every_step_wherever_the_evaluation_was_interrupted(tmp_path):
    """A checkpoint makes a step final; killed during the evaluation after it, its row must not be missing."""
    first = ScriptedJob(tmp_path, config())
    first.on_event = lambda kind, data: first.learner.stop() if (kind, data.get("step")) == ("saved", 2) else None
    await first.run()
    second = ScriptedJob(tmp_path, config())
    await second.run()
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    assert all("train/reward_mean" in row for row in found[1:])
    assert "validation/reward_mean" in found[2]


class OddEngine(FakeEngine):
    """Says of some tokens that their log-probability is not a number."""

    async def generate(self, request):
        odd = b"say 1" in bytes(i for i in request.prompt.ids.tolist() if i < 256)
        async for piece in super().generate(request):
            yield replace(piece, logprobs=(math.nan,) * len(piece.ids)) if odd else piece


async def test_episodes_that_can_not_be_trained_are_left_out_counted_and_named_the_same_every_time(tmp_path):
    def job_in(folder, **how) -> ScriptedJob:
        job = ScriptedJob(folder, config(), **how)
        job.engine = OddEngine(digits_script(6, 258))
        object.__setattr__(job.opened, "engine", job.engine)
        runtime = job.sessions.context.policies.runtime("policy")
        object.__setattr__(runtime, "engine", job.engine)
        return job

    job = job_in(tmp_path / "whole")
    weights = await job.run()
    said = [data for kind, data in job.events if kind == "episode_untrainable"]
    counted = {row["step"]: row["train/episodes_untrainable"] for row in rows(tmp_path / "whole") if row["step"]}
    assert len(said) == sum(counted.values()) > 0
    assert all("log-probability" in data["reason"] for data in said)
    with open_store(tmp_path / "whole") as store:
        for data in said:
            assert data["episode_id"] in (await store.log.manifest(data["step"])).episode_ids
            assert (await store.episodes.get(data["episode_id"])).task.data == {"text": "say 1"}
    crashes = 0
    for number in (25, 40, 60):
        with contextlib.suppress(Crash):
            await job_in(tmp_path / "again", crash_at=number).run()
            continue
        crashes += 1
    assert crashes
    assert await job_in(tmp_path / "again").run() == weights
    assert rows(tmp_path / "again")[-1]["train/episodes_untrainable"] == counted[3]


async def test_what_a_stop_breaks_off_has_ended_when_the_learner_goes_on():
    """Else it could still write to the store, or hold the trainer, while the run is saved."""
    ended = []

    async def gather() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append("gathered")

    learner = object.__new__(Learner)
    learner._stopping = asyncio.Event()
    waiting = asyncio.ensure_future(learner._unless_stopped(gather()))
    await asyncio.sleep(0.01)
    learner.stop()
    assert (await waiting, ended) == (None, ["gathered"])


async def test_the_rate_of_episodes_that_are_played_ahead_is_by_the_time_between_batches(tmp_path):
    """The step itself has hardly waited for them, so its wait would make a rate that no engine has."""
    rollout = {"group_size": 2, "groups_per_step": 2, "max_staleness": 2}
    job = ScriptedJob(tmp_path, config(steps=4, deterministic=False, rollout=rollout))
    train, trained = job.trainer.forward_backward, 0.1

    async def slow(*arguments):
        await asyncio.sleep(trained)
        return await train(*arguments)

    job.trainer.forward_backward = slow
    await job.run()
    later = rows(tmp_path)[2:]
    assert any(row["time/rollout_seconds"] < trained / 2 for row in later)
    for row in later:
        tokens = row["rollout/prompt_tokens"] + row["rollout/completion_tokens"]
        assert 0 < row["rollout/tokens_per_second"] < tokens / trained


async def test_a_rate_after_a_restart_waits_for_the_first_step_that_is_gathered_and_the_next(tmp_path):
    """Steps that are repeated from their manifests play nothing; episodes of the next may have been played before."""
    settings = config(steps=5, checkpoint={"every_steps": 5})
    first = ScriptedJob(tmp_path, settings)

    def crash(kind, data):
        if (kind, data.get("step")) == ("step", 2.0):
            raise Crash

    first.on_event = crash
    with contextlib.suppress(BaseExceptionGroup, Crash):
        await first.run()
    await ScriptedJob(tmp_path, settings).run()
    assert ["rollout/tokens_per_second" in row for row in rows(tmp_path)] == [False, False, False, False, True, True]


async def test_rows_that_a_resumed_job_drops_are_gone_before_readers_see_that_it_was_resumed(tmp_path):
    settings = config(steps=4, checkpoint={"every_steps": 2})
    first = ScriptedJob(tmp_path, settings)

    def crash(kind, data):
        if (kind, data.get("step")) == ("step", 3.0):
            raise Crash

    first.on_event = crash
    with contextlib.suppress(BaseExceptionGroup, Crash):
        await first.run()
    run = Run(name="r", folder=tmp_path)

    def newest() -> float:
        with run.open() as connection:
            return readable_metrics(connection).rows[-1]["step"]

    before, found = run.begun, []
    job = ScriptedJob(tmp_path, settings)
    write = job.folder.write_config
    job.folder.write_config = lambda saved: (found.append(newest()), write(saved))
    assert newest() == 3.0
    await job.run()
    assert found == [2.0]
    assert run.begun != before


async def test_seconds_of_a_job_never_go_back_where_a_long_evaluation_came_after_the_checkpoint(tmp_path):
    settings = config(evaluation={"every_steps": 1}, checkpoint={"every_steps": 1})
    first = ScriptedJob(tmp_path, settings)
    first.on_event = lambda kind, data: first.learner.stop() if (kind, data.get("step")) == ("step", 1.0) else None
    await first.run()
    with open_store(tmp_path) as store:  # as if the evaluation of step 1 had taken an hour
        _, one = await store.log.metrics()
        await store.log.put_metrics(1, one | {"wall_seconds": 3600.0})
    await ScriptedJob(tmp_path, settings).run()
    seconds = [row["wall_seconds"] for row in rows(tmp_path)]
    assert seconds == sorted(seconds)
    assert seconds[2] > 3600.0


@pytest.mark.parametrize("crash_at", range(20, 60, 8))
async def test_a_job_that_syncs_between_episodes_goes_on_after_a_kill(tmp_path, crash_at):
    """The first weights do not wait for episodes, which wait for them."""
    rollout = {"group_size": 2, "groups_per_step": 2, "max_staleness": 2, "weight_sync": "between_episodes"}
    settings = config(steps=4, deterministic=False, rollout=rollout, checkpoint={"every_steps": 10})
    with pytest.raises(Crash):
        await ScriptedJob(tmp_path, settings, crash_at=crash_at).run()
    job = ScriptedJob(tmp_path, settings)

    async def time_passes() -> None:  # so that leases of the dead process run out
        while True:
            await asyncio.sleep(0.02)
            job.clock.advance(5)
            await job.store.episodes.expire_leases()

    passing = asyncio.create_task(time_passes())
    async with asyncio.timeout(20):
        await job.run()
    passing.cancel()
    assert rows(tmp_path)[-1]["step"] == 4
