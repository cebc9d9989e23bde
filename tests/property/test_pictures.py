"""Conversations with pictures that agents edit in every way: what is trained is what was sampled, and once.

The prompts are those of tiny-random-vision. What an engine was asked and what it has sampled is written down by the
engine itself, and everything else is compared with that.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from unit.building import FakeClock, one_policy, rows_of
from unit.session.conftest import STOP, Bench
from unit.vision.seeing import Shown, noise, renderer_of, seeing, seeing_once

from palestra.config import TrainerConfig
from palestra.engine.base import EngineRequest
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.engine.fake import FakeEngine
from palestra.models.loading import LoadedModels
from palestra.session import PolicyRuntime, SessionContext
from palestra.trainer.base import PolicySpec
from palestra.trainer.torch_trainer import TorchTrainer
from palestra.types.calls import Chat, ForkReason, SampledTokens, TokenSequence
from palestra.types.messages import ChatMessage, GenerationRequest, ImagePart, text_message
from palestra.types.records import TrainSample
from property.calls import Edge, digests_of

pytestmark = pytest.mark.ci

Messages = tuple[ChatMessage, ...]


def gallery() -> tuple[Shown, list[ImagePart]]:
    """Two pictures of one size, the first of them with one pixel changed, and one of another size."""
    shown, first = Shown(), noise(40, 30)
    almost = first.copy()
    almost.putpixel((7, 11), tuple(255 - value for value in first.getpixel((7, 11))))
    images: list[Image.Image] = [first, almost, noise(40, 30, seed=1), noise(20, 60)]
    parts = [shown.add(image) for image in images]
    assert len({part.digest for part in parts}) == len(parts)
    return shown, parts


SHOWN, PARTS = gallery()
pieces = st.lists(st.sampled_from([*PARTS, *PARTS, "a", "b"]), min_size=1, max_size=3)


@dataclass(frozen=True)
class Turn:
    """What an agent does next: from which earlier call it goes on, what it does to the history, what it adds."""

    source: int
    habit: str
    place: int
    picture: ImagePart
    question: list[str | ImagePart]


turns = st.builds(
    Turn,
    source=st.integers(0, 5),
    habit=st.sampled_from(["go on", "go on", "go on", "again", "other picture", "swap", "drop", "edit", "new"]),
    place=st.integers(0, 5),
    picture=st.sampled_from(PARTS),
    question=pieces,
)


def asks(parts: Sequence[str | ImagePart]) -> ChatMessage:
    made = tuple(text_message("user", part).content[0] if isinstance(part, str) else part for part in parts)
    return ChatMessage(role="user", content=made)


def sent(done: Sequence[Chat], turn: Turn) -> Messages:
    """The messages of the next call."""
    if not done or turn.habit == "new":
        return (asks(turn.question),)
    chat = done[turn.source % len(done)]
    history = (*chat.messages, chat.reply)
    if turn.habit == "again":
        return chat.messages
    users = [number for number, message in enumerate(history) if message.role == "user"]
    at = users[turn.place % len(users)]
    content = history[at].content
    if turn.habit == "other picture":
        content = tuple(turn.picture if isinstance(part, ImagePart) else part for part in content)
    elif turn.habit == "swap":
        content = content[::-1]
    elif turn.habit == "drop":
        content = content[1:] or content
    elif turn.habit == "edit":
        content = (*text_message("user", "c").content, *content)
    changed = history[at].model_copy(update={"content": content})
    return (*history[:at], changed, *history[at + 1 :], asks(turn.question))


@dataclass(frozen=True)
class Sampled:
    """What an engine has sampled, by its own account."""

    prompt: TokenSequence
    ids: list[int]
    logprobs: list[float]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Each token of prompt and reply, with the picture that it stands for."""
        prompt = zip(self.prompt.ids.tolist(), digests_of(self.prompt.media, len(self.prompt.ids)), strict=True)
        return (*prompt, *((token, None) for token in self.ids))


