"""The metrics that every run writes to `metrics.jsonl`, each declared once with name, unit and formula.

Docs and checks use these tables. A trainer, an algorithm or a loss declares its own metrics
(`trainer.base.TRAINER_METRICS`, `Algorithm.metrics`, `Loss.metrics`); `learner.metrics.metric_tables` joins all of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from palestra.types.calls import MEANINGS, ForkReason


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of `metrics.jsonl`.

    Attributes:
        name: key in the row, such as `train/reward_mean`.
        unit: such as `tokens`, `s` or `1`.
        formula: how to compute the number, in a sentence for the docs.
    """

    name: str
    unit: str
    formula: str


def of_policy(name: str, policy: str) -> str:
    """Return the name of a policy's metric in a job that trains several: `white/train/reward_mean`."""
    return f"{policy}/{name}"


def row_of_policy(row: Mapping[str, float], policy: str, rivals: Sequence[str]) -> dict[str, float]:
    """Return a step's metrics as if a policy were the only trained one. `rivals` are all trained policies, if there are
    several; without them the row is unchanged.
    """
    own = of_policy("", policy)
    others = tuple(of_policy("", rival) for rival in rivals)
    whole = {name: value for name, value in row.items() if name in OF_THE_JOB or not name.startswith(others)}
    return whole | {name.removeprefix(own): value for name, value in row.items() if rivals and name.startswith(own)}


