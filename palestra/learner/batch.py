"""Turns the episodes of a manifest into the rows of the loss, in canonical order: (group index, sample index)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from palestra.algorithms.base import Algorithm, ForwardOutputs, Group, TokenAdvantages
from palestra.algorithms.named_rewards import missing_rewards, reward_means
from palestra.config import AlgorithmConfig, LossAggMode, Roles, past_of
from palestra.errors import ConfigError, InvalidAlgorithm, InvalidRequest
from palestra.learner.shares import shares_of, without_unused
from palestra.tokens import TokenTrie, calls_of_final_answers, choice_rows, part_scale, rows_of, token_weights
from palestra.trainer.base import Trainer, not_finite
from palestra.types.calls import Chat, Floats, ForkReason, PolicyVersion
from palestra.types.records import TrainSample, Trajectory

T = TypeVar("T")
Choices = Mapping[tuple[str, int], Sequence[tuple[int, ...]]]
"""Every reply that could be sampled, token by token, by the grammar of a call and its `max_tokens`."""
LEAST_TASKS = 3  # different ones, whose replies can be expected to differ
LEFT_OUT = (
    "groups_zero_variance",
    "episodes_without_tokens",
    "calls_abandoned",
    "tokens_abandoned",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows that one step trains on, and metrics of left-out data.

    Attributes:
        groups: all groups of the step; advantages of their rows are 0 until `with_advantages`.
        tokens: for each group, the trained tokens of each rollout, including those without rows.
        staleness: number of trained tokens by age: n of the policy before the step minus n of the token.
    """

    groups: list[Group]
    tokens: list[tuple[int, ...]]
    staleness: dict[int, int]
    metrics: dict[str, float]

    @property
    def samples(self) -> list[TrainSample]:
        """Return the rows of all groups, in canonical order."""
        return [row for group in self.groups for row in group.rows]

    def without(self, episodes: Collection[str], version: PolicyVersion) -> Batch:
        """Return the batch without the rows of untrainable episodes.

        Their tokens still count in the divisor of the loss, and their rewards in their groups' advantages, so that the
        other rows keep their gradient.
        """
        groups = [
            replace(group, rows=tuple(row for row in group.rows if row.episode_id not in episodes))
            for group in self.groups
        ]
        staleness = staleness_of([row for group in groups for row in group.rows], version)
        left_out = self.metrics.get("train/episodes_untrainable", 0.0) + len(episodes)
        counted = {"train/episodes_untrainable": left_out}
        metrics = self.metrics | counted | staleness_metrics(staleness)
        return replace(self, groups=groups, staleness=staleness, metrics=metrics)

    def with_advantages(self, found: TokenAdvantages, forward: ForwardOutputs) -> Batch:
        """Return the batch with the algorithm's advantages and importance weights. Both are for all rows, in order;
        rows carry the outputs that a loss reads.
        """
        rows = self.samples
        check_advantages(found, rows)
        given = []
        for number, row in enumerate(rows):
            weights = row.loss_weights
            if found.importance_weights is not None:
                weights = np.where(row.loss_mask, weights * found.importance_weights[number], np.float32(0.0))
            given.append(
                replace(
                    row,
                    advantages=np.where(row.loss_mask, found.advantages[number], np.float32(0.0)).astype(
                        np.float32, copy=False
                    ),
                    loss_weights=weights.astype(np.float32, copy=False),
                    old_logprobs=_at(forward.get("old_logprobs"), number),
                    reference_logprobs=_at(forward.get("reference_logprobs"), number),
                    values=_at(forward.get("values"), number),
                    returns=_at(found.returns, number),
                )
            )
        metrics = {f"train/{name}": value for name, value in found.metrics.items() if math.isfinite(value)}
        return replace(self, groups=self._with_rows(given), metrics=self.metrics | metrics)

    def parts(self, count: int, mode: LossAggMode, draw: np.random.Generator) -> list[list[TrainSample]]:
        """Return the rows in nonempty parts of whole groups, each weighted as its own batch.

        Groups are not split: their episodes are compared with one another, and an episode's rows belong together.
        """
        if count == 1:
            return [self.samples]
        found = []
        whole = [n for tokens in self.tokens for n in tokens]
        for chosen in np.array_split(draw.permutation(len(self.groups)), count):
            places = sorted(map(int, chosen))
            tokens = [n for place in places for n in self.tokens[place]]
            rows = [row for place in places for row in self.groups[place].rows]
            if rows:
                scale = np.float32(part_scale(tokens, whole, mode))
                found.append([replace(row, loss_weights=row.loss_weights * scale) for row in rows])
        return found

    def of_critic(self) -> Batch:
        """Return the batch whose rows only train tokens with a critic's target."""
        rows = [
            replace(row, loss_mask=row.loss_mask & np.isfinite(row.returns)) if row.returns is not None else row
            for row in self.samples
        ]
        groups = self._with_rows(rows)
        return replace(
            self, groups=[replace(g, rows=tuple(row for row in g.rows if row.loss_mask.any())) for g in groups]
        )

    def with_token_rewards(self, rewards: Sequence[Floats] | None) -> Batch:
        """Return the batch whose rows carry rewards of single tokens. Rewards are float32 [N] for each row."""
        if rewards is None:
            return self
        given = [replace(row, token_rewards=own) for row, own in zip(self.samples, rewards, strict=True)]
        return replace(self, groups=self._with_rows(given))

    def _with_rows(self, rows: Sequence[TrainSample]) -> list[Group]:
        left = iter(rows)
        return [replace(group, rows=tuple(next(left) for _ in group.rows)) for group in self.groups]

    def advantage_problems(self) -> dict[str, str]:
        """Return episodes whose advantages or returns are not finite: ids and descriptions of the position."""
        rows = self.samples
        # NaN is no problem in returns: the critic learns nothing there. One that is no return has no advantage, either.
        columns = [
            {"advantage": row.advantages}
            | ({} if row.returns is None else {"return": np.nan_to_num(row.returns, posinf=np.inf, neginf=-np.inf)})
            for row in rows
        ]
        return not_finite(rows, columns)


