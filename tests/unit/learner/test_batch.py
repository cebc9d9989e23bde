from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from palestra.config import GRPOConfig, Roles
from palestra.learner.batch import LEFT_OUT, rollout_metrics
from palestra.types.calls import Fork, ForkReason, PolicyVersion, VersionSpan
from palestra.types.messages import ChatMessage, FunctionCall, ToolCall
from palestra.types.records import Task, Trajectory
from unit.building import SOLE, make_chat, make_episode, make_train_batch, make_trajectory, metric_names

VERSION = PolicyVersion(0, 3)


def trajectory(group: int, sample: int, reward: float, *completions: int, fork: bool = False) -> Trajectory:
    """Calls with so many completion tokens each: one conversation, or (`fork`) each of its own."""
    chats = []
    for index, length in enumerate(completions):
        parent = chats[-1] if chats and not fork else None
        chats.append(
            make_chat(
                f"train-{group:06d}-{sample:02d}",
                index=index,
                parent=parent,
                prompt=(9, 9),
                completion=[1] * length,
                versions=(VersionSpan(PolicyVersion(0, 2), length),),
            )
        )
    return make_trajectory(group, sample, reward, chats)


def batch_of(*trajectories: Trajectory, max_tokens: int = 100, **algorithm):
    return make_train_batch(trajectories, GRPOConfig.model_validate(algorithm), max_tokens, VERSION)


def names(batch) -> list[str]:
    return [s.episode_id for s in batch.samples]


