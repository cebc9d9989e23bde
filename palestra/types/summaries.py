"""Records that the store reads for lists, and that pages and commands show unchanged."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MOST_METADATA = 500  # characters; a list of a page has 200 episodes


class ShownRecord(BaseModel):
    """Base of the records that a page answers with."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null", serialize_by_alias=True)


class EpisodeSummary(ShownRecord):
    """One episode in a list.

    Attributes:
        metadata: the worker's metadata, with `facts`; empty of an episode that was read from a server.
    """

    episode_id: str
    kind: str = "train"
    group_index: int = Field(0, description="Index of its group in the canonical order of its kind.")
    sample_index: int = 0
    task_id: str = ""
    state: str = ""
    reward: float | None = Field(None, description="Sum of its agents' rewards; None until it is completed.")
    rewards: dict[str, float] | None = None
    calls: int = 0
    tokens: int = Field(0, description="Sampled tokens of its calls.")
    cut: int = Field(0, description="Replies that ended at max_tokens.")
    attempts: int = 0
    forks: dict[str, int] = Field({}, description="Calls that lost exact tokens of an earlier one, by reason.")
    refused: dict[str, int] = Field({}, description="Refused model calls, by error and field.")
    termination: str | None = Field(None, description="How it ended, or the kind of reason why it was given back.")
    reason: str | None = Field(None, description="Why it was given back or discarded last.")
    earlier_reason: str | None = Field(None, description="Of a completed one: why the attempt before it failed.")
    about: str = Field("", alias="metadata", description="The beginning of its metadata: NAME=VALUE, …")
    metadata: dict[str, Any] = Field({}, exclude=True, validation_alias="whole_metadata")
    worker: str | None = Field(None, description="The worker that holds it now.")
    claimed_at: float | None = Field(None, description="Unix seconds of its last claim; None: it was never claimed.")
    ended_at: float | None = Field(None, description="Unix seconds of its end; None: it has not ended.")
    players: dict[str, str] = Field({}, description="Who plays a role that has a pool, by the role.")
    damaged: str | None = Field(None, description="Why its record can't be read.")


def shown_metadata(metadata: dict[str, Any]) -> str:
    """Return metadata as the text of a list, cut at `MOST_METADATA` characters."""
    text = ", ".join(f"{name}={value!r}" for name, value in metadata.items())
    return text if len(text) <= MOST_METADATA else f"{text[: MOST_METADATA - 1]}…"


class HealthWarning(ShownRecord):
    """A sign that a run learns nothing, although its steps succeed."""

    code: str = Field(
        description="`no_calls`, `equal_rewards`, `no_gradient`, `updates_skipped`, `entropy_collapse`, `truncated`, "
        "`groups_dropped` or `episodes_discarded`."
    )
    step: int = Field(description="The newest step that shows it.")
    text: str = Field(description="What it means and what to do.")
    policy: str = Field(
        "", exclude_if=lambda policy: not policy, description="That shows it, where several are trained."
    )


class Finding(ShownRecord):
    """A sign of a problem, present or past; see `palestra.doctor`."""

    code: str = Field(description="Of the rule, such as `reward_collapse`.")
    seen: str = Field(description="What was seen in step `until`, in words.")
    since: int = Field(description="First of the consecutive steps that show it; of several stretches, of the last.")
    until: int = Field(description="Last of these steps.")
    holds: bool = Field(description="Whether the newest step shows it.")
    steps: int = Field(description="How many steps show it, in all.")
    means: str = Field(description="What it usually means.")
    remedy: str = Field(description="What to try.")
    episodes: tuple[str, ...] = Field((), description="Of step `until`: those that show it best, the clearest first.")
    policy: str = Field("", description="That shows it; empty: the only one that is trained, or the whole job.")


class Examination(ShownRecord):
    """The result of the doctor's rules for a run."""

    step: int = Field(description="The newest step that was looked at; 0: none is finished.")
    steps: int = Field(description="Of the job.")
    findings: tuple[Finding, ...] = Field(
        description="Those that hold first, then those of the past; each in the order of the rules."
    )
    damaged: tuple[int, ...] = Field((), description="Steps whose rows of metrics can't be read.")
    failed: int = Field(0, description="Failed episodes, if no step is finished and no episode completed; otherwise 0.")
    reason: str = Field("", description="Why the job or the newest of these episodes failed; empty otherwise.")
    numerics: dict[str, str] = Field({}, description="What computes the run; empty: unknown.")