class Telling(FakeEngine):
    """Replies with letters, and now and then with the id of a placeholder; each token has a logprob of its own."""

    def __init__(self) -> None:
        super().__init__(_reply)
        self.told: list[Sampled] = []

    async def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        told = Sampled(request.prompt, [], [])
        self.told.append(told)
        async for piece in super().generate(request):
            own = tuple(-100.0 * len(self.told) - place for place in range(len(piece.ids)))
            told.ids.extend(piece.ids)
            told.logprobs.extend(own)
            yield replace(piece, logprobs=own)


def _reply(prompt, sampling) -> list[int]:
    letters = [ord("xy"[(sampling.seed >> n) & 1]) for n in range(1 + (sampling.seed >> 9) % 2)]
    return [*letters, *([seeing_once().vision.image_token] if sampling.seed >> 12 & 1 else []), STOP]


class SeeingBench(Bench):
    """A bench whose policy takes pictures."""

    def new_context(self) -> SessionContext:
        runtime = PolicyRuntime(
            name="policy",
            config=self.policy,
            renderer=renderer_of(SHOWN),
            engine=self.engine,
            grammars=self.grammars,
        )
        return SessionContext(store=self.store, policies=one_policy(runtime), seed=11)


async def played(engine, script: Sequence[Turn], folder: Path) -> list[Chat]:
    """The calls of an episode, as they are read from its store."""
    bench = SeeingBench(folder, FakeClock(), sampling={"max_tokens": 4})
    bench.engine = engine
    bench.context = bench.new_context()
    try:
        session, done = await bench.session(), list[Chat]()
        for turn in script:
            request = GenerationRequest(policy="policy", messages=sent(done, turn))
            done.append(await session.generate_one(request))
        return list(await bench.recorded(session))
    finally:
        bench.grammars.close()
        bench.store.close()


def recorded(engine, script: Sequence[Turn]) -> list[Chat]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(played(engine, script, Path(folder)))


def edges_of(row: TrainSample) -> tuple[Edge, ...]:
    return (*zip(row.ids.tolist(), digests_of(row.media, len(row.ids)), strict=True),)


def said(message: ChatMessage, pictures: bool = True) -> tuple:
    """What a message tells the model: its texts, and where its pictures stand among them."""
    parts = [part.digest if isinstance(part, ImagePart) else part.text for part in message.content]
    if not any(isinstance(part, ImagePart) for part in message.content):
        parts = ["".join(parts)]
    texts = "".join(part.text for part in message.content if not isinstance(part, ImagePart))
    return message.role, *(parts if pictures else [texts])


def alike(some: Messages, others: Messages) -> int:
    same = [said(one) == said(other) for one, other in zip(some, others, strict=False)]
    return same.index(False) if False in same else len(same)


@given(st.lists(turns, min_size=2, max_size=6))
@examples(15, 150)
def test_every_sampled_token_is_trained_once_with_the_prompt_that_the_engine_got(script):
    engine = Telling()
    chats = recorded(engine, script)
    assert len(chats) == len(script)
    for chat, told in zip(chats, engine.told, strict=True):
        assert Sampled(TokenSequence(chat.prompt_ids, chat.all_media), chat.completion_ids.tolist(), []).edges == (
            told.edges
        )
        assert chat.logprobs.tolist() == told.logprobs
        shown = [part.digest for message in chat.messages for part in message.content if isinstance(part, ImagePart)]
        assert [span.digest for span in told.prompt.media] == shown
    found: Counter[tuple[int, int]] = Counter()
    index = {chat.index: number for number, chat in enumerate(chats)}
    for row in rows_of(chats):
        edges = edges_of(row)
        for position in np.flatnonzero(row.loss_mask).tolist():
            number = index[int(row.calls[position])]
            told = engine.told[number]
            place = position - len(told.prompt.ids)
            found[number, place] += 1
            assert edges[: position + 1] == told.edges[: position + 1]
            assert row.logprobs[position] == told.logprobs[place]
    wanted = {(number, place) for number, told in enumerate(engine.told) for place in range(len(told.ids))}
    assert found == Counter(dict.fromkeys(wanted, 1))