def make_batch(
    trajectories: Sequence[Trajectory],
    algorithm: Algorithm,
    max_tokens: int,
    version: PolicyVersion,
    policy: str,
    roles: Roles,
    choices: Choices | None = None,
) -> Batch:
    """Return the rows of a step for one policy, with loss weights.

    Groups from which nothing can be learned get no rows, and are counted.

    Such groups still count in the loss weights, as rollouts with advantage 0: a batch from which little can be learned
    makes a small step, not one that a few rollouts decide.

    Args:
        trajectories: completed episodes, in canonical order.
        algorithm: decides which groups can be learned from, and by its settings which calls are trained.
        max_tokens: the divisor of `seq-mean-token-sum-norm`.
        version: the policy before the step, from which staleness is counted.
        policy: name of the policy that is trained.
        roles: which policy plays which agent; calls and tokens of frozen policies are left out, and counted.
        choices: for an algorithm that trains `every_choice`: there is a row for each reply that a call could have
            given, and loss weights are shared by calls as otherwise by tokens. None: rows have what was sampled.
    """
    config, left_out = algorithm.config, Counter[str]()
    shares = [_used(share, roles, left_out) for share in shares_of(trajectories, policy, roles)]
    rollouts = [_rollout(share, config, left_out) for share in shares]
    shared = [rollout.tokens if choices is None else len(rollout.trained) for rollout in rollouts]
    weights = token_weights(shared, config.loss_agg_mode, max_tokens)
    # Each is forgotten when its group is done: to free all tries at once would hold up all threads.
    weighted = zip(_taken(rollouts), weights, strict=True)
    groups: list[Group] = []
    of_groups: list[tuple[int, ...]] = []
    for _, group in groupby(weighted, key=lambda pair: pair[0].trajectory.episode.group_index):
        members = list(group)
        episodes = tuple(rollout.trajectory for rollout, _ in members)
        rows: tuple[TrainSample, ...] = ()
        differs = algorithm.learns_from(episodes)
        left_out["groups_zero_variance"] += not differs
        if differs or config.trains_equal_rewards:
            rows = tuple(row for rollout, weight in members for row in _rows(rollout, weight, choices))
        groups.append(Group(trajectories=episodes, rows=rows))
        of_groups.append(tuple(rollout.tokens for rollout, _ in members))
    metrics = {f"train/{name}": float(left_out[name]) for name in LEFT_OUT}
    metrics |= token_metrics(trajectories, roles) | rollout_metrics(shares, policy, roles, config)
    return Batch(groups=groups, tokens=of_groups, staleness={}, metrics=metrics).without((), version)


def _taken(items: list[T]) -> Iterator[T]:
    """Yield the items of a list in order, and take each from the list."""
    items.reverse()
    while items:
        yield items.pop()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rollout:
    trajectory: Trajectory
    trie: TokenTrie
    trained: frozenset[int]  # indices of the calls whose tokens enter the loss
    tokens: int  # number of tokens that those calls sampled


