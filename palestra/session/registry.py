"""The calls of one lease: numbers, seeds, recording, and replies kept for retries."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from palestra.session.context import SessionContext
from palestra.session.prompting import Prompt, PromptBuilder
from palestra.types.calls import Chat, Ids
from palestra.types.messages import GenerationRequest

# `hashlib` lets another thread run while it digests more bytes than these, and a busy server waits longer for its turn
# than for the digest of a prompt.
_PIECE = 2047
KEYED = "key-"  # beginning of the digest of a request that has a key of its own, by which its retries are known


@dataclass(frozen=True, slots=True)
class ReservedCall:
    """The number and seed of a call, reserved once its prompt is known.

    Attributes:
        index: number of the call in its lease.
        occurrence: number of earlier calls with an equal prompt.
    """

    index: int
    seed: int
    prompt: bytes
    occurrence: int


class CallRegistry:
    """Gives calls their numbers and seeds, and recognises calls that are sent again.

    Calls with equal prompts are different samples, so each has a seed of its own, in the order in which they arrive. A
    call that was lost and is sent again has the same seed as before. A call that was recorded, but whose reply was not
    delivered, is answered from the record. So is every repetition of a request that has a key of its own, also after
    its reply was sent: the connection may have lost the reply.

    Attributes:
        next_step: the time step of a call whose agent does not name one.
    """

    def __init__(self, job_seed: int, episode_id: str, recorded: Iterable[Chat]) -> None:
        """Create the registry from the calls on disk.

        Args:
            job_seed: all seeds derive from it and the episode.
            recorded: the lease's calls, in any order.
        """
        self._job_seed, self._episode_id = job_seed, episode_id
        self._seeds: dict[int, int] = {}  # of the calls that are recorded or in flight: whose it is, by index
        self._taken: dict[bytes, int] = {}  # for each prompt the number from which a free occurrence is searched
        # Calls by the digest of their request, by which a retry is recognised.
        self._undelivered: dict[str, Chat] = {}
        self._recordings: dict[str, asyncio.Future[None]] = {}
        self._next_index = 0
        self.next_step = 0
        calls = list(recorded)
        used = {chat.parent.index for chat in calls if chat.parent is not None and chat.extends}
        for chat in calls:
            self._seeds[chat.sampling.seed] = chat.index
            self._count(chat)
            # A call that continues this one shows that the reply arrived. Otherwise a retry may ask for it.
            if chat.index not in used or chat.request_digest.startswith(KEYED):
                self._undelivered[chat.request_digest] = chat

    def reserve(self, prompt_ids: Ids, policy: str = "", seat: str = "") -> ReservedCall:
        """Reserve the next number and the first free seed of the prompt.

        Args:
            prompt_ids: int32 [P].
            policy: "": the job's default. Each policy has its own seeds for a prompt, so the order of calls to
                different policies does not matter.
            seat: the agent's player slot, if any, for the same reason.
        """
        prompt = prompt_digest(prompt_ids, policy, seat)
        for occurrence in count(self._taken.get(prompt, 0)):
            seed = call_seed(self._job_seed, self._episode_id, prompt, occurrence)
            if seed not in self._seeds:
                break
        self._taken[prompt] = occurrence
        index = self._next_index  # larger than its parent's, because prompts are built in this order
        self._next_index += 1
        self._seeds[seed] = index
        return ReservedCall(index, seed, prompt, occurrence)

    def release(self, reservation: ReservedCall) -> None:
        """Free the seed of a call that will not be recorded, so that a retry gives the same sample."""
        if self._seeds.get(reservation.seed) != reservation.index:  # it was freed before, and another call may have it
            return
        del self._seeds[reservation.seed]
        self._taken[reservation.prompt] = min(self._taken[reservation.prompt], reservation.occurrence)

    def free(self, index: int, seed: int, prompt_ids: Ids, policy: str = "", seat: str = "") -> None:
        """Free the seed of a call that led to no action, so that a repetition gives the same sample.

        Args:
            index: of the call, which may be recorded, sampled, or in writing.
            seed: kept if another call uses it by now.
            prompt_ids: int32 [P].
        """
        if self._seeds.get(seed) == index:
            del self._seeds[seed]
            self._taken[prompt_digest(prompt_ids, policy, seat)] = 0

    async def undelivered(self, request: GenerationRequest) -> dict[int, Chat]:
        """Return a request's recorded but undelivered choices by number, after waiting for those in writing."""
        digests = [request.choice_digest(number) for number in range(request.choices)]
        if writing := [self._recordings[digest] for digest in digests if digest in self._recordings]:
            await asyncio.wait(writing)
        return {n: self._undelivered[digest] for n, digest in enumerate(digests) if digest in self._undelivered}

    def delivered(self, chat: Chat) -> None:
        """Mark a reply as sent, so that a retry without a key does not match this call."""
        if chat.request_digest.startswith(KEYED):
            return
        if self._undelivered.get(chat.request_digest) is chat:
            del self._undelivered[chat.request_digest]

    def recording(self, chat: Chat, written: asyncio.Future[None]) -> None:
        """Mark a call as being written; `written` resolves when it is on disk."""
        self._count(chat)
        self._recordings[chat.request_digest] = written

    def recorded(self, chat: Chat, written: asyncio.Future[None], kept: bool) -> None:
        """Mark a call's writing as finished.

        Args:
            kept: whether retries may get the call: it is on disk, and its episode has not ended.
        """
        if self._recordings.get(chat.request_digest) is written:
            del self._recordings[chat.request_digest]
        if kept:
            self._undelivered[chat.request_digest] = chat

    def _count(self, chat: Chat) -> None:
        """Advance the next number and time step past those of a call."""
        self._next_index = max(self._next_index, chat.index + 1)
        self.next_step = max(self.next_step, chat.time_step + 1)


