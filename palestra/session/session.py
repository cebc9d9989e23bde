"""A session: builds the prompt of each call, has it sampled, records it, and only then returns the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from palestra.errors import GrammarRefused, PalestraError, UnsupportedField
from palestra.renderers import whole_message
from palestra.session.context import SessionContext
from palestra.session.policies import PolicyRuntime
from palestra.session.prompting import Prompt, PromptBuilder
from palestra.session.registry import CallRegistry, CallStore, NoStore, Recorder, ReservedCall
from palestra.session.reply import sample_reply
from palestra.session.request import UNCONSTRAINED, CallStart, Constraint, Listener, ReplyPiece, constraint_of
from palestra.session.sampling import overruled, sampling_of, trainable
from palestra.session.turns import Turn, Turns
from palestra.types.calls import Chat, SamplingParams
from palestra.types.messages import GenerationRequest
from palestra.types.records import EpisodeKind, EpisodeRecord
from palestra.types.states import TurnState
from palestra.waiting import together

GRAMMARS_AT_ONCE = 2  # grammars of one session that are being compiled or wait to be


@dataclass(kw_only=True, slots=True)
class _Choice:
    """One sample of a call in progress.

    Attributes:
        reserved: None: the prompt is not built yet.
        sampling: None: the prompt is not built yet.
        recorded: whether it is on disk.
    """

    number: int
    turn: Turn
    reserved: ReservedCall | None = None
    sampling: SamplingParams | None = None
    recorded: bool = False


@dataclass(kw_only=True, slots=True)
class _Call:
    """The parts of a call that its choices share.

    Attributes:
        request: the request as it is sampled.
        listener: of the choices, if any.
        started_at: Unix seconds.
        time_step: None: the first recorded choice decides.
    """

    asked: GenerationRequest
    request: GenerationRequest
    runtime: PolicyRuntime
    listener: Listener | None
    constraint: Constraint
    prompt: Prompt
    started_at: float
    time_step: int | None


class CallMaker(Protocol):
    """Makes the model calls of one request: a `Session`, or an external player's part of one."""

    async def generate(self, request: GenerationRequest, listener: Listener | None = None) -> tuple[Chat, ...]:
        """Sample all choices of a request; see `Session.generate`."""
        ...

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of prompt tokens of a request; see `Session.count_tokens`."""
        ...

    def delivered(self, chat: Chat) -> None:
        """Mark a reply as sent, so that a retry does not match this call."""
        ...


class Session:
    """Calls that share their history: of one lease of an episode, or of one request outside episodes.

    Attributes:
        episode_id: outside episodes, a random name.
        kind: selects the job's sampling settings.
    """

    def __init__(
        self,
        context: SessionContext,
        store: CallStore,
        episode_id: str,
        fence: int,
        kind: EpisodeKind,
        recorded: Sequence[Chat] = (),
    ) -> None:
        """Create the session from the calls on disk.

        Args:
            recorded: the calls of this lease, by index.
        """
        self.episode_id, self.fence, self.kind = episode_id, fence, kind
        self._context, self._clock = context, context.clock
        self._prompts = PromptBuilder(
            context.pool,
            context.picture_pool,
            context.sameness,
            context.strict_history,
            context.seat_of if context.seats else None,
            context.policies.unseen,
        )
        self._registry = CallRegistry(context.seed, episode_id, recorded)
        self._recorder = Recorder(store, context, self._registry, self._prompts)
        self._turns = Turns(f"a call of episode {episode_id}", context.times)
        # All sessions share one queue of grammars to compile, which a single episode must not fill with hundreds.
        self._checks = asyncio.Semaphore(GRAMMARS_AT_ONCE)
        self._in_flight: set[asyncio.Task[object]] = set()
        self._over: PalestraError | None = None
        for chat in recorded:
            self._prompts.add(chat)

    @property
    def state(self) -> TurnState:
        """Return the state of the session; see `Turns.state`."""
        return self._turns.state(called=self._prompts.calls > 0)

    async def generate(self, request: GenerationRequest, listener: Listener | None = None) -> tuple[Chat, ...]:
        """Sample all choices of a request concurrently, and return a call for each when they are on disk.

        A retry gets the choices that were recorded but not delivered.

        Raises:
            NotFound: the policy is unknown.
            UnsupportedField: a training episode's call asks for sampling that cannot be trained.
            InvalidRequest: a schema, tool or token id is not usable.
            GrammarRefused: a schema takes too much time or memory, possibly after some tokens of the reply.
            ContextOverflow: the prompt leaves no tokens for a reply.
            HistoryDrift: the job is strict, and exact tokens of an earlier call would be lost.
            EpisodeLeaseExpired, EpisodeEnded: the lease ended meanwhile; the call was not recorded.
        """
        if self._over is not None:
            raise self._over
        known = await self._answer_again(request, listener) if request.retry else {}
        missing = [number for number in range(request.choices) if number not in known] if known else None
        if missing == []:
            return tuple(known[number] for number in range(request.choices))
        sampled = await self._sample_all(request, listener, known, missing or range(request.choices))
        if not known:
            return sampled
        known |= zip(missing or (), sampled, strict=True)
        return tuple(known[number] for number in range(request.choices))

    async def generate_one(self, request: GenerationRequest, listener: Listener | None = None) -> Chat:
        """Sample a request of one choice, and return its call; see `generate`."""
        (chat,) = await self.generate(request, listener)
        return chat

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of prompt tokens of a request, without limit, sampling or recording.

        Raises:
            NotFound: the policy is unknown.
            InvalidRequest: the model's template cannot render the messages.
        """
        if self._over is not None:
            raise self._over
        runtime = self._context.policies.runtime(request.policy)
        return len((await self._prompts.build(request, runtime.renderer, max_context=None)).ids)

    def delivered(self, chat: Chat) -> None:
        """Mark a reply as sent, so that a retry does not match this call."""
        self._registry.delivered(chat)

    def free_seed(self, call: CallStart, policy: str, agent: str) -> None:
        """Free the seed of a call that led to no action, so that its repetition is the same sample."""
        self._registry.free(call.index, call.sampling.seed, call.prompt_ids, *self._seeded_for(policy, agent))

    def terminate(self, reason: PalestraError) -> None:
        """End the session. Running and later calls raise `reason`."""
        self._over = reason
        self._turns.terminate()
        self._recorder.close()
        for task in self._in_flight:
            task.cancel()
        self._forget_if_idle()

    async def _answer_again(self, request: GenerationRequest, listener: Listener | None) -> dict[int, Chat]:
        """Return the choices of a retry that are on disk already, by number, after replaying them to the listener."""
        known = await self._registry.undelivered(request)
        for number, chat in known.items():
            self._context.counts["retries_answered"] += 1
            _replay(number, chat, listener)
        return known

    async def _sample_all(
        self,
        request: GenerationRequest,
        listener: Listener | None,
        known: Mapping[int, Chat],
        numbers: Sequence[int],
    ) -> tuple[Chat, ...]:
        """Sample choices, holding the lease. If that fails, give up the choices that are not recorded."""
        task = asyncio.current_task()
        assert task is not None
        choices = [_Choice(number=number, turn=self._turns.begin()) for number in numbers]
        self._in_flight.add(task)
        try:
            with self._context.store.leases.hold(self.episode_id, self.fence):
                call = await self._begin(request, listener, known)
                for choice in choices:
                    self._reserve(call, choice)
                if len(choices) == 1:
                    return (await self._sample(call, choices[0]),)
                return tuple(await together(*(self._sample(call, choice) for choice in choices)))
        except BaseException as error:
            for choice in choices:
                self._give_up(choice)
            if isinstance(error, asyncio.CancelledError) and self._over is not None:
                raise self._over from None
            raise
        finally:
            self._in_flight.discard(task)
            self._turns.end([choice.turn for choice in choices])
            if self._over is not None:
                self._forget_if_idle()

    async def _begin(
        self,
        asked: GenerationRequest,
        listener: Listener | None,
        known: Mapping[int, Chat],
    ) -> _Call:
        """Check a request, have its grammar compiled, and build its prompt."""
        request, runtime = asked, self._context.policies.runtime(asked.policy)
        if self.kind == "train" and not runtime.config.frozen:  # what a frozen policy says is not trained on
            request = trainable(asked, self._context.ignore_untrainable)
        if not request.parallel_tool_calls and request.callable_tools and not runtime.renderer.incremental:
            raise UnsupportedField(
                "parallel_tool_calls = false is not supported in this model's format of tool calls",
                "parallel_tool_calls",
            )
        started_at = self._clock.now()
        constraint = UNCONSTRAINED
        if request.tool_choice == "required" or request.response_schema is not None or request.response_choices:
            constraint = constraint_of(request, runtime.renderer)
            async with self._checks:
                await runtime.grammars.check(*constraint)
        return _Call(
            asked=asked,
            request=request,
            runtime=runtime,
            listener=listener,
            constraint=constraint,
            prompt=await self._prompts.build(request, runtime.renderer, runtime.config.max_context),
            started_at=started_at,
            time_step=request.time_step if not known else min(chat.time_step for chat in known.values()),
        )

    def _reserve(self, call: _Call, choice: _Choice) -> None:
        """Give a choice its number, its seed and its sampling parameters, and report them to the listener."""
        seeded_for = self._seeded_for(call.request.policy, call.request.agent)
        reserved = choice.reserved = self._registry.reserve(call.prompt.ids, *seeded_for)
        sampling = choice.sampling = sampling_of(
            call.request,
            call.runtime.config,
            self.kind,
            len(call.prompt.ids),
            reserved.seed,
            choice.number,
            call.constraint.grammar,
        )
        if overruled(call.asked, sampling, choice.number) is not None:
            self._context.counts["sampling_overruled"] += 1
        if call.listener is not None:
            start = CallStart(
                episode_id=self.episode_id,
                fence=self.fence,
                index=reserved.index,
                prompt_ids=call.prompt.ids,
                shared=call.prompt.shared,
                sampling=sampling,
            )
            call.listener.started(choice.number, start)

    def _seeded_for(self, policy: str, agent: str) -> tuple[str, str]:
        """Return policy and player slot as used for seeds: the default policy is ""."""
        default = policy == self._context.policies.roles.default
        return "" if default else policy, self._context.seat_of(agent) if self._context.seats else ""

    async def _sample(self, call: _Call, choice: _Choice) -> Chat:
        """Sample one choice, parse its reply, and record it."""
        reserved, sampling, listener, number = choice.reserved, choice.sampling, call.listener, choice.number
        assert reserved is not None
        assert sampling is not None
        choice.turn.move(TurnState.GENERATING)
        try:
            sampled = await sample_reply(
                call.request,
                call.runtime,
                call.prompt.sequence,
                sampling,
                call_ids=f"call_{reserved.seed:016x}",
                tell=None if listener is None else (lambda piece: listener.sampled(number, piece)),
            )
        except GrammarRefused as error:  # at a token of the reply; the engine does not know the request's field
            raise error.of_field(call.constraint.field) from None
        choice.turn.move(TurnState.INTERACTING)
        self._context.counts["malformed_tool_calls"] += len(sampled.reply.malformed)
        if call.time_step is None:
            call.time_step = self._registry.next_step
        request, prompt = call.request, call.prompt
        chat = Chat(
            episode_id=self.episode_id,
            fence=self.fence,
            index=reserved.index,
            time_step=call.time_step,
            agent=request.agent,
            policy=request.policy,
            parent=prompt.parent,
            shared=prompt.shared,
            shared_messages=prompt.shared_messages,
            new_messages=prompt.new_messages,
            prompt_tail=prompt.tail,
            media=prompt.media,
            tools=request.tools,
            reply=sampled.reply.message,
            completion_ids=sampled.ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            finish_reason=sampled.finish_reason,
            fork=prompt.fork,
            stop=sampled.stop,
            top=sampled.top,
            sampling=sampling,
            request_digest=request.choice_digest(number) if number else request.digest,
            started_at=call.started_at,
            finished_at=self._clock.now(),
        )
        await self._recorder.record(chat, prompt)
        choice.recorded = True
        if listener is not None:
            listener.finished(number, chat)
        return chat

    def _give_up(self, choice: _Choice) -> None:
        """Free a choice's reservation, unless the choice is recorded or may still become so."""
        if choice.recorded:
            return
        if choice.reserved is not None and choice.turn.state is not TurnState.INTERACTING:
            self._registry.release(choice.reserved)
        choice.turn.move(TurnState.TERMINATED)
        self._context.counts["calls_incomplete"] += 1

    def _forget_if_idle(self) -> None:
        """Free the memory of a session that is over, if no call needs it any more."""
        if not self._in_flight:
            self._prompts.clear()


