"""The logprobs of tokens when they were trained, for the newest steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, select

from palestra.database import Database
from palestra.database.sqlite import pieces
from palestra.store.codec import pack_array, unpack
from palestra.store.tables import Prepared, trained_tokens
from palestra.types.calls import Floats

KEPT_STEPS = 100  # the newest ones; a token takes about 4 bytes, and the page is asked about what happens now
_PUT = Prepared(
    trained_tokens.insert().prefix_with("OR REPLACE").values({c.name: bindparam(c.name) for c in trained_tokens.c})
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedCall:
    """The trained tokens of one call.

    Attributes:
        start: position of the first of `logprobs`, counted from the start of the prompt.
        logprobs: float32 [C] under the weights of the token's first gradient; NaN where the token is not trained.
    """

    episode_id: str
    index: int
    start: int
    logprobs: Floats


class TrainedTokens:
    """Records the logprobs of trained tokens for the newest steps."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def record(self, step: int, calls: Sequence[TrainedCall]) -> None:
        """Record calls of a step, replacing those of an earlier attempt at the step."""
        early = sa.delete(trained_tokens).where(trained_tokens.c.step <= step - KEPT_STEPS)
        for piece in pieces(calls):

            def put(connection: Connection, piece: Sequence[TrainedCall] = piece) -> None:
                for one in piece:
                    values = {"step": step, "episode_id": one.episode_id, "idx": one.index, "start": one.start}
                    _PUT.change(connection, values | {"logprobs": pack_array(one.logprobs, "f4")})
                connection.execute(early)

            await self._db.write(put)


def read_trained(connection: Connection, step: int, episode_id: str) -> dict[int, TrainedCall]:
    """Return an episode's calls that a step has trained, by index; empty if they are not recorded."""
    wanted = select(trained_tokens).where(trained_tokens.c.step == step, trained_tokens.c.episode_id == episode_id)
    return {row.idx: trained_call(row) for row in connection.execute(wanted)}


def trained_call(row: Any) -> TrainedCall:
    """Return the call of a row of `trained_tokens`. Raises zlib.error if the row is damaged."""
    values = unpack(row.logprobs, "f4")
    return TrainedCall(episode_id=row.episode_id, index=row.idx, start=row.start, logprobs=values)