class CallStore(Protocol):
    """The part of the run store that a session writes to: `Calls` or `NoStore`."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Record a call; the future resolves when it is on disk, even if the client has disconnected.

        The future raises EpisodeLeaseExpired or EpisodeEnded if the call's lease is over.
        """
        ...


class NoStore:
    """Implements `CallStore` for calls outside episodes: records nothing."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Return a resolved future; see `CallStore.append`."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Recorder:
    """Records the calls of a session, and adds recorded ones to its history."""

    def __init__(
        self, store: CallStore, context: SessionContext, registry: CallRegistry, prompts: PromptBuilder
    ) -> None:
        self._store, self._context = store, context
        self._registry, self._prompts = registry, prompts
        self._over = False

    def close(self) -> None:
        """End the session.

        Calls in writing are still recorded, but no later call continues from them.
        """
        self._over = True

    async def record(self, chat: Chat, prompt: Prompt) -> None:
        """Record a call, and return when it is on disk. Cancelling the caller does not stop the recording.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease is over, and nothing of the call is stored.
        """
        written = self._store.append(chat)
        self._registry.recording(chat, written)
        # Added before the callback of `shield`, so that the call is registered when the caller resumes.
        written.add_done_callback(partial(self._written, chat, prompt))
        await asyncio.shield(written)

    def _written(self, chat: Chat, prompt: Prompt, written: asyncio.Future[None]) -> None:
        """Run at the end of the commit, even after the client disconnected, so that a retry returns exactly the
        committed call.
        """
        failed = written.cancelled() or written.exception() is not None  # the error is raised where it is awaited
        self._registry.recorded(chat, written, kept=not failed and not self._over)
        if failed:
            return
        self._context.count(chat)
        if not self._over:
            self._prompts.add(chat, prompt)


def call_seed(job_seed: int, episode_id: str, prompt: bytes, occurrence: int) -> int:
    """Return a call's seed, 63 bits, from job, episode, prompt and the order among equal prompts.

    It depends neither on the order of different calls nor on lost calls that are retried.

    Args:
        occurrence: number of earlier calls with an equal prompt.
    """
    text = f"{job_seed}\0{episode_id}\0{occurrence}\0".encode()
    digest = hashlib.blake2b(text + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(prompt_ids: Ids, policy: str = "", seat: str = "") -> bytes:
    """Return a digest of 16 bytes of a prompt, its policy and its player slot.

    Args:
        prompt_ids: int32 [P].
        policy: at most 64 ASCII characters; see `CallRegistry.reserve`.
    """
    person = hashlib.blake2b(seat.encode(), digest_size=16).digest() if seat else b""
    digest = hashlib.blake2b(digest_size=16, key=policy.encode(), person=person)
    data = memoryview(prompt_ids.astype("<i4").tobytes())
    for start in range(0, len(data), _PIECE):
        digest.update(data[start : start + _PIECE])
    return digest.digest()
