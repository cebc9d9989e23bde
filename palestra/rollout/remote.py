"""`EnvironmentPlayer`: plays a job's episodes in an environment of this process, while the job runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

from palestra.agents import ModelAgent
from palestra.client import AsyncClient
from palestra.client.episode import Episode, RolloutResult, StepRecords
from palestra.client.model_call import ModelCall, ModelReply
from palestra.client.worker import EpisodePlayer
from palestra.config import Roles
from palestra.config.algorithm_base import weighted_sum
from palestra.errors import RolloutFailed
from palestra.pictures.containers import too_many_bytes
from palestra.pictures.parts import Picture
from palestra.rollout.collect import TrajectoryCollectEngine
from palestra.rollout.orchestrator import EnvironmentPool, RolloutSpec
from palestra.rollout.result import EpisodeResult, Termination
from palestra.types.calls import Chat, SamplingParams, floats_of, ids_of
from palestra.types.clock import Clock, SystemClock
from palestra.types.messages import GenerationRequest
from palestra.types.wire import RolloutFacts


class EnvironmentPlayer(EpisodePlayer):
    """Plays claimed episodes like the job's own process: agents in an environment, with the same records.

    The job's server executes and records model calls. Here an agent's `Chat` has no versions, and its whole prompt
    without a parent.
    """

    def __init__(
        self, client: AsyncClient, spec: RolloutSpec, facts: RolloutFacts, *, clock: Clock | None = None
    ) -> None:
        """Create a player. An environment with one agent gets the job's system message by default. `clock` is the
        source of observation times.
        """
        self._client, self._facts = client, facts
        self._agents = spec.agents or {"": ModelAgent(max_tokens=spec.max_tokens)}
        self._temperature, self._clock = spec.temperature, clock or SystemClock()
        system = facts.system if spec.system is None else spec.system
        self._environments = EnvironmentPool(spec.environment, system=system, clock=self._clock)

    async def __aenter__(self) -> Self:
        self._environments.keep()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._environments.close()

    async def play(self, episode: Episode) -> RolloutResult:
        """Play an episode to its end. Raises NotScored: the environment gave no reward. Raises EpisodeLeaseExpired,
        EpisodeEnded: the lease was lost.
        """
        limit = self._facts.timeout_seconds
        try:
            async with asyncio.timeout(limit) as timeout:
                collected = await self._collect(episode, timeout)
        except TimeoutError:
            assert timeout.expired(), "everything else comes as RolloutFailed"
            raise RolloutFailed(Termination.TIMED_OUT, f"not over after {limit:g} s") from None
        return RolloutResult(
            reward=collected.final_rewards,
            named_rewards=collected.named_rewards,
            step_rewards=collected.step_rewards,
            steps=StepRecords(rewards=collected.agent_step_rewards, times=collected.step_times, facts=collected.facts),
        )

    async def _collect(self, episode: Episode, limit: asyncio.Timeout) -> EpisodeResult:
        async with self._environments.acquire() as environment:
            engine = TrajectoryCollectEngine(
                environment=environment,
                agents=self._agents,
                episode=_ServedEpisode(self._client, episode, self._facts, self._clock),
                temperature=self._temperature,
            )
            return (await engine.collect(episode.task, limit)).finite()


class _ServedEpisode:
    """The `PlayedEpisode` of a job that runs elsewhere."""

    def __init__(self, client: AsyncClient, episode: Episode, facts: RolloutFacts, clock: Clock) -> None:
        self._client, self._episode, self._facts, self._clock = client, episode, facts, clock
        self.episode_id, self.seed, self.credits_agents = episode.episode_id, facts.seed, facts.credits_agents
        self.job_roles = Roles(
            default=facts.default, named=facts.roles, frozen=frozenset(facts.frozen), rivals=facts.rivals
        )
        self.roles = self.job_roles.of_episode(episode.players)

    def weighted_sum(self, policy: str, named_rewards: Mapping[str, float | None]) -> float:
        return weighted_sum(named_rewards, self._facts.reward_weights.get(policy, {}))

    def first_not_writable(self, policy: str, moves: Sequence[str]) -> str | None:
        """Return None: the server has the vocabularies, and refuses a call with moves that they cannot express."""
        return None

    def count_observation(self) -> None:
        """No effect: the server counts calls itself."""

    async def keep_picture(self, picture: Picture) -> None:
        # The server would answer with a body over its limit, which does not say that the picture is at fault.
        most = self._facts.max_picture_bytes
        if most is not None and len(picture.data) > most:
            raise too_many_bytes(picture.data, most)
        await self._client.upload_picture(picture.data, picture.digest, self._episode)

    async def call(self, request: GenerationRequest) -> Chat:
        began = self._clock.now()
        call = ModelCall(
            policy=request.policy,
            messages=request.messages,
            tools=request.tools,
            tool_choice=request.tool_choice,
            choices=request.response_choices,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            agent=request.agent,
            time_step=request.time_step,
        )
        return self._chat(request, await self._client.call_model(self._episode, call), began)

    def _chat(self, request: GenerationRequest, reply: ModelReply, began: float) -> Chat:
        """Return the record of a call as far as it is known here."""
        fence, index = reply.lease_and_index
        return Chat(
            episode_id=self.episode_id,
            fence=fence,
            index=index,
            time_step=request.time_step or 0,
            agent=request.agent,
            policy=request.policy,
            parent=None,
            shared=0,
            shared_messages=0,
            new_messages=request.messages,
            prompt_tail=ids_of(reply.prompt_token_ids),
            tools=request.tools,
            reply=reply.message,
            completion_ids=ids_of(reply.choices[0].token_ids),
            logprobs=floats_of(reply.logprobs),
            versions=(),
            finish_reason=reply.finish_reason,
            sampling=SamplingParams(temperature=request.temperature or 0.0, max_tokens=request.max_tokens or 0, seed=0),
            request_digest="",
            started_at=began,
            finished_at=self._clock.now(),
        )
