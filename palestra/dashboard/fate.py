"""Why the tokens of an episode were trained or not, in words; and which call continues which."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from palestra.config import AlgorithmConfig, JobConfig, Roles
from palestra.store.browsing import EpisodeView
from palestra.tokens import TokenTrie, TrieNode, calls_of_final_answers
from palestra.types.calls import Chat
from palestra.types.records import Event, Trajectory


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether something is trained, and the reason in words."""

    trained: bool
    why: str


def episode_fate(view: EpisodeView, roles: Roles, algorithm: AlgorithmConfig, events: Sequence[Event] = ()) -> Fate:
    """Return whether an episode is trained, and why.

    Args:
        view: the episode, its step and the rewards of its group.
        roles: of the job; rewards of frozen policies do not count.
        algorithm: may compare the episodes of a group with one another.
        events: of the run, those that may be about this episode.
    """
    episode = view.trajectory.episode
    if episode.kind != "train":
        return Fate(False, f"never trained: it is {'an ad-hoc' if episode.kind == 'adhoc' else 'a validation'} episode")
    mine = [event for event in events if event.data.get("episode_id") == episode.episode_id]
    if view.step is None:
        if any(event.kind == "episode_stale" for event in mine):
            return Fate(False, "not trained: it has tokens older than rollout.max_staleness allows; it is played again")
        return Fate(False, "not trained: it is in no batch yet")
    for event in mine:
        if event.kind == "episode_untrainable":
            return Fate(False, f"in the batch of step {view.step}, and left out of it: {event.data.get('reason')}")
    rewards = [sum(roles.trained_rewards(by_agent).values()) for by_agent in view.group_rewards]
    if algorithm.smallest_group > 1 and len(set(rewards)) < 2:
        return Fate(False, f"in the batch of step {view.step}, not trained: all rewards of its group are equal")
    return Fate(
        True, f"trained in step {view.step}; rewards of its group: {', '.join(f'{reward:g}' for reward in rewards)}"
    )


def kept_calls(trajectory: Trajectory, trie: TokenTrie, config: JobConfig) -> frozenset[int]:
    """Return the indices of the calls that `algorithm.train_on` keeps, of frozen policies too.

    Args:
        trajectory: the episode.
        trie: its calls.
        config: of the run.
    """
    if config.algorithm.train_on != "final-branch":
        return frozenset(trie.chats)
    # As the learner does, by policy: a judge's call after it does not make a writer's last call an earlier one.
    own: dict[str, list[Chat]] = {}
    for chat in trajectory.chats:
        own.setdefault(chat.policy, []).append(chat)
    return frozenset().union(*(calls_of_final_answers(TokenTrie(chats), chats) for chats in own.values()))


def continued_calls(chats: Sequence[Chat], trie: TokenTrie) -> dict[int, Chat | None]:
    """Return for each call, by index, the longest earlier one that its prompt starts with all of; None: none.

    Args:
        chats: calls of an episode.
        trie: the same calls.
    """
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
    """The reasons why tokens of an episode are trained or not, by call.

    Attributes:
        episode: of the episode as a whole.
        frozen: the policies that are never trained.
        kept: indices of the calls that `algorithm.train_on` keeps.
        policies: the policy of each call, by index.
    """

    episode: Fate
    frozen: frozenset[str]
    kept: Collection[int]
    policies: Mapping[int, str] = field(default_factory=dict)

    def of_call(self, index: int) -> Fate:
        """Return whether the tokens that a call sampled are trained, and why."""
        policy = self.policies[index]
        if policy in self.frozen:
            return Fate(False, f"sampled, not trained: the policy {policy} is frozen")
        if index not in self.kept:
            return Fate(
                False, "sampled, not trained: no later call went on from it, and algorithm.train_on is final-branch"
            )
        return self.episode if self.episode.trained else Fate(False, f"sampled, {self.episode.why}")


PROMPT = "not trained: it is part of a prompt, which the model read and did not sample"
OTHER_ROW = "sampled, and context here: another row of this episode trains it, so that it is trained once"
