"""The calls of one lease: their numbers, their seeds, and which of their replies a retry may still ask for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from palestra.schemas.records import Chat, Ids
from palestra.session.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Reservation:
    """The number and the seed that a call has from its prompt on."""

    index: int
    seed: int
    prompt: bytes  # see `prompt_digest`
    occurrence: int  # how many equal prompts came before


class CallRegistry:
    """Tells calls apart and knows them again.

    Calls with equal prompts are different samples: each has a seed of its own, by the order in which they come. A call
    that was lost and is sent again has the seed that it had before, and one that was recorded and whose reply has not
    been delivered is answered from the record.
    """

    def __init__(self, job_seed: int, episode_id: str, recorded: Iterable[Chat]) -> None:
        """Begin with the calls that are on disk.

        Args:
            job_seed: of the job; from it and the episode all seeds follow.
            episode_id: the episode.
            recorded: the lease's calls, in any order.
        """
        self._job_seed, self._episode_id = job_seed, episode_id
        self._seeds: set[int] = set()  # of the calls that are recorded or in flight
        self._taken: dict[bytes, int] = {}  # by prompt: all occurrences before this one have calls
        self._undelivered: dict[str, Chat] = {}  # by request digest
        self._recordings: dict[str, asyncio.Future[None]] = {}  # that are being written, by request digest
        self._next_index = 0
        self._next_step = 0
        calls = list(recorded)
        used = {chat.parent.index for chat in calls if chat.parent is not None and chat.extends}
        for chat in calls:
            self._seeds.add(chat.sampling.seed)
            self._count(chat)
            if chat.index not in used:  # nothing shows that its reply arrived, so a retry may ask for it again
                self._undelivered[chat.request_digest] = chat

    # Seeds

    def reserve(self, prompt_ids: Ids) -> Reservation:
        """Give a call its number and its seed; that of the first occurrence of this prompt that no other call has.

        Args:
            prompt_ids: [P].
        """
        prompt = prompt_digest(prompt_ids)
        for occurrence in count(self._taken.get(prompt, 0)):
            seed = call_seed(self._job_seed, self._episode_id, prompt, occurrence)
            if seed not in self._seeds:
                break
        self._taken[prompt] = occurrence
        self._seeds.add(seed)
        index = self._next_index  # after its parent's, and no other call comes between
        self._next_index += 1
        return Reservation(index, seed, prompt, occurrence)

    def release(self, reservation: Reservation) -> None:
        """Free the seed of a call that will not be recorded; the same call, sent again, is the same sample."""
        self._seeds.discard(reservation.seed)
        self._taken[reservation.prompt] = min(self._taken[reservation.prompt], reservation.occurrence)

    # Retries

    async def undelivered(self, request: GenerationRequest) -> dict[int, Chat]:
        """Return the choices of a request that are on disk and have not been delivered, by their numbers.

        Those that are being written are waited for.
        """
        digests = [request.choice_digest(number) for number in range(request.choices)]
        if writing := [self._recordings[digest] for digest in digests if digest in self._recordings]:
            await asyncio.wait(writing)
        return {n: self._undelivered[digest] for n, digest in enumerate(digests) if digest in self._undelivered}

    def delivered(self, chat: Chat) -> None:
        """Note that a reply has left: a retry can no longer mean this call."""
        if self._undelivered.get(chat.request_digest) is chat:
            del self._undelivered[chat.request_digest]

    # Records

    def time_step(self) -> int:
        """Return the time step of a call whose agent names none."""
        return self._next_step

    def recording(self, chat: Chat, written: asyncio.Future[None]) -> None:
        """Note that a call is being written; `written` is done when it is on disk."""
        self._count(chat)
        self._recordings[chat.request_digest] = written

    def recorded(self, chat: Chat, written: asyncio.Future[None], kept: bool) -> None:
        """Note that a call is not being written any more.

        Args:
            chat: the call.
            written: see `recording`.
            kept: whether a retry may ask for it: it is on disk, and its episode is not over.
        """
        if self._recordings.get(chat.request_digest) is written:
            del self._recordings[chat.request_digest]
        if kept:
            self._undelivered[chat.request_digest] = chat

    def _count(self, chat: Chat) -> None:
        self._next_index = max(self._next_index, chat.index + 1)
        self._next_step = max(self._next_step, chat.time_step + 1)


def call_seed(job_seed: int, episode_id: str, prompt: bytes, occurrence: int) -> int:
    """Return 63 bits from job, episode and call. A call is known by its prompt, and among equal ones by their order.

    So the order in which different calls arrive changes nothing, nor does a call that was lost and is sent again.

    Args:
        job_seed: of the job.
        episode_id: the episode.
        prompt: see `prompt_digest`.
        occurrence: how many calls with an equal prompt came before.
    """
    text = f"{job_seed}\0{episode_id}\0{occurrence}\0".encode()
    digest = hashlib.blake2b(text + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(prompt_ids: Ids) -> bytes:
    """Return 16 bytes that stand for a prompt."""
    return hashlib.blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=16).digest()
