"""The calls of one lease: states, numbers, seeds, and replies kept for retries.

Seeds follow from the job, the episode and the prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from palestra.session.context import StateTimes
from palestra.types.calls import Chat, Ids
from palestra.types.messages import GenerationRequest
from palestra.types.states import TRANSITIONS, TurnState, check_transition

if TYPE_CHECKING:
    from palestra.session.policies import PolicyRuntime
    from palestra.session.prompting import Prompt
    from palestra.session.request import Constraint

NO_SEED = -1
_MEASURED = {state: state for state in (TurnState.PENDING, TurnState.GENERATING)}  # by the call itself
KEYED = "key-"  # beginning of the digest of a request that has a key of its own, by which its retries are known
# `hashlib` lets another thread run while it digests more bytes than these, and a busy server waits longer for its turn
# than for the digest of a prompt.
_PIECE = 2047


@dataclass(slots=True, eq=False)
class CallInFlight:
    """One choice of a request, from its arrival until it is on disk.

    Attributes:
        number: of the choice in its request.
        state: only tokens of GENERATING are trained.
        seed: reserved for it; NO_SEED: its prompt is not built yet. A caller's own may replace it in `chat.sampling`.
        request, runtime, constraint, prompt: what it is sampled from; set with the seed, and shared by all choices.
        chat: its record, filled on the way; set with the seed.
        recorded: whether it is on disk.
    """

    number: int = 0
    state: TurnState = TurnState.PENDING
    seed: int = NO_SEED
    request: GenerationRequest = field(init=False)
    runtime: PolicyRuntime = field(init=False)
    constraint: Constraint = field(init=False)
    prompt: Prompt = field(init=False)
    chat: Chat = field(init=False)
    recorded: bool = False


class Turns:
    """The calls of a session that are in flight, with their states and times.

    Without any, the agent or its environment acts.
    """

    def __init__(self, subject: str, times: StateTimes) -> None:
        self._subject, self._times = subject, times
        self._open: set[CallInFlight] = set()
        self._acting = False  # whether no call is in flight after there was one
        self._over = False

    def begin(self, calls: Iterable[CallInFlight]) -> None:
        """Add calls, which end the agent's action."""
        left, self._acting = TurnState.INTERACTING if self._acting else None, False
        for call in calls:
            self._open.add(call)
            self._times.move(left, TurnState.PENDING)
            left = None

    def move(self, call: CallInFlight, following: TurnState) -> None:
        """Change a call to its next state."""
        if following not in TRANSITIONS[call.state]:
            check_transition(self._subject, call.state, following)  # raises
        self._times.move(_MEASURED.get(call.state), _MEASURED.get(following))
        call.state = following

    def end(self, calls: Iterable[CallInFlight]) -> None:
        """Remove calls. After the last one the agent acts."""
        self._open.difference_update(calls)
        if not self._open and not self._over:
            self._acting = True
            self._times.move(None, TurnState.INTERACTING)

    def terminate(self) -> None:
        """End the session, and stop measuring the agent's time."""
        self._over = True
        if self._acting:
            self._acting = False
            self._times.move(TurnState.INTERACTING, None)


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
        """Create the registry from the calls on disk. All seeds derive from `job_seed` and the episode; `recorded` are
        the lease's calls, in any order.
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
            self._next_index = max(self._next_index, chat.index + 1)
            self.next_step = max(self.next_step, chat.time_step + 1)
            # A call that continues this one shows that the reply arrived. Otherwise a retry may ask for it.
            if chat.index not in used or chat.request_digest.startswith(KEYED):
                self._undelivered[chat.request_digest] = chat

    def reserve(self, prompt: bytes) -> tuple[int, int]:
        """Reserve the next index of a call and the first free seed of a prompt, given by its `prompt_digest`."""
        for occurrence in count(self._taken.get(prompt, 0)):
            seed = call_seed(self._job_seed, self._episode_id, prompt, occurrence)
            if seed not in self._seeds:
                break
        self._taken[prompt] = occurrence + 1
        index = self._next_index  # larger than its parent's, because prompts are built in this order
        self._next_index += 1
        self._seeds[seed] = index
        return index, seed

    def free(self, index: int, seed: int, prompt: bytes) -> None:
        """Free the seed of a call that is not recorded or led to no action, so that a repetition is the same sample.
        The seed is kept if another call uses it by now.
        """
        if self._seeds.get(seed) == index:
            del self._seeds[seed]
            self._taken[prompt] = 0

    async def undelivered(self, request: GenerationRequest) -> dict[int, Chat]:
        """Return a request's recorded but undelivered choices by number, after waiting for those in writing."""
        digests = [request.choice_digest(number) for number in range(request.choices)]
        if writing := [self._recordings[digest] for digest in digests if digest in self._recordings]:
            await asyncio.wait(writing)
        return {n: self._undelivered[digest] for n, digest in enumerate(digests) if digest in self._undelivered}

    def delivered(self, *chats: Chat) -> None:
        """Mark replies as sent, so that a retry without a key does not match these calls."""
        for chat in chats:
            digest = chat.request_digest
            if self._undelivered.get(digest) is chat and not digest.startswith(KEYED):
                del self._undelivered[digest]

    def recording(self, chat: Chat, written: asyncio.Future[None]) -> None:
        """Mark a call as being written; `written` resolves when it is on disk."""
        self.next_step = max(self.next_step, chat.time_step + 1)
        self._recordings[chat.request_digest] = written

    def recorded(self, chat: Chat, written: asyncio.Future[None], kept: bool) -> None:
        """Mark a call's writing as finished. `kept`: retries may get the call, as it is on disk and its episode has not
        ended.
        """
        if self._recordings.get(chat.request_digest) is written:
            del self._recordings[chat.request_digest]
        if kept:
            self._undelivered[chat.request_digest] = chat


def call_seed(job_seed: int, episode_id: str, prompt: bytes, occurrence: int) -> int:
    """Return a call's seed, 63 bits, from job, episode, prompt and the order among equal prompts.

    It depends neither on the order of different calls nor on lost calls that are retried. `occurrence` counts earlier
    calls with an equal prompt.
    """
    text = f"{job_seed}\0{episode_id}\0{occurrence}\0".encode()
    digest = hashlib.blake2b(text + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(prompt_ids: Ids, policy: str = "", seat: str = "") -> bytes:
    """Return a digest of 16 bytes of a prompt, its policy and its player slot, which have their own seeds, so that the
    order of calls to different ones does not matter. The policy's name has at most 64 ASCII characters; the default
    policy is "".
    """
    person = hashlib.blake2b(seat.encode(), digest_size=16).digest() if seat else b""
    digest = hashlib.blake2b(digest_size=16, key=policy.encode(), person=person)
    data = memoryview(prompt_ids.astype("<i4").tobytes())
    for start in range(0, len(data), _PIECE):
        digest.update(data[start : start + _PIECE])
    return digest.digest()
