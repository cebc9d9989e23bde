"""Bodies of the data plane, one class for each request and answer.

The gateway checks them and the client builds them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import to_json

from palestra.config import REWARD_NAME
from palestra.types.gpus import GpuUse
from palestra.types.messages import MAX_NAMED, ChatMessage
from palestra.types.summaries import HealthWarning


def _storable(data: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the JSON object if the store keeps it unchanged, so without NaN, long integers, lone surrogates."""
    try:
        json.dumps(data, allow_nan=False)
        orjson.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this JSON can't be stored: {error}") from None
    return data


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_storable)]
# One episode must not fill the memory or the store, so what a worker hands in with it is limited.
MAX_METADATA_BYTES = 65_536
# Clients ask again; a proxy may end a request that has no answer for longer.
MAX_WAIT_SECONDS = 60.0
MAX_REWARDED_AGENTS = 1_000
MAX_REWARDED_STEPS = 10_000


def _short(data: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the JSON object unchanged if it has at most `MAX_METADATA_BYTES` bytes."""
    size = len(orjson.dumps(data))
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"{size} bytes of JSON are over the limit of {MAX_METADATA_BYTES}")
    return data


# Much larger than any useful reward, and small enough that sums and squares of rewards do not overflow.
MAX_REWARD = 1e9
Reward = Annotated[float, Field(allow_inf_nan=False, strict=True, ge=-MAX_REWARD, le=MAX_REWARD)]
MAX_NAME = 200  # characters
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
RewardName = Annotated[str, Field(pattern=REWARD_NAME)]


class Body(BaseModel):
    """Base of all bodies: unknown keys are refused, so that a misspelled field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskBody(Body):
    """One task: an input of the environment, as JSON, with an id that identifies repeated uploads."""

    id: Name | None = Field(
        None,
        description="Unique in the run. None: the `id` in `data`, if that is a short text or a whole number; else made "
        "from a digest of `data`.",
    )
    data: JsonObject


class PushTasks(Body):
    """Request of `POST /tasks`: add tasks to a split. Idempotent by `chunk_id`."""

    split: Literal["train", "validation"] = "train"
    chunk_id: Name = Field(description="The client's name for this chunk; a chunk of a known name adds nothing.")
    tasks: tuple[TaskBody, ...] = Field(max_length=10_000)
    final: bool = Field(False, description="No more tasks will come, in either split; the job starts.")


class TasksPushed(Body):
    """Answer of `POST /tasks`: how many tasks the split has now."""

    split: str
    total: int


class RegisterEpisode(Body):
    """Request of `POST /register_episode`: an episode outside the schedule, recorded but never trained on."""

    task: TaskBody
    request_id: Name = Field(
        description="The client's name for this request; a repeated name returns the same episode."
    )


class EpisodeRegistered(Body):
    """Answer of `POST /register_episode`: the id for claiming the episode."""

    episode_id: str


class ClaimEpisode(Body):
    """Request of `POST /claim_episode`: get an episode to play, under a lease. Idempotent by `request_id`."""

    worker_id: Name = "worker"
    request_id: Name = Field(description="A retry with the same id gets the same claim.")
    wait_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, strict=True, description="How long to wait for an episode, at most 60 s."
    )
    allow_discard_timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, strict=True, description="Lease in seconds; None: the job's `lease_seconds`."
    )
    episode_id: Name | None = Field(None, description="The episode to claim; None: the next in order.")
    role: Name | None = Field(
        None,
        exclude_if=lambda role: role is None,
        description="Claim this seat of an episode that the server plays, and not an episode; see `seats.roles`.",
    )


