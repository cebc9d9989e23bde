"""Playing one episode: agents answer the observations of a concurrent environment until the episode is over."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from palestra.agents import Agent, ModelAgent
from palestra.envs import ConcurrentEnvironment
from palestra.errors import (
    ContextOverflow,
    EpisodeForfeited,
    EpisodeOver,
    InvalidEnvironment,
    NotScored,
    RolloutFailed,
)
from palestra.rollout.played import EpisodePictures, PlayedEpisode, ShownSeats
from palestra.rollout.result import EpisodeResult, Step, Termination, classify_errors, said
from palestra.types.calls import AgentStepReward, Chat
from palestra.types.messages import MAX_NAMED, ChatMessage, GenerationRequest, Observation, StepReward, ToolChoice
from palestra.types.records import FORFEIT
from palestra.waiting import ordinary_errors

_OF_ENVIRONMENT = classify_errors(Termination.ENVIRONMENT_FAILED)
_AFTER_ACTION = classify_errors(Termination.ENVIRONMENT_FAILED, acted=True)
_OF_AGENT = classify_errors(Termination.AGENT_FAILED)


class TrajectoryCollectEngine:
    """Plays one episode. Agents answer open observations concurrently."""

    def __init__(
        self,
        *,
        environment: ConcurrentEnvironment,
        agents: Mapping[str, Agent],
        episode: PlayedEpisode,
        temperature: float | None = None,
        seats: ShownSeats | None = None,
    ) -> None:
        """Prepare to play one episode.

        The environment is set up, but not reset. An agent without an entry in `agents` is played by its nearest
        parent's, or by the one named "". `temperature` is used if the job fixes none; `seats` get every observation.
        """
        self._environment, self._agents = environment, agents
        self._episode, self.roles = episode, episode.roles
        self._pictures = EpisodePictures(episode.keep_picture)
        self._temperature, self._seats = temperature, seats
        self._histories: dict[str, tuple[ChatMessage, ...]] = defaultdict(tuple)
        self._number: dict[str, int] = {}  # observation -> its TimeStep
        self._answering: dict[str, Observation] = {}  # by agent: the observation that it is to answer
        self._observing: asyncio.Task[Observation] | None = None
        self._turns: dict[asyncio.Task[None], str] = {}  # turns that run as tasks -> the observation that is answered
        self._acted = False  # whether any agent has
        self._result = EpisodeResult()

    async def collect(self, task: Mapping[str, Any], limit: asyncio.Timeout | None = None) -> EpisodeResult:
        """Play the episode of `task` to its end, leaving no running task behind.

        An episode in which `limit`, that of this call, expires while the environment processes an action is a forfeit.
        Raises NotScored: the environment gave no reward. Raises EpisodeLeaseExpired, EpisodeEnded: the lease was lost.
        """
        try:
            await self._play(task)
        except EpisodeForfeited as error:
            self._forfeit(error)
        except asyncio.CancelledError:
            if limit is None or not limit.expired() or not self._acted or self._answering:
                raise
            self._forfeit(EpisodeForfeited("the time for the episode was over before the action had an end"))
        with _OF_ENVIRONMENT:
            self._check_named()
        self._result.without_policy = sorted(name for name in self._result.rewards if not self._asks_policy(name))
        if self._seats is not None:
            self._result.unused_calls = self._seats.unused_calls
        return self._result

    async def _play(self, task: Mapping[str, Any]) -> None:
        """Play the episode to its end, and collect it in the result."""
        try:
            with _OF_ENVIRONMENT:
                await self._environment.reset(task)
            for role in self._environment.roles:
                self._check_moves(role, self._environment.moves)
            while True:
                await self._proceed()
        except EpisodeOver:
            return
        except ContextOverflow as error:
            # No action was possible: the task itself does not fit, so there is no behaviour to reward.
            if all(step.acted_at is None for step in self._result.steps):
                raise RolloutFailed(Termination.AGENT_FAILED, said(error)) from error
            self._result.termination = Termination.CONTEXT_FULL
        finally:
            left = [*self._turns, *([self._observing] if self._observing is not None else [])]
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._environment.abandon()

    async def _proceed(self) -> None:
        """Wait for an observation or for the end of turns, and begin the turn that an observation asks for."""
        turns = self._turns
        # Fast path: with nothing else to wait for, no task of the event loop is needed.
        if not turns and self._observing is None:
            with _AFTER_ACTION if self._acted else _OF_ENVIRONMENT:
                observation = await self._observed()
            if not self._take(observation):
                return
            if self._environment.waits_only_for(observation.id):  # as in every game of one agent
                await self._turn(observation)
            else:
                turns[asyncio.ensure_future(self._turn(observation))] = observation.id
            return
        observing = self._observing = self._observing or asyncio.ensure_future(self._observed())
        await asyncio.wait((observing, *turns), return_when=asyncio.FIRST_COMPLETED)
        for turn in [turn for turn in turns if turn.done()]:
            del turns[turn]
            if not turn.cancelled():  # as is the turn of an agent whose time is over
                turn.result()
        if observing.done():
            with _AFTER_ACTION if self._acted else _OF_ENVIRONMENT:
                observation, self._observing = observing.result(), None
            if self._take(observation):
                turns[asyncio.ensure_future(self._turn(observation))] = observation.id

    async def _observed(self) -> Observation:
        """Return the next observation, after putting its pictures into the run's folder."""
        with ordinary_errors():
            observation = await self._environment.observe()
        if not self._pictures.change(observation.content):
            return observation
        return replace(observation, content=await self._pictures.without_files(observation.content))

    def _check_moves(self, agent: str, moves: Sequence[str]) -> None:
        """Raise an error for an agent restricted to legal moves that its policy's vocabulary cannot express."""
        if not moves or not isinstance(self._agent(agent), ModelAgent):
            return
        policy = self.roles.policy_of(agent)
        if (move := self._episode.first_not_writable(policy, moves)) is not None:
            text = f"the vocabulary of the policy {policy!r}, which plays {agent!r}, can't express the move {move!r}"
            raise RolloutFailed(Termination.AGENT_FAILED, text)

    def _take(self, observation: Observation) -> bool:
        """Record an observation and return whether it asks for an action."""
        result = self._result
        self._drop_turn(observation.agent)
        if observation.reward is not None:
            # Without a known cause, as for an agent that has not acted yet, a reward follows the last action of any.
            known = [self._number[parent] for parent in observation.parents if parent in self._number]
            known = known or [number for number, step in enumerate(result.steps) if step.acted_at is not None][-1:]
            self._pay(observation.agent, self._weighed(observation.agent, observation.reward), max(known, default=None))
            if self.roles.learns(observation.agent):
                result.name(observation.reward)
        if observation.info:
            result.note(self._name_of(observation), observation.info)
        if observation.truncated and not observation.terminated:
            result.termination = Termination.MAX_STEPS
        self._episode.count_observation()
        if observation.is_last:
            said = [message.text for message in observation.content]
            result.last_seen = "\n".join([result.last_seen, *said] if result.last_seen else said)
            self._show(observation, None)
            return False
        self._number[observation.id] = len(result.steps)
        self._answering[observation.agent] = observation
        self._show(observation, len(result.steps))
        result.steps.append(Step(observation=observation))
        return True

    def _pay(self, agent: str, reward: float, number: int | None) -> None:
        """Add an agent's reward for its action in this TimeStep, or None."""
        result = self._result
        result.rewards[agent] += reward
        if number is not None and self.roles.learns(agent):  # a frozen policy's reward is no one's return
            result.steps[number].reward += reward
        if number is not None:
            result.by_agent.append(AgentStepReward(number, agent, reward))

    def _forfeit(self, error: EpisodeForfeited) -> None:
        """End the episode as the loss of the agent that acted last, without rewards that it would lose by playing on.
        Raises RolloutFailed: the environment has several roles, whose rewards are unknown; or a frozen policy acted.
        """
        result = self._result
        number, name = max(
            ((number, step.observation.agent) for number, step in enumerate(result.steps) if step.acted_at is not None),
            key=lambda one: (result.steps[one[0]].acted_at or 0.0, one[0]),
        )
        if self._environment.has_other_players or self.roles.plays_frozen(name):
            raise RolloutFailed(Termination.ENVIRONMENT_FAILED, str(error)) from (error.__cause__ or error)
        self._environment.broken = True
        result.termination, result.forfeited = Termination.FORFEIT, error
        result.note(str(number), {FORFEIT: str(error)})
        policy, named = self._episode.job_roles.policy_of(name), result.named_rewards or {}
        for one, value in named.items():
            named[one] = value if self._episode.weighted_sum(policy, {one: value}) <= 0 else 0.0
        least = min(self._environment.forfeit_reward, self._episode.weighted_sum(policy, named))
        for agent in {name: None, **result.rewards}:
            self._pay(agent, min((least if agent == name else 0.0) - result.rewards[agent], 0.0), number)

    def _show(self, observation: Observation, number: int | None) -> None:
        """Show the external players an observation of this TimeStep; None: it expects no action."""
        if self._seats is not None:
            self._seats.show(observation, number)

    def _drop_turn(self, agent: str) -> None:
        """End an agent's turn that the environment no longer waits for, and record the default action."""
        before = self._answering.get(agent)
        if before is None or not self._environment.is_withdrawn(before.id):
            return
        del self._answering[agent]
        for turn, answered in self._turns.items():
            if answered == before.id:
                turn.cancel()
        done = self._environment.action_in_place(before.id)
        self._histories[agent] = (*self._histories[agent], *before.content, *(() if done is None else (done,)))

    def _weighed(self, agent: str, reward: StepReward) -> float:
        """Return a reward as one number, by the weights of the policy that plays the agent."""
        if not isinstance(reward, Mapping):
            return reward
        policy = self._episode.job_roles.policy_of(agent)  # whose past version may play the agent
        return self._episode.weighted_sum(policy, reward)

    def _check_named(self) -> None:
        """Raise an error for invalid combinations of named rewards."""
        result = self._result
        if (named := result.named_rewards) is None:
            return
        if result.unnamed:
            raise InvalidEnvironment(
                f"some rewards of this episode have names ({', '.join(map(repr, named))}), and others have none; give "
                "all of them by name"
            )
        if len(named) > MAX_NAMED:
            raise InvalidEnvironment(f"an episode has at most {MAX_NAMED} rewards by name, not {len(named)}")
        unscored = [name for name, value in named.items() if value is None]
        if len(unscored) == len(named):
            raise NotScored("no reward by name was scored")
        if unscored and self.roles.rivals:
            raise InvalidEnvironment(
                f"{', '.join(map(repr, unscored))} was not scored (None), and where several policies are trained it is "
                "not known whose reward that would have been; score it"
            )
        if unscored and len(self.roles.trained_rewards(result.rewards)) > 1 and self._episode.credits_agents:
            raise InvalidEnvironment(
                f"{', '.join(map(repr, unscored))} was not scored (None) in an episode in which several agents are "
                "rewarded, each for itself; score it, or pool the rewards of all agents "
                "(algorithm.credit = 'episode' or 'team-step')"
            )

    def _name_of(self, observation: Observation) -> str:
        """Return the TimeStep whose action caused an observation, as text, or `reset`."""
        known = [self._number[parent] for parent in observation.parents if parent in self._number]
        return str(max(known)) if known else "reset"

    async def _turn(self, observation: Observation) -> None:
        """Let the agent answer an observation, and pass its action to the environment."""
        number, name = self._number[observation.id], observation.agent
        self._check_moves(name, observation.choices)
        try:
            with _OF_AGENT:
                chats, action = await self._agent(name).step(observation, _Handle(self, name, number))
        except ContextOverflow as error:
            self._fill(observation, error)
            return
        except RolloutFailed as error:
            if error.termination != Termination.AGENT_FAILED or not self._environment.survives_failure(observation.id):
                raise
            self._environment.cancel(observation.id)  # the environment scores it as a forfeit
            return
        if self._environment.is_withdrawn(observation.id):
            return
        self._result.steps[number].acted_at = self._environment.clock.now()
        self._acted = True
        self._answering.pop(name, None)
        self._histories[name] = _conversation((*self._histories[name], *observation.content), chats, action)
        self._environment.calls.extend(chats)
        with _OF_ENVIRONMENT:
            self._environment.act(observation.id, action)

    def _fill(self, observation: Observation, error: ContextOverflow) -> None:
        """End the part of an agent whose context has no space for a reply, or the episode."""
        name = observation.agent
        if name not in self._result.full_contexts:  # a forfeit may leave the role in the game
            self._result.full_contexts.append(name)
        if self._environment.survives_failure(observation.id):  # the environment scores it as a forfeit
            self._environment.cancel(observation.id)
            return
        if self._seats is not None and self._seats.was_taken_over(name):
            # Its worker has filled the context and left: an end without a reward would spare it a loss.
            raise RolloutFailed(Termination.SEAT_LOST, f"{name}, whose worker is gone: {said(error)}") from error
        if "/" in name:  # only this subagent ends; its parent continues
            self._environment.cancel(observation.id)
            return
        # A reward of 0 would reward a player who is about to lose for filling its context, and take the other's win.
        if self._environment.has_other_players:
            policy = self.roles.policy_of(name)
            text = (
                f"the context of {name!r} is full, so that the game of {', '.join(self._environment.roles)} has no "
                f"result: {error.prompt_tokens} tokens of prompt, and policies.{policy}.max_context is "
                f"{error.max_context}; raise it, show less, or have the environment score it as a forfeit "
                "(Fault.FAILED in its `forfeits`)"
            )
            raise RolloutFailed(Termination.AGENT_FAILED, text) from error
        if self.roles.plays_frozen(name):
            # The policy that is trained is not to blame, so the episode fails instead of getting a reward of 0.
            text = f"{name}, which a frozen policy plays: {said(error)}"
            raise RolloutFailed(Termination.AGENT_FAILED, text) from error
        raise error

    def _asks_policy(self, name: str) -> bool:
        """Return whether a policy plays an agent, possibly without a turn so far."""
        try:
            return self._agent(name).asks_policy
        except RolloutFailed:  # the environment has rewarded someone whom it never asked
            return True

    def _agent(self, name: str) -> Agent:
        nearest = name
        while nearest not in self._agents and nearest:
            nearest = nearest.rpartition("/")[0]
        if nearest not in self._agents:
            known = ", ".join(map(repr, self._agents))
            raise RolloutFailed(Termination.AGENT_FAILED, f"nobody plays the agent {name!r}; there are {known}")
        return self._agents[nearest]

    async def call(self, request: GenerationRequest) -> Chat:
        """Make one model call of the episode and return its record."""
        if self._pictures.change(request.messages):  # with those of tools of the agent's own
            request = replace(request, messages=await self._pictures.without_files(request.messages))
        return await self._episode.call(request)