METRICS = (
    Metric("step", "steps", "Number of this training step, from 1."),
    Metric("version", "updates", "n of the policy version after the step."),
    Metric(
        "train/reward_mean",
        "reward",
        "Mean of the rewards of all completed episodes of the step's batch; an episode's is the sum over its agents, "
        "without those that a frozen policy plays. A named reward that was not scored counts as the mean of the scored "
        "ones.",
    ),
    Metric("train/reward_std", "reward", "Population standard deviation of the same rewards."),
    Metric(
        "train/rewards/NAME",
        "reward",
        "Mean of the named reward NAME over the batch's episodes in which it was scored; of each such name.",
    ),
    Metric("train/episodes", "episodes", "Completed episodes in the batch."),
    Metric(
        "train/groups_zero_variance",
        "groups",
        "Groups whose returns are all equal, where they are compared within the group: advantage 0, and rows only for "
        "a penalty or a bonus of entropy. Always 0 of `reinforce_pp` without `baseline = group`, `rae`, `ppo`, `a2c`, "
        "`sac`, `sft` and `distill`.",
    ),
    Metric("judge/verdicts", "verdicts", "Verdicts of the job's judge on the step's groups; of jobs with a judge."),
    Metric("judge/calls", "calls", "Requests that these verdicts took, with those that failed before."),
    Metric("judge/tokens", "tokens", "Tokens of their answered requests, of prompts and replies."),
    Metric("judge/seconds", "s", "Sum of the times from a question to its verdict; many are asked at the same time."),
    Metric("judge/failed", "episodes", "Episodes of the step that were discarded because the judge gave no verdict."),
    Metric(
        "audit/episodes", "episodes", "Episodes of the step that the audit's judge has scored; of jobs with `[audit]`."
    ),
    Metric("audit/failed", "episodes", "Episodes on which it was asked and gave no verdict; they are in no mean."),
    Metric("audit/score", "1", "Mean of its scores of the drawn episodes: weighted share of the best choices, 0 to 1."),
    Metric("audit/score_best", "1", "Mean of its scores of the audited episodes with the highest rewards."),
    Metric("audit/score_best_std", "1", "Standard deviation of the same scores."),
    Metric(
        "audit/agreement",
        "1",
        "Mean over groups of Σ (r_i - r_j)(v_i - v_j) / Σ |r_i - r_j| with rewards r and scores v, from -1 to 1: below "
        "0 the reward pays for what the audit scores low.",
    ),
    Metric(
        "audit/evidence",
        "nats",
        "Evidence that rewards and scores disagree within groups (`audit/agreement` < 0): logarithm of an e-value.",
    ),
    Metric(
        "audit/score_best_evidence",
        "nats",
        "Evidence that the audited episodes with the highest rewards have lower scores than in the best five steps "
        "before, by more than chance.",
    ),
    Metric(
        "audit/evidence/NAME", "nats", "Evidence that the sum of the other rewards is low where the reward is high."
    ),
    Metric("audit/others/NAME", "reward", "Mean of the rewards without the named reward NAME; if there are several."),
    Metric("audit/length_evidence", "nats", "Evidence that lengths agree with rewards by more than 0.5 within groups."),
    Metric(
        "audit/repeated_share", "ratio", "Share of a last reply's 8-grams of tokens that are in one to another task."
    ),
    Metric("audit/null_share", "ratio", "Share of canned replies to which the job's judge gives more than 0.5."),
    Metric("audit/null_replies", "replies", "Canned replies that it has judged, in the first of every ten steps."),
    Metric("audit/calls", "calls", "Requests to judges that the audit of the step took."),
    Metric("audit/tokens", "tokens", "Tokens of their answered requests."),
    Metric("audit/seconds", "s", "Sum of the times from a question to its verdict."),
    Metric("time/audit_seconds", "s", "Time for which the trained step has waited for its audit."),
    Metric("train/groups_dropped", "groups", "Groups of this step that lost too many episodes and were replaced."),
    Metric(
        "train/groups_skipped",
        "groups",
        "Groups of this step that had nothing to teach and were replaced (`algorithm.dynamic_sampling`).",
    ),
    Metric("train/episodes_discarded", "episodes", "Episodes of the batch's groups that were discarded."),
    Metric(
        "train/episodes_stale",
        "episodes",
        "Completed episodes with a token older than `max_staleness` allows: left out, and registered again.",
    ),
    Metric(
        "train/episodes_without_tokens",
        "episodes",
        "Completed episodes in which nothing was sampled from the trained policy: no row.",
    ),
    Metric(
        "train/episodes_untrainable",
        "episodes",
        "Episodes whose rows are left out because what was recorded of them can't be trained; the event "
        "`episode_untrainable` says why. Their tokens count in the divisor of the loss, their rewards in the "
        "advantages of their groups.",
    ),
    Metric(
        "train/calls_abandoned",
        "calls",
        "Calls that were left out because of `train_on = final-branch` or `rollout.untrained_agents`, or because the "
        "worker of a seat left before it acted.",
    ),
    Metric("train/tokens_abandoned", "tokens", "Sampled tokens of those calls."),
    Metric("train/calls_frozen", "calls", "Calls that were left out because their policy is frozen."),
    Metric("train/tokens_frozen", "tokens", "Sampled tokens of those calls."),
    Metric("train/rows", "rows", "TrainSamples that entered the loss."),
    Metric("train/trained_tokens", "tokens", "Sampled tokens that entered the loss, each once per epoch."),
    Metric(
        "train/merged_share",
        "ratio",
        "1 - tokens forwarded / tokens of the flat rows: saved by shared prefixes.",
    ),
    Metric("train/grad_norm", "1", "Global L2 norm of the gradient before clipping."),
    Metric("train/updates_skipped", "updates", "Updates left out because their gradient was not finite."),
    Metric("train/learning_rate", "1", "Learning rate of the update."),
    Metric("train/warnings", "warnings", "Signs that the run learns nothing, after this step; `/status` has them."),
    Metric("rollout/prompt_tokens", "tokens", "Prompt tokens of all calls of the batch."),
    Metric("rollout/reused_tokens", "tokens", "Prompt tokens that an earlier call of the episode has, too."),
    Metric("rollout/completion_tokens", "tokens", "Sampled tokens of all calls of the batch."),
    Metric(
        "rollout/sampled_tokens",
        "tokens",
        "Tokens that the trained policy has sampled in all completed training episodes of this step and of all steps "
        "before, also in groups that were replaced: what `token_budget` limits.",
    ),
    Metric("rollout/truncated_share", "ratio", "Share of the trained policy's calls that ended at max_tokens."),
    Metric(
        "rollout/same_replies_share",
        "ratio",
        "Largest share of the policy's episodes that have the same sampled tokens; 0 with fewer than three tasks.",
    ),
    Metric("rollout/calls_with_tools", "calls", "The policy's calls that offered it tools."),
    Metric("rollout/calls_of_tools", "calls", "Those of these calls whose reply calls a tool."),
    Metric(
        "rollout/context_full_share",
        "ratio",
        "Share of the policy's episodes in which the context of an agent that it plays was full: the episode ended "
        "there, the subagent was given up, or the environment scored a forfeit. Episodes of several agents that fail "
        "by it are in `train/episodes_discarded`, and in `/status` as `agent_failed`.",
    ),
    Metric(
        "rollout/forfeit_share",
        "ratio",
        "Share of the policy's episodes that an agent's action has broken, which is its loss.",
    ),
    Metric(
        "rollout/attempts_replayed",
        "attempts",
        "Attempts at the batch's episodes that failed and were played again, so that rewards are those of a later one.",
    ),
    Metric(
        "rollout/tokens_per_second",
        "tokens/s",
        "Prompt and completion tokens / the seconds in which the step's episodes were played: time/rollout_seconds or, "
        "with `rollout.max_staleness` above 0, those since the batch of the step before was complete. "
        "Left out of the first step that is gathered after a restart, because its episodes may have been played in "
        "part before it.",
    ),
    Metric(
        "rollout/staleness_max",
        "versions",
        "Largest n(policy before the step) - n(token) over trained tokens.",
    ),
    Metric("rollout/staleness_mean", "versions", "Mean of the same."),
    Metric(
        "rollout/drift_share",
        "ratio",
        "Calls of the trained policy that went on from an earlier one, and could not start with its exact tokens / all "
        "of its calls.",
    ),
    *(
        Metric(f"rollout/forks_{reason.value}", "calls", f"Calls that forked: {MEANINGS[reason]}.")
        for reason in ForkReason
    ),
    Metric(
        "time/rollout_seconds",
        "s",
        "The step's wait for its episodes. With `rollout.max_staleness` above 0 they are "
        "played while earlier steps are trained as well, so it is shorter than they took.",
    ),
    Metric("time/train_seconds", "s", "Forward, backward and optimizer."),
    Metric("time/publish_seconds", "s", "Handing the weights to the engine."),
    Metric(
        "time/checkpoint_seconds",
        "s",
        "Writing a checkpoint, which goes on beside the next rollout; on the row of the step in which it ended.",
    ),
    Metric("time/step_seconds", "s", "The whole step, evaluation left out."),
    Metric("validation/reward_mean", "reward", "Mean reward of the scored validation episodes, greedy."),
    Metric(
        "validation/rewards/NAME",
        "reward",
        "Mean of the named reward NAME over the validation episodes in which it was scored; of each such name.",
    ),
    Metric(
        "validation/win_rate",
        "ratio",
        "With a relative judge: mean over the scored tasks of 1 where the reply is better than that of the first "
        "validation, which is of version 0, 0.5 where the judge's two orders disagree or the replies are equal, and 0 "
        "where it is worse.",
    ),
    Metric(
        "validation/win_rate_low",
        "ratio",
        "Lower bound of the 95 % interval of `validation/win_rate` over tasks: Tango's score interval of paired "
        "proportions, which without ties is Wilson's.",
    ),
    Metric("validation/win_rate_high", "ratio", "Upper bound of that interval."),
    Metric("validation/scored", "episodes", "Validation episodes that got a reward."),
    Metric("validation/total", "episodes", "Validation episodes in all; the mean is over `scored` of them."),
    Metric("validation/replies", "calls", "Replies in the validation episodes."),
    Metric("validation/replies_cut", "calls", "Those of these replies that ended at max_tokens."),
    Metric(
        "validation/attempts_replayed",
        "attempts",
        "Attempts at the validation episodes that failed and were played again, so that the mean is of later ones.",
    ),
    Metric("time/validation_seconds", "s", "The whole evaluation."),
    Metric("wall_seconds", "s", "Seconds since the job was first started, without the time it was stopped."),
)

