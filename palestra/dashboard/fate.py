"""Explains why an episode's tokens were trained or not, and which call continues which."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig, OwnAlgorithmConfig, Roles, past_of
from palestra.learner.shares import shares_of, unused_calls, without_unused
from palestra.store.browsing import EpisodeView
from palestra.tokens import TokenTrie, TrieNode, calls_of_final_answers
from palestra.types.calls import Chat
from palestra.types.records import RunEvent, Trajectory
from palestra.types.states import EpisodeState, GroupState


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether something is trained, and the reason for people."""

    trained: bool
    why: str


def episode_fates(
    view: EpisodeView, config: JobConfig, group: Sequence[Trajectory] | None, events: Sequence[RunEvent] = ()
) -> dict[str, Fate]:
    """Return for each trained policy whether an episode is trained, and why. `group`: the episodes of its group in its
    step's batch, including itself; see `group_in_batch`. None: one of them cannot be read.
    """
    # Where nothing is trained, as in an evaluation, the reason is the same for whichever policy is asked for.
    policies = config.trained_policies or (config.players.default,)
    return {policy: _fate(view, config, policy, group, events) for policy in policies}


def whole_fate(fates: Mapping[str, Fate]) -> Fate:
    """Return whether any policy trains on an episode, and why; for several policies the reason of each."""
    if len(fates) == 1 or len(set(fates.values())) == 1:
        return next(iter(fates.values()))
    said = "; ".join(f"{policy}: {fate.why}" for policy, fate in fates.items())
    return Fate(any(fate.trained for fate in fates.values()), said)


def _fate(
    view: EpisodeView, config: JobConfig, policy: str, group: Sequence[Trajectory] | None, events: Sequence[RunEvent]
) -> Fate:
    """Return whether an episode is trained by one policy, and why; see `episode_fates`."""
    episode = view.trajectory.episode
    if episode.kind != "train":
        return Fate(False, f"never trained: it is {'an ad-hoc' if episode.kind == 'adhoc' else 'a validation'} episode")
    mine = [event for event in events if event.data.get("episode_id") == episode.episode_id]
    if view.step is None:
        if any(event.kind == "episode_stale" for event in mine):
            return Fate(False, "not trained: it has tokens older than rollout.max_staleness allows; it is played again")
        return Fate(False, f"not trained: {_in_no_batch(view)}")
    if not config.updates_in(policy, view.step):
        return Fate(False, f"in the batch of step {view.step}, not trained: the policy {policy} is not updated in it")
    for event in mine:
        if event.kind == "episode_untrainable" and event.data.get("policy", policy) == policy:
            return Fate(False, f"in the batch of step {view.step}, and left out of it: {event.data.get('reason')}")
    if group is None:
        why = "what it was compared with is not known, because an episode of its group can't be read"
        return Fate(True, f"in the batch of step {view.step}; {why}")
    shares = [without_unused(share, config.players)[0] for share in shares_of(group, policy, config.players)]
    rewards = [share.episode.reward or 0.0 for share in shares]
    if not _teaches(shares, config, policy):
        why = "all rewards of its group are equal"
        if len(set(rewards)) > 1:
            why = "its group has no call whose return differs from those that it is compared with"
        return Fate(False, f"in the batch of step {view.step}, not trained: {why}")
    return Fate(
        True, f"trained in step {view.step}; rewards of its group: {', '.join(f'{reward:g}' for reward in rewards)}"
    )


def _in_no_batch(view: EpisodeView) -> str:
    """Return why an episode is in no batch."""
    if view.trajectory.episode.state is EpisodeState.DISCARDED:
        return f"it was discarded ({view.failed_reason})" if view.failed_reason else "it was discarded"
    if view.group_state is GroupState.DROPPED:
        return "its group was dropped and replaced, because too few of its episodes were completed"
    if view.group_state is GroupState.SKIPPED:
        return "its group was replaced, because there was nothing to compare in it (algorithm.dynamic_sampling)"
    return "it is in no batch yet"


