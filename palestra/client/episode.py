"""The records that a worker holds while it plays: the episode, and the model under training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.errors import NotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEndpoint:
    """The model under training, for an OpenAI client: `OpenAI(base_url=policy.base_url, api_key=policy.api_key)`.

    The key is the episode's: calls that are made with it are recorded in the episode. `model` stands for the policy of
    the calling agent's role, where the job has roles; another policy is called by its name.
    """

    base_url: str
    api_key: str
    model: str
    version: str  # weights of `model` when the episode was claimed: "incarnation.n", n counts updates
    policies: Mapping[str, str] = field(default_factory=dict)  # the same of all policies of the job, by name

    def of(self, policy: str) -> ModelEndpoint:
        """Return the endpoint of another policy of the job, for the same episode.

        Args:
            policy: its name, a key of `policies`.

        Raises:
            NotFound: the job has no such policy.
        """
        if policy not in self.policies:
            raise NotFound(f"this job has the policies {', '.join(map(repr, self.policies))}, not {policy!r}")
        return replace(self, model=policy, version=self.policies[policy])

    @property
    def anthropic_url(self) -> str:
        """Return the URL for Anthropic's client, which adds `/v1` itself.

        Use it as `Anthropic(base_url=policy.anthropic_url, api_key=policy.api_key)`.
        """
        return self.base_url.removesuffix("/v1")

    def headers(self, agent: str | None = None, step: int | None = None) -> dict[str, str]:
        """Return headers that say which agent makes a call, and in which TimeStep.

        Pass them to a call of the model: `extra_headers=policy.headers(agent="planner/search", step=3)`.

        Args:
            agent: name of the calling agent; a subagent's name starts with its parent's. Rewards can be given by these
                names.
            step: the TimeStep, from 0, that the call belongs to. None: the call is a TimeStep of its own.
        """
        names = {"x-palestra-agent": agent, "x-palestra-step": None if step is None else str(step)}
        return {name: value for name, value in names.items() if value is not None}


@dataclass(kw_only=True, slots=True)
class Episode:
    """A claimed episode: its task, and the model to play it with.

    Inside `with client.episode()`, set `reward` (a number, or numbers by agent) and optionally `metadata` (JSON to
    record with the episode); the end of the block hands them in.
    """

    episode_id: str
    kind: str  # "train", "validation" or "adhoc"
    task_id: str
    task: dict[str, Any]
    policy: ModelEndpoint
    lease_seconds: float
    reward: float | Mapping[str, float] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def headers(self, agent: str | None = None, step: int | None = None) -> dict[str, str]:
        """Return headers that say which agent makes a call, and in which TimeStep; see `ModelEndpoint.headers`.

        Args:
            agent: name of the calling agent.
            step: the TimeStep, from 0, that the call belongs to.
        """
        return self.policy.headers(agent, step)

    @property
    def base_url(self) -> str:
        """Return the base URL for an OpenAI client; it ends with `/v1`."""
        return self.policy.base_url

    @property
    def anthropic_url(self) -> str:
        """Return the base URL for Anthropic's client; see `ModelEndpoint.anthropic_url`."""
        return self.policy.anthropic_url

    @property
    def api_key(self) -> str:
        """Return the key of this episode, which opens its model calls and no other route of the job."""
        return self.policy.api_key

    @property
    def model(self) -> str:
        """Return the name to send as `model` in requests."""
        return self.policy.model


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """What a rollout function may return instead of a plain reward.

    A `reward` of None leaves the episode out of training, without playing it again.
    """

    reward: float | Mapping[str, float] | None  # one number, or one by agent; None: not scored
    step_rewards: Sequence[float] | None = None  # by TimeStep
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON; shown by `palestra episodes`
