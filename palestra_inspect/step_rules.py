"""Signs in one step, or a few consecutive ones: a step that learns nothing, or the wrong thing."""

from __future__ import annotations

from palestra.doctor.rule import RECENT, Row, Rule, RunHistory, in_each, in_each_recent, mean, steps_of
from palestra_inspect import rule_episodes
from palestra_inspect.trend_rules import improves

TRUNCATED, SAME = "rollout/truncated_share", "rollout/same_replies_share"
OFFERED, CALLED = "rollout/calls_with_tools", "rollout/calls_of_tools"
TRUNCATED_SHARE = 0.5  # a run that learns may have more replies cut, where the answer comes first
TRUNCATED_GROWTH = 0.25  # more than in the first step, which is not how the model has always replied
SAME_SHARE, DIVERSE_SHARE = 0.95, 0.5


def _truncated(history: RunHistory) -> str | None:
    recent = history.recent
    share = mean(recent, TRUNCATED) or 0.0
    if share < TRUNCATED_SHARE:
        return None
    grown = share >= history.start[0].get(TRUNCATED, 0.0) + TRUNCATED_GROWTH
    forgotten = grown and share >= 1.0 and len(history.validations) < 2  # how to end a reply
    early = len(history.rows) < min(2 * RECENT, history.job.steps) and not grown and share < 1.0
    if not forgotten and (early or improves(history)):
        return None
    return (
        f"in the last {len(recent)} steps {share:.0%} of the replies were cut at max_tokens, so rewards "
        f"({mean(recent, 'train/reward_mean'):.3g}) judge unfinished replies"
    )


def _one_reply(history: RunHistory) -> str | None:
    recent, first = history.recent, mean(history.start[:RECENT], SAME)
    if first is None or first > DIVERSE_SHARE or not in_each(recent, lambda row: row.get(SAME, 0.0) >= SAME_SHARE):
        return None
    return (
        f"{steps_of(recent)} {mean(recent, SAME):.0%} of the episodes have the same replies, although their tasks "
        f"differ; {first:.0%} had at the start"
    )


def _tools_unused(history: RunHistory) -> str | None:
    recent = history.recent
    if not in_each(recent, lambda row: row.get(OFFERED, 0.0) > 0 and not row.get(CALLED)):
        return None
    return f"{steps_of(recent)} tools were offered, and no reply called one"


REPLY_RULES = (
    Rule(
        code="truncated",
        formula=f"mean of `{TRUNCATED}` over {RECENT} steps ≥ {TRUNCATED_SHARE:g}, from step {2 * RECENT} on, or as "
        f"soon as it is 1, or {TRUNCATED_GROWTH:g} above that of the first step; not where the newest validation keeps "
        "more than half of what validations have gained or, before the second one, `train/reward_mean` more than half "
        "of what it has gained and more than a standard error, and the mean has not risen to 1",
        seen=_truncated,
        means="the limit is shorter than what the model has to say, or the model does not know how to end",
        remedy="raise policies.*.sampling.max_tokens, or the limit that the calls ask for; pay nothing for a reply "
        "that is cut",
        shows=rule_episodes.longest,
    ),
    Rule(
        code="one_reply",
        formula=f"`{SAME}` ≥ {SAME_SHARE:g} in each of {RECENT} steps, and ≤ {DIVERSE_SHARE:g} in the first",
        seen=_one_reply,
        means="the policy gives one reply to every task, however high the reward is: the tasks have one answer, or the "
        "reward pays for a text that does not depend on the task",
        remedy="read the episodes; mix tasks with other answers, and let the reward compare with the task's",
        shows=rule_episodes.best,
    ),
    Rule(
        code="tools_unused",
        formula=f"`{OFFERED}` > 0 and `{CALLED}` = 0 in each of {RECENT} steps",
        seen=_tools_unused,
        means="the model does not know when or how to call a tool, or its calls are not in the format of its renderer",
        remedy="say in the system message when to call which tool, with an example; read a reply in `palestra episodes "
        "RUN ID`; start from a model that was trained on tools, or ask with tool_choice = 'required'",
        shows=rule_episodes.any_of,
    ),
)


# Share of the entropy of the step before. An update within the clip range changes a probability by a fifth, so an
# entropy that falls to a tenth in one step is not learning: the update was far too large.
ENTROPY_SHARE = 0.1
# Nats. If the entropy is small already (a model that is sure of the right answer), a fall to a tenth is noise.
ENTROPY_FALL = 0.1
CONTEXT_FULL, FORFEITS = "rollout/context_full_share", "rollout/forfeit_share"
CONTEXT_FULL_SHARE = 0.1
FORFEIT_SHARE = 0.1
EQUAL = 1e-9  # standard deviation of rewards below which they are equal, but for rounding
DRIFT_SHARE = 0.1  # share of all calls
FORKS = "rollout/forks_"


