"""The tables `[judge]` and `[audit]`. Entry points of `palestra.judges` name the sections of each kind of judge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from palestra.config.section import Seconds, Section, schema_by_kind
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension

if TYPE_CHECKING:
    from palestra.envs.judge import Judge

GROUP = "palestra.judges"


class Meter(Protocol):
    """Counts the tokens that a server is asked for, within the budget of the job."""

    async def reserve(self, prompt_tokens: int, reply_tokens: int) -> Any:
        """Return what reserves the tokens that a call may use, once they fit into the budget."""
        ...

    async def pay(self, reserved: Any, prompt_tokens: int, reply_tokens: int) -> None:
        """Record what a call has used, in place of what it has reserved."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeAccess:
    """How a judge reaches the policies of its job.

    Attributes:
        url: of the job's server, without /v1.
        key: returns the present key of model calls outside any episode; `model` names the policy.
        frozen: names of the job's frozen policies.
        meter: what calls to servers are charged to; None: they are not counted.
        pictures: returns the bytes of a picture of the run by its digest; None: no episode has one.
    """

    url: str
    key: Callable[[], str]
    frozen: tuple[str, ...] = ()
    meter: Meter | None = None
    pictures: Callable[[str], bytes] | None = None


class JudgeConfig(Section, ABC):
    """What every judge has. A field of this type takes a table of any kind that is installed.

    Attributes:
        not_judged: keys that change no verdict, so that a run may go on with other values.
        bounded: whether each score lies from 0 to 1, as an audit needs it.
    """

    model_config = ConfigDict(defer_build=True)  # the kinds are known when the first configuration is checked

    not_judged: ClassVar[frozenset[str]] = frozenset({"url", "key_variable", "wait_seconds"})
    bounded: ClassVar[bool] = True

    kind: str = Field(description="The kind of judge; each has keys of its own.")
    url: str | None = Field(
        None,
        description="URL of the server that the judge asks, without /v1, such as `http://10.0.0.5:8000`: any with "
        "OpenAI's chat completions.",
    )
    key_variable: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the server's key. None: the server needs none.",
    )
    wait_seconds: Seconds | None = Field(
        None,
        description="Judges of whole groups: seconds after the first episode of a group has been played at which those "
        "that have not been are discarded, if the others are two or more. None: leases alone decide.",
    )

    @property
    @abstractmethod
    def reward_weights(self) -> Mapping[str, float]:
        """Return the names of the rewards that the judge gives, with their weights."""

    @property
    def compares(self) -> str | None:
        """Return the name of the reward that ranks the episodes of a group: above 0.5 is better than the others, 0.5 is
        a tie. None: there is no such reward.
        """
        return None

    @property
    def asked_policy(self) -> str | None:
        """Return the policy of the job that judges; None: the judge is none."""
        return None

    @property
    def served_model(self) -> str | None:
        """Return the name of the model on the server; None: the only one that it has."""
        return None

    @property
    def asks_policy(self) -> bool:
        """Return whether the judge is a policy of the job, which answers no call before the job samples."""
        return self.asked_policy is not None

    @abstractmethod
    def make(self, access: JudgeAccess) -> Judge:
        """Return the judge."""

    @classmethod
    def alternatives(cls) -> Sequence[type[Section]]:
        """Return the sections of which a field of this type holds one."""
        return tuple(_sections().values()) if cls is JudgeConfig else (cls,)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check a field of this type by the section that `kind` chooses."""
        if cls is not JudgeConfig:
            return handler(source)
        return schema_by_kind(_sections(), _kind_of, handler)


@cache
def _sections() -> dict[str, type[JudgeConfig]]:
    """Return the section of each kind of judge that is installed."""
    found: dict[str, type[JudgeConfig]] = {}
    for name, point in extensions(GROUP).items():
        section = load_extension(point)
        if (kind := section.model_fields["kind"].default) != name:
            raise ConfigError(f"the judge {name!r} of {point.value} has a section of kind {kind!r}; make them equal")
        found[name] = section
    return found


def _kind_of(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


class AuditConfig(Section):
    """Looks at each step for signs that the reward is gamed; see docs/how-to/audits.md."""

    model_config = ConfigDict(defer_build=True)

    judge: JudgeConfig | None = Field(
        None,
        description="A second judge, whose scores are never a reward: a table with the keys of `[judge]`. None: no "
        "episode is scored again, and only the other signs are looked for.",
    )
    episodes: int = Field(
        32,
        ge=4,
        le=4096,
        description="Episodes of a step that `judge` scores: half of them are drawn, the others have the highest "
        "rewards of the rest.",
    )
    action: Literal["warn", "hold", "pause"] = Field(
        "warn",
        description="What follows if rewards and audit diverge. `warn`: a warning; `hold`: the new versions play the "
        "job's own episodes only; `pause`: the job ends before the new version is published.",
    )

    @model_validator(mode="after")
    def _can_hold(self) -> AuditConfig:
        if self.action != "warn" and self.judge is None:
            raise ValueError(f"action = {self.action!r} needs the scores of a second judge: add [audit.judge]")
        return self

    @model_validator(mode="after")
    def _has_scores_with_bounds(self) -> AuditConfig:
        if self.judge is not None and not self.judge.bounded:
            raise ValueError(f"an audit needs scores from 0 to 1, and a judge of kind {self.judge.kind!r} gives others")
        return self
