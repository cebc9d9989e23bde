"""Rules about replies: they are cut, they are all the same, or they never call the tools that are offered."""

from __future__ import annotations

from palestra.doctor import episodes
from palestra.doctor.rule import RECENT, Rule, RunHistory, in_each, mean, steps_of
from palestra.doctor.trend_rules import improves

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
        "more than half of what validations have gained or, before the second one, `train/reward_mean` has risen by "
        "more than a standard error and the mean has not risen to 1",
        seen=_truncated,
        means="the limit is shorter than what the model has to say, or the model does not know how to end",
        remedy="raise policies.*.sampling.max_tokens, or the limit that the calls ask for; pay nothing for a reply "
        "that is cut",
        shows=episodes.longest,
    ),
    Rule(
        code="one_reply",
        formula=f"`{SAME}` ≥ {SAME_SHARE:g} in each of {RECENT} steps, and ≤ {DIVERSE_SHARE:g} in the first",
        seen=_one_reply,
        means="the policy gives one reply to every task, however high the reward is: the tasks have one answer, or the "
        "reward pays for a text that does not depend on the task",
        remedy="read the episodes; mix tasks with other answers, and let the reward compare with the task's",
        shows=episodes.best,
    ),
    Rule(
        code="tools_unused",
        formula=f"`{OFFERED}` > 0 and `{CALLED}` = 0 in each of {RECENT} steps",
        seen=_tools_unused,
        means="the model does not know when or how to call a tool, or its calls are not in the format of its renderer",
        remedy="say in the system message when to call which tool, with an example; read a reply in `palestra episodes "
        "RUN ID`; start from a model that was trained on tools, or ask with tool_choice = 'required'",
        shows=episodes.any_of,
    ),
)
