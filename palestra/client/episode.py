"""What a worker holds while it plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEndpoint:
    """The model under training, for an OpenAI client: `OpenAI(base_url=policy.base_url, api_key=policy.api_key)`."""

    base_url: str
    api_key: str
    model: str
    version: str  # (incarnation.n) when the episode was claimed

    @property
    def anthropic_url(self) -> str:
        """For Anthropic's client, which adds `/v1` itself: `Anthropic(base_url=policy.anthropic_url)`."""
        return self.base_url.removesuffix("/v1")

    def headers(self, agent: str | None = None, step: int | None = None) -> dict[str, str]:
        """To say who calls and why: `extra_headers=policy.headers(agent="planner/search", step=3)`.

        Args:
            agent: who calls; a subagent's name starts with its parent's. Rewards can be given by these names.
            step: the TimeStep, from 0, that the call belongs to. None: every call is one of its own.
        """
        names = {"x-palestra-agent": agent, "x-palestra-step": None if step is None else str(step)}
        return {name: value for name, value in names.items() if value is not None}


@dataclass(kw_only=True, slots=True)
class Episode:
    """A claimed episode. `reward` and `metadata` are for `with client.episode()`; see there."""

    episode_id: str
    kind: str  # "train", "validation" or "adhoc"
    task_id: str
    task: dict[str, Any]
    policy: ModelEndpoint
    lease_seconds: float
    reward: float | Mapping[str, float] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def headers(self, agent: str | None = None, step: int | None = None) -> dict[str, str]:
        """See `ModelEndpoint.headers`."""
        return self.policy.headers(agent, step)

    @property
    def base_url(self) -> str:
        """For an OpenAI client."""
        return self.policy.base_url

    @property
    def anthropic_url(self) -> str:
        """See `ModelEndpoint.anthropic_url`."""
        return self.policy.anthropic_url

    @property
    def api_key(self) -> str:
        """Opens this episode and nothing else."""
        return self.policy.api_key

    @property
    def model(self) -> str:
        """The name to send as `model`."""
        return self.policy.model


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """What a rollout function may return instead of a plain reward."""

    reward: float | Mapping[str, float] | None  # or by agent; None: the episode is not scored, and left out
    step_rewards: Sequence[float] | None = None  # by TimeStep
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON; shown by `palestra episodes`
