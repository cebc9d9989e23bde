"""Any tree of calls comes back from the store bit by bit."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import TASK, make_chat, open_store

from palestra.types.calls import Chat, MediaSpan, PolicyVersion, SamplingParams, TopTokens, VersionSpan
from palestra.types.messages import ChatMessage

EPISODE = "train-000000-00"
texts = st.text(max_size=8)
parts = st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | st.fixed_dictionaries(
    {"type": st.just("image"), "digest": st.text(alphabet="0123456789abcdef", max_size=8)}
)
messages = st.builds(
    lambda role, content, name: ChatMessage.model_validate({"role": role, "content": content, "name": name}),
    st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
    st.none() | texts | st.lists(parts, max_size=3),
    st.none() | texts,
)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6)
media = st.builds(MediaSpan, st.integers(0, 9), st.integers(1, 9), texts)
tools = st.lists(st.sampled_from([{"name": "f"}, {"name": "g", "parameters": {"é": [1.5, None]}}]), max_size=2).map(
    tuple
)
logprobs = st.floats(width=32)  # with NaN, infinities, subnormal numbers


@st.composite
def spans(draw, total: int) -> tuple[VersionSpan, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, total - 1))) if total > 1 else set())
    edges = [0, *cuts, total]
    versions = st.builds(PolicyVersion, st.integers(0, 3), st.integers(0, 2**40))
    return tuple(VersionSpan(draw(versions), b - a) for a, b in pairwise(edges))


@st.composite
def tops(draw, total: int) -> TopTokens | None:
    size = draw(st.integers(0, 3))
    if size == 0:
        return None
    number, pairs = total * size, st.tuples(st.integers(-(2**31), 2**31 - 1), logprobs)
    tokens, values = zip(*draw(st.lists(pairs, min_size=number, max_size=number)), strict=True)
    shape = (total, size)
    return TopTokens(np.array(tokens, np.int32).reshape(shape), np.array(values, np.float32).reshape(shape))


@st.composite
def episodes(draw) -> list[Chat]:
    chats: list[Chat] = []
    for index in range(draw(st.integers(1, 7))):
        completion = draw(ids)
        chats.append(
            make_chat(
                index=index,
                parent=draw(st.none() | st.sampled_from(chats)) if chats else None,
                prompt=draw(ids),
                completion=completion,
                messages=tuple(draw(st.lists(messages, max_size=3))),
                reply=draw(texts),
                logprobs=draw(st.lists(logprobs, min_size=len(completion), max_size=len(completion))),
                versions=draw(spans(len(completion))),
                top=draw(tops(len(completion))),
                tools=draw(tools),
                media=tuple(draw(st.lists(media, max_size=2))),
                time_step=draw(st.integers(0, 3)),
                agent=draw(texts),
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                request_digest=draw(texts),
                started_at=draw(st.floats(0, 1e10)),
                sampling=SamplingParams(
                    temperature=draw(st.floats(0, 10)),
                    max_tokens=draw(st.integers(1, 10**6)),
                    seed=draw(st.integers(0, 2**64 - 1)),
                ),
            )
        )
    return chats


def same(a: Chat, b: Chat) -> None:
    for field in dataclasses.fields(Chat):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if field.name == "parent":
            assert (one is None and other is None) or one.index == other.index
        elif isinstance(one, TopTokens):
            assert [array.tobytes() for array in one] == [array.tobytes() for array in other]
            assert [(array.dtype, array.shape) for array in one] == [(array.dtype, array.shape) for array in other]
        elif isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes(), field.name
        else:
            assert one == other, field.name


@given(episodes())
@examples(6, 30)
def test_any_tree_of_calls_comes_back_bit_by_bit_even_after_a_restart(chats):
    async def store_and_read(folder: Path) -> None:
        with open_store(folder) as store:
            await store.groups.register("train", 0, 1, TASK, 1)
            await store.episodes.claim("w", "r", None)
            for chat in chats:
                await store.calls.append(chat)
            first = (await store.calls.of_lease(EPISODE, 1))[1]
        with open_store(folder) as store:
            for found in (first, (await store.calls.of_lease(EPISODE, 1))[1]):
                assert len(found) == len(chats)
                for one, other in zip(chats, found, strict=True):
                    same(one, other)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(store_and_read(Path(folder)))
