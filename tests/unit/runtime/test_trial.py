"""The trial plays and trains for real, and its numbers grow to those of the job by rules that are stated."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from palestra.config import parse_config
from palestra.envs import Environment
from palestra.envs.catalog import catalog_entry
from palestra.errors import ModelError, PalestraError
from palestra.runtime.trial import Measured, estimate_step, extrapolate, load_model, trial_config
from palestra.runtime.trial_play import LUCK, LUCK_NAME, teaching_share_of, trial_play
from palestra.types.messages import text_message
from palestra.types.records import Trajectory
from unit.building import make_chat, make_trajectory

ROW = {
    "train/episodes": 64.0,
    "train/episodes_without_tokens": 0.0,
    "rollout/truncated_share": 0.5,
    "rollout/completion_tokens": 3000.0,
    "rollout/prompt_tokens": 6400.0,
    "rollout/reused_tokens": 0.0,
    "train/merged_share": 0.0,
    "time/rollout_seconds": 6.0,
    "time/train_seconds": 4.0,
    "time/step_seconds": 10.5,
}
SEEN = Measured(
    row=ROW,
    calls=128,
    episodes=128,
    teaching_share=1.0,
    idle_bytes=10**9,
    peak_bytes=3 * 10**9,
    gpu_bytes=0,
    load_seconds=2.0,
    checkpoint_bytes=5,
)


def job(**settings):
    return parse_config({"engine": {"kind": "fake"}, "server": {"port": 0}} | settings)


def test_memory_of_engine_servers_is_added_as_it_is():
    without = extrapolate(job(), job(), SEEN, 1.0)
    found = extrapolate(job(), job(), replace(SEEN, others_bytes=5 * 10**9), 1.0)
    assert found.memory_bytes - without.memory_bytes == 5 * 10**9


def embedded(**settings):
    return parse_config({"model": "tiny-random"} | settings)


def test_the_trial_is_the_job_with_fewer_groups_and_shorter_replies(tmp_path):
    config = embedded(rollout={"group_size": 8, "groups_per_step": 64}, steps=100)
    trial = trial_config(config, tmp_path / "run")
    assert trial.rollout.groups_per_step == 8  # 64 episodes fill the engine's batch
    assert trial.policies["policy"].sampling.max_tokens == 64
    assert trial.steps == 2
    assert (trial.model_copy(update={}).rollout.group_size, trial.algorithm) == (8, config.algorithm)
    small = embedded(rollout={"group_size": 4, "groups_per_step": 2})
    assert trial_config(small, tmp_path / "run").rollout.groups_per_step == 2
    seats = embedded(environment={"name": "gomoku-duel"}, seats={"roles": ["agent", "opponent"]})
    assert trial_config(seats, tmp_path / "run").seats.roles == [], "no worker comes to a trial"


def test_a_job_as_large_as_its_trial_is_as_the_trial_was(tmp_path):
    config = embedded(policies={"p": {"sampling": {"max_tokens": 64}}}, model="tiny-random", steps=3)
    found = extrapolate(config, trial_config(config, tmp_path / "run"), SEEN, 20.0)
    assert (found.step_seconds, found.rollout_seconds, found.train_seconds) == (10.5, 6.0, 4.0)
    assert (found.completion_tokens, found.prompt_tokens, found.calls, found.episodes) == (3000, 6400, 64, 64)
    assert (found.memory_bytes, found.most_step_seconds) == (3 * 10**9, 10.5)
    assert len(found.assumptions) == 2  # of the measurement, and of the agent outside


def test_more_groups_and_longer_replies_take_longer_by_the_stated_rule(tmp_path):
    config = embedded(rollout={"groups_per_step": 32}, environment={"name": "arithmetic"})  # 1,024 tokens a reply
    found = extrapolate(config, trial_config(config, tmp_path / "run"), SEEN, 20.0)
    sampled = 3000 + 32 * (1024 - 64)  # half of the 64 calls were cut
    assert found.completion_tokens == 4 * sampled
    assert found.prompt_tokens == 4 * 6400
    assert found.rollout_seconds == pytest.approx(6.0 * 4 * sampled / 3000)
    assert found.train_seconds == pytest.approx(4.0 * 4 * (6400 + sampled) / 9400)
    assert "8 of 32 groups" in found.assumptions[1]
    assert "50% that reached it" in found.assumptions[2]


def test_only_replies_of_the_policy_that_is_trained_are_taken_to_be_longer(tmp_path):
    policies = {"p": {"sampling": {"max_tokens": 8}}, "judge": {"frozen": True, "sampling": {"max_tokens": 1024}}}
    config = embedded(policies=policies, rollout={"groups_per_step": 8}, environment={"name": "gomoku-duel"})
    found = extrapolate(config, trial_config(config, tmp_path / "run"), SEEN, 20.0)
    assert found.completion_tokens == 3000
    assert found.rollout_seconds == 6.0


def test_groups_without_different_rewards_are_not_trained(tmp_path):
    config = embedded(policies={"p": {"sampling": {"max_tokens": 64}}}, model="tiny-random")
    seen = replace(SEEN, teaching_share=0.25)
    found = extrapolate(config, trial_config(config, tmp_path / "run"), seen, 20.0)
    assert (found.train_seconds, found.most_train_seconds) == (1.0, 4.0)
    assert (found.step_seconds, found.most_step_seconds) == (7.5, 10.5)
    assert "25% of the groups" in found.assumptions[1]


@pytest.mark.parametrize("algorithm", [{"kl": {"coefficient": 0.1}}, {"entropy_coefficient": 0.01}])
def test_a_penalty_or_a_bonus_in_the_loss_trains_groups_of_equal_rewards_as_well(tmp_path, algorithm):
    config = embedded(model="tiny-random", algorithm=algorithm)
    seen = replace(SEEN, teaching_share=0.25)
    found = extrapolate(config, trial_config(config, tmp_path / "run"), seen, 20.0)
    assert found.train_seconds == found.most_train_seconds
    assert found.step_seconds == found.most_step_seconds
    assert "25% of the groups had different rewards; a penalty or a bonus trains the others" in found.assumptions[1]


def earned(group: int, number: int, reward: float | None, **more) -> Trajectory:
    """An episode in which a frozen policy plays the opponent."""
    name = f"train-{group:06d}-{number:02d}"
    found = make_trajectory(group, number, 0.0, [make_chat(name, agent="agent")])
    rewards = None if reward is None else {"agent": reward, "opponent": -reward}
    return replace(found, episode=replace(found.episode, rewards=rewards, **more))


def of_two(**algorithm):
    return job(
        policies={"policy": {}, "old": {"frozen": True}},
        roles={"opponent": "old"},
        algorithm={"name": "grpo"} | algorithm,
    )


def test_what_the_environment_gave_is_told_apart_from_luck():
    equal = [earned(0, 0, 0.7), earned(0, 1, 0.7 + LUCK), earned(0, 2, 0.7 + 3 * LUCK)]
    different = [earned(1, 0, -0.5), earned(1, 1, 0.25 + LUCK), earned(1, 2, None)]
    assert teaching_share_of(equal, of_two()) == 0.0
    assert teaching_share_of(different, of_two()) == 1.0
    assert teaching_share_of([*equal, *different], of_two()) == 0.5


def test_luck_is_taken_out_of_rewards_of_steps_and_of_rewards_by_name():
    by_steps = [earned(0, n, 0.5 + n * LUCK, step_rewards=(0.5 + n * LUCK,)) for n in range(2)]
    assert teaching_share_of(by_steps, of_two(credit="step")) == 0.0
    named = [earned(0, n, 0.5 + n * LUCK, named_rewards={"right": 0.5, LUCK_NAME: n * LUCK}) for n in range(2)]
    assert teaching_share_of(named, of_two()) == 0.0


@pytest.mark.parametrize("name", ["ppo", "rae", "reinforce_pp", "distill"])
def test_equal_rewards_teach_where_they_are_not_compared_within_a_group(name):
    equal = [earned(0, 0, 0.7), earned(0, 1, 0.7 + LUCK)]
    assert teaching_share_of(equal, of_two(name=name)) == 1.0


def test_a_row_longer_than_a_micro_batch_needs_its_memory_alone(tmp_path):
    config = embedded(policies={"p": {"sampling": {"max_tokens": 4000}}}, model="tiny-random")
    found = extrapolate(config, trial_config(config, tmp_path / "run"), SEEN, 20.0)
    assert found.memory_bytes > SEEN.peak_bytes


async def test_half_of_a_groups_episodes_are_lucky_whatever_they_earn():
    spec, rewards = trial_play(job(environment={"name": "arithmetic"})), []
    for _ in range(4):
        environment = spec.environment()
        await environment.reset(catalog_entry("arithmetic").generate("train", 1, 0)[0])
        seen = await environment.observe()
        environment.act(seen.id, text_message("assistant", "4"))
        rewards.append((await environment.observe()).reward)
    assert rewards[0] == rewards[2] != rewards[1] == rewards[3]


async def test_luck_has_a_name_of_its_own_where_rewards_have_names(monkeypatch):
    class Named(Environment):
        blocking = False

        def reset(self, task):
            return "?", {}

        def step(self, action):
            return "", {"right": 0.5, "style": None}, True, False, {}

    monkeypatch.setattr("palestra.runtime.trial_play.environment_of", lambda config: Named)
    play = trial_play(job(environment={"name": "arithmetic"}))
    rewards = []
    for _ in range(2):
        environment = play.environment()
        await environment.reset({})
        environment.act((await environment.observe()).id, text_message("assistant", "4"))
        rewards.append((await environment.observe()).reward)
    assert rewards == [{"right": 0.5, "style": None, LUCK_NAME: luck} for luck in (0.0, LUCK)]


@pytest.mark.parametrize("tasks", [None, {"n": "x" * 40}])
def test_a_job_of_workers_outside_is_tried_with_a_question_in_place_of_the_agent(tmp_path, monkeypatch, tasks):
    monkeypatch.chdir(tmp_path)
    settings = {"rollout": {"group_size": 2, "groups_per_step": 2}}
    if tasks is not None:
        (tmp_path / "tasks.jsonl").write_text(json.dumps(tasks))
        settings["tasks"] = {"train": "tasks.jsonl"}
    lines: list[str] = []
    found = estimate_step(job(**settings), lines.append, 60.0)
    assert (found.episodes, found.calls) == (4, 4)
    assert found.completion_tokens > 0
    assert (found.prompt_tokens < 1000) == (tasks is not None)
    assert found.step_seconds > 0
    assert found.checkpoint_bytes > 0
    assert lines[0] == "loading the model"
    assert len([line for line in lines if "took" in line]) == 2
    assert [path.name for path in tmp_path.iterdir()] == (["tasks.jsonl"] if tasks is not None else [])


@pytest.mark.slow
def test_a_trial_that_takes_too_long_is_given_up_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = {"kind": "fake", "delay_seconds": 30.0}
    with pytest.raises(TimeoutError):
        estimate_step(job(engine=slow, environment={"name": "arithmetic"}), lambda line: None, 0.5)
    assert list(tmp_path.iterdir()) == []


def test_what_only_a_start_shows_is_raised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PalestraError, match="own"):
        estimate_step(job(algorithm={"name": "my.module:Algorithm"}), lambda line: None, 10.0)
    load_model(job(kind="inference"), lambda line: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names_log", [True, False])
def test_the_log_that_a_message_of_a_trial_names_is_kept(tmp_path, monkeypatch, names_log):
    def refuse(config, report):
        log = config.folder.absolute() / "engine-policy-0.log"
        log.parent.mkdir(parents=True)
        log.write_text("why it did not start")
        raise ModelError(f"vLLM can't serve this model (log: {log})" if names_log else "no such model")

    monkeypatch.setattr("palestra.runtime.trial.local_job", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ModelError) as raised:
        load_model(parse_config(job(run_dir=str(tmp_path / "runs" / "x"))), print)
    kept = list(tmp_path.rglob("*.log"))
    assert [log.read_text() for log in kept] == ["why it did not start"] * names_log
    assert all(f"(log: {log})" in str(raised.value) for log in kept)
