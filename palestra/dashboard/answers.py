"""Answers of the page's routes, as JSON: one class each."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue, PlainSerializer

from palestra.config import PolicyConfig
from palestra.config.budget import exact_money, shown_money
from palestra.types.records import RunEvent
from palestra.types.summaries import EpisodeSummary, Examination, HealthWarning, ShownRecord
from palestra.types.wire import BriefJobStatus


class LiveState(BriefJobStatus, ShownRecord):
    """State of a running job for its page."""

    calls_in_flight: int = 0
    requests_waiting: int = Field(0, description="Of the engines: requests that have not begun.")
    requests_running: int = Field(0, description="Of the engines: requests whose prompt or reply is being computed.")
    kv_bytes_used: int = Field(0, description="Keys and values that requests have reserved, or that are kept.")
    kv_bytes: int = Field(0, description="The most that they may be; 0: the engines have none.")
    checkpoints: list[str] = Field(
        [],
        description="That it can answer as, too, after `POST /v1/checkpoints/{name}`; of each policy the newest first.",
    )


class RunAnswer(ShownRecord):
    """A run in a list: its progress and its results."""

    run: str = Field(description="Stands for the run in addresses.")
    title: str
    folder: str
    kind: str = "training"
    state: str = Field(description="`running`, `completed`, `failed`, `stopped`, or `unreadable`.")
    reason: str | None = Field(None, description="Why it failed, or why it can't be read.")
    step: int = 0
    steps: int = 0
    models: dict[str, str] = Field({}, description="Model of each policy.")
    reward: float | None = Field(None, description="train/reward_mean of the newest step.")
    validation: float | None = Field(None, description="validation/reward_mean of the newest evaluation.")
    rewards: dict[str, float] = Field({}, description="`reward` of each policy, where several are trained.")
    validations: dict[str, float] = Field({}, description="`validation` of each policy, where several are trained.")
    seconds: float | None = Field(None, description="wall_seconds of the newest step.")
    seconds_per_step: float | None = Field(None, description="Mean of the last ten steps.")
    seconds_left: float | None = Field(None, description="Of a running job: the remaining steps at that pace.")
    tokens_per_second: float | None = Field(None, description="rollout/tokens_per_second of the newest step.")
    episodes: dict[str, dict[str, int]] = Field({}, description="How many episodes there are, by kind and state.")
    warnings: list[HealthWarning] = Field([])
    store_bytes: int = Field(0, description="Of run.db and its log of writes.")
    disk_free_bytes: int | None = Field(None, description="Free room on the disk of the run, in whole 64 MiB.")
    damaged: list[int] = Field([], description="Steps, of the newest 200, whose rows of metrics can't be read.")
    started_at: float | None = Field(None, description="Unix seconds of the first event.")
    changed_at: float | None = Field(None, description="Unix seconds of the newest event.")
    serve: str = Field("", description="Command that serves what the run has trained, to talk to it.")
    last_event: int = Field(0, description="Number of the newest event; a stream opened after it gives the later ones.")
    live: LiveState | None = None


class RunsAnswer(ShownRecord):
    """All runs of the page."""

    runs: list[RunAnswer]
    version: str = Field(description="Of Palestra.")
    default_model: str = Field(
        PolicyConfig.model_fields["model"].default, description="Of a policy whose configuration names no model."
    )


class MetricsAnswer(ShownRecord):
    """Metrics by step, in columns."""

    run: str
    rows: int
    columns: dict[str, list[float | None]] = Field(description="By name; None where a step has no such number.")
    units: dict[str, str] = Field(description="Unit of each metric that Palestra knows.")
    formulas: dict[str, str] = Field(description="How each of them is computed, in a sentence.")
    damaged: list[int] = Field(description="Steps whose rows can't be read; the columns lack them.")
    last_event: int = Field(description="Number of the newest event that the columns contain.")


def _units(money: int | str) -> int:
    return int(money.replace(".", "")) if isinstance(money, str) else money


class Cost(ShownRecord):
    """What something has cost."""

    name: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    ms: int = Field(0, description="Milliseconds of the run, on all devices of the job.")
    money: Annotated[int, BeforeValidator(_units), PlainSerializer(exact_money, return_type=str)] = Field(
        0, description="In the currency of `[prices]`: an exact decimal number."
    )
    shown: str = Field(default_factory=lambda known: shown_money(known["money"]), description="`money`, rounded.")


class CostsAnswer(ShownRecord):
    """What a run has cost so far. Each list adds up to the total."""

    run: str
    counted: bool = Field(description="Whether calls are in it; they are where a job has `[prices]` or a `[budget]`.")
    priced: bool = Field(description="Whether the job has `[prices]`; without them, money is 0.")
    total: Cost
    phases: list[Cost]
    payees: list[Cost] = Field(description="By policy, or server that was asked, and the time of `(devices)`.")
    episodes: list[Cost] = Field([])


class SettingsAnswer(ShownRecord):
    """The configuration of a run."""

    run: str
    config: dict[str, JsonValue] = Field(description="As config.toml has it, defaults included.")
    changed: list[str] = Field(description="Dotted keys that differ from their defaults.")


class FindingsAnswer(Examination):
    """The doctor's findings for a run."""

    run: str
    rules: int = Field(description="How many rules were asked.")