WIN_RATE = "validation/win_rate"
NORMAL_95 = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations

# Metrics that are not of one policy, and so have no policy's name before theirs where several policies are trained.
OF_THE_JOB = frozenset(
    {
        "step",
        "train/groups_dropped",
        "train/groups_skipped",
        "train/episodes_discarded",
        "train/episodes_stale",
        "train/calls_frozen",
        "train/tokens_frozen",
        "train/warnings",
        "rollout/prompt_tokens",
        "rollout/reused_tokens",
        "rollout/completion_tokens",
        "rollout/sampled_tokens",
        "rollout/tokens_per_second",
        "time/rollout_seconds",
        "time/publish_seconds",
        "time/checkpoint_seconds",
        "time/step_seconds",
        "time/validation_seconds",
        "validation/scored",
        "validation/total",
        "validation/replies",
        "validation/replies_cut",
        "validation/attempts_replayed",
        "rollout/attempts_replayed",
        "wall_seconds",
    }
)


def win_rate_words(row: Mapping[str, float]) -> str:
    """Return the win rate of a row with its interval; "" if it has none."""
    if WIN_RATE not in row:
        return ""
    return f"win rate {row[WIN_RATE]:.2f} ({row[f'{WIN_RATE}_low']:.2f} to {row[f'{WIN_RATE}_high']:.2f})"


def of_policies(row: Mapping[str, float], name: str) -> dict[str, float]:
    """Return a metric of each policy that reported it, by policy; "" for the only trained one. `name` is that of the
    metric in a job that trains one policy, such as `train/reward_mean`.
    """
    found = {"": row[name]} if name in row else {}
    behind = of_policy(name, "")
    return found | {
        whole.removesuffix(behind): value
        for whole, value in row.items()
        if whole.endswith(behind) and "/" not in whole.removesuffix(behind)
    }


def names_of_policies(rows: Iterable[Mapping[str, float]], name: str) -> list[str]:
    """Return the keys under which rows have a metric: its own name, and one for each of several trained policies."""
    policies = dict.fromkeys(policy for row in rows for policy in of_policies(row, name))
    return [of_policy(name, policy) if policy else name for policy in policies]


def by_policy(row: Mapping[str, float], policy: str) -> dict[str, float]:
    """Return one policy's metrics, its own ones prefixed with its name."""
    return {name if name in OF_THE_JOB else of_policy(name, policy): value for name, value in row.items()}
