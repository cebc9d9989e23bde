"""Pictures that no recorded call names are removed, and no other: also beside calls in flight, and after a crash."""

from __future__ import annotations

import threading

import pytest

from palestra.errors import NotFound
from palestra.store.run_store import UNUSED_SECONDS, remove_unnamed_pictures
from palestra.types.calls import MediaSpan
from unit.building import TASK, make_chat, open_store

pytestmark = pytest.mark.ci

LONGEST = 100.0  # seconds of an attempt
LATER = LONGEST + UNUSED_SECONDS + 1


async def record(store, *digests: str, index: int = 0) -> None:
    media = tuple(MediaSpan(n, 1, digest) for n, digest in enumerate(digests))
    await store.calls.append(make_chat(index=index, media=media))


async def test_what_no_call_names_is_removed_after_it_was_not_used_for_long(store, clock):
    await store.groups.register("train", 0, 1, TASK, 1)
    await store.episodes.claim("w", "r", None)
    named, refused, upload = (store.pictures.put(content) for content in (b"named", b"refused", b"upload"))
    await record(store, named)
    clock.advance(LONGEST + UNUSED_SECONDS - 1)
    assert await remove_unnamed_pictures(store, LONGEST) == 0
    assert store.pictures.renew(upload)  # a call names it, which is not recorded yet
    clock.advance(2)
    assert await remove_unnamed_pictures(store, LONGEST) == 1
    assert set(store.pictures) == {named, upload}
    assert not store.pictures.renew(refused)
    with pytest.raises(NotFound):
        store.pictures.get(refused)
    await record(store, upload, index=1)
    for _ in range(2):
        clock.advance(LATER)
        assert await remove_unnamed_pictures(store, LONGEST) == 0
    assert set(store.pictures) == {named, upload}


async def test_what_a_dead_process_has_left_is_removed_by_the_next_one(tmp_path, clock):
    with open_store(tmp_path, clock) as store:
        left = store.pictures.put(b"of a call that was in flight")
    half = store.pictures.path(left).with_name(f".{left}.4711")
    half.write_bytes(b"of a call tha")
    with open_store(tmp_path, clock) as store:
        assert await remove_unnamed_pictures(store, LONGEST) == 0  # perhaps its client asks again
        assert left in store.pictures
        clock.advance(LATER)
        assert await remove_unnamed_pictures(store, LONGEST) == 1
        assert [path for path in store.pictures.folder.rglob("*") if path.is_file()] == []


async def test_room_is_there_again_and_a_removed_picture_can_be_put_again(tmp_path, clock):
    with open_store(tmp_path, clock) as store:
        pictures = store.pictures
        pictures._max_bytes = 10
        digest = pictures.put(b"0123456789")
        clock.advance(LATER)
        assert await remove_unnamed_pictures(store, LONGEST) == 1
        assert pictures.put(b"abcdefghij") != digest
        clock.advance(LATER)
        assert await remove_unnamed_pictures(store, LONGEST) == 1
        assert pictures.get(pictures.put(b"0123456789")) == b"0123456789"


def test_a_picture_that_is_put_while_others_are_removed_is_there_afterwards(store, clock):
    contents = [f"{n}".encode() for n in range(200)]
    digests = {store.pictures.put(content) for content in contents}
    clock.advance(LATER)
    start = threading.Barrier(2)

    def put() -> None:
        start.wait()
        for content in contents:
            store.pictures.put(content)

    putting = threading.Thread(target=put)
    putting.start()
    start.wait()
    store.pictures.remove_unused(digests, LONGEST)
    putting.join()
    assert set(store.pictures) == digests