class ClaimedEpisode(Body):
    """Everything that a worker needs to play an episode: its task, and a key for model calls."""

    episode_id: str
    kind: str
    task_id: str
    task: dict[str, JsonValue]
    base_url: str = Field(description="Base URL for an OpenAI client.")
    api_key: str = Field(description="Opens this episode, under this lease, and nothing else.")
    model: str = Field(description="The name to call a model by: of the policy that plays every agent without a role.")
    version: str = Field(description="Of that policy, now.")
    policies: dict[str, str] = Field(
        default_factory=dict, description="The version of each policy of the job now, by the policy's name."
    )
    max_context: int | None = Field(None, description="Most tokens of a prompt and its reply, of the model.")
    max_tokens: int | None = Field(None, description="Most tokens of a reply, of the model.")
    players: dict[str, str] = Field(
        default_factory=dict,
        exclude_if=lambda players: not players,
        description="Who plays the roles that have a pool in this episode, by the role: a past version such as "
        "`white@5`, or the policy itself.",
    )
    lease_seconds: float
    role: str | None = Field(None, description="The claimed seat; None: the whole episode was claimed.")
    history: dict[str, tuple[ChatMessage, ...]] = Field(
        default_factory=dict,
        description="Of a seat that another worker has left: its observations and actions so far, by the agent's name.",
    )


class ClaimAnswer(Body):
    """Answer of `POST /claim_episode`: `claimed` with an episode; `waiting`: none now, ask again; `finished`: the job
    has ended.
    """

    status: Literal["claimed", "waiting", "finished"]
    episode: ClaimedEpisode | None = None
    job_state: str

    @model_validator(mode="after")
    def _has_what_it_says(self) -> ClaimAnswer:
        """Refuse an answer that is `claimed` without an episode, or the reverse."""
        if (self.status == "claimed") != (self.episode is not None):
            raise ValueError("an answer has an episode if, and only if, its status is `claimed`")
        return self


class HeartbeatEpisode(Body):
    """Request of `POST /heartbeat_episode`: renew the lease of an episode while its worker makes no calls."""

    episode_id: Name


Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
EarnedBody = tuple[Annotated[int, Field(ge=0, lt=MAX_REWARDED_STEPS)], Name, Reward]
StepTimesBody = tuple[Moment, Moment | None]


class EndEpisode(Body):
    """Request of `POST /end_episode`: complete an episode with its reward.

    Repeating the same body is answered 200; another reward is answered 409.
    """

    episode_id: Name
    reward: Reward | None = Field(None, description="One reward for the episode; or `rewards`, or `named_rewards`.")
    rewards: Annotated[dict[Name, Reward], Field(min_length=1, max_length=MAX_REWARDED_AGENTS)] | None = Field(
        None, description="Rewards by agent, of at least one."
    )
    named_rewards: Annotated[dict[RewardName, Reward | None], Field(min_length=1, max_length=MAX_NAMED)] | None = Field(
        None,
        exclude_if=lambda named: named is None,
        description="Several rewards of the episode by name, of which at least one is scored: null was not scored, "
        "which is not 0. The episode's reward is their sum, weighed by `algorithm.reward_weights`; `rewards` beside "
        "them are these sums by agent.",
    )
    step_rewards: Annotated[tuple[Reward, ...], Field(max_length=MAX_REWARDED_STEPS)] | None = Field(
        None, description="Rewards by TimeStep."
    )
    metadata: Annotated[JsonObject, AfterValidator(_short)] = Field(
        default_factory=dict,
        description=f"Kept with the episode, for people; at most {MAX_METADATA_BYTES} bytes of JSON.",
    )
    truncated: bool = Field(
        False,
        exclude_if=lambda truncated: not truncated,
        description="The episode was cut off, so a critic's value of what would have followed counts.",
    )
    forfeit: bool = Field(
        False,
        exclude_if=lambda forfeit: not forfeit,
        description="The agent's own action ended the episode: the reward is its loss, and there is no other attempt.",
    )
    facts: Annotated[JsonObject, AfterValidator(_short)] | None = Field(
        None,
        exclude_if=lambda facts: facts is None,
        description="How a player of Palestra's own has played it; see `EpisodeRecord.facts`.",
    )
    agent_step_rewards: Annotated[tuple[EarnedBody, ...], Field(max_length=MAX_REWARDED_STEPS)] | None = Field(
        None,
        exclude_if=lambda earned: earned is None,
        description="Of which agents `step_rewards` are the sums, in order: TimeStep, agent, reward. Needed where "
        "several agents are rewarded and each is credited with its own rewards by time (`credit = step`).",
    )
    step_times: Annotated[tuple[StepTimesBody, ...], Field(max_length=MAX_REWARDED_STEPS)] | None = Field(
        None,
        exclude_if=lambda times: times is None,
        description="By TimeStep: when it was observed, and when the action was given (null: there was none), in Unix "
        "seconds.",
    )

    @model_validator(mode="after")
    def _earned_in_steps(self) -> EndEpisode:
        steps = len(self.step_rewards or ())
        if any(step >= steps for step, _, _ in self.agent_step_rewards or ()):
            raise ValueError(f"agent_step_rewards names a TimeStep that step_rewards, of {steps}, does not have")
        return self


