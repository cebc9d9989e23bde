"""Removes pictures that no recorded call names: of refused calls, and unused uploads.

A call names its pictures when it is recorded, at most one attempt after they were put or renewed. Until then, and for
another hour, pictures are kept. So this module need not know the running calls, and a killed process leaves at worst a
picture for the next removal.
"""

from __future__ import annotations

import orjson
from sqlalchemy import Connection, select

from palestra.store.run_store import RunStore
from palestra.store.tables import chats
from palestra.threads import in_thread

UNUSED_SECONDS = 3600.0  # beyond the longest attempt: workers upload a picture again after half of this time


async def remove_unnamed_pictures(store: RunStore, max_episode_seconds: float) -> int:
    """Remove pictures that no recorded call names and that were not used recently, and return how many. `store`: of the
    run; only this process may write to it.
    """
    pictures, seconds = store.pictures, max_episode_seconds + UNUSED_SECONDS
    unused = await in_thread(lambda: pictures.unused(seconds))
    if not unused:
        return 0
    named = unused & await store.db.read(_named)
    for digest in named:  # so that they are not asked for again at the next look
        pictures.renew(digest)
    return await in_thread(lambda: pictures.remove_unused(unused - named, seconds))


def _named(connection: Connection) -> set[str]:
    """Return the digests of the pictures of all recorded calls."""
    rows = connection.execute(select(chats.c.media).where(chats.c.media.is_not(None)).distinct())
    return {digest for (media,) in rows for _, _, digest in orjson.loads(media)}