@given(st.lists(turns, min_size=2, max_size=6))
@examples(15, 150)
def test_the_same_pictures_go_on_and_other_ones_fork_with_their_own_reason(script):
    engine = Telling()
    chats = recorded(engine, script)
    for number, (chat, told) in enumerate(zip(chats, engine.told, strict=True)):
        before = [((*other.messages, other.reply), engine.told[n]) for n, other in enumerate(chats[:number])]
        goes_on = [one for whole, one in before if alike(chat.messages, whole) == len(whole) < len(chat.messages)]
        if goes_on:
            longest = max(len(one.edges) for one in goes_on)
            begun = [one.edges == told.edges[: len(one.edges)] for one in goes_on if len(one.edges) == longest]
            assert any(begun)
        assert (
            chat.parent is None
            or told.edges[: chat.shared] == engine.told[chats.index(chat.parent)].edges[: chat.shared]
        )
        known = max((alike(chat.messages, whole) for whole, _ in before), default=0)
        rest = chat.messages[known:]
        nexts = [whole[known] for whole, _ in before if alike(chat.messages, whole) == known < len(whole)]
        replies = {said(other.reply) for other in chats[:number]}
        keeps_a_reply = any(message.role == "assistant" and said(message) in replies for message in rest)
        only_pictures = rest and any(said(rest[0], pictures=False) == said(one, pictures=False) for one in nexts)
        if only_pictures and keeps_a_reply:
            assert chat.fork is not None
            assert chat.fork.reason is ForkReason.PICTURE_CHANGED
            assert chat.fork.message == known
        else:
            assert chat.fork is None or chat.fork.reason is not ForkReason.PICTURE_CHANGED


# With a model


class Remembering:
    """An engine that writes down what it was asked."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self.told = engine, list[Sampled]()

    async def generate(self, request: EngineRequest) -> AsyncIterator[SampledTokens]:
        told = Sampled(request.prompt, [], [])
        self.told.append(told)
        async for piece in self._engine.generate(request):
            told.ids.extend(piece.ids)
            told.logprobs.extend(piece.logprobs)
            yield piece


def sample_of(row: TrainSample) -> TrainSample:
    return replace(row, grammars=(), loss_weights=row.loss_mask.astype(np.float32))


@pytest.mark.slow
@given(st.lists(turns, min_size=3, max_size=6))
@examples(2, 8, deadline=None)
def test_the_trainer_says_of_each_sampled_token_what_the_engine_has_said(script):
    async def gaps(folder: Path) -> tuple[int, int, float]:
        policy = PolicyModel(model=seeing(SHOWN), stop_ids=frozenset({STOP}))
        settings = EmbeddedEngineConfig(threads=1, dtype="float32")
        engine = EmbeddedEngine({"policy": policy}, settings)
        trainer = TorchTrainer(TrainerConfig(threads=1, dtype="float32"), 2, LoadedModels(pictures=SHOWN))
        try:
            told = Remembering(engine)
            chats = await played(told, script, folder)
            rows = [sample_of(row) for row in rows_of(chats)]
            await trainer.create("policy", PolicySpec(model="tiny-random-vision"))
            found = (await trainer.forward("policy", rows, ["old_logprobs"]))["old_logprobs"]
        finally:
            await engine.close()
            await trainer.close()
        sampled = sum(len(one.ids) for one in told.told)
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        gap = max(np.abs(now - row.logprobs)[row.loss_mask].max() for now, row in zip(found, rows, strict=True))
        return sampled, trained, float(gap)

    with tempfile.TemporaryDirectory() as folder:
        sampled, trained, gap = asyncio.run(gaps(Path(folder)))
    assert trained == sampled
    assert gap < 1e-4