class RolloutFacts(Body):
    """Answer of `GET /rollout`: what a worker that plays an environment needs to know about the job."""

    seed: int = Field(description="The job's; agents that draw do so from it.")
    default: str = Field(description="The policy that plays every agent without a role.")
    roles: dict[str, str] = Field(default_factory=dict, description="The policy of a role, by the agent's name.")
    frozen: tuple[str, ...] = Field((), description="The policies that are not trained.")
    rivals: tuple[str, ...] = Field((), description="The policies that are trained, where there are several.")
    reward_weights: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="By policy, and then by the name of a reward, its weight; 1 without one."
    )
    credits_agents: bool = Field(False, description="Whether each agent is credited with its own reward.")
    environment: str | None = Field(None, description="Name of the environment of the catalogue that the job names.")
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict, description="Of this environment.")
    agent: str | None = Field(None, description="Name of the agent that the job names; null: replies of the policy.")
    agent_settings: dict[str, bool | int | float | str] = Field(default_factory=dict, description="Of this agent.")
    system: str | None = Field(None, description="System message for environments with one agent; null: their own.")
    timeout_seconds: float | None = Field(None, description="Limit for one attempt at an episode; null: none.")
    max_picture_bytes: int | None = Field(None, description="Limit for the file of a picture; null: it is not known.")


class AbortEpisode(Body):
    """Request of `POST /abort_episode`: the episode failed, but not because of the policy.

    It has no reward and is not trained on.
    """

    episode_id: Name
    reason: str = Field("", max_length=2000)
    discard: bool = Field(False, description="True: never try it again; False: give it back for another attempt.")


class PictureKept(Body):
    """Answer of `PUT /pictures/DIGEST`: the picture is on disk, and messages may name it."""

    digest: str = Field(description="SHA-256 of the file, in hex; the name of the picture.")


class EpisodeAnswer(Body):
    """Answer of the routes that change an episode: its new state."""

    episode_id: str
    state: str


class EpisodeCalls(Body):
    """Answer of `GET /episode_calls`: the model calls under the lease of the key, so far."""

    answered: int = Field(description="Recorded calls.")
    sampled_tokens: int = Field(0, description="Tokens of their replies.")
    answer: str | None = Field(
        None, description="Text of the newest reply to an agent that is no subagent; null: no call was answered."
    )
    refused: dict[str, int] = Field(description="Calls that were refused for what they ask, by error and field.")


class EpisodeHolder(Body):
    """A worker that holds a claimed episode, and how long it has been silent."""

    episode_id: str
    worker_id: str
    claimed_seconds: float = Field(description="Since the claim, or since the server started, if that is shorter.")
    heard_seconds: float = Field(description="Since its last call or heartbeat; 0 while a call is in flight.")


class EngineWorker(Body):
    """One inference worker of a job with several."""

    name: str
    state: str = Field(description="`starting`, `ready`, `updating` (takes new weights) or `draining`.")
    requests: int = Field(description="Requests that it is answering.")
    restarts: int = Field(description="How often another one had to be started in its place.")
    process: int | None = Field(description="Number of its process; None: it is starting.")
    versions: dict[str, str] = Field(description="What it samples from, by policy, where it was given weights.")


