"""One episode under one lease: builds each call's prompt, has it sampled, records it, and only then hands it out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.chat import parse_reply
from palestra.errors import ContextOverflow, EngineFailure, PalestraError
from palestra.schemas.messages import ChatMessage
from palestra.schemas.records import Chat, Episode, Ids, SampledTokens, Sampling, VersionSpan
from palestra.schemas.states import TurnState
from palestra.session.context import PolicyRuntime, SessionContext
from palestra.session.prompting import Prompts
from palestra.session.turn import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """What an agent asks of a model."""

    policy: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None  # None: as many as the job allows
    temperature: float | None = None  # used where the job does not fix it
    seed: int | None = None  # likewise
    tools: tuple[dict[str, Any], ...] = ()  # that the model is told of, in OpenAI's shape
    parse_tool_calls: bool = True  # False: what looks like one stays text
    agent: str = "agent"  # a subagent's name starts with its parent's: "planner/search"
    time_step: int | None = None  # None: every call is a TimeStep of its own
    digest: str = ""  # of the request, to know a retry
    retry: bool = False  # the client says that it has sent this before


class EpisodeSession:
    """The calls of one lease."""

    def __init__(self, context: SessionContext, episode: Episode, recorded: Sequence[Chat]) -> None:
        self.episode = episode
        self._context = context
        self._prompts = Prompts(context.keep_dropped_reasoning)
        self._undelivered: dict[str, Chat] = {}  # by request digest
        self._seeds: set[int] = set()  # of the calls that are recorded or in flight
        self._taken: dict[bytes, int] = {}  # by prompt: all occurrences before this one have calls
        self._in_flight: set[asyncio.Task[object]] = set()
        self._turns: set[Turn] = set()
        self._next_index = 0
        self._next_step = 0
        self._over: PalestraError | None = None
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
        return TurnState.INTERACTING if self._prompts.trie.chats else TurnState.PENDING

    async def chat(self, call: ModelCall) -> Chat:
        """Play one call. When it returns, the call is on disk.

        Raises:
            NotFound: no such policy.
            ContextOverflow: the prompt leaves no room for a reply.
            HistoryDrift: the job is strict, and exact tokens of an earlier call would be lost.
            EpisodeLeaseExpired, EpisodeEnded: the lease ended meanwhile; nothing of the call is kept.
            EngineFailure: the engine could not finish.
        """
        if self._over is not None:
            raise self._over
        if call.retry and (known := self._undelivered.get(call.digest)) is not None:
            self._context.counts["retries_answered"] += 1
            return known
        runtime = self._context.runtime(call.policy)
        task = asyncio.current_task()
        assert task is not None
        turn = Turn(f"a call of episode {self.episode.episode_id}", self._context.clock, self._context.seconds)
        self._in_flight.add(task)
        self._turns.add(turn)
        try:
            with self._context.store.hold(self.episode.episode_id, self.episode.fence):
                return await self._play(call, runtime, turn)
        except BaseException as error:
            turn.move(TurnState.TERMINATED)
            self._context.counts["calls_incomplete"] += 1
            if isinstance(error, asyncio.CancelledError) and self._over is not None:
                raise self._over from None
            raise
        finally:
            self._in_flight.discard(task)
            self._turns.discard(turn)

    def delivered(self, chat: Chat) -> None:
        """The reply has left; a retry can no longer mean this call."""
        if self._undelivered.get(chat.request_digest) is chat:
            del self._undelivered[chat.request_digest]

    def terminate(self, reason: PalestraError) -> None:
        """Nothing more may be added; calls in flight are cancelled and end with `reason`."""
        self._over = reason
        for task in self._in_flight:
            task.cancel()

    async def _play(self, call: ModelCall, runtime: PolicyRuntime, turn: Turn) -> Chat:
        clock, started = self._context.clock, self._context.clock.now()
        prompt = await self._prompts.make(runtime, call.policy, call.messages, call.tools, self._context.strict_history)
        index = self._next_index  # after its parent's, and no other call comes between
        self._next_index += 1
        digest = prompt_digest(prompt.ids)
        occurrence, seed = self._free_seed(digest)
        sampling = self._sampling(call, runtime, prompt.ids, seed)
        self._seeds.add(seed)
        try:
            turn.move(TurnState.GENERATING)
            pieces = [p async for p in runtime.engine.generate(call.policy, prompt.ids, sampling)]
            completion_ids, logprobs, versions = _join(pieces)
        except BaseException:
            self._seeds.discard(seed)  # the same call, sent again, is the same sample
            self._taken[digest] = min(self._taken[digest], occurrence)
            raise
        turn.move(TurnState.INTERACTING)
        tools = call.tools if call.parse_tool_calls else ()
        reply = parse_reply(runtime.renderer, completion_ids, lambda: prompt.ids, tools, f"call_{seed:016x}")
        self._context.counts["malformed_tool_calls"] += len(reply.malformed)
        chat = Chat(
            episode_id=self.episode.episode_id,
            fence=self.episode.fence,
            index=index,
            time_step=self._next_step if call.time_step is None else call.time_step,
            agent=call.agent,
            policy=call.policy,
            parent=prompt.parent,
            shared=prompt.shared,
            shared_messages=prompt.shared_messages,
            new_messages=prompt.new_messages,
            prompt_tail=prompt.tail,
            tools=call.tools,
            reply=reply.message,
            completion_ids=completion_ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason="stop" if int(completion_ids[-1]) in runtime.stop_ids else "length",
            fork=prompt.fork,
            sampling=sampling,
            request_digest=call.digest,
            started_at=started,
            finished_at=clock.now(),
        )
        self._next_step = max(self._next_step, chat.time_step + 1)
        await asyncio.shield(self._record(chat))
        return chat

    async def _record(self, chat: Chat) -> None:
        """Goes on where the caller is gone: what was committed is what a retry gets, and nothing beside it."""
        await self._context.store.append_chat(chat)
        self._remember(chat)
        self._undelivered[chat.request_digest] = chat
        self._context.count(chat)

    def _free_seed(self, prompt: bytes) -> tuple[int, int]:
        """Number and seed of the first occurrence of this prompt that no other call has."""
        for occurrence in count(self._taken.get(prompt, 0)):
            seed = _seed(self._context.seed, self.episode.episode_id, prompt, occurrence)
            if seed not in self._seeds:
                break
        self._taken[prompt] = occurrence
        return occurrence, seed

    def _sampling(self, call: ModelCall, runtime: PolicyRuntime, prompt_ids: Ids, seed: int) -> Sampling:
        """The job's settings for training, greedy for validation, the caller's own for an ad-hoc episode."""
        room = runtime.config.max_context - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(len(prompt_ids), runtime.config.max_context)
        fixed = runtime.config.sampling
        most = min(fixed.max_tokens, room)
        temperature = {"train": fixed.temperature, "validation": 0.0}.get(self.episode.kind)
        if temperature is None:
            temperature = fixed.temperature if call.temperature is None else call.temperature
        if self.episode.kind == "adhoc" and call.seed is not None:
            seed = call.seed
        return Sampling(
            temperature=temperature,
            max_tokens=most if call.max_tokens is None else min(call.max_tokens, most),
            seed=seed,
        )

    def _remember(self, chat: Chat) -> None:
        self._prompts.add(chat)
        self._next_index = max(self._next_index, chat.index + 1)
        self._next_step = max(self._next_step, chat.time_step + 1)


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


def _join(pieces: Sequence[SampledTokens]) -> tuple[Ids, NDArray[np.float32], tuple[VersionSpan, ...]]:
    """Pieces of a reply to arrays and version spans.

    Raises:
        EngineFailure: the engine gave no token.
    """
    spans: list[VersionSpan] = []
    for piece in pieces:
        if spans and spans[-1].version == piece.version:
            spans[-1] = VersionSpan(piece.version, spans[-1].tokens + len(piece.ids))
        elif piece.ids:
            spans.append(VersionSpan(piece.version, len(piece.ids)))
    if not spans:
        raise EngineFailure("the engine returned no token")
    ids = np.fromiter((i for piece in pieces for i in piece.ids), np.int32)
    logprobs = np.fromiter((p for piece in pieces for p in piece.logprobs), np.float32)
    return ids, logprobs, tuple(spans)
