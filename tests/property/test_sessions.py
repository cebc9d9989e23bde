"""Calls of one episode that overlap, and an episode whose server dies: nothing differs from calls one after another."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from unit.building import FakeClock, rows_of
from unit.session.conftest import STOP, Bench

from palestra.engine.fake import FakeEngine
from palestra.session import EpisodeSession
from palestra.session.prompting import PromptBuilder
from palestra.session.registry import call_seed, prompt_digest
from palestra.store.tables import chats as chats_table
from palestra.tokens import TokenTrie
from palestra.types.calls import Chat
from palestra.types.messages import ChatMessage, GenerationRequest, text_message

Messages = tuple[ChatMessage, ...]


def pick(*choices: object, of: object) -> object:
    """Drawn by a hash: an agent that decides by what it has seen, and by nothing else."""
    return choices[hashlib.blake2b(repr(of).encode(), digest_size=1).digest()[0] % len(choices)]


def reply(prompt, sampling) -> list[int]:
    """One or two letters out of two, so that unlike calls get like replies."""
    letters = [ord("xy"[(sampling.seed >> n) & 1]) for n in range(1 + (sampling.seed >> 9) % 2)]
    return [*letters, STOP]


class Turning(FakeEngine):
    """Lets others go first as often as it is told to, call by call."""

    def __init__(self, turns: Sequence[int]) -> None:
        super().__init__(reply)
        self._turns = list(turns)

    async def generate(self, request):
        for _ in range(self._turns.pop() if self._turns else 0):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0005 * (self._turns.pop() if self._turns else 0))
        async for piece in super().generate(request):
            yield piece


class Agent:
    """What it says next depends on its name and on what was said; sometimes it edits what was said."""

    def __init__(self, name: str, opening: str, turns: int) -> None:
        self.name, self.opening, self.turns = name, opening, turns

    async def play(self, session: EpisodeSession) -> None:
        messages: Messages = (text_message("system", "be brief"), text_message("user", self.opening))
        for turn in range(self.turns):
            chat = await session.generate_one(
                GenerationRequest(policy="policy", messages=messages, agent=self.name, time_step=turn, max_tokens=9)
            )
            messages = self.following((*messages, chat.reply), turn)

    def following(self, messages: Messages, turn: int) -> Messages:
        # The opening is in every question: unlike agents stay unlike, whatever they edit.
        question = text_message("user", f"{self.opening}{turn}")
        habit = pick("go on", "go on", "again", "edit", "summarise", of=(self.opening, turn, str(messages)))
        if habit == "again":
            return messages[:-1]
        if habit == "edit":
            return (*messages[:1], text_message("user", f"{self.opening}!"), *messages[2:], question)
        if habit == "summarise":
            return (messages[0], text_message("user", f"{self.opening} so far"), *messages[-1:], question)
        return (*messages, question)


@st.composite
def casts(draw) -> list[Agent]:
    """Agents of one episode, each with an opening of its own."""
    openings = draw(st.lists(st.sampled_from("abcde"), min_size=2, max_size=4, unique=True))
    return [Agent(f"agent/{opening}", opening, draw(st.integers(1, 4))) for opening in openings]


def without_indices(chats: Sequence[Chat]) -> tuple:
    """The trie and the rows; a call is known by its seed."""
    trie = TokenTrie(chats)
    nodes = list(trie.nodes())
    place = {id(node): n for n, node in enumerate(nodes)}
    return (
        [
            (n.start, n.ids.tolist(), trie.digests(n), sorted((s.chat.sampling.seed, s.start) for s in n.samplings))
            for n in nodes
        ],
        sorted((chat.sampling.seed, place[id(trie.end(chat.index))]) for chat in chats),
        sorted((c.sampling.seed, c.agent, c.time_step, c.finish_reason, c.reply.text) for c in chats),
        [(row.ids.tolist(), row.loss_mask.tolist(), row.logprobs.tobytes()) for row in rows_of(chats)],
    )


def played(engine: FakeEngine, play: Callable) -> tuple[Chat, ...]:
    """The recorded calls of an episode that `play` plays."""

    async def run(folder: Path) -> tuple[Chat, ...]:
        bench = Bench(folder, FakeClock())
        bench.engine = engine
        bench.context = bench.new_context()
        try:
            session = await bench.session()
            await play(session)
            recorded = await bench.recorded(session)
            live = session._prompts.earlier("policy", "agent").trie()
            assert [live.end(c.index).stop for c in recorded] == [c.tokens for c in recorded]
            assert len(live) == len(TokenTrie(recorded))
            return recorded
        finally:
            bench.store.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


@examples(6, 30)
@given(casts(), st.lists(st.integers(0, 6), max_size=40), st.randoms(use_true_random=False))
def test_calls_that_overlap_give_what_the_same_calls_give_one_after_another(cast, turns, random):
    async def in_series(session: EpisodeSession) -> None:
        for agent in cast:
            await agent.play(session)

    async def at_once(session: EpisodeSession) -> None:
        await asyncio.gather(*(agent.play(session) for agent in random.sample(cast, len(cast))))

    assert without_indices(played(Turning(turns), at_once)) == without_indices(played(Turning([]), in_series))


@examples(4, 15)
@given(st.integers(2, 6), st.lists(st.integers(0, 6), max_size=40))
def test_equal_calls_at_once_are_the_samples_that_they_are_one_after_another(copies, turns):
    call = GenerationRequest(policy="policy", messages=(text_message("user", "a"),))

    async def in_series(session: EpisodeSession) -> None:
        for _ in range(copies):
            await session.generate_one(call)

    async def at_once(session: EpisodeSession) -> None:
        await asyncio.gather(*(session.generate_one(call) for _ in range(copies)))

    one, other = played(Turning(turns), at_once), played(Turning([]), in_series)
    assert without_indices([replace(c, time_step=0) for c in one]) == without_indices(
        [replace(c, time_step=0) for c in other]
    )
    seeds = [call_seed(11, chat.episode_id, prompt_digest(chat.prompt_ids), n) for n, chat in enumerate(one)]
    assert sorted(chat.sampling.seed for chat in one) == sorted(seeds)
    assert sorted(chat.index for chat in one) == list(range(copies))
    assert sorted(chat.time_step for chat in one) == list(range(copies))  # none was told, so each is its own


# A server that dies


def same_chat(one: Chat, other: Chat) -> None:
    for field in fields(Chat):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "parent":
            a, b = (None if chat is None else chat.index for chat in (a, b))
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), field.name
        else:
            assert a == b, field.name


def same_trie(one: TokenTrie, other: TokenTrie) -> None:
    def written(trie: TokenTrie) -> list:
        return [
            (
                node.start,
                node.ids.tolist(),
                trie.digests(node),
                node.chat and node.chat.index,
                [(s.chat.index, s.start) for s in node.samplings],
                [index for index in trie.chats if trie.end(index) is node],
            )
            for node in trie.nodes()
        ]

    assert written(one) == written(other)


@st.composite
def scripts(draw) -> list[tuple[int, str, str]]:
    """Calls one after another: from which earlier one, what the agent does to its history, what it asks."""
    habits = st.sampled_from(["go on", "go on", "go on", "again", "edit", "drop", "rewrite", "thought", "new"])
    count = draw(st.integers(2, 6))
    return [(draw(st.integers(0, count)), draw(habits), draw(st.sampled_from("uv"))) for _ in range(count)]


def asked(done: Sequence[Chat], source: int, habit: str, question: str) -> Messages:
    end = text_message("user", question)
    if not done or habit == "new":
        return (text_message("system", "s"), end)
    chat = done[source % len(done)]
    history = (*chat.messages, chat.reply)
    if habit == "again":
        return chat.messages
    if habit == "edit":
        return (text_message("system", "S"), *history[1:], end)
    if habit == "drop":
        return (*history[:1], *history[2:], end)
    if habit == "rewrite":
        return (*history[:-1], text_message("assistant", "z"), end)
    if habit == "thought":
        return (*(m.model_copy(update={"reasoning_content": None}) for m in history), end)
    return (*history, end)


def thinking_reply(prompt, sampling) -> list[int]:
    thought = b"<think>" + b"hm"[: sampling.seed % 3] + b"</think>" if sampling.seed % 2 else b""
    return [*thought, ord("xy"[(sampling.seed >> 5) & 1]), *([0xFF] if sampling.seed >> 6 & 1 else []), STOP]


async def episode(
    folder: Path, script: Sequence[tuple[int, str, str]], crashes: bool
) -> tuple[list[Chat], PromptBuilder]:
    """With `crashes` the store is closed, and store and session are made anew, after every commit."""
    clock = FakeClock()
    bench = Bench(folder, clock)
    bench.script = thinking_reply
    session = await bench.session()
    done: list[Chat] = []
    try:
        for source, habit, question in script:
            done.append(
                await session.generate_one(
                    GenerationRequest(policy="policy", messages=asked(done, source, habit, question))
                )
            )
            if crashes:
                before, runtime = session._prompts, bench.context.policies.runtime("policy")
                bench.store.close()
                bench = Bench(folder, clock)
                bench.script = thinking_reply
                recorded = await bench.recorded(session)
                session = EpisodeSession(bench.context, session.episode, recorded)
                same_trie(session._prompts.earlier("policy", "agent").trie(), before.earlier("policy", "agent").trie())
                for after in script:  # whatever is asked next
                    request = GenerationRequest(policy="policy", messages=asked(done, *after))
                    prompts = [await p.build(request, runtime.renderer, None) for p in (before, session._prompts)]
                    one, other = (
                        replace(p, sequence=p.sequence.ids.tobytes(), parent=p.parent and p.parent.index)
                        for p in prompts
                    )
                    assert one == other
                done = list(recorded)
        return done, session._prompts
    finally:
        bench.store.close()


@examples(3, 12)
@given(scripts())
def test_a_server_that_dies_after_every_commit_ends_with_the_calls_of_one_that_never_did(script):
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        undisturbed, prompts = asyncio.run(episode(Path(one), script, crashes=False))
        disturbed, rebuilt = asyncio.run(episode(Path(other), script, crashes=True))
    for a, b in zip(undisturbed, disturbed, strict=True):
        same_chat(a, b)
    same_trie(prompts.earlier("policy", "agent").trie(), rebuilt.earlier("policy", "agent").trie())


# What it costs


def held(arrays: Sequence[np.ndarray]) -> int:
    """Elements that the arrays keep in memory, each once: a view keeps all of what it is a view of."""
    owners: dict[int, int] = {}
    for array in arrays:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        owners[id(owner)] = owner.size
    return sum(owners.values())


def cost(turns: int) -> dict[str, int]:
    async def run(folder: Path) -> dict[str, int]:
        bench = Bench(folder, FakeClock(), max_context=10**6)
        bench.script = lambda prompt, sampling: [*b"a reply of some length", STOP]
        try:
            session = await bench.session()
            messages: Messages = ()
            chats: list[Chat] = []
            for turn in range(turns):
                messages = (*messages, text_message("user", f"question {turn:04d}"))
                chats.append(await session.generate_one(GenerationRequest(policy="policy", messages=messages)))
                messages = (*messages, chats[-1].reply)
            trie = session._prompts.earlier("policy", "agent").trie()
            assert len(trie) == chats[-1].tokens
            columns = [c for c in chats_table.c if c.name not in ("episode_id", "request_digest")]
            rows = await bench.store.db.read(lambda connection: connection.execute(chats_table.select()).all())
            return {
                "tokens": chats[-1].tokens,
                "trie": held([node.edges for node in trie.nodes()]),
                "tails": held([chat.prompt_tail for chat in chats]),
                "completions": held([chat.completion_ids for chat in chats]),
                "messages": sum(len(chat.new_messages) for chat in chats),
                "stored": sum(
                    len(value) if isinstance(value, bytes | str) else 8
                    for row in rows
                    for value in (getattr(row, column.name) for column in columns)
                    if value is not None
                ),
            }
        finally:
            bench.store.close()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


@pytest.mark.slow
def test_a_long_conversation_is_held_and_stored_in_proportion_to_its_tokens():
    few, many = cost(40), cost(400)
    for found, turns in ((few, 40), (many, 400)):
        assert found["trie"] == found["tokens"]
        assert found["tails"] + found["completions"] == found["tokens"]
        assert found["messages"] == turns
    assert many["stored"] < 10.5 * few["stored"]