class EpisodeSession(Session):
    """The calls of one lease of an episode, each recorded before its reply is returned."""

    def __init__(self, context: SessionContext, episode: EpisodeRecord, recorded: Sequence[Chat] = ()) -> None:
        """Create the session from the store's calls of this lease."""
        super().__init__(context, context.store.calls, episode.episode_id, episode.fence, episode.kind, recorded)
        self.episode = episode


class StatelessSession(Session):
    """The calls of one request outside episodes: sampled with the caller's settings, and not recorded.

    The session's name and thus its seeds are random: equal calls are different samples, unless the caller gives a seed.
    """

    def __init__(self, context: SessionContext) -> None:
        super().__init__(context, NoStore(), uuid4().hex, 0, "adhoc")


def _replay(number: int, chat: Chat, listener: Listener | None) -> None:
    """Report a call that was recorded before to a listener, as if it was sampled now."""
    if listener is None:
        return
    listener.started(
        number,
        CallStart(
            episode_id=chat.episode_id,
            fence=chat.fence,
            index=chat.index,
            prompt_ids=chat.prompt_ids,
            shared=chat.shared,
            sampling=chat.sampling,
        ),
    )
    ids, logprobs = tuple(chat.completion_ids.tolist()), tuple(chat.logprobs.tolist())
    top = () if chat.top is None else tuple(map(tuple, chat.top.rows()))
    listener.sampled(number, ReplyPiece(delta=whole_message(chat.reply), ids=ids, logprobs=logprobs, top=top))
    listener.finished(number, chat)