class BriefJobStatus(Body):
    """What a running job is doing; only its process knows that."""

    state: str
    reason: str | None = Field(None, description="Why it failed or is waiting; None otherwise.")
    phase: str = Field(description="What the job is doing, in words.")
    phase_done: int | None = Field(
        None, description="Episodes of this phase that are settled; None where it plays none."
    )
    phase_due: int | None = Field(None, description="Episodes that this phase waits for; None where it plays none.")
    step: int = Field(description="Steps that are done.")
    seconds_left: float | None = Field(None, description="Estimated; None until two steps are done.")
    tokens_per_second: float = Field(
        0.0, description="Tokens of prompts and replies, of calls that ended in the last ten seconds."
    )
    ignored_fields: dict[str, int] = Field(
        {}, description="Calls with a field that had no effect, by its name, such as `reasoning_effort`."
    )
    workers: int = Field(0, description="Workers that ask for an episode or play one now.")
    policies: list[str] = Field([], description="All policies; past versions have names such as white@5.")
    gpus: list[GpuUse] = Field([], description="Graphics cards that this job may use; none of a job that uses none.")
    gpu_problem: str = Field("", description="Why there are no figures of them; empty: there are, or there is no card.")


class JobStatus(BriefJobStatus):
    """Answer of `GET /status`: the progress, health and speed of the job."""

    job: str
    kind: str = Field(description="`training`, or `inference`: a model is served.")
    steps: int
    version: str = Field(description="Of the policy that is trained, after the last step.")
    versions: dict[str, str] = Field(description="What each policy is sampled from now, by its name.")
    episodes: dict[str, int]
    held_by: list[EpisodeHolder] = Field(
        description="Workers that hold claimed episodes: the 20 that have been silent for the longest time; "
        "`episodes.claimed` counts all."
    )
    runners: int = Field(0, description="Processes of the job's own that play its environment now.")
    engine_workers: list[EngineWorker] = Field([], description="Inference workers; none where the job is the engine.")
    calls: dict[str, float]
    turn_seconds: dict[str, float] = Field(
        description="Over all calls: `pending` until sampling begins, `generating`, and `interacting` between an "
        "episode's calls, when the agent or its environment is at work."
    )
    rollouts: dict[str, int] = Field(
        description="Episodes that the server plays itself: `playing` now, and how those that ended did."
    )
    recent_reward: float | None = Field(
        description="Mean of the last 64 training episodes, without what frozen policies earned; None before the first."
    )
    recent_rewards: dict[str, float] = Field(
        {}, description="The same of each policy, where several are trained; `recent_reward` is None then."
    )
    staleness: dict[int, int] = Field(
        description="Trained tokens of the last step, by how many versions older than the policy they were."
    )
    warnings: list[HealthWarning] = Field(description="Signs that the run learns nothing, after the last step.")
    last_metrics: dict[str, float]
    run_dir: str
    numerics: dict[str, str] = Field(
        {},
        description="What computes the job: processor, libraries, threads, and `kernels`: which compiler has made the "
        "functions between matrix products, or torch's own operators, with the reason in `kernels_problem`.",
    )


class ErrorBody(Body):
    """An error in OpenAI's shape, which every OpenAI client can read."""

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorAnswer(Body):
    """The body of every answer with a status of 400 or above."""

    error: ErrorBody


def task_id_of(task: TaskBody) -> str:
    """Return the task's id, or the `id` in its data if that is a valid name, or one made from a digest of its data."""
    return task.id or name_in(task.data) or f"t{task_digest(task.data)}"


def name_in(data: Mapping[str, Any]) -> str | None:
    """Return a task's name from its own key `id`; None: its value is not a short text or a whole number."""
    given = data.get("id")
    if type(given) is str:
        return given if 0 < len(given) <= MAX_NAME else None
    if isinstance(given, bool) or not isinstance(given, str | int):
        return None
    return str(given) if 0 < len(str(given)) <= MAX_NAME else None


def task_digest(data: Mapping[str, Any]) -> str:
    """Return 15 hex digits derived from a task's data."""
    return hashlib.sha256(to_json({"data": data})).hexdigest()[:15]