def test_rows_are_in_the_order_of_the_trajectories_with_their_groups_advantages():
    batch = batch_of(
        trajectory(0, 0, 0.0, 2), trajectory(0, 1, 1.0, 3), trajectory(4, 0, 5.0, 1), trajectory(4, 1, 1.0, 1)
    )
    assert names(batch) == ["train-000000-00", "train-000000-01", "train-000004-00", "train-000004-01"]
    two, four = 0.5 / (math.sqrt(0.5) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
    found = [float(s.advantages[s.loss_mask][0]) for s in batch.samples]
    assert found == pytest.approx([-two, two, four, -four], rel=1e-6)


def test_what_is_not_trained_has_no_advantage_and_no_weight():
    for s in batch_of(trajectory(0, 0, 0.0, 2, 3), trajectory(0, 1, 1.0, 3)).samples:
        assert (s.advantages[~s.loss_mask] == 0).all()
        assert (s.loss_weights[~s.loss_mask] == 0).all()
        assert (s.loss_weights[s.loss_mask] > 0).all()
        assert len(set(s.loss_weights[s.loss_mask].tolist())) == 1
        assert (s.advantages.dtype, s.loss_weights.dtype) == (np.float32, np.float32)


def test_groups_without_variance_are_left_out_and_counted():
    batch = batch_of(
        trajectory(0, 0, 1.0, 2),
        trajectory(0, 1, 1.0, 2),
        trajectory(1, 0, 0.0, 2),
        trajectory(1, 1, 1.0, 2),
        trajectory(2, 0, 7.0, 2),  # a group of one has nothing to be compared with (trap 2)
    )
    assert names(batch) == ["train-000001-00", "train-000001-01"]
    assert batch.metrics["train/groups_zero_variance"] == 2
    assert batch.metrics["train/episodes"] == 5
    assert batch.metrics["train/reward_mean"] == pytest.approx(2.0)
    assert batch.metrics["train/reward_std"] == pytest.approx(np.std([1, 1, 0, 1, 7]))


@pytest.mark.parametrize(
    "algorithm",
    [{"entropy_coefficient": 0.1}, {"kl": {"coefficient": 0.1}}, {"entropy_coefficient": 0.1, "kl": {}}],
)
def test_a_penalty_trains_groups_without_variance_as_all_others(algorithm):
    equal, different = [trajectory(0, n, 1.0, 2) for n in (0, 1)], [trajectory(1, n, float(n), 2) for n in (0, 1)]
    batch = batch_of(*equal, *different, **algorithm)
    assert len(batch.samples) == 4
    assert batch.metrics["train/groups_zero_variance"] == 1
    for sample in batch.samples:
        assert sample.loss_weights[sample.loss_mask].tolist() == pytest.approx([1 / 8, 1 / 8])
        assert bool(sample.advantages.any()) == sample.episode_id.startswith("train-000001")


@pytest.mark.parametrize("algorithm", [{}, {"kl": {}}, {"kl": {"coefficient": 0.0}}])
def test_what_is_only_measured_trains_no_group_without_variance(algorithm):
    assert batch_of(trajectory(0, 0, 1.0, 2), trajectory(0, 1, 1.0, 2), **algorithm).samples == []


def test_a_group_whose_rewards_differ_is_trained_though_the_one_that_called_has_the_mean_of_them():
    batch = batch_of(trajectory(0, 0, 0.25, 2), trajectory(0, 1, 0.0), trajectory(0, 2, 0.5))
    assert names(batch) == ["train-000000-00"]
    assert batch.metrics["train/groups_zero_variance"] == 0


def test_where_no_group_has_variance_there_is_nothing_to_train():
    batch = batch_of(trajectory(0, 0, 1.0, 2), trajectory(0, 1, 1.0, 2))
    assert batch.samples == []
    assert batch.metrics["rollout/completion_tokens"] == 4


def test_an_episode_in_which_nothing_was_sampled_has_no_row_and_is_counted():
    batch = batch_of(trajectory(0, 0, 1.0), trajectory(0, 1, 0.0, 2), trajectory(0, 2, 0.0, 2))
    assert names(batch) == ["train-000000-01", "train-000000-02"]
    assert batch.metrics["train/episodes_without_tokens"] == 1
    assert float(batch.samples[0].advantages.min()) < 0  # its reward is still part of the baseline


def total_weights(batch) -> dict[str, float]:
    found: dict[str, float] = {}
    for s in batch.samples:
        found[s.episode_id] = found.get(s.episode_id, 0.0) + float(s.loss_weights.sum())
    return found


@pytest.mark.parametrize("loss_agg_mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"])
def test_how_a_rollout_is_cut_into_calls_and_rows_does_not_matter(loss_agg_mode):
    """Promise 2: more calls, rows or branches never mean more weight."""
    whole = batch_of(trajectory(0, 0, 0.0, 6), trajectory(0, 1, 1.0, 3), loss_agg_mode=loss_agg_mode)
    turns = batch_of(trajectory(0, 0, 0.0, 1, 2, 3), trajectory(0, 1, 1.0, 3), loss_agg_mode=loss_agg_mode)
    rows = batch_of(trajectory(0, 0, 0.0, 1, 2, 3, fork=True), trajectory(0, 1, 1.0, 3), loss_agg_mode=loss_agg_mode)
    assert [len(b.samples) for b in (whole, turns, rows)] == [2, 2, 4]
    assert total_weights(whole) == pytest.approx(total_weights(turns))
    assert total_weights(whole) == pytest.approx(total_weights(rows))


def test_weights_are_those_of_the_loss_agg_mode_over_all_rollouts_of_the_batch():
    """Groups without variance count: a batch in which little can be learned makes a small step."""
    members = (
        trajectory(0, 0, 0.0, 2),
        trajectory(0, 1, 1.0, 6),
        trajectory(1, 0, 1.0, 4),
        trajectory(1, 1, 1.0, 4),
        trajectory(1, 2, 1.0),
    )
    assert total_weights(batch_of(*members)) == pytest.approx({"train-000000-00": 1 / 4, "train-000000-01": 1 / 4})
    assert total_weights(batch_of(*members, loss_agg_mode="token-mean")) == pytest.approx(
        {"train-000000-00": 2 / 16, "train-000000-01": 6 / 16}
    )
    assert total_weights(batch_of(*members, loss_agg_mode="seq-mean-token-sum-norm", max_tokens=50)) == pytest.approx(
        {"train-000000-00": 2 / 200, "train-000000-01": 6 / 200}
    )