def _no_calls(history: RunHistory) -> str | None:
    row = history.newest
    without, of = row["train/episodes_without_tokens"], row["train/episodes"]
    if not of or 2 * without < of:
        return None
    what = "called frozen policies only" if row.get("train/calls_frozen") else "never called the model"
    return f"{without:.0f} of {of:.0f} episodes of step {row['step']:.0f} {what}, so nothing is trained on them"


def _equal_rewards(history: RunHistory) -> str | None:
    recent = history.recent
    if not in_each(recent, lambda row: row["train/groups_zero_variance"] >= history.job.groups_per_step):
        return None
    if all(row["train/episodes_without_tokens"] == row["train/episodes"] for row in recent):
        return None  # `no_calls` names the cause: without calls, equal rewards follow
    return (
        f"{steps_of(recent)} all groups had equal rewards (mean {recent[-1]['train/reward_mean']:.3g}), so there was "
        "nothing to compare and no weight changed"
    )


def _no_gradient(history: RunHistory) -> str | None:
    row = history.newest
    if row["train/groups_zero_variance"] >= history.job.groups_per_step or row["train/updates_skipped"]:
        return None
    norm = row.get("train/grad_norm", row.get("train/critic_grad_norm", 0.0))  # a step may train the critic alone
    if row["train/trained_tokens"] and (norm > 0 or _moved_before(row)):
        return None
    if row.get("train/reward_std", 1.0) < EQUAL:  # of an algorithm that compares with more than the group
        return (
            f"all rewards of step {row['step']:.0f} are equal, so there was nothing to compare, and its gradient is 0"
        )
    return (
        f"rewards of step {row['step']:.0f} differ, and its gradient is 0 ({row['train/trained_tokens']:.0f} tokens "
        "were trained)"
    )


def _moved_before(row: Row) -> bool:
    """Return whether earlier updates of a step moved the policy, after which its own tokens can be clipped."""
    return row.get("train/clip_fraction", 0.0) > row.get("train/clip_fraction_on_policy", 1.0)


def _updates_skipped(history: RunHistory) -> str | None:
    row = history.newest
    if not row["train/updates_skipped"]:
        return None
    return (
        f"{row['train/updates_skipped']:.0f} update(s) of step {row['step']:.0f} were left out because their gradient "
        "was not finite"
    )


def _entropy_collapse(history: RunHistory) -> str | None:
    rows = history.last(min(len(history.rows), RECENT))
    known = [(row["step"], row["train/entropy"]) for row in rows if "train/entropy" in row]
    if len(known) < 2:
        return None
    (_, before), (step, now) = known[-2:]
    if step != history.newest["step"] or now > ENTROPY_SHARE * before or before - now < ENTROPY_FALL:
        return None
    return (
        f"the entropy of the policy fell from {before:.2g} to {now:.2g} nats in one step, so it says nearly the same "
        "whatever it is asked"
    )


def _dropped(history: RunHistory) -> str | None:
    row, due = history.newest, history.job.groups_per_step
    if row["train/groups_dropped"] < due:
        return None
    return (
        f"{row['train/groups_dropped']:.0f} groups were dropped to fill the {due} of step {row['step']:.0f}, because "
        "too many of their episodes failed or were not scored"
    )


def _discarded(history: RunHistory) -> str | None:
    row = history.newest
    if row["train/episodes_discarded"] < max(row["train/episodes"], 1):
        return None
    return (
        f"{row['train/episodes_discarded']:.0f} episodes of step {row['step']:.0f} failed for good or were not scored, "
        f"and {row['train/episodes']:.0f} are trained"
    )


def _forks_lose_tokens(history: RunHistory) -> str | None:
    recent = history.last(RECENT)
    if not in_each(recent, lambda row: row.get("rollout/drift_share", 0.0) >= DRIFT_SHARE):
        return None
    counts = {
        name.removeprefix(FORKS): sum(row.get(name, 0.0) for row in recent)
        for name in recent[-1]
        if name.startswith(FORKS) and not name.endswith("new_conversation")
    }
    most = max(counts, key=lambda name: counts[name], default="")
    why = f", most often because of {most.replace('_', ' ')}" if most and counts[most] else ""
    share = recent[-1]["rollout/drift_share"]
    return f"{steps_of(recent)} calls could not go on from the exact tokens of the call before ({share:.0%} now){why}"


