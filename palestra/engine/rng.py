"""Random numbers that depend only on a call's seed and a position."""

from __future__ import annotations

import hashlib


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, from a call's seed and a token's position in its reply."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
