"""One episode under one lease: builds each call's prompt, has it sampled, records it, and only then hands it out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from jinja2 import TemplateError

from palestra.chat import ChatMLRenderer
from palestra.chat.long_text import TooManyTokens
from palestra.chat.raw_text import encode_text, vocabulary_size
from palestra.chat.streaming import whole_message
from palestra.errors import ContextOverflow, GrammarRefused, InvalidRequest, PalestraError, UnsupportedField
from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Chat, Episode, Ids, SamplingParams
from palestra.schemas.states import TurnState
from palestra.session.call import CallStart, GenerationRequest, Listener, ReplyPiece
from palestra.session.constraints import Constraint, constraint_of
from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.prompting import LONG_TEXT, Prompt, Prompts
from palestra.session.recorder import CallRecorder
from palestra.session.reply import Completion, ReplyReader, read_whole, sample
from palestra.session.sampling import overruled, sampling_of, trainable
from palestra.session.turn import Turn

GRAMMARS_AT_ONCE = 2  # of one episode, that are being compiled or wait for it


@dataclass(kw_only=True, slots=True)
class _Choice:
    """One sample of a call on its way."""

    number: int
    turn: Turn
    index: int = 0
    seed: int = 0  # of its own, also where the caller gave another
    prompt: bytes = b""  # its digest
    occurrence: int = 0  # of equal prompts
    sampling: SamplingParams | None = None  # None: the prompt is not there yet
    recorded: bool = False


@dataclass(kw_only=True, slots=True)
class _Play:
    """A call that is being played: what its choices share."""

    call: GenerationRequest
    runtime: PolicyRuntime
    listener: Listener | None
    prompt: Prompt
    constraint: Constraint
    started_at: float
    time_step: int | None  # None: of the first choice that is recorded


class EpisodeSession:
    """The calls of one lease."""

    def __init__(
        self,
        context: SessionContext,
        episode: Episode,
        recorded: Sequence[Chat],
        recorder: CallRecorder | None = None,
    ) -> None:
        """`recorder`: where its calls are recorded. None: in the context's store."""
        self.episode = episode
        self._context = context
        self._recorder = context.store.calls if recorder is None else recorder
        self._prompts = Prompts(context.sameness)
        # The queue of grammars to be compiled is one for all: an episode that asks for hundreds must not fill it.
        self._checks = asyncio.Semaphore(GRAMMARS_AT_ONCE)
        self._undelivered: dict[str, Chat] = {}  # by request digest
        self._recordings: dict[str, asyncio.Future[None]] = {}  # that are being written, by request digest
        self._seeds: set[int] = set()  # of the calls that are recorded or in flight
        self._taken: dict[bytes, int] = {}  # by prompt: all occurrences before this one have calls
        self._in_flight: set[asyncio.Task[object]] = set()
        self._turns: set[Turn] = set()
        self._next_index = 0
        self._next_step = 0
        self._over: PalestraError | None = None
        self._acting = False  # no call is in flight, and there was one: it is the agent's move
        for chat in recorded:
            self._remember(chat)
            self._seeds.add(chat.sampling.seed)
        used = {chat.parent.index for chat in recorded if chat.parent is not None and chat.extends}
        for chat in recorded:
            if chat.index not in used:  # nothing tells that its reply arrived, so a retry may ask for it again
                self._undelivered[chat.request_digest] = chat

    @property
    def state(self) -> TurnState:
        """GENERATING if any call is, else PENDING if any is; between calls the agent or its environment acts."""
        if self._over is not None:
            return TurnState.TERMINATED
        states = {turn.state for turn in self._turns}
        for state in (TurnState.GENERATING, TurnState.PENDING):
            if state in states:
                return state
        return TurnState.INTERACTING if self._prompts.calls else TurnState.PENDING

    async def chat(self, call: GenerationRequest, listener: Listener | None = None) -> Chat:
        """Play a call of one choice; see `chats`."""
        (chat,) = await self.chats(call, listener)
        return chat

    async def chats(self, call: GenerationRequest, listener: Listener | None = None) -> tuple[Chat, ...]:
        """Play one call, all its choices at once. When it returns, they are on disk.

        A retry gets those choices that were recorded and have not been delivered.

        Raises:
            NotFound: no such policy.
            UnsupportedField: the episode is for training, and the call asks for what can't be trained on.
            InvalidRequest: a schema, tool or token id that can't be used.
            GrammarRefused: a schema that takes too much time or memory, perhaps after some tokens of the reply.
            ContextOverflow: the prompt leaves no room for a reply.
            HistoryDrift: the job is strict, and exact tokens of an earlier call would be lost.
            EpisodeLeaseExpired, EpisodeEnded: the lease ended meanwhile; nothing of the call is kept.
            EngineFailure: the engine could not finish.
        """
        if self._over is not None:
            raise self._over
        known = await self._recorded_before(call) if call.retry else {}
        for number, chat in known.items():
            self._context.counts["retries_answered"] += 1
            _replay(number, chat, listener)
        missing = [number for number in range(call.choices) if number not in known]
        if missing:
            known |= await self._play(call, missing, known, listener)
        return tuple(known[number] for number in range(call.choices))

    async def count_tokens(self, call: GenerationRequest) -> int:
        """Return how many tokens the prompt of a call would have, however many that are; nothing is sampled or kept.

        Raises:
            NotFound: no such policy.
            InvalidRequest: the model's template can't show the messages.
        """
        if self._over is not None:
            raise self._over
        return len((await self._prompt(call, self._context.runtime(call.policy), bounded=False)).ids)

    def delivered(self, chat: Chat) -> None:
        """The reply has left; a retry can no longer mean this call."""
        if self._undelivered.get(chat.request_digest) is chat:
            del self._undelivered[chat.request_digest]

    def terminate(self, reason: PalestraError) -> None:
        """Nothing more may be added; calls in flight are cancelled and end with `reason`."""
        self._over = reason
        self._acted()
        for task in self._in_flight:
            task.cancel()
        self._forget_if_over()

    async def _recorded_before(self, call: GenerationRequest) -> dict[int, Chat]:
        """Choices that are on disk and have not been delivered; what is being written is waited for."""
        digests = [call.choice_digest(number) for number in range(call.choices)]
        if writing := [self._recordings[digest] for digest in digests if digest in self._recordings]:
            await asyncio.wait(writing)
        found = {number: self._undelivered.get(call.choice_digest(number)) for number in range(call.choices)}
        return {number: chat for number, chat in found.items() if chat is not None}

    async def _play(
        self, call: GenerationRequest, numbers: Sequence[int], known: dict[int, Chat], listener: Listener | None
    ) -> dict[int, Chat]:
        runtime = self._context.runtime(call.policy)
        task = asyncio.current_task()
        assert task is not None
        subject = f"a call of episode {self.episode.episode_id}"
        choices = [_Choice(number=number, turn=Turn(subject, self._context.times)) for number in numbers]
        self._acted()
        self._in_flight.add(task)
        self._turns.update(choice.turn for choice in choices)
        try:
            with self._context.store.leases.hold(self.episode.episode_id, self.episode.fence):
                play = await self._begin(call, runtime, choices, known, listener)
                chats = await _all_at_once([self._sample(play, choice) for choice in choices])
                return dict(zip(numbers, chats, strict=True))
        except BaseException as error:
            for choice in choices:
                self._give_up(choice)
            if isinstance(error, asyncio.CancelledError) and self._over is not None:
                raise self._over from None
            raise
        finally:
            self._in_flight.discard(task)
            self._turns.difference_update(choice.turn for choice in choices)
            if not self._turns and self._over is None:
                self._acting = True
                self._context.times.enter(TurnState.INTERACTING)
            self._forget_if_over()

    async def _begin(
        self,
        call: GenerationRequest,
        runtime: PolicyRuntime,
        choices: Sequence[_Choice],
        known: dict[int, Chat],
        listener: Listener | None,
    ) -> _Play:
        """Make the prompt, and give each choice its index and its seed."""
        asked = call
        if self.episode.kind == "train":
            call = trainable(asked, self._context.ignore_untrainable)
        if call.callable_tools and not call.parallel_tool_calls and not isinstance(runtime.renderer, ChatMLRenderer):
            raise UnsupportedField(
                "parallel_tool_calls = false is not supported in this model's format of tool calls",
                "parallel_tool_calls",
            )
        started_at = self._context.clock.now()
        constraint = constraint_of(call, runtime.renderer)
        if constraint.grammar:
            async with self._checks:
                await runtime.grammars.check(*constraint)
        prompt = await self._prompt(call, runtime)
        step = call.time_step if not known else min(chat.time_step for chat in known.values())
        play = _Play(
            call=call,
            runtime=runtime,
            listener=listener,
            prompt=prompt,
            constraint=constraint,
            started_at=started_at,
            time_step=step,
        )
        digest = prompt_digest(prompt.ids)
        for choice in choices:
            choice.prompt = digest
            choice.occurrence, choice.seed = self._free_seed(digest)
            sampling = choice.sampling = sampling_of(
                call, runtime.config, self.episode.kind, len(prompt.ids), choice.seed, choice.number, constraint.grammar
            )
            choice.index = self._next_index  # after its parent's, and no other call comes between
            self._next_index += 1
            self._seeds.add(choice.seed)
            if overruled(asked, sampling, choice.number) is not None:
                self._context.counts["sampling_overruled"] += 1
            if listener is not None:
                listener.started(choice.number, self._start(prompt, choice.index, sampling))
        return play

    async def _prompt(self, call: GenerationRequest, runtime: PolicyRuntime, bounded: bool = True) -> Prompt:
        """Make the prompt of a call.

        Raises:
            ContextOverflow: it leaves no room for a reply.
            InvalidRequest: it has no tokens, or can't be shown.
        """
        most = runtime.config.max_context
        try:
            if call.prompt is not None:
                return await self._raw_prompt(call.prompt, runtime, most - 1)
            return await self._prompts.make(
                self._context, runtime, call.policy, call.messages, call.tools, most - 1 if bounded else None
            )
        except TooManyTokens as error:
            raise ContextOverflow(error.tokens, most, at_least=True) from None
        except (ValueError, KeyError, TemplateError) as error:  # templates refuse what they have no place for
            text = " ".join(str(error).split())[:200]
            raise InvalidRequest(f"messages: this model's template can't show them: {text}", "messages") from error

    async def _raw_prompt(self, prompt: str | tuple[int, ...], runtime: PolicyRuntime, room: int) -> Prompt:
        if isinstance(prompt, str):
            ids = (
                await self._context.pool.run(encode_text, runtime.renderer, prompt, room)
                if len(prompt) > LONG_TEXT
                else encode_text(runtime.renderer, prompt)
            )
        elif len(prompt) > room:
            raise ContextOverflow(len(prompt), room + 1)
        else:
            ids = np.asarray(prompt, np.int32)
        size = vocabulary_size(runtime.renderer)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= size:
            raise InvalidRequest(f"prompt: it has no token, or ids that are none; ids are below {size}", "prompt")
        return self._prompts.raw(ids)

    def _start(self, prompt: Prompt, index: int, sampling: SamplingParams) -> CallStart:
        return CallStart(
            episode_id=self.episode.episode_id,
            fence=self.episode.fence,
            index=index,
            prompt_ids=prompt.ids,
            shared=prompt.shared,
            sampling=sampling,
        )

    async def _sample(self, play: _Play, choice: _Choice) -> Chat:
        """One choice, from its prompt to its record."""
        call, runtime, prompt = play.call, play.runtime, play.prompt
        sampling, listener, number = choice.sampling, play.listener, choice.number
        assert sampling is not None
        call_ids = f"call_{choice.seed:016x}"
        reader = None
        if listener is not None or call.stop or call.prompt is not None or not call.parallel_tool_calls:
            reader = ReplyReader(call, runtime, sampling, call_ids)
        tell = None if listener is None else (lambda piece: listener.sampled(number, piece))
        choice.turn.move(TurnState.GENERATING)
        try:
            completion = await sample(runtime.engine, call.policy, prompt.ids, sampling, reader, tell)
        except GrammarRefused as error:  # at a token of the reply; the engine does not know what the field was
            raise error.of_field(play.constraint.field) from None
        choice.turn.move(TurnState.INTERACTING)
        if reader is None:
            reply = read_whole(call, runtime, completion.ids, prompt.ids, call_ids)
        else:
            rest, reply = reader.finish(completion.ids, prompt.ids)
            if tell is not None and rest:
                tell(ReplyPiece(delta=rest))
        self._context.counts["malformed_tool_calls"] += len(reply.malformed)
        stop = None if reader is None else reader.stop
        chat = self._chat(play, choice, completion, reply.message, stop)
        self._next_step = max(self._next_step, chat.time_step + 1)
        recording = self._recordings[chat.request_digest] = self._recorder.append(chat)
        recording.add_done_callback(partial(self._recorded, chat, prompt.keys))  # before whoever waits for it goes on
        await asyncio.shield(recording)
        choice.recorded = True
        if listener is not None:
            listener.finished(number, chat)
        return chat

    def _chat(self, play: _Play, choice: _Choice, completion: Completion, reply: ChatMessage, stop: str | None) -> Chat:
        call, prompt, sampling = play.call, play.prompt, choice.sampling
        assert sampling is not None
        if play.time_step is None:
            play.time_step = self._next_step
        stopped = stop is not None or int(completion.ids[-1]) in {*play.runtime.stop_ids, *sampling.stop_ids}
        return Chat(
            episode_id=self.episode.episode_id,
            fence=self.episode.fence,
            index=choice.index,
            time_step=play.time_step,
            agent=call.agent,
            policy=call.policy,
            parent=prompt.parent,
            shared=prompt.shared,
            shared_messages=prompt.shared_messages,
            new_messages=prompt.new_messages,
            prompt_tail=prompt.tail,
            tools=call.tools,
            reply=reply,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason="stop" if stopped else "length",
            fork=prompt.fork,
            stop=stop,
            sampling=sampling,
            request_digest=call.choice_digest(choice.number),
            started_at=play.started_at,
            finished_at=self._context.clock.now(),
        )

    def _recorded(self, chat: Chat, keys: Mapping[int, Hashable], recording: asyncio.Future[None]) -> None:
        """Also where the caller is gone: what was committed is what a retry gets, and nothing beside it."""
        if self._recordings.get(chat.request_digest) is recording:
            del self._recordings[chat.request_digest]
        if recording.cancelled() or recording.exception() is not None:  # raised where it is awaited
            return
        self._context.count(chat)
        if self._over is None:
            self._remember(chat, keys)
            self._undelivered[chat.request_digest] = chat

    def _acted(self) -> None:
        """The agent's move is over: it calls again, or the episode ends."""
        if self._acting:
            self._acting = False
            self._context.times.leave(TurnState.INTERACTING)

    def _forget_if_over(self) -> None:
        """No prompt will be made any more."""
        if self._over is not None and not self._in_flight:
            self._prompts.clear()

    def _give_up(self, choice: _Choice) -> None:
        """A choice that will not be recorded; the same call, sent again, is the same sample."""
        if choice.recorded:
            return
        if choice.sampling is not None and choice.turn.state is not TurnState.INTERACTING:
            self._seeds.discard(choice.seed)
            self._taken[choice.prompt] = min(self._taken[choice.prompt], choice.occurrence)
        choice.turn.move(TurnState.TERMINATED)
        self._context.counts["calls_incomplete"] += 1

    def _free_seed(self, prompt: bytes) -> tuple[int, int]:
        """Number and seed of the first occurrence of this prompt that no other call has."""
        for occurrence in count(self._taken.get(prompt, 0)):
            seed = _seed(self._context.seed, self.episode.episode_id, prompt, occurrence)
            if seed not in self._seeds:
                break
        self._taken[prompt] = occurrence
        return occurrence, seed

    def _remember(self, chat: Chat, keys: Mapping[int, Hashable] | None = None) -> None:
        self._prompts.add(chat, keys)
        self._next_index = max(self._next_index, chat.index + 1)
        self._next_step = max(self._next_step, chat.time_step + 1)