def test_every_sampled_token_is_trained_once_with_what_was_recorded_of_it():
    chat = make_chat(prompt=(1, 2), completion=(3, 4), logprobs=[-0.5, -1.5])
    one = make_trajectory(0, 0, 1.0, [chat])
    batch = batch_of(one, trajectory(0, 1, 0.0, 1))
    s = batch.samples[0]
    assert s.ids.tolist() == [1, 2, 3, 4]
    assert s.logprobs[s.loss_mask].tolist() == [-0.5, -1.5]
    assert sum(int(s.loss_mask.sum()) for s in batch.samples) == batch.metrics["rollout/completion_tokens"] == 3
    assert set(s.temperatures.tolist()) == {1.0}


def test_the_rewards_of_several_agents_are_added():
    one = replace(
        trajectory(0, 0, 0.0, 1),
        episode=make_episode(0, 0, rewards={"a": 1.0, "b": 2.0}),
    )
    assert batch_of(one, trajectory(0, 1, 1.0, 1)).metrics["train/reward_mean"] == 2.0


def test_tokens_calls_and_staleness_are_measured():
    cut = make_chat(
        index=1,
        prompt=(1,),
        completion=(2,),
        finish_reason="length",
        versions=(VersionSpan(PolicyVersion(0, 3), 1),),
    )
    old = replace(cut, index=2, versions=(VersionSpan(PolicyVersion(0, 1), 1),))
    batch = batch_of(trajectory(0, 0, 0.0, 2), make_trajectory(0, 1, 1.0, [cut, old]))
    assert batch.metrics["rollout/prompt_tokens"] == 4
    assert batch.metrics["rollout/completion_tokens"] == 4
    assert batch.metrics["rollout/truncated_share"] == pytest.approx(2 / 3)
    assert batch.metrics["rollout/staleness_max"] == 2


def one_call(task: int, **changes) -> Trajectory:
    episode = make_episode(task, 0, 1.0, task=Task(task_id=f"t{task}", data={}))
    return replace(make_trajectory(task, 0, 1.0, [make_chat(**changes)]), episode=episode)


def measured(name: str, *played: Trajectory) -> float:
    return rollout_metrics(played, "policy", SOLE, GRPOConfig())[f"rollout/{name}"]


def test_replies_that_are_the_same_whatever_the_task_are_a_share():
    assert measured("same_replies_share", one_call(0), one_call(1), one_call(2)) == 1.0
    others = one_call(0), one_call(1), one_call(2, completion=(4, 6)), one_call(3)
    assert measured("same_replies_share", *others) == 0.75
    assert measured("same_replies_share", one_call(0), one_call(1), one_call(1)) == 0.0  # too few tasks


def test_calls_that_call_a_tool_are_counted_among_those_with_tools_on_offer():
    tools = ({"type": "function", "function": {"name": "f"}},)
    call = ChatMessage(role="assistant", tool_calls=(ToolCall(function=FunctionCall(name="f", arguments="{}")),))
    played = one_call(0), one_call(1, tools=tools), replace_reply(one_call(2, tools=tools), call)
    assert measured("calls_with_tools", *played) == 2.0
    assert measured("calls_of_tools", *played) == 1.0


def replace_reply(played: Trajectory, reply: ChatMessage) -> Trajectory:
    return make_trajectory(0, 0, 1.0, [replace(played.chats[0], reply=reply)])


def test_episodes_in_which_a_context_was_full_are_counted_for_the_policy_that_played_the_agent():
    full = make_trajectory(0, 1, 1.0, [make_chat()])
    full = replace(full, episode=replace(full.episode, facts={"context_full": ["judge", "agent/search"]}))
    assert batch_of(trajectory(0, 0, 0.0, 2), full).metrics["rollout/context_full_share"] == 0.5
    full = replace(full, episode=replace(full.episode, facts={"context_full": ["judge"]}))
    roles = Roles(default="policy", named={"judge": "old"}, frozen=frozenset({"old"}))
    assert rollout_metrics([full], "policy", roles, GRPOConfig())["rollout/context_full_share"] == 0.0