class EventsAnswer(ShownRecord):
    """Events of a run, newest first."""

    run: str
    events: list[RunEvent]
    before: int | None = Field(description="Where the next page begins; None: there are no older ones.")


class EpisodesAnswer(ShownRecord):
    """A page of a search for episodes, newest first."""

    run: str
    episodes: list[EpisodeSummary]
    trained_in: dict[str, int] = Field({}, description="The step whose batch has an episode, by its id.")
    following: str | None = Field(description="`before` of the next page; None: there is nothing more.")
    looked_at: int = Field(description="How many episodes were looked at for this page.")


class GroupLine(ShownRecord):
    """A group of a step."""

    kind: str
    group_index: int
    task_id: str
    task: str = Field(description="The beginning of its task, as JSON.")
    state: str
    episodes: list[EpisodeSummary]


class StepAnswer(ShownRecord):
    """A step: its metrics, its groups, and left-out episodes."""

    run: str
    step: int
    steps: int
    row: dict[str, float] = Field(description="Its row of metrics.jsonl; empty until it is finished.")
    versions: dict[str, str] = Field(description="Of the policies before the step; empty until its batch is fixed.")
    batch: list[str] = Field(description="Ids of the episodes that it trains.")
    groups: list[GroupLine]
    validation: list[GroupLine] = Field(description="Groups of the evaluation after the step.")
    events: list[RunEvent] = Field(description="What was left out of the step, and warnings.")


class SlowCall(ShownRecord):
    """A slow model call."""

    episode_id: str
    call: int
    agent: str
    seconds: float
    ended: float = Field(description="Unix seconds.")


class SlowCallsAnswer(ShownRecord):
    """The slowest of the newest calls, slowest first."""

    run: str
    calls: list[SlowCall]


class GroupMember(ShownRecord):
    """An episode within its group."""

    line: EpisodeSummary
    trained: bool
    why: str
    advantage: tuple[float, float] | None = Field(None, description="Least and most of its tokens; None: not known.")
    weight: float | None = Field(
        None, description="Loss weight of each of its tokens; None: not known, or each policy has another."
    )
    mean_logprob: float | None = None
    prompt: str = Field("", description="The end of the first prompt: its last message.")
    reply: str = Field("", description="The last reply, or its beginning.")
    seconds: float | None = Field(None, description="From the first call to the end of the last.")


class GroupAnswer(ShownRecord):
    """The episodes of one task, side by side."""

    run: str
    kind: str
    group_index: int
    step: int
    task_id: str
    task: dict[str, JsonValue]
    task_cut: int = Field(0, description="Bytes of the task's JSON, of whole values, that are left out here.")
    state: str
    members: list[GroupMember]
    notes: list[str] = Field(description="What is not known, and why.")


class ToolUse(ShownRecord):
    """A call of a tool in a message."""

    id: str
    name: str
    arguments: str


class PartAnswer(ShownRecord):
    """Text of a message up to its next image, or an image."""

    text: str = ""
    cut: int = Field(0, description="Characters of the text that are left out here.")
    image: str | None = Field(None, description="Digest of the image; none for a text.")


class MessageAnswer(ShownRecord):
    """A message of a conversation."""

    role: str
    name: str | None = None
    content: list[PartAnswer] = Field([], description="Texts and images in the order in which the model reads them.")
    reasoning: str | None = None
    tool_calls: list[ToolUse] = Field([])
    tool_calls_cut: int = Field(0, description="Tool calls that are left out here.")
    tool_call_id: str | None = None


