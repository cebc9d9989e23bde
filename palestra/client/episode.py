"""The objects of a worker that plays an episode: the episode, its model, and a lease renewed in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.errors import NotFound, PalestraError
from palestra.types.calls import AgentStepReward, StepTimes
from palestra.waiting import cancelled

log = logging.getLogger("palestra.client")
SHORTEST_SECONDS = 0.1  # between two heartbeats of one episode
Reward = float | Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEndpoint:
    """The trained model for an OpenAI client: `OpenAI(base_url=policy.base_url, api_key=policy.api_key)`.

    The key is the episode's: calls made with it are recorded in the episode. `model` means the policy of the calling
    agent's role, if the job has roles; other policies are called by name.
    """

    base_url: str
    api_key: str
    model: str
    version: str  # weights of `model` when the episode was claimed: "incarnation.n", n counts updates
    policies: Mapping[str, str] = field(
        default_factory=dict, hash=False
    )  # the same of all policies of the job, by name
    max_context: int | None = None  # most tokens of a prompt and its reply, of `model`; None: the server does not say
    max_tokens: int | None = None  # most tokens of a reply, of `model`; None: the server does not say

    def of(self, policy: str) -> ModelEndpoint:
        """Return the endpoint of another policy of the job, for the same episode.

        Args:
            policy: its name, a key of `policies`.

        Raises:
            NotFound: the job has no such policy.
        """
        if policy not in self.policies:
            known = ", ".join(map(repr, self.policies)) or repr(self.model)
            raise NotFound(f"this job has no policy {policy!r}, but {known}")
        return replace(self, model=policy, version=self.policies[policy])

    @property
    def anthropic_url(self) -> str:
        """Return the URL for Anthropic's client, which adds `/v1` itself.

        Use it as `Anthropic(base_url=policy.anthropic_url, api_key=policy.api_key)`.
        """
        return self.base_url.removesuffix("/v1")

    def headers(self, agent: str | None = None, step: int | None = None) -> dict[str, str]:
        """Return headers that name the calling agent, and the TimeStep of the call.

        Pass them to a model call: `extra_headers=policy.headers(agent="planner/search", step=3)`.

        Args:
            agent: name of the calling agent; a subagent's name starts with its parent's. Rewards can use these names.
            step: the TimeStep of the call, from 0. None: the call is its own TimeStep.
        """
        names = {"x-palestra-agent": agent, "x-palestra-step": None if step is None else str(step)}
        return {name: value for name, value in names.items() if value is not None}


@dataclass(kw_only=True, slots=True)
class Episode:
    """A claimed episode: its task, and the model to play it with.

    Inside `with client.episode()`, set `reward` (a number, or numbers by agent) or `named_rewards` (several rewards by
    name), and optionally `metadata` (JSON to record with the episode) and `truncated` (it was cut off); the end of the
    block submits them. Or set `reward` to a `RolloutResult`, which contains all of them.
    """

    episode_id: str
    kind: str  # "train", "validation" or "adhoc"
    task_id: str
    task: dict[str, Any]
    policy: ModelEndpoint
    lease_seconds: float
    players: Mapping[str, str] = field(
        default_factory=dict
    )  # who plays a role that has a pool: `{"opponent": "white@5"}`
    reward: Reward | RolloutResult | None = None
    named_rewards: Mapping[str, float | None] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False

    def headers(self, agent: str | None = None, step: int | None = None) -> dict[str, str]:
        """Return headers that name the calling agent, and the TimeStep of the call; see `ModelEndpoint.headers`.

        Args:
            agent: name of the calling agent.
            step: the TimeStep of the call, from 0.
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
        """Return the key of this episode, which is only valid for its model calls."""
        return self.policy.api_key

    @property
    def model(self) -> str:
        """Return the name to send as `model` in requests."""
        return self.policy.model


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecords:
    """What Palestra's own players know about an episode, apart from the rewards of its TimeSteps."""

    rewards: Sequence[AgentStepReward] | None  # of which `RolloutResult.step_rewards` are the sums; None: one agent's
    times: Sequence[StepTimes]  # by TimeStep
    facts: Mapping[str, Any] = field(default_factory=dict)  # how it was played; see `EpisodeRecord.facts`


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """A result that a rollout function may return instead of a plain reward.

    A `reward` of None leaves the episode out of training, without a retry, unless one of its named rewards is scored.
    """

    reward: float | Mapping[str, float] | None = None  # one number, or one by agent; None: not scored
    step_rewards: Sequence[Reward] | None = None  # by TimeStep; of several agents: in each one by agent
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON; shown by `palestra episodes`
    named_rewards: Mapping[str, float | None] | None = None  # weighed and added up; None in place of one: not scored
    truncated: bool = False  # cut off, by a limit of steps for instance: a critic then values what would have followed
    forfeit: bool = False  # the agent's own action ended the episode, whose reward is its loss
    steps: StepRecords | None = None  # None: a rollout function knows nothing more of them


def period(episode: Episode) -> float:
    """Return the seconds between two heartbeats, a third of the lease: two may be lost before the lease expires."""
    return max(SHORTEST_SECONDS, episode.lease_seconds / 3)


@asynccontextmanager
async def renewed(heartbeat: Callable[[Episode], Awaitable[None]], episode: Episode) -> AsyncIterator[None]:
    """Renew the lease of an episode while the block is open."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(period(episode))
            try:
                await heartbeat(episode)
            except PalestraError as error:
                log.warning("heartbeat of %s: %s", episode.episode_id, error)
                # The lease is lost: the next call of the episode raises the same error where the user sees it.
                if not error.retryable:
                    return

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        await cancelled(beating)


@contextmanager
def renewed_in_thread(heartbeat: Callable[[Episode], object], episode: Episode) -> Iterator[None]:
    """Renew the lease of an episode in a thread while the block is open. `heartbeat`: sends one heartbeat, without
    retries: the next beat is the retry.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(period(episode)):
            try:
                heartbeat(episode)
            except PalestraError as error:
                log.log(
                    logging.INFO if error.retryable else logging.WARNING,
                    "heartbeat of %s: %s",
                    episode.episode_id,
                    error,
                )
                # The lease is lost: the next call of the episode raises the same error where the user sees it.
                if not error.retryable:
                    return

    thread = threading.Thread(target=beat, name="palestra-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
