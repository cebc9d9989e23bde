"""Seeds of calls, which follow from the job, the episode and the prompt."""

from __future__ import annotations

import hashlib

from palestra.types.calls import Ids

# `hashlib` lets another thread run while it digests more bytes than these, and a busy server waits longer for its turn
# than for the digest of a prompt.
_PIECE = 2047


def call_seed(job_seed: int, episode_id: str, prompt: bytes, occurrence: int) -> int:
    """Return a call's seed, 63 bits, from job, episode, prompt and the order among equal prompts.

    It depends neither on the order of different calls nor on lost calls that are retried. `occurrence` counts earlier
    calls with an equal prompt.
    """
    text = f"{job_seed}\0{episode_id}\0{occurrence}\0".encode()
    digest = hashlib.blake2b(text + prompt, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_digest(prompt_ids: Ids, policy: str = "", seat: str = "") -> bytes:
    """Return a digest of 16 bytes of a prompt, its policy and its player slot. The policy's name has at most 64 ASCII
    characters.
    """
    person = hashlib.blake2b(seat.encode(), digest_size=16).digest() if seat else b""
    digest = hashlib.blake2b(digest_size=16, key=policy.encode(), person=person)
    data = memoryview(prompt_ids.astype("<i4").tobytes())
    for start in range(0, len(data), _PIECE):
        digest.update(data[start : start + _PIECE])
    return digest.digest()