# Credit


def attempts(sample: int, reward: float) -> Trajectory:
    """A first call, an attempt that was given up, and the answer, which goes on from the first call."""
    name = f"train-000000-{sample:02d}"
    first = make_chat(name, prompt=(9,), completion=(1, 1), logprobs=[-1, -2])
    given_up = make_chat(name, index=1, parent=first, prompt=(8,), completion=(2, 2, 2), logprobs=[-3, -4, -5])
    answer = make_chat(name, index=2, parent=first, prompt=(7,), completion=(3,), logprobs=[-6])
    return make_trajectory(0, sample, reward, [first, given_up, answer])


def test_abandoned_calls_are_trained_unless_they_are_excluded_and_then_they_are_counted():
    everything = batch_of(attempts(0, 0.0), attempts(1, 1.0))
    assert sum(int(s.loss_mask.sum()) for s in everything.samples) == 12
    assert (everything.metrics["train/calls_abandoned"], everything.metrics["train/tokens_abandoned"]) == (0, 0)
    answers = batch_of(attempts(0, 0.0), attempts(1, 1.0), train_on="final-branch")
    assert [s.ids.tolist() for s in answers.samples] == [[9, 1, 1, 7, 3]] * 2
    assert [s.logprobs[s.loss_mask].tolist() for s in answers.samples] == [[-1, -2, -6]] * 2
    assert (answers.metrics["train/calls_abandoned"], answers.metrics["train/tokens_abandoned"]) == (2, 6)
    assert total_weights(answers) == pytest.approx(total_weights(everything))
    assert answers.metrics["rollout/completion_tokens"] == 12  # what was sampled, trained or not


def test_each_call_has_the_advantage_of_its_own_step_in_one_row():
    def walked(sample: int, *rewards: float) -> Trajectory:
        steps = trajectory(0, sample, 0.0, *[1] * len(rewards))
        return replace(steps, episode=make_episode(0, sample, 0.0, step_rewards=rewards))

    batch = batch_of(walked(0, 0.0, 4.0), walked(1, 1.0), credit="step", discount=0.5, advantage_scale="none")
    baseline = ((2.0 + 4.0) / 2 + 1.0) / 2
    assert [s.advantages[s.loss_mask].tolist() for s in batch.samples] == [[2 - baseline, 4 - baseline], [1 - baseline]]
    assert total_weights(batch) == pytest.approx({"train-000000-00": 0.5, "train-000000-01": 0.5})


def test_a_call_without_peers_has_no_advantage_and_is_counted():
    def talked(sample: int, *agents: str) -> Trajectory:
        chats = [make_chat(index=n, agent=agent, prompt=(n + 1,)) for n, agent in enumerate(agents)]
        episode = make_episode(0, sample, rewards={"a": float(sample), "b": 5.0})
        return replace(make_trajectory(0, sample, 0.0, chats), episode=episode)

    batch = batch_of(talked(0, "a", "b", "b"), talked(1, "a"), credit="agent")
    assert batch.metrics["train/calls_without_peers"] == 2
    assert [s.advantages[s.loss_mask].any() for s in batch.samples] == [True, False, False, True]
    assert total_weights(batch) == pytest.approx({"train-000000-00": 0.5, "train-000000-01": 0.5})


def test_forks_are_counted_by_reason_and_drift_is_their_share_of_all_calls():
    def forked(index: int, reason: ForkReason):
        return make_chat(index=index, prompt=(index + 1,), fork=Fork(reason=reason, call=0, message=1, position=1))

    calls = [
        make_chat(prompt=(1,)),
        forked(1, ForkReason.EDITED_MESSAGE),
        forked(2, ForkReason.NEW_CONVERSATION),
        forked(3, ForkReason.EDITED_MESSAGE),
    ]
    metrics = batch_of(make_trajectory(0, 0, 1.0, calls), trajectory(0, 1, 0.0, 2)).metrics
    assert metrics["rollout/drift_share"] == 2 / 5
    counted = {name: value for name, value in metrics.items() if name.startswith("rollout/forks_") and value}
    assert counted == {"rollout/forks_edited_message": 2, "rollout/forks_new_conversation": 1}


