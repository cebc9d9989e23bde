"""Episodes of any shape, drawn as what the engine saw; chats are recorded from them in any order that is possible."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
from hypothesis import strategies as st
from unit.building import make_chat

from palestra.types.calls import Chat, MediaSpan, PolicyVersion, SamplingParams, VersionSpan

Edge = tuple[int, str | None]  # a token id and the digest of the media that it stands for

tokens = st.integers(1, 3)  # few, so that unrelated calls look alike
edges = st.tuples(tokens, st.sampled_from([None, None, None, "a", "b"]))


@dataclass(frozen=True)
class Drawn:
    """A call, by itself. Its number is its name; what differs between records of it (the index) is not here."""

    number: int
    parent: int | None
    shared: int
    prompt: tuple[Edge, ...]
    completion: tuple[int, ...]
    versions: tuple[VersionSpan, ...]
    policy: str
    agent: str
    time_step: int
    temperature: float

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Prompt and completion."""
        return (*self.prompt, *((token, None) for token in self.completion))

    @property
    def logprobs(self) -> list[float]:
        """They tell which call and which token."""
        return [-(100.0 * self.number + place + 1) for place in range(len(self.completion))]


@st.composite
def episodes(draw, most: int = 8, policies: Sequence[str] = ("p", "q"), media: bool = True) -> list[Drawn]:
    """Calls that go on from any part of an earlier one, or from none; also such that repeat what is there already."""
    calls: list[Drawn] = []
    token = edges if media else tokens.map(lambda i: (i, None))
    for number in range(draw(st.integers(1, most))):
        parent = draw(st.none() | st.sampled_from(calls)) if calls else None
        whole = () if parent is None else parent.edges
        said: tuple[int, ...] = ()
        if parent is not None and draw(st.booleans()):  # the same prompt again, and perhaps the same reply
            shared, tail = len(parent.prompt), []
            said = parent.completion[: draw(st.integers(0, len(parent.completion)))]
        else:
            shared = draw(st.just(len(whole)) | st.integers(0, len(whole)))
            runs = draw(st.lists(st.tuples(token, st.integers(1, 3)), min_size=0 if shared else 1, max_size=3))
            tail = [edge for edge, length in runs for _ in range(length)]
        completion = [*said, *draw(st.lists(tokens, min_size=0 if said else 1, max_size=4))]
        cuts = [0, *sorted(draw(st.sets(st.integers(1, 3)))), len(completion)]
        cuts = sorted({min(cut, len(completion)) for cut in cuts})
        calls.append(
            Drawn(
                number=number,
                parent=None if parent is None else parent.number,
                shared=shared,
                prompt=(*whole[:shared], *tail),
                completion=tuple(completion),
                versions=tuple(VersionSpan(PolicyVersion(number, a), b - a) for a, b in pairwise(cuts)),
                policy=draw(
                    st.sampled_from(policies) if parent is None else st.sampled_from([parent.policy, *policies])
                ),
                agent=draw(st.sampled_from(["a", "a/b", "c"])),
                time_step=draw(st.integers(0, 3)),
                temperature=draw(st.sampled_from([0.5, 1.0, 1.5])),
            )
        )
    return calls


@st.composite
def orders(draw, calls: Sequence[Drawn]) -> list[int]:
    """Numbers of the calls, parents first."""
    order: list[int] = []
    left = {call.number: call for call in calls}
    while left:
        order.append(draw(st.sampled_from([n for n, call in left.items() if call.parent not in left])))
        del left[order[-1]]
    return order


def record(
    calls: Sequence[Drawn], order: Sequence[int] | None = None, orphans: Collection[int] = (), **changes
) -> dict[int, Chat]:
    """The chats by number; indices are places in `order`. Of `orphans` it is not known what they go on from."""
    made: dict[int, Chat] = {}
    for index, number in enumerate(range(len(calls)) if order is None else order):
        call = calls[number]
        parent = None if call.parent is None or number in orphans else made[call.parent]
        shared = 0 if parent is None else call.shared
        chat = make_chat(
            index=index,
            parent=parent,
            prompt=[token for token, _ in call.prompt[shared:]],
            completion=call.completion,
            logprobs=call.logprobs,
            versions=call.versions,
            policy=call.policy,
            agent=call.agent,
            time_step=call.time_step,
            media=spans(call.prompt, shared),
            sampling=SamplingParams(temperature=call.temperature, max_tokens=9, seed=1000 - call.number),
        )
        made[number] = replace(chat, shared=shared, **changes)
    return made


def spans(prompt: Sequence[Edge], start: int) -> tuple[MediaSpan, ...]:
    """From a place on; tokens of equal media that stand side by side are one span."""
    found: list[MediaSpan] = []
    position = start
    for digest, run in groupby(prompt[start:], key=lambda edge: edge[1]):
        length = len(list(run))
        if digest is not None:
            found.append(MediaSpan(position, length, digest))
        position += length
    return tuple(found)


def digests_of(media: Sequence[MediaSpan], length: int) -> list[str | None]:
    """[length] for each token the digest, or None."""
    found = np.full(length, None, object)
    for span in media:
        found[span.start : span.start + span.tokens] = span.digest
    return found.tolist()