async def _all_at_once(choices: Sequence[Coroutine[None, None, Chat]]) -> list[Chat]:
    """Await all; if one fails, cancel the others."""
    if len(choices) == 1:
        return [await choices[0]]
    tasks = [asyncio.ensure_future(choice) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _replay(number: int, chat: Chat, listener: Listener | None) -> None:
    """Tell of a call that was recorded before."""
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
    listener.sampled(number, ReplyPiece(delta=whole_message(chat.reply), ids=ids, logprobs=logprobs))
    listener.finished(number, chat)


def call_seed(job_seed: int, episode_id: str, prompt_ids: Ids, occurrence: int) -> int:
    """63 bits from (job, episode, call). A call is known by its prompt, and among equal ones by their order.

    So the order in which different calls arrive changes nothing, nor does a call that was lost and is sent again.
    """
    return _seed(job_seed, episode_id, prompt_digest(prompt_ids), occurrence)


def _seed(job_seed: int, episode_id: str, prompt: bytes, occurrence: int) -> int:
    text = f"{job_seed}\0{episode_id}\0{occurrence}\0".encode()
    digest = hashlib.blake2b(text + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(prompt_ids: Ids) -> bytes:
    """16 bytes that stand for a prompt."""
    return hashlib.blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=16).digest()
