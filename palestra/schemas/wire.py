"""Bodies of the data plane, one class each way; the gateway checks them and the client builds them."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator


def _storable(data: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """What the store gives back as it came: NaN would be null, and longer numbers and lone surrogates an error."""
    try:
        json.dumps(data, allow_nan=False)
        orjson.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this JSON can't be stored: {error}") from None
    return data


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_storable)]
MAX_METADATA_BYTES = 65_536
MAX_REWARDED_AGENTS = 1_000
MAX_REWARDED_STEPS = 10_000


def _short(data: dict[str, JsonValue]) -> dict[str, JsonValue]:
    size = len(orjson.dumps(data))
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"{size} bytes of JSON are over the limit of {MAX_METADATA_BYTES}")
    return data


# Far beyond any useful reward, and far from where sums and squares of rewards overflow.
MAX_REWARD = 1e9
Reward = Annotated[float, Field(allow_inf_nan=False, strict=True, ge=-MAX_REWARD, le=MAX_REWARD)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    """Base of all bodies: unknown keys are refused, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskBody(Body):
    """One task."""

    id: Name | None = Field(None, description="None: made from the data as it is written.")
    data: JsonObject


class PushTasks(Body):
    """`POST /tasks`. Idempotent by `chunk_id`."""

    split: Literal["train", "validation"] = "train"
    chunk_id: Name = Field(description="The client's name of this chunk; the same again is a no-op.")
    tasks: tuple[TaskBody, ...] = Field(max_length=10_000)
    final: bool = Field(False, description="No more tasks will come, in either split; the job starts.")


class TasksPushed(Body):
    """How many tasks the split has now."""

    split: str
    total: int


class RegisterEpisode(Body):
    """`POST /register_episode`: an episode outside the schedule, recorded and never trained on."""

    task: TaskBody
    request_id: Name = Field(description="The client's name of this request; the same again gives the same episode.")


class EpisodeRegistered(Body):
    """Claim it with `episode_id`."""

    episode_id: str


class ClaimEpisode(Body):
    """`POST /claim_episode`."""

    worker_id: Name = "worker"
    request_id: Name = Field(description="A retry with the same id gets the same claim.")
    wait_seconds: float = Field(0.0, ge=0, allow_inf_nan=False, description="How long to wait for an episode.")
    allow_discard_timeout: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Lease in seconds; None: the job's `lease_seconds`."
    )
    episode_id: Name | None = Field(None, description="Only this episode; None: the next in order.")


class ClaimedEpisode(Body):
    """What a worker needs to play one episode."""

    episode_id: str
    kind: str
    task_id: str
    task: dict[str, JsonValue]
    base_url: str = Field(description="For an OpenAI client.")
    api_key: str = Field(description="Opens this episode, under this lease, and nothing else.")
    model: str
    version: str
    lease_seconds: float


class ClaimAnswer(Body):
    """`claimed` with an episode; `waiting`: none now, ask again; `finished`: the job is over."""

    status: Literal["claimed", "waiting", "finished"]
    episode: ClaimedEpisode | None = None
    job_state: str

    @model_validator(mode="after")
    def _has_what_it_says(self) -> ClaimAnswer:
        if (self.status == "claimed") != (self.episode is not None):
            raise ValueError("an answer has an episode if, and only if, its status is `claimed`")
        return self


class HeartbeatEpisode(Body):
    """`POST /heartbeat_episode`."""

    episode_id: Name


class EndEpisode(Body):
    """`POST /end_episode`. The same body again is answered 200; another reward 409."""

    episode_id: Name
    reward: Reward | None = Field(None, description="One reward for the episode; or `rewards`.")
    rewards: Annotated[dict[Name, Reward], Field(min_length=1, max_length=MAX_REWARDED_AGENTS)] | None = Field(
        None, description="Rewards by agent, of at least one."
    )
    step_rewards: Annotated[tuple[Reward, ...], Field(max_length=MAX_REWARDED_STEPS)] | None = Field(
        None, description="Rewards by TimeStep."
    )
    metadata: Annotated[JsonObject, AfterValidator(_short)] = Field(
        default_factory=dict, description=f"Kept with the episode; at most {MAX_METADATA_BYTES} bytes of JSON."
    )


class AbortEpisode(Body):
    """`POST /abort_episode`: it failed for a reason that is not the policy's; no reward, nothing trained."""

    episode_id: Name
    reason: str = Field("", max_length=2000)
    discard: bool = Field(False, description="True: never try it again; False: give it back for another attempt.")


class EpisodeAnswer(Body):
    """An episode after a change."""

    episode_id: str
    state: str


class EpisodeHolder(Body):
    """Who holds a claimed episode."""

    episode_id: str
    worker_id: str
    claimed_seconds: float = Field(description="Since the claim, or since the server started, if that is shorter.")
    heard_seconds: float = Field(description="Since its last call or heartbeat; 0 while a call is in flight.")


class HealthWarningBody(Body):
    """A sign that the run learns nothing, although its steps succeed."""

    code: str = Field(
        description="`no_calls`, `equal_rewards`, `no_gradient`, `updates_skipped`, `entropy_collapse`, `truncated`, "
        "`groups_dropped` or `episodes_discarded`."
    )
    step: int = Field(description="The newest step that shows it.")
    text: str = Field(description="What it means and what to do.")


class JobStatus(Body):
    """`GET /status`."""

    job: str
    kind: str = Field(description="`training`, or `inference`: a model is served.")
    state: str
    reason: str | None = Field(description="Why it failed or is waiting; None otherwise.")
    phase: str = Field(description="What it is doing, in words.")
    step: int = Field(description="Steps that are done.")
    steps: int
    version: str
    policies: list[str]
    phase_done: int | None = Field(description="Episodes of this phase that are settled; None where it plays none.")
    phase_due: int | None = Field(description="Episodes that this phase waits for; None where it plays none.")
    episodes: dict[str, int]
    held_by: list[EpisodeHolder] = Field(
        description="Who holds claimed episodes: of the 20 of which nothing was heard for the longest time; "
        "`episodes.claimed` counts them all."
    )
    workers: int = Field(description="Workers that ask for an episode or play one now.")
    calls: dict[str, float]
    tokens_per_second: float = Field(description="Prompts and replies, of calls that ended in the last ten seconds.")
    turn_seconds: dict[str, float] = Field(
        description="Over all calls: `pending` until sampling begins, `generating`, and `interacting` between an "
        "episode's calls, when the agent or its environment is at work."
    )
    rollouts: dict[str, int] = Field(
        description="Episodes that the server plays itself: `playing` now, and how those that ended did."
    )
    recent_reward: float | None = Field(description="Mean of the last 64 training episodes; None before the first.")
    staleness: dict[int, int] = Field(
        description="Trained tokens of the last step, by how many versions older than the policy they were."
    )
    warnings: list[HealthWarningBody] = Field(description="Signs that the run learns nothing, after the last step.")
    last_metrics: dict[str, float]
    seconds_left: float | None = Field(description="Estimated; None until two steps are done.")
    run_dir: str


class ErrorBody(Body):
    """OpenAI's error shape."""

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorAnswer(Body):
    """All answers of 400 and above."""

    error: ErrorBody


def task_id_of(task: TaskBody) -> str:
    """The task's id, or one made from its data."""
    return task.id or "t" + hashlib.sha256(task.model_dump_json(include={"data"}).encode()).hexdigest()[:15]
