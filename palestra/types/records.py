"""The records that cross rooms: frozen, keyword-only, every field with its shape, unit and meaning of None."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from palestra.types.calls import (
    Chat,
    Floats,
    GrammarSpan,
    Ids,
    Mask,
    MediaSpan,
    PolicyVersion,
)
from palestra.types.states import EpisodeState
from palestra.types.steps import AgentStepReward, StepTimes

EpisodeKind = Literal["train", "validation", "adhoc"]
# Beginnings of reasons of episodes that did not fail: they were left out on purpose, or their job was stopped.
ON_PURPOSE = ("not_scored", "cancelled")
FORFEIT = "forfeit"  # why an episode ended: its environment was broken by an agent's action
CONTEXT_FULL = "context_full"  # why an episode ended; in its facts also the agents whose context was full
WITHOUT_POLICY = "without_policy"  # `facts[...]` of an episode: agents that were played by no policy
UNUSED_CALLS = "unused_calls"  # `facts[...]` of an episode: calls that are not trained, by index
SOLE_AGENT = "agent"  # name of an agent that does not say its name, and who has a reward that names no agent
MAX_STEPS = "max_steps"  # `facts["termination"]` of an episode that the environment has cut off


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One input of an environment.

    Attributes:
        task_id: unique in the run.
        data: any JSON object; the server hands it to the worker that claims an episode of the task.
    """

    task_id: str
    data: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One attempt at a task, as the store keeps it.

    Attributes:
        episode_id: unique in the run.
        kind: training, validation, or ad hoc (outside the schedule, never trained on).
        group_index: position of its group in the canonical order of its kind.
        sample_index: position in its group, 0 <= sample_index < group_size.
        task: its input.
        state: of its lifecycle; see `states.TRANSITIONS`.
        fence: fencing token: grows with every claim, so that requests under an old lease are refused; 0 before the
            first.
        attempts: claims used so far.
        rewards: by agent; None until the episode is completed. Of an episode with named rewards, their weighted sum.
        step_rewards: by TimeStep; None: the reward is for the whole episode.
        step_times: by TimeStep; None: a worker outside of the server played it.
        metadata: JSON for people: what the worker handed in with the reward, beside `facts`.
        worker_id: of the newest claim.
        lease_seconds: how long a claim is valid without a call or heartbeat.
        named_rewards: the rewards of which the episode's is the weighted sum, by name; None in place of one: it was not
            scored, which is not 0. None: the episode has no named rewards.
        agent_step_rewards: of which agents `step_rewards` are the sums, in order of time; None: one agent played alone,
            or a worker has not said it.
        facts: how the episode was played, as a player of Palestra's own recorded it, or a worker that said that it was
            cut off. Of a key that a worker's `metadata` has as well, `metadata` has the worker's value.
        players: who plays a role that has a pool under the newest claim, by the role: a past version such as `white@5`,
            or the policy itself. Empty: the job has no pools.
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
        """Return whether the environment cut the episode off, by a limit of steps for instance."""
        return self.facts.get("termination") == MAX_STEPS

    @property
    def forfeited(self) -> bool:
        """Return whether an agent's action broke the environment, which is its loss."""
        return self.facts.get("termination") == FORFEIT

    @property
    def replays(self) -> int:
        """Return how many attempts have failed and were followed by another one."""
        return max(self.attempts - 1, 0)

    @property
    def full_contexts(self) -> tuple[str, ...]:
        """Return the agents whose context had no room for a reply, so that their part ended there."""
        found = self.facts.get(CONTEXT_FULL)
        return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()

    @property
    def rewards_by_policies(self) -> dict[str, float] | None:
        """Return the rewards without those of agents that were played by no policy, but drew their moves, say."""
        found = self.facts.get(WITHOUT_POLICY)
        if self.rewards is None or not isinstance(found, list):
            return self.rewards
        return {agent: reward for agent, reward in self.rewards.items() if agent not in found}

    @property
    def unused_calls(self) -> frozenset[int]:
        """Return the calls, by index, of workers that left their seat before they acted: they are not trained."""
        found = self.facts.get(UNUSED_CALLS)
        return frozenset(index for index in found if type(index) is int) if isinstance(found, list) else frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeStep:
    """One interaction with the environment: the calls it took, and how the environment answered.

    Attributes:
        index: position in the episode.
        chats: calls of the agent before it acted.
        reward: None: not scored on its own.
        observed_at: Unix seconds; with a worker outside of the server, when the first call arrived.
        acted_at: Unix seconds; if no action was given, when the last call returned.
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
    """Everything that happened in one episode: its interactions with the environment, in order."""

    episode: EpisodeRecord
    steps: tuple[TimeStep, ...]

    @property
    def chats(self) -> tuple[Chat, ...]:
        """Return every call of the episode, in the order in which their prompts were made."""
        return tuple(sorted((chat for step in self.steps for chat in step.chats), key=lambda chat: chat.index))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedEpisode:
    """A completed episode of the past that a job takes over as one of its own.

    Attributes:
        task: what was played.
        rewards: by agent.
        step_rewards: one for each TimeStep; None: the reward is for the whole episode.
        step_times: one for each TimeStep; None: not known.
        named_rewards: by name; None: the episode has none.
        metadata: kept with the episode.
        calls: in order of their index, of fence 0, with policy and versions of the job; `episode_id` is not used.
    """

    task: Task
    rewards: dict[str, float]
    step_rewards: tuple[float, ...] | None = None
    step_times: tuple[StepTimes, ...] | None = None
    named_rewards: dict[str, float | None] | None = None
    metadata: dict[str, Any]
    calls: tuple[Chat, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainSample:
    """One row: a token sequence that the engine saw, with what the loss needs at each position.

    Attributes:
        episode_id: of the episode.
        policy: the policy that is trained.
        ids: int32 [N].
        targets: int32 [N], trained at each position in place of the row's own token; None: the row's own tokens.
        media: images for which some of the ids are placeholders.
        loss_mask: bool [N], True where the token is trained: it was sampled, or could have been in place of another.
        logprobs: float32 [N], as recorded at sampling; NaN where not sampled.
        versions: int32 [N, 2] (incarnation, n); -1 where not sampled.
        calls: int32 [N], index of the call that sampled the token, or could have; -1 elsewhere.
        advantages: float32 [N], 0 where not trained.
        loss_weights: float32 [N], share in the loss; 0 where not trained.
        temperatures: float32 [N], at which the token was sampled; 1 where not sampled.
        grammars: replies in the row that had to match a grammar.
        old_logprobs: float32 [N], of the policy before the step; None: the algorithm does not need them.
        token_rewards: float32 [N], earned by single tokens, such as a penalty; None: only TimeSteps have rewards.
        reference_logprobs: float32 [N], of the reference policy; None: there is no reference.
        values: float32 [N], of the critic before the step: of the state before the token; None: there is no critic.
        returns: float32 [N], what the critic learns to say, NaN where it learns nothing; None: there is no critic.
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
    """The batch on which a step trains; committed before the step, so that a repeated step trains on the same batch.

    Attributes:
        step: number of the step, from 1.
        versions: of each policy that is trained, before the step, by its name.
        episode_ids: in canonical order: (group index, sample index).
        seed: of the job.
        config_digest: of the job's configuration.
    """

    step: int
    versions: dict[str, PolicyVersion]
    episode_ids: tuple[str, ...]
    seed: int
    config_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened in a job, for people and for clients that follow `/events`.

    Attributes:
        event_id: grows; gaps are possible.
        at: Unix seconds.
        kind: stable name, for programs.
        data: JSON.
    """

    event_id: int
    at: float
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
