"""The calls of one lease: their numbers and seeds, their recording, and the replies that a retry may still ask for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from palestra.session.context import SessionContext
from palestra.session.prompting import PromptBuilder
from palestra.types.calls import Chat, Ids
from palestra.types.generation import GenerationRequest

# `hashlib` lets another thread run while it digests more bytes than these, and a busy server waits longer for its turn
# than for the digest of a prompt.
_PIECE = 2047
KEYED = "key-"  # beginning of the digest of a request that has a key of its own, by which its retries are known


@dataclass(frozen=True, slots=True)
class ReservedCall:
    """The number and the seed of a call, reserved when its prompt is known.

    Attributes:
        index: number of the call in its lease.
        seed: of its sampling.
        prompt: see `prompt_digest`.
        occurrence: how many calls with an equal prompt came before.
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
    """

    def __init__(self, job_seed: int, episode_id: str, recorded: Iterable[Chat]) -> None:
        """Start with the calls that are on disk.

        Args:
            job_seed: of the job; all seeds follow from it and the episode.
            recorded: the lease's calls, in any order.
        """
        self._job_seed, self._episode_id = job_seed, episode_id
        self._seeds: dict[int, int] = {}  # of the calls that are recorded or in flight: whose it is, by index
        self._taken: dict[bytes, int] = {}  # for each prompt the number from which a free occurrence is searched
        # Calls by the digest of their request, by which a retry is recognised.
        self._undelivered: dict[str, Chat] = {}
        self._recordings: dict[str, asyncio.Future[None]] = {}
        self._next_index = 0
        self._next_step = 0
        calls = list(recorded)
        used = {chat.parent.index for chat in calls if chat.parent is not None and chat.extends}
        for chat in calls:
            self._seeds[chat.sampling.seed] = chat.index
            self._count(chat)
            # A call that continues this one shows that the reply arrived. Otherwise a retry may ask for it.
            if chat.index not in used or chat.request_digest.startswith(KEYED):
                self._undelivered[chat.request_digest] = chat

    def reserve(self, prompt_ids: Ids, policy: str = "", seat: str = "") -> ReservedCall:
        """Give a call its number and its seed: the first seed of its prompt that no other call has.

        Args:
            prompt_ids: int32 [P].
            policy: name of the policy that is called; empty for the job's default one. Two policies that get the same
                prompt have seeds of their own, so that it does not matter which of them is called first.
            seat: of the agent that calls, for the same reason; empty: it has none.
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
        """Free the seed of a call that will not be recorded, so that sending the call again gives the same sample."""
        if self._seeds.get(reservation.seed) != reservation.index:  # it was freed before, and another call may have it
            return
        del self._seeds[reservation.seed]
        self._taken[reservation.prompt] = min(self._taken[reservation.prompt], reservation.occurrence)

    def free(self, index: int, seed: int, prompt_ids: Ids, policy: str = "", seat: str = "") -> None:
        """Free the seed of a call of which no action will come, so that making it again gives the same sample.

        Args:
            index: of the call, which may be recorded, or sampled, or being written.
            seed: of its sampling; one that another call has by now stays.
            prompt_ids: int32 [P].
            policy: see `reserve`.
            seat: see `reserve`.
        """
        if self._seeds.get(seed) == index:
            del self._seeds[seed]
            self._taken[prompt_digest(prompt_ids, policy, seat)] = 0

    async def undelivered(self, request: GenerationRequest) -> dict[int, Chat]:
        """Return the choices of a request that are on disk and were not delivered, by their numbers.

        Waits for choices that are being written.
        """
        digests = [request.choice_digest(number) for number in range(request.choices)]
        if writing := [self._recordings[digest] for digest in digests if digest in self._recordings]:
            await asyncio.wait(writing)
        return {n: self._undelivered[digest] for n, digest in enumerate(digests) if digest in self._undelivered}

    def delivered(self, chat: Chat) -> None:
        """Record that a reply was sent, so that a retry without a key can't mean this call any more."""
        if chat.request_digest.startswith(KEYED):
            return
        if self._undelivered.get(chat.request_digest) is chat:
            del self._undelivered[chat.request_digest]

    def time_step(self) -> int:
        """Return the time step of a call whose agent did not name one."""
        return self._next_step

    def recording(self, chat: Chat, written: asyncio.Future[None]) -> None:
        """Record that a call is being written; `written` is done when the call is on disk."""
        self._count(chat)
        self._recordings[chat.request_digest] = written

    def recorded(self, chat: Chat, written: asyncio.Future[None], kept: bool) -> None:
        """Record that a call is not being written any more.

        Args:
            written: see `recording`.
            kept: whether a retry may ask for the call: it is on disk, and its episode has not ended.
        """
        if self._recordings.get(chat.request_digest) is written:
            del self._recordings[chat.request_digest]
        if kept:
            self._undelivered[chat.request_digest] = chat

    def _count(self, chat: Chat) -> None:
        """Move the next number and the next time step behind those of a call."""
        self._next_index = max(self._next_index, chat.index + 1)
        self._next_step = max(self._next_step, chat.time_step + 1)