def _rollout(trajectory: Trajectory, config: AlgorithmConfig, left_out: Counter[str]) -> _Rollout:
    chats = trajectory.chats
    trie = TokenTrie(chats)
    trained = frozenset(chat.index for chat in chats)
    if config.train_on == "final-branch":
        trained = calls_of_final_answers(trie, chats)
        abandoned = [chat for chat in chats if chat.index not in trained]
        _count_abandoned(abandoned, left_out)
    tokens = sum(len(chat.completion_ids) for chat in chats if chat.index in trained)
    left_out["episodes_without_tokens"] += not tokens  # counted even if the group's rewards are equal
    return _Rollout(trajectory=trajectory, trie=trie, trained=trained, tokens=tokens)


def _used(share: Trajectory, roles: Roles, left_out: Counter[str]) -> Trajectory:
    """Return an episode without its unused calls, and count them."""
    used, unused = without_unused(share, roles)
    _count_abandoned(unused, left_out)
    return used


def _count_abandoned(calls: Sequence[Chat], left_out: Counter[str]) -> None:
    left_out["calls_abandoned"] += len(calls)
    left_out["tokens_abandoned"] += sum(len(chat.completion_ids) for chat in calls)


def _rows(rollout: _Rollout, weight: float, choices: Choices | None) -> list[TrainSample]:
    """Return the rows of a rollout. Each of its trained tokens has the same weight, in whichever row and call it is."""
    episode_id = rollout.trajectory.episode.episode_id
    if choices is None:
        rows = rows_of(rollout.trie, rollout.trained, episode_id)
    else:
        calls = [chat for chat in rollout.trajectory.chats if chat.index in rollout.trained]
        rows = [row for chat in calls for row in choice_rows(chat, choices[choice_key(chat)], episode_id)]
    return [replace(row, loss_weights=row.loss_mask * np.float32(weight)) for row in rows]


def choice_key(chat: Chat) -> tuple[str, int]:
    """Return what determines a call's possible replies: its grammar, and its token limit."""
    return chat.sampling.grammar, chat.sampling.max_tokens


def _at(columns: Sequence[Floats] | None, number: int) -> Floats | None:
    """Return the column [N] of one row; None: there are no columns."""
    return None if columns is None else columns[number]


def check_advantages(found: TokenAdvantages, rows: Sequence[TrainSample]) -> None:
    """Raise InvalidAlgorithm unless a result has one array [N] for each row, of the row's length."""
    given = {
        "advantages": found.advantages,
        "importance_weights": found.importance_weights,
        "returns": found.returns,
    }
    for name, columns in given.items():
        shapes = None if columns is None else [np.shape(column) for column in columns]
        if shapes is not None and shapes != [row.ids.shape for row in rows]:
            raise InvalidAlgorithm(f"the algorithm's {name} have other shapes than the {len(rows)} rows: {shapes[:8]}")


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.episode.reward
    assert reward is not None, f"episode {trajectory.episode.episode_id} has no reward"
    return reward


def staleness_of(samples: Sequence[TrainSample], version: PolicyVersion) -> dict[int, int]:
    """Return the number of sampled trained tokens by age: n of a version minus n of the token."""
    sampled = [sample.versions[sample.loss_mask, 1] for sample in samples]
    ages = [version.n - versions[versions >= 0] for versions in sampled]
    found, tokens = np.unique(np.concatenate([np.zeros(0, np.int32), *ages]), return_counts=True)
    return dict(zip(map(int, found), map(int, tokens), strict=True))


def staleness_metrics(staleness: Mapping[int, int]) -> dict[str, float]:
    """Return the metrics of tokens by age, by full name."""
    return {
        "rollout/staleness_max": float(max(staleness, default=0)),
        "rollout/staleness_mean": sum(age * n for age, n in staleness.items()) / max(sum(staleness.values()), 1),
    }


def _same_replies(shares: Sequence[Trajectory]) -> float:
    """Return the share of episodes that have the same replies; 0 where too few tasks could have other ones."""
    if len({t.episode.task.task_id for t in shares}) < LEAST_TASKS:
        return 0.0
    counts = Counter(tuple(chat.completion_ids.tobytes() for chat in t.chats) for t in shares)
    return max(counts.values()) / len(shares)