def _teaches(shares: Sequence[Trajectory], config: JobConfig, policy: str) -> bool:
    """Return whether a group gets rows, as the learner decides: by returns, which may differ even if rewards do not."""
    settings = config.algorithm_of(policy)
    if settings.trains_equal_rewards or isinstance(settings, OwnAlgorithmConfig):  # a user's class is not run here
        return True
    return create_algorithm(settings, config.rollout.step_order).learns_from(shares)


def unused_reasons(trajectory: Trajectory, roles: Roles) -> dict[int, str]:
    """Return why calls are not trained that led to no action, or are an untrained agent's; by index."""
    left, unused = trajectory.episode.unused_calls, unused_calls(trajectory, roles)
    return {
        chat.index: "the worker of the seat left before it acted"
        if chat.index in left
        else f"rollout.untrained_agents names {chat.agent}"
        for chat in trajectory.chats
        if chat.index in unused
    }


def kept_calls(trajectory: Trajectory, config: JobConfig) -> frozenset[int]:
    """Return the indices of the calls that `algorithm.train_on` selects, including frozen policies'."""
    # As the learner does, by policy: a judge's call after it does not make a writer's last call an earlier one.
    own: dict[str, list[Chat]] = {}
    unused = unused_calls(trajectory, config.players)
    for chat in trajectory.chats:
        if chat.index not in unused:
            own.setdefault(chat.policy, []).append(chat)
    kept: set[int] = set()
    for policy, chats in own.items():
        final = policy in config.policies and config.algorithm_of(policy).train_on == "final-branch"
        kept |= calls_of_final_answers(TokenTrie(chats), chats) if final else {chat.index for chat in chats}
    return frozenset(kept)


def continued_calls(chats: Sequence[Chat], trie: TokenTrie) -> dict[int, Chat | None]:
    """Return for each call index the longest earlier call that its prompt completely starts with, or None."""
    ends = {trie.end(chat.index): chat for chat in reversed(chats)}  # the first of equal ones
    return {chat.index: _goes_on_from(chat, ends, trie.end(chat.index).path()) for chat in chats}


def _goes_on_from(chat: Chat, ends: Mapping[TrieNode, Chat], path: Sequence[TrieNode]) -> Chat | None:
    for node in reversed(path):
        found = ends.get(node)
        if found is None or found.policy != chat.policy:
            continue
        if node.stop <= chat.prompt_tokens and found.index < chat.index:
            return found
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFates:
    """Reasons why an episode's tokens are trained or not, by call.

    Attributes:
        kept: indices of the calls that `algorithm.train_on` selects.
        unused: why calls are not trained that led to no action, or are an untrained agent's; by index.
    """

    episode: Fate
    by_policy: Mapping[str, Fate]
    frozen: frozenset[str]
    kept: Collection[int]
    policies: Mapping[int, str] = field(default_factory=dict)
    unused: Mapping[int, str] = field(default_factory=dict)

    def of_call(self, index: int) -> Fate:
        """Return whether the tokens sampled by a call are trained, and why."""
        policy = self.policies[index]
        if policy in self.frozen:
            what = f"the policy {policy} is frozen" if past_of(policy) is None else f"{policy} is a past version"
            return Fate(False, f"sampled, not trained: {what}")
        if index in self.unused:
            return Fate(False, f"sampled, not trained: {self.unused[index]}")
        if index not in self.kept:
            return Fate(
                False, "sampled, not trained: no later call went on from it, and algorithm.train_on is final-branch"
            )
        own = self.by_policy.get(policy, self.episode)
        return own if own.trained else Fate(False, f"sampled, {own.why}")


PROMPT = "not trained: it is part of a prompt, which the model read and did not sample"
OTHER_ROW = "sampled, and context here: another row of this episode trains it, so that it is trained once"