def _conversation(seen: tuple[ChatMessage, ...], chats: Sequence[Chat], action: ChatMessage) -> tuple[ChatMessage, ...]:
    """Return the messages that an agent's next turn continues.

    These are the messages of its last call, with the tools that it ran before its action. If its action is not its last
    reply, or that call had other messages, they are only its observations and its action.
    """
    if chats and chats[-1].reply == action and (messages := chats[-1].messages)[: len(seen)] == seen:
        return (*messages, action)
    return (*seen, action)


class _Handle:
    """The `PolicyHandle` of one agent in one TimeStep; each call is recorded with both."""

    def __init__(self, engine: TrajectoryCollectEngine, agent: str, step: int) -> None:
        self._engine, self._agent, self._step = engine, agent, step

    @property
    def name(self) -> str:
        return self._engine.roles.policy_of(self._agent)

    @property
    def seed(self) -> int:
        episode = self._engine._episode
        whole = f"{episode.seed}/{episode.episode_id}/{self._agent}/{self._step}"
        return int.from_bytes(hashlib.sha256(whole.encode()).digest()[:8], "big")

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        return self._engine._histories[self._agent]

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        choices: Sequence[str] = (),
        tool_choice: ToolChoice = "auto",
    ) -> Chat:
        call = GenerationRequest(
            policy=self.name,
            messages=tuple(messages),
            tools=tuple(dict(tool) for tool in tools),
            max_tokens=max_tokens,
            response_choices=tuple(choices),
            tool_choice=tool_choice,
            temperature=self._engine._temperature,
            agent=self._agent,
            time_step=self._step,
        )
        return await self._engine.call(call)