def token_metrics(trajectories: Sequence[Trajectory], roles: Roles) -> dict[str, float]:
    """Return token counts of all calls, whichever policy sampled them, and of tokens without a loss, by full name."""
    calls = [chat for t in trajectories for chat in t.chats]
    frozen = [chat for chat in calls if chat.policy in roles.frozen or past_of(chat.policy) is not None]
    return {
        "train/calls_frozen": float(len(frozen)),
        "train/tokens_frozen": float(sum(len(chat.completion_ids) for chat in frozen)),
        "rollout/attempts_replayed": float(sum(t.episode.replays for t in trajectories)),
        "rollout/prompt_tokens": float(sum(c.prompt_tokens for c in calls)),
        "rollout/reused_tokens": float(sum(c.shared for c in calls)),
        "rollout/completion_tokens": float(sum(len(c.completion_ids) for c in calls)),
    }


def rollout_metrics(
    shares: Sequence[Trajectory], policy: str, roles: Roles, config: AlgorithmConfig
) -> dict[str, float]:
    """Return metrics of episodes as one trained policy has played them, by full name. `shares` is what the policy
    learns from in each; without any there are no means. `config` weights named rewards.
    """
    named = [t.episode.named_rewards for t in shares]
    rewards = [_reward(t) + more for t, more in zip(shares, missing_rewards(named, config), strict=True)]
    calls = [chat for t in shares for chat in t.chats]
    full = [
        any(roles.of_episode(t.episode.players).policy_of(agent) == policy for agent in t.episode.full_contexts)
        for t in shares
    ]
    forks = Counter(call.fork.reason for call in calls if call.fork is not None)
    offered = [chat for chat in calls if chat.tools]
    means = (
        {"train/reward_mean": float(np.mean(rewards)), "train/reward_std": float(np.std(rewards))} if rewards else {}
    )
    return {
        **means,
        "train/episodes": float(len(shares)),
        **{f"train/rewards/{name}": mean for name, mean in reward_means(named).items()},
        "rollout/truncated_share": float(np.mean([c.finish_reason == "length" for c in calls])) if calls else 0.0,
        "rollout/same_replies_share": _same_replies(shares),
        "rollout/calls_with_tools": float(len(offered)),
        "rollout/calls_of_tools": float(sum(bool(call.reply.tool_calls) for call in offered)),
        "rollout/context_full_share": sum(full) / max(len(full), 1),
        "rollout/forfeit_share": sum(t.episode.forfeited for t in shares) / max(len(shares), 1),
        "rollout/drift_share": sum(forks[reason] for reason in forks if reason.is_drift) / max(len(calls), 1),
    } | {f"rollout/forks_{reason.value}": float(forks[reason]) for reason in ForkReason}


MOST_CHOICES = 256  # replies of a call; each is a row
MOST_KNOWN = 16_384  # grammars whose choices are kept


class CallChoices:
    """Asks the trainer for the choices of each grammar once, and caches them."""

    def __init__(self, trainer: Trainer, policy: str, algorithm: str) -> None:
        self._trainer, self._policy, self._algorithm = trainer, policy, algorithm
        self._known: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = {}

    async def of(self, trajectories: Sequence[Trajectory]) -> Choices:
        """Return the choices of all calls of the policy."""
        found = {}
        for trajectory in trajectories:
            for chat in trajectory.chats:
                if chat.policy != self._policy or (key := choice_key(chat)) in found:
                    continue
                if not chat.sampling.grammar:
                    raise ConfigError(
                        f"algorithm.name is {self._algorithm!r}, which needs replies that are held to finitely many "
                        f"choices, and call {chat.index} of episode {trajectory.episode.episode_id} was not; give its "
                        "agent `choices`, or send `structured_outputs = {'choice': [...]}` with the call"
                    )
                found[key] = await self._choices(key)
        return found

    async def problems(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Return episodes with replies outside their call's choices: ids and reasons."""
        found = {}
        for trajectory in trajectories:
            try:
                choices = await self.of([trajectory])
            except InvalidRequest as error:  # or GrammarRefused: a bound was reached by a reply that was not sampled
                found[trajectory.episode.episode_id] = f"the choices of a call can't be found: {error}"
                continue
            for chat in trajectory.chats:
                if chat.policy == self._policy and tuple(chat.completion_ids.tolist()) not in choices[choice_key(chat)]:
                    found[trajectory.episode.episode_id] = (
                        f"the reply of call {chat.index} is none of those that its grammar allows"
                    )
        return found

    async def _choices(self, key: tuple[str, int]) -> tuple[tuple[int, ...], ...]:
        if key not in self._known:
            grammar, max_tokens = key
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = await self._trainer.choices(self._policy, grammar, max_tokens, MOST_CHOICES)
        return self._known[key]
