"""A session: builds the prompt of each call, has it sampled, records it, and only then returns the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

from palestra.errors import GrammarRefused, PalestraError, UnsupportedField, VersionQuarantined
from palestra.renderers import whole_message
from palestra.session.context import SessionContext
from palestra.session.prompting import PromptBuilder
from palestra.session.registry import NO_SEED, CallInFlight, CallRegistry, Turns, prompt_digest
from palestra.session.request import UNCONSTRAINED, Listener, ReplyPiece, constraint_of
from palestra.session.sampling import NEUTRAL, overruled, reshaping, sample_reply, sampling_of, trainable
from palestra.types.calls import Chat
from palestra.types.messages import GenerationRequest, text_message
from palestra.types.records import EpisodeKind, EpisodeRecord
from palestra.types.states import TurnState
from palestra.waiting import together

GRAMMARS_AT_ONCE = 2  # grammars of one session that are being compiled or wait to be
_UNDECIDED = -1  # time step of choices of which none is recorded: the first one decides
_NO_REPLY: dict[str, Any] = {
    "reply": text_message("assistant", ""),
    "completion_ids": np.empty(0, np.int32),
    "logprobs": np.empty(0, np.float32),
    "versions": (),
    "finish_reason": "length",
    "finished_at": 0.0,
}  # of a call that is not sampled yet


Record: TypeAlias = Callable[[Chat], asyncio.Future[None]]
"""Records a call; see `Calls.append`."""


def not_recorded(_chat: Chat) -> asyncio.Future[None]:
    """Record nothing, for calls outside episodes; see `Record`."""
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


class Session:
    """Calls that share their history: of one lease of an episode, or of one request outside episodes.

    Attributes:
        episode_id: outside episodes, a random name.
        kind: selects the job's sampling settings.
        keeps: returns whether a reply may be recorded; None: all are.
    """

    keeps: Callable[[Chat], Awaitable[bool]] | None = None

    def __init__(
        self,
        context: SessionContext,
        record: Record,
        episode_id: str,
        fence: int,
        kind: EpisodeKind,
        recorded: Sequence[Chat] = (),
    ) -> None:
        """Create the session. `recorded` are the calls of this lease on disk, by index; `record` adds to them."""
        self.episode_id, self.fence, self.kind = episode_id, fence, kind
        self._context, self._clock = context, context.clock
        self._prompts = PromptBuilder(context)
        self._registry = CallRegistry(context.seed, episode_id, recorded)
        self.delivered = self._registry.delivered
        self._record = record
        self._turns = Turns(f"a call of episode {episode_id}", context.times)
        # All sessions share one queue of grammars to compile, which a single episode must not fill with hundreds.
        self._checks = asyncio.Semaphore(GRAMMARS_AT_ONCE)
        self._in_flight: set[asyncio.Task[object]] = set()
        self._over: PalestraError | None = None
        for chat in recorded:
            self._prompts.add(chat)

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
        if request.choices == 1 and not request.retry:
            return await self._sample_all([CallInFlight()], request, listener, request.time_step)
        known = await self._answer_again(request, listener) if request.retry else {}
        calls = [CallInFlight(number) for number in range(request.choices) if number not in known]
        if calls:
            step = min((chat.time_step for chat in known.values()), default=request.time_step)
            sampled = await self._sample_all(calls, request, listener, step)
            known |= zip((call.number for call in calls), sampled, strict=True)
        return tuple(known[number] for number in range(request.choices))

    async def generate_one(self, request: GenerationRequest, listener: Listener | None = None) -> Chat:
        """Sample a request of one choice, and return its call; see `generate`."""
        (chat,) = await self.generate(request, listener)
        return chat

    async def count_tokens(self, request: GenerationRequest) -> int:
        """Return the number of prompt tokens of a request, without limit, sampling or recording. Raises NotFound: the
        policy is unknown. Raises InvalidRequest: the model's template cannot render the messages.
        """
        if self._over is not None:
            raise self._over
        runtime = self._context.policies.runtime(request.policy)
        return len((await self._prompts.build(request, runtime.renderer, max_context=None)).sequence.ids)

    def free_seed(self, chat: Chat) -> None:
        """Free the seed of a call that led to no action, so that its repetition is the same sample."""
        earlier = self._prompts.earlier(chat.policy, chat.agent)
        digest = prompt_digest(chat.prompt_ids, earlier.policy, earlier.seat)
        self._registry.free(chat.index, chat.sampling.seed, digest)

    def terminate(self, reason: PalestraError) -> None:
        """End the session. Running and later calls raise `reason`."""
        self._over = reason
        self._turns.terminate()
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
        calls: Sequence[CallInFlight],
        request: GenerationRequest,
        listener: Listener | None,
        time_step: int | None,
    ) -> tuple[Chat, ...]:
        """Sample choices, holding the lease. If that fails, give up the choices that are not recorded."""
        task = asyncio.current_task()
        assert task is not None
        self._turns.begin(calls)
        self._in_flight.add(task)
        leases = self._context.store.leases
        lease = leases.begin_hold(self.episode_id, self.fence)
        try:
            await self._begin(calls, request, listener, time_step)
            if len(calls) == 1:
                return (await self._sample(calls[0], calls, listener),)
            return tuple(await together(*(self._sample(call, calls, listener) for call in calls)))
        except BaseException as error:
            for call in calls:
                self._give_up(call)
            if isinstance(error, asyncio.CancelledError) and self._over is not None:
                raise self._over from None
            raise
        finally:
            leases.end_hold(lease)
            self._in_flight.discard(task)
            self._turns.end(calls)
            if self._over is not None:
                self._forget_if_idle()

    async def _begin(
        self,
        calls: Sequence[CallInFlight],
        asked: GenerationRequest,
        listener: Listener | None,
        time_step: int | None,
    ) -> None:
        """Check a request, have its grammar compiled, build its prompt, and begin the records of its choices."""
        request, runtime = asked, self._context.policies.runtime(asked.policy)
        if self.kind == "adhoc":
            self._check_served(asked.policy)
        # What a frozen policy says is not trained on.
        if self.kind == "train" and not runtime.config.frozen and reshaping(asked) != NEUTRAL:
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
        prompt = await self._prompts.build(request, runtime.renderer, runtime.config.max_context)
        for call in calls:
            call.request, call.runtime, call.constraint, call.prompt = request, runtime, constraint, prompt
            index, call.seed = self._registry.reserve(prompt.digest)
            call.chat = Chat(
                episode_id=self.episode_id,
                fence=self.fence,
                index=index,
                time_step=_UNDECIDED if time_step is None else time_step,
                agent=request.agent,
                policy=request.policy,
                parent=prompt.parent,
                shared=prompt.shared,
                shared_messages=prompt.shared_messages,
                new_messages=prompt.new_messages,
                prompt_tail=prompt.sequence.ids[prompt.shared :].copy(),  # a view would keep the whole prompt in memory
                media=prompt.media,
                tools=request.tools,
                fork=prompt.fork,
                sampling=sampling_of(call, self.kind, call.seed),
                request_digest=request.choice_digest(call.number),
                started_at=started_at,
                **_NO_REPLY,
            )
            if overruled(asked, call.chat.sampling, call.number) is not None:
                self._context.counts["sampling_overruled"] += 1
            if listener is not None:
                listener.started(call.number, call.chat)

    def _check_served(self, policy: str) -> None:
        """Raise an error if an audit holds a policy back from calls outside the job's own episodes."""
        if (why := self._context.policies.why_held(policy)) is not None:
            raise VersionQuarantined(f"{policy!r} is {why}")

    async def _sample(self, call: CallInFlight, calls: Sequence[CallInFlight], listener: Listener | None) -> Chat:
        """Sample one of the choices of a request, parse its reply, and record it."""
        chat, number = call.chat, call.number

        def told(piece: ReplyPiece) -> None:
            if self.kind == "adhoc":
                self._check_served(chat.policy)  # a new version is published while replies are sampled
            if listener is not None:
                listener.sampled(number, piece)

        tell = None if listener is None else told
        metering = self._context.metering
        hold = None if metering is None else await metering.hold(chat, self.kind)
        self._turns.move(call, TurnState.GENERATING)
        try:
            malformed = await sample_reply(call, tell)
            kept = self.keeps is None or await self.keeps(chat)
        except GrammarRefused as error:  # at a token of the reply; the engine does not know the request's field
            raise error.of_field(call.constraint.field) from None
        finally:
            if metering is not None and hold is not None:
                metering.settle(hold, chat)
        if self.kind == "adhoc":
            self._check_served(chat.policy)
        self._turns.move(call, TurnState.INTERACTING)
        self._context.counts["malformed_tool_calls"] += len(malformed)
        if chat.time_step == _UNDECIDED:
            for choice in calls:
                choice.chat.time_step = self._registry.next_step
        chat.finished_at = self._clock.now()
        if kept:
            written = self._record(chat)
            self._registry.recording(chat, written)
            # Added before the callback of `shield`, so that the call is registered when this task resumes.
            written.add_done_callback(partial(self._written, call))
            await asyncio.shield(written)
        elif metering is not None:
            metering.lost(chat, self.kind)
        call.recorded = True
        if listener is not None:
            listener.finished(number, chat)
        return chat

    def _written(self, call: CallInFlight, written: asyncio.Future[None]) -> None:
        """Run at the end of the commit, even after the client disconnected, so that a retry returns exactly the
        committed call. A call that was in writing when the session ended is recorded, but none continues from it.
        """
        failed = written.cancelled() or written.exception() is not None  # the error is raised where it is awaited
        self._registry.recorded(call.chat, written, kept=not failed and self._over is None)
        if failed:
            if self._context.metering is not None:
                self._context.metering.lost(call.chat, self.kind)
            return
        self._context.count(call.chat)
        if self._over is None:
            self._prompts.add(call.chat, call.prompt)

    def _give_up(self, call: CallInFlight) -> None:
        """Free a choice's seed, unless the choice is recorded or may still become so."""
        if call.recorded:
            return
        if call.seed != NO_SEED and call.state is not TurnState.INTERACTING:
            self._registry.free(call.chat.index, call.seed, call.prompt.digest)
            if self._context.metering is not None and call.state is TurnState.GENERATING:
                self._context.metering.lost(call.chat, self.kind)
        self._turns.move(call, TurnState.TERMINATED)
        self._context.counts["calls_incomplete"] += 1

    def _forget_if_idle(self) -> None:
        """Free the memory of a session that is over, if no call needs it any more."""
        if not self._in_flight:
            self._prompts.clear()