class ForkAnswer(ShownRecord):
    """Where a call diverged from the exact tokens of an earlier one; see `palestra.types.calls.Fork`."""

    reason: str
    text: str = Field(description="The reason in words.")
    drift: bool = Field(description="Whether exact tokens were lost.")
    call: int | None
    message: int
    position: int


class CallAnswer(ShownRecord):
    """One call of a model."""

    index: int
    parent: int | None = Field(description="The earlier call with the longest common beginning; None: none.")
    after: int | None = Field(description="The earlier call whose tokens its prompt begins with; None: none.")
    agent: str
    policy: str
    time_step: int
    prompt_tokens: int
    reused: int = Field(description="Prompt tokens that are those of `after`.")
    sampled: int
    finish_reason: str
    stop: str | None
    fork: ForkAnswer | None
    kept: bool = Field(description="Whether `algorithm.train_on` selects it.")
    trained: bool
    why: str
    versions: list[tuple[str, int]] = Field(description="Versions of its tokens, each with how many.")
    mean_logprob: float | None
    temperature: float
    max_tokens: int
    seed: str
    sampling: dict[str, JsonValue] = Field(description="Other parameters that differ from their defaults.")
    grammar: str
    tools: list[str] = Field(description="Names of the tools that were offered.")
    started_at: float
    seconds: float
    messages: list[MessageAnswer] = Field(description="Those that are new in this call, after those of `parent`.")
    messages_before: int = Field(description="How many messages stand before them in the call's prompt.")
    reply: MessageAnswer


class ConversationAnswer(ShownRecord):
    """The prompt and reply of a call, in the form of OpenAI's chat completions."""

    run: str
    policy: str
    temperature: float
    max_tokens: int
    messages: list[dict[str, JsonValue]] = Field(description="Those of the prompt, and the reply as the last one.")
    tools: list[dict[str, JsonValue]] = Field(description="That were offered.")
    notes: list[str] = Field(description="What of it can't be sent again, and why.")


class RowAnswer(ShownRecord):
    """A row: one sequence of tokens that the model processed."""

    row: int
    policy: str
    tokens: int
    sampled: int
    runs: list[tuple[int, int, int]] = Field(description="First token, end, and the call that sampled them or -1.")
    trained: bool
    frozen: bool = Field(description="Whether its policy is not trained in this episode.")


class VerdictAnswer(ShownRecord):
    """What the job's judge has said of an episode, by one name."""

    verdict: int = Field(description="Its place; one for each order in which the judge saw the episodes.")
    name: str
    score: float
    reason: str | None = Field(description="None: the judge gave none.")


class EpisodeDetail(ShownRecord):
    """An episode with its calls."""

    run: str
    line: EpisodeSummary
    task: dict[str, JsonValue]
    task_cut: int = Field(0, description="Bytes of the task's JSON, of whole values, that are left out here.")
    metadata: dict[str, JsonValue]
    metadata_cut: int = Field(0, description="Bytes of the metadata's JSON, of whole values, that are left out here.")
    step_rewards: list[float] | None
    named_rewards: dict[str, float | None] | None = Field(
        description="Those of which the reward is the weighted sum, by name; null for one that is not scored."
    )
    verdicts: list[VerdictAnswer] = Field([], description="Of the job's judge; one for each name and order.")
    step: int | None = Field(description="The step whose batch it is in.")
    trained: bool
    why: str
    distinct_tokens: int
    calls: list[CallAnswer]
    rows: list[RowAnswer]
    notes: list[str] = Field(description="What is not known, and why.")


class TokensAnswer(ShownRecord):
    """Tokens of a row, in columns of one length."""

    run: str
    row: int
    start: int
    ids: list[int]
    texts: list[str] | None = Field(description="None: the tokenizer is not on this machine; `notes` says why.")
    calls: list[int] = Field(description="The call that sampled the token; -1: part of a prompt.")
    logprobs: list[float | None] = Field(description="When it was sampled, natural logarithm.")
    trained_logprobs: list[float | None] = Field(description="Under the weights of the token's first gradient.")
    ratios: list[float | None] = Field(description="exp(logprob when it was trained - logprob when it was sampled).")
    advantages: list[float | None]
    weights: list[float | None] = Field(description="Share in the loss.")
    versions: list[int] = Field(description="Place in `version_names`; -1: not sampled.")
    version_names: list[str]
    temperatures: list[float | None]
    fates: list[int] = Field(description="Place in `fate_texts`.")
    fate_texts: list[str]
    trained: list[bool]
    notes: list[str]