def test_every_metric_is_defined_and_everything_that_is_left_out_is_among_them():
    metrics = batch_of(trajectory(0, 0, 0.0, 1), trajectory(0, 1, 1.0, 2)).metrics
    assert metrics.keys() <= metric_names()
    assert {f"train/{name}" for name in (*LEFT_OUT, "calls_without_peers")} <= metrics.keys()


def test_tokens_that_were_reused_are_those_that_a_call_shares_with_an_earlier_one():
    metrics = batch_of(trajectory(0, 0, 0.0, 2, 3), trajectory(0, 1, 1.0, 1)).metrics
    assert (metrics["rollout/prompt_tokens"], metrics["rollout/reused_tokens"]) == (2 + 6 + 2, 4)


def test_without_an_episode_the_other_rows_stay_as_they_were():
    """Its tokens are in the divisor of the loss and its reward in the advantages, as if it moved nothing."""
    whole = batch_of(
        trajectory(0, 0, 0.0, 2), trajectory(0, 1, 1.0, 3), trajectory(1, 0, 5.0, 4), trajectory(1, 1, 1.0, 1)
    )
    left = whole.without({"train-000000-01"}, VERSION)
    assert names(left) == ["train-000000-00", "train-000001-00", "train-000001-01"]
    kept = [s for s in whole.samples if s.episode_id != "train-000000-01"]
    assert all(one is other for one, other in zip(left.samples, kept, strict=True))
    assert (whole.metrics["train/episodes_untrainable"], left.metrics["train/episodes_untrainable"]) == (0, 1)
    assert (whole.staleness, left.staleness) == ({1: 10}, {1: 7})
    changed = {name for name, value in left.metrics.items() if value != whole.metrics[name]}
    assert changed == {"train/episodes_untrainable"}
    assert left.without({name: "" for name in names(left)}, VERSION).samples == []


# Minibatches


def groups_of_four():
    return [
        trajectory(group, sample, float(sample if group != 2 else 0), 2 + group, 1 + sample)
        for group in range(4)
        for sample in range(2)
    ]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_minibatch_is_weighed_as_a_batch_of_its_own(mode, count):
    """Its rows are those of a batch that has its groups alone, also one that has nothing to teach."""
    everything, seen = groups_of_four(), []
    parts = iter(batch_of(*everything, loss_agg_mode=mode).parts(count, mode, np.random.default_rng(3)))
    for places in np.array_split(np.random.default_rng(3).permutation(4), count):
        if set(places) == {2}:
            continue  # no part is without rows
        alone = [t for t in everything if t.episode.group_index in places]
        wanted = batch_of(*alone, loss_agg_mode=mode).samples
        for found, expected in zip(next(parts), wanted, strict=True):
            assert found.episode_id == expected.episode_id
            np.testing.assert_allclose(found.loss_weights, expected.loss_weights, rtol=1e-6)
            seen.append(found.episode_id[:12])
    assert next(parts, None) is None
    assert sorted(set(seen)) == ["train-000000", "train-000001", "train-000003"]


def test_groups_that_teach_nothing_count_in_their_minibatchs_weights():
    whole = batch_of(*groups_of_four())
    two = whole.parts(2, "seq-mean-token-mean", np.random.default_rng(0))
    total = sum(float(sample.loss_weights.sum()) for part in two for sample in part)
    assert total == pytest.approx(2 * sum(float(sample.loss_weights.sum()) for sample in whole.samples))


def test_one_minibatch_is_the_batch_itself():
    batch = batch_of(*groups_of_four())
    (part,) = batch.parts(1, "token-mean", np.random.default_rng(0))
    assert all(a is b for a, b in zip(part, batch.samples, strict=True))