STEP_RULES = (
    Rule(
        code="no_calls",
        formula="`train/episodes_without_tokens` ≥ ½ `train/episodes`",
        seen=_no_calls,
        means="the rollout asks another model, or none",
        remedy="send the calls to endpoint.base_url with endpoint.api_key, or return None for what is not to be scored",
        shows=rule_episodes.without_calls,
    ),
    Rule(
        code="equal_rewards",
        formula=f"`train/groups_zero_variance` ≥ `rollout.groups_per_step` in each of {RECENT} steps",
        seen=_equal_rewards,
        means="tasks are too hard or too easy for the model, or the reward does not see what differs",
        remedy="choose tasks that the model solves sometimes, give partial rewards, or raise rollout.group_size",
        shows=rule_episodes.of_equal_groups,
    ),
    Rule(
        code="no_gradient",
        formula="fewer than `rollout.groups_per_step` groups without variance, no update skipped, and "
        "`train/trained_tokens` = 0 or `train/grad_norm` = 0; that norm is of the last update, so not where "
        "`train/clip_fraction` > `train/clip_fraction_on_policy`: updates before have moved the policy",
        seen=_no_gradient,
        means="all tokens were left out or clipped, or there was nothing to compare",
        remedy="choose tasks that the model solves sometimes, or give partial rewards; where rewards differ, see "
        "train/calls_without_peers, train/calls_abandoned and train/clip_fraction for the reason",
        shows=rule_episodes.any_of,
    ),
    Rule(
        code="updates_skipped",
        formula="`train/updates_skipped` > 0",
        seen=_updates_skipped,
        means="the learning rate is too high, or the numbers of the trainer are too coarse",
        remedy="lower learning_rate, or set trainer.dtype = 'float32'",
        shows=rule_episodes.any_of,
    ),
    Rule(
        code="entropy_collapse",
        formula=f"`train/entropy` ≤ {ENTROPY_SHARE:g} of that of the step before, and lower by ≥ {ENTROPY_FALL:g} nats",
        seen=_entropy_collapse,
        means="an update was far too large",
        remedy="go on from an earlier checkpoint with a lower learning_rate",
        shows=rule_episodes.any_of,
    ),
    Rule(
        code="context_full",
        formula=f"`{CONTEXT_FULL}` ≥ {CONTEXT_FULL_SHARE:g} in each of {RECENT} steps",
        seen=in_each_recent(
            CONTEXT_FULL,
            CONTEXT_FULL_SHARE,
            "a context was full before the end of the episode, in {now:.0%} of the episodes",
        ),
        means="conversations grow longer than the model's context, so rewards judge episodes that were cut",
        remedy="raise policies.*.max_context, show the agent less in each turn, or limit the episode's steps; the "
        "episode's metadata (`context_full`) names the agent",
        shows=rule_episodes.longest,
    ),
    Rule(
        code="forfeits",
        formula=f"`{FORFEITS}` ≥ {FORFEIT_SHARE:g} in each of {RECENT} steps",
        seen=in_each_recent(
            FORFEITS, FORFEIT_SHARE, "{now:.0%} of the episodes were forfeits: an action broke the environment"
        ),
        means="the environment raises, hangs or ends within actions, which counts as the agent's loss",
        remedy="the episode's facts (`info`) have what was raised; an environment raises `EnvironmentFailed` where no "
        "action is to blame, and says in text what is wrong with an action",
        shows=rule_episodes.worst,
    ),
    Rule(
        code="groups_dropped",
        formula="`train/groups_dropped` ≥ `rollout.groups_per_step`",
        seen=_dropped,
        means="the environment or the agent fails, or a reward is not given",
        remedy="`palestra episodes` has the reasons",
        shows=rule_episodes.failed,
        of_job=True,
    ),
    Rule(
        code="episodes_discarded",
        formula="`train/episodes_discarded` ≥ `train/episodes`",
        seen=_discarded,
        means="the environment or the agent fails, or a reward is not given",
        remedy="`palestra episodes` has the reasons",
        shows=rule_episodes.failed,
        of_job=True,
    ),
    Rule(
        code="forks_lose_tokens",
        formula=f"`rollout/drift_share` ≥ {DRIFT_SHARE:g} in each of {RECENT} steps",
        seen=_forks_lose_tokens,
        means="the agent edits what the model said, or the chat template writes it in another way, so the calls before "
        "a fork are trained as conversations of their own",
        remedy="send messages back as they came; `palestra episodes RUN ID` shows where a call forked and why",
        shows=rule_episodes.forked,
    ),
)