class CallStore(Protocol):
    """The part of the run store that a session writes to: `Calls`, or `NoStore`."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Record a call; the future is done when the call is on disk, even if the client has disconnected.

        Raises (the future):
            EpisodeLeaseExpired, EpisodeEnded: the lease under which the call was made is over.
        """
        ...


class NoStore:
    """Implements `CallStore` for calls outside any episode: nothing is recorded."""

    def append(self, chat: Chat) -> asyncio.Future[None]:
        """Return a future that is done; see `CallStore.append`."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Recorder:
    """Records the calls of a session, and lets later calls continue from those that are on disk."""

    def __init__(
        self, store: CallStore, context: SessionContext, registry: CallRegistry, prompts: PromptBuilder
    ) -> None:
        self._store, self._context = store, context
        self._registry, self._prompts = registry, prompts
        self._over = False

    def close(self) -> None:
        """End the session.

        Calls that are still being written are recorded, but no later call can continue from them.
        """
        self._over = True

    async def record(self, chat: Chat, keys: Mapping[int, Hashable]) -> None:
        """Record a call, and return when it is on disk. Cancelling the caller does not stop the recording.

        Args:
            keys: of its messages; see `History.add`.

        Raises:
            EpisodeLeaseExpired, EpisodeEnded: the lease is over, and nothing of the call is kept.
        """
        written = self._store.append(chat)
        self._registry.recording(chat, written)
        # Added before the callback of `shield`, so that the call is registered when the caller resumes.
        written.add_done_callback(partial(self._written, chat, keys))
        await asyncio.shield(written)

    def _written(self, chat: Chat, keys: Mapping[int, Hashable], written: asyncio.Future[None]) -> None:
        """Run when the commit ends, even if the client is gone, so that a retry returns exactly the committed call."""
        failed = written.cancelled() or written.exception() is not None  # the error is raised where it is awaited
        self._registry.recorded(chat, written, kept=not failed and not self._over)
        if failed:
            return
        self._context.count(chat)
        if not self._over:
            self._prompts.add(chat, keys)


def call_seed(job_seed: int, episode_id: str, prompt: bytes, occurrence: int) -> int:
    """Return a seed of 63 bits for a call, which depends on job, episode, prompt and the order among equal prompts.

    The order in which different calls arrive does not change it, nor does a call that was lost and is sent again.

    Args:
        prompt: see `prompt_digest`.
        occurrence: how many calls with an equal prompt came before.
    """
    text = f"{job_seed}\0{episode_id}\0{occurrence}\0".encode()
    digest = hashlib.blake2b(text + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(prompt_ids: Ids, policy: str = "", seat: str = "") -> bytes:
    """Return a digest of 16 bytes for a prompt of a policy and of a seat.

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
