"""Whatever becomes of the bytes of a run store: it is read as it was, or a StoreError says so in one line."""

from __future__ import annotations

import asyncio
import random
import tempfile
from functools import cache
from pathlib import Path

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.learner.scripted_job import ScriptedJob, config

from palestra.errors import NotFound, StoreError
from palestra.store import open_run_store
from palestra.store.browsing import browse, list_episodes, read_episode


@cache
def played() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(ScriptedJob(Path(folder), config()).run())
        return (Path(folder) / "run.db").read_bytes()


def cut(content: bytes, at: float) -> bytes:
    return content[: int(len(content) * at)]


def flipped(content: bytes, seed: int, count: int) -> bytes:
    draw, damaged = random.Random(seed), bytearray(content)
    for _ in range(count):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def overwritten(content: bytes, seed: int, length: int) -> bytes:
    draw = random.Random(seed)
    at = draw.randrange(len(content))
    return content[:at] + draw.randbytes(min(length, len(content) - at)) + content[at + length :]


class OneLine:
    """What is raised in the block is a StoreError of one line, if anything is."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, StoreError):
            assert "\n" not in str(error)
            assert "run.db" in str(error)
        return isinstance(error, StoreError | NotFound)  # not found: the id of an episode is not what it was


async def read_all(path: Path) -> None:
    with OneLine(), open_run_store(path, config().rollout) as store:
        await store.tasks.sealed()
        list(await store.tasks.stored("train"))
        await store.log.metrics()
        await store.episodes.counts()
        await store.log.events(0)
        for step in (1, 2, 3):
            await store.groups.of_step("train", step)
            manifest = await store.log.manifest(step)
            if manifest is not None:
                await store.calls.trajectories(manifest.episode_ids)
        await store.log.restore_metrics(2)
        await store.log.add_event("x", {})


def browse_all(path: Path) -> None:
    with OneLine(), browse(path) as connection:
        for episode in list_episodes(connection, None, None, 1000):
            read_episode(connection, episode.episode_id)


DAMAGES = {"cut": cut, "flipped": flipped, "overwritten": overwritten}
damages = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flipped"), st.integers(0, 10**6), st.integers(1, 50)),
    st.tuples(st.just("overwritten"), st.integers(0, 10**6), st.integers(1, 9000)),
)


@examples(10, 40)
@given(damages)
def test_damage_is_said_in_one_line(damage):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.db"
        path.write_bytes(DAMAGES[damage[0]](played(), *damage[1:]))
        browse_all(path)
        asyncio.run(read_all(path))


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + bytes(84), b"x" * 10000])
def test_what_is_no_store_is_refused(tmp_path, content):
    path = tmp_path / "run.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db"):
        open_run_store(path, config().rollout)
    with pytest.raises(StoreError, match=r"run\.db"), browse(path) as connection:
        list_episodes(connection, None, None, 10)


def test_half_a_store_is_refused(tmp_path):
    path = tmp_path / "run.db"
    path.write_bytes(cut(played(), 0.5))
    with pytest.raises(StoreError, match="damaged"):
        open_run_store(path, config().rollout)