class EpisodeSession(Session):
    """The calls of one lease of an episode, each recorded before its reply is returned."""

    def __init__(self, context: SessionContext, episode: EpisodeRecord, recorded: Sequence[Chat] = ()) -> None:
        """Create the session from the store's calls of this lease."""
        metering, append = context.metering, context.store.calls.append
        record = append if metering is None else partial(metering.record, kind=episode.kind)
        super().__init__(context, record, episode.episode_id, episode.fence, episode.kind, recorded)
        self.episode = episode


class StatelessSession(Session):
    """The calls of one request outside episodes: sampled with the caller's settings, and not recorded.

    The session's name and thus its seeds are random: equal calls are different samples, unless the caller gives a seed.
    """

    def __init__(self, context: SessionContext) -> None:
        record = not_recorded if context.metering is None else partial(context.metering.record, kind="adhoc")
        super().__init__(context, record, uuid4().hex, 0, "adhoc")


def _replay(number: int, chat: Chat, listener: Listener | None) -> None:
    """Report a call that was recorded before to a listener, as if it was sampled now."""
    if listener is None:
        return
    listener.started(number, chat)
    ids, logprobs = tuple(chat.completion_ids.tolist()), tuple(chat.logprobs.tolist())
    top = () if chat.top is None else tuple(map(tuple, chat.top.rows()))
    listener.sampled(number, ReplyPiece(delta=whole_message(chat.reply), ids=ids, logprobs=logprobs, top=top))
    listener.finished(number, chat)
