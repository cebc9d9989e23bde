"""Records shared by packages: frozen, keyword-only, with shapes, units and the meaning of None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from palestra.types.calls import (
    AgentStepReward,
    Chat,
    Floats,
    GrammarSpan,
    Ids,
    Mask,
    MediaSpan,
    PolicyVersion,
    StepTimes,
)
from palestra.types.states import EpisodeState

EpisodeKind = Literal["train", "validation", "adhoc"]
# Beginnings of reasons of episodes that did not fail: they were left out on purpose, or their job was stopped.
ON_PURPOSE = ("not_scored", "cancelled")
JUDGE_FAILED = "judge_failed"  # beginning of the reason of an episode without a verdict
FORFEIT = "forfeit"  # why an episode ended: its environment was broken by an agent's action
CONTEXT_FULL = "context_full"  # why an episode ended; in its facts also the agents whose context was full
WITHOUT_POLICY = "without_policy"  # `facts[...]` of an episode: agents that were played by no policy
UNUSED_CALLS = "unused_calls"  # `facts[...]` of an episode: calls that are not trained, by index
SOLE_AGENT = "agent"  # name of an agent that does not say its name, and who has a reward that names no agent
REFUSED_CALLS = "refused_calls"  # `facts[...]` of an episode: refused model calls, by error and field
MAX_STEPS = "max_steps"  # `facts["termination"]` of an episode that the environment has cut off


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One input of an environment.

    Attributes:
        data: any JSON object; workers get it when they claim an episode of the task.
    """

    task_id: str
    data: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One attempt at a task, in the store.

    Attributes:
        kind: training, validation, or ad hoc (outside the schedule, never trained on).
        group_index: position of its group in the canonical order of its kind.
        sample_index: position in its group, 0 <= sample_index < group_size.
        fence: fencing token: grows with every claim, so that requests under an old lease are refused; 0 before the
            first.
        rewards: by agent, weighted sums if they are named; None until the episode is completed.
        step_rewards: by TimeStep; None: the reward is for the whole episode.
        step_times: by TimeStep; None: an external worker played it.
        metadata: JSON for people, from the worker with the reward.
        lease_seconds: how long a claim is valid without a call or heartbeat.
        named_rewards: summands of the episode's reward, by name; None in place of one: not scored, which differs from
            0. None: no named rewards.
        agent_step_rewards: summands of `step_rewards` by agent, in order of time; None: one agent played, or a worker
            did not report them.
        facts: how the episode was played, recorded by Palestra's own players, or by a worker that reported it as cut
            off. `metadata` wins for keys in both.
        players: the policy of each role with a pool under the newest claim: a past version such as `white@5`, or the
            policy itself. Empty: the job has no pools.
    """

    episode_id: str
    kind: EpisodeKind
    group_index: int
    sample_index: int
    task: Task
    state: EpisodeState
    fence: int
    attempts: int
    rewards: dict[str, float] | None
    step_rewards: tuple[float, ...] | None
    step_times: tuple[StepTimes, ...] | None
    metadata: dict[str, Any]
    worker_id: str | None
    lease_seconds: float
    named_rewards: dict[str, float | None] | None = None
    agent_step_rewards: tuple[AgentStepReward, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    players: dict[str, str] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """Return the sum of the agents' rewards; None until the episode is completed."""
        return None if self.rewards is None else float(sum(self.rewards.values()))

    @property
    def truncated(self) -> bool:
        """Return whether the environment cut the episode off, for example by a step limit."""
        return self.facts.get("termination") == MAX_STEPS

    @property
    def forfeited(self) -> bool:
        """Return whether an agent's action broke the environment, which is its loss."""
        return self.facts.get("termination") == FORFEIT

    @property
    def replays(self) -> int:
        """Return the number of failed attempts that were retried."""
        return max(self.attempts - 1, 0)

    @property
    def full_contexts(self) -> tuple[str, ...]:
        """Return the agents whose context was full, so that their part ended there."""
        found = self.facts.get(CONTEXT_FULL)
        return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()

    @property
    def rewards_by_policies(self) -> dict[str, float] | None:
        """Return the rewards of agents played by policies, without random agents, for example."""
        found = self.facts.get(WITHOUT_POLICY)
        if self.rewards is None or not isinstance(found, list):
            return self.rewards
        return {agent: reward for agent, reward in self.rewards.items() if agent not in found}

    @property
    def unused_calls(self) -> frozenset[int]:
        """Return the indices of calls by external players that left before they acted; these are not trained on."""
        found = self.facts.get(UNUSED_CALLS)
        return frozenset(index for index in found if type(index) is int) if isinstance(found, list) else frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """One interaction with the environment: its calls, and the environment's answer.

    Attributes:
        chats: calls of the agent before it acted.
        reward: None: not scored on its own.
        observed_at: Unix seconds; for an external worker, when the first call arrived.
        acted_at: Unix seconds; without an action, when the last call returned.
        terminated: whether the episode ended here.
        truncated: whether the episode was cut off here.
    """

    index: int
    chats: tuple[Chat, ...]
    reward: float | None
    observed_at: float
    acted_at: float
    terminated: bool
    truncated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """All interactions with the environment in one episode, in order."""

    episode: EpisodeRecord
    steps: tuple[TimeStep, ...]

    @property
    def chats(self) -> tuple[Chat, ...]:
        """Return all calls of the episode, in the order in which their prompts were made."""
        return tuple(sorted((chat for step in self.steps for chat in step.chats), key=lambda chat: chat.index))


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeEnd:
    """The result of an episode: a worker's report at its end, or that of a judge.

    Attributes:
        step_rewards: one per TimeStep; None: the reward is for the whole episode.
        step_times: one per TimeStep; None: unknown.
        named_rewards: terms of the weighted sum `rewards`, if any.
        agent_step_rewards: terms of the sums `step_rewards`, if known and needed.
        refused: refused model calls, which the server has counted; not part of the worker's report.
    """

    rewards: Mapping[str, float]
    step_rewards: Sequence[float] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    step_times: Sequence[StepTimes] | None = None
    named_rewards: Mapping[str, float | None] | None = None
    agent_step_rewards: Sequence[AgentStepReward] | None = None
    facts: Mapping[str, Any] | None = None
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedEpisode(EpisodeEnd):
    """A completed past episode that a job adopts as its own.

    Attributes:
        calls: in order of their index, of fence 0, with policy and versions of the job; `episode_id` is not used.
    """

    task: Task
    calls: tuple[Chat, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainSample:
    """One row: a token sequence that the engine processed, with the loss's inputs at each position.

    Attributes:
        ids: int32 [N].
        targets: int32 [N], trained at each position instead of the row's own token; None: the row's own tokens.
        media: images for some of the ids as placeholders.
        loss_mask: bool [N], whether the token is trained: it was sampled, or could have been instead of another.
        logprobs: float32 [N], recorded at sampling; NaN where not sampled.
        versions: int32 [N, 2] (incarnation, n); -1 where not sampled.
        calls: int32 [N], index of the call that sampled the token, or could have; -1 elsewhere.
        advantages: float32 [N], 0 where not trained.
        loss_weights: float32 [N], 0 where not trained.
        temperatures: float32 [N], at sampling; 1 where not sampled.
        old_logprobs: float32 [N], of the policy before the step; None: the algorithm does not need them.
        token_rewards: float32 [N], of single tokens, such as a penalty; None: only TimeSteps have rewards.
        reference_logprobs: float32 [N]; None: no reference.
        values: float32 [N], of the critic before the step, for the state before the token; None: no critic.
        returns: float32 [N], the critic's targets, NaN where there is none; None: no critic.
    """

    episode_id: str
    policy: str
    ids: Ids
    media: tuple[MediaSpan, ...] = ()
    loss_mask: Mask
    logprobs: Floats
    versions: Ids
    calls: Ids
    advantages: Floats
    loss_weights: Floats
    temperatures: Floats
    grammars: tuple[GrammarSpan, ...] = ()
    old_logprobs: Floats | None = None
    token_rewards: Floats | None = None
    reference_logprobs: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    targets: Ids | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchManifest:
    """The batch of a training step; committed before the step, so that a repeated step trains on the same batch.

    Attributes:
        step: from 1.
        versions: of each trained policy before the step, by name.
        episode_ids: in canonical order: (group index, sample index).
    """

    step: int
    versions: dict[str, PolicyVersion]
    episode_ids: tuple[str, ...]
    seed: int
    config_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEvent:
    """An event of a job, for people and for clients that follow `/events`.

    Attributes:
        at: Unix seconds.
        data: JSON.
    """

    event_id: int
    at: float
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


AUDIT = "audit: "  # before the name of a judge whose verdicts are no rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictKey:
    """What a judge was asked; the store has one verdict of a key.

    Attributes:
        members: episodes that are judged together, each with the fence under which it was played.
        rubric: digest of what is asked.
        judge: who is asked, with its version.
        ordering: number of the order in which the judge sees the members.
    """

    kind: EpisodeKind
    group_index: int
    members: tuple[tuple[str, int], ...]
    rubric: str
    judge: str
    ordering: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a judge has said.

    Attributes:
        reasons: by episode, by name; without the names for which the judge gave none.
        calls: requests that it took, failed ones included.
        tokens: of the answered requests, prompts and replies.
    """

    scores: Mapping[str, Mapping[str, float]]
    reasons: Mapping[str, Mapping[str, str]]
    calls: int = 1
    tokens: int = 0
    seconds: float = 0.0
