"""What is heard while a reply is sampled, of several choices, and of a reply that was recorded before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError

from palestra.config import PolicyConfig
from palestra.engine.fake import FakeEngine
from palestra.errors import EngineFailure, InvalidRequest, UnsupportedField
from palestra.renderers import ByteTokenizer, ChatMLRenderer, MessageDelta, whole_message
from palestra.renderers.base import WholeReplyStream
from palestra.session import EpisodeSession, Session
from palestra.session.session import not_recorded
from palestra.types.calls import PolicyVersion, SampledTokens
from unit.session.conftest import STOP, call

TOOLS = ({"type": "function", "function": {"name": "f"}},)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>Hm é</think>\n\nBoth. 漢\n{CALL}\n{CALL}"


class Heard:
    """Notes everything; checks the order."""

    def __init__(self, session: EpisodeSession | None = None) -> None:
        self.starts: dict[int, Any] = {}
        self.pieces: dict[int, list[Any]] = {}
        self.chats: dict[int, Any] = {}

    def started(self, choice, start) -> None:
        assert choice not in self.starts
        self.starts[choice], self.pieces[choice] = start, []

    def sampled(self, choice, piece) -> None:
        assert choice in self.starts
        assert choice not in self.chats
        self.pieces[choice].append(piece)

    def finished(self, choice, chat) -> None:
        self.chats[choice] = chat

    def message(self, choice=0) -> MessageDelta:
        return sum((piece.delta for piece in self.pieces[choice]), MessageDelta())

    def ids(self, choice=0) -> list[int]:
        return [token for piece in self.pieces[choice] for token in piece.ids]


class Foreign(ChatMLRenderer):
    """A renderer that reads only whole replies, as those of the `renderers` package do."""

    incremental = False

    def __init__(self) -> None:
        super().__init__(ByteTokenizer())

    def stream(self, prompt_ids, tools=(), call_ids="call", single_call=False):
        return WholeReplyStream(self, prompt_ids, tools, call_ids)


def says(text: str):
    return lambda prompt, sampling: [*text.encode(), STOP]


@pytest.fixture
def pieces(bench):
    """The bench with an engine that gives out three tokens at a time."""
    bench.engine = FakeEngine(lambda ids, sampling: bench.script(ids, sampling), piece_tokens=3)
    bench.policy = PolicyConfig.model_validate({"max_context": 4096, "sampling": {"max_tokens": 200}})
    bench.context = bench.new_context()
    return bench


async def test_deltas_and_ids_put_together_are_the_recorded_call(pieces):
    pieces.script = says(TEXT)
    session, heard = await pieces.session(), Heard()
    chat = await session.generate_one(call("a", tools=TOOLS), heard)
    assert heard.message() == whole_message(chat.reply)
    assert heard.ids() == chat.completion_ids.tolist() == [*TEXT.encode(), STOP]
    assert [p for piece in heard.pieces[0] for p in piece.logprobs] == chat.logprobs.tolist()
    assert heard.starts[0].prompt_ids.tolist() == chat.prompt_ids.tolist()
    assert (heard.starts[0].index, heard.starts[0].sampling) == (chat.index, chat.sampling)
    assert heard.chats[0] is chat
    quiet = await session.generate_one(call("a", tools=TOOLS))
    assert quiet.reply.text == chat.reply.text
    assert len(heard.pieces[0]) > 10


async def test_a_choice_is_finished_when_it_is_on_disk(pieces):
    session = await pieces.session()
    found = []

    class Looks(Heard):
        def finished(self, choice, chat) -> None:
            super().finished(choice, chat)
            found.append(asyncio.ensure_future(pieces.recorded(session)))

    await session.generate_one(call("a"), Looks())
    assert [chat.index for chat in await found[0]] == [0]


@pytest.mark.parametrize("restarted", [False, True])
async def test_top_logprobs_are_heard_recorded_and_heard_again_by_a_retry(pieces, restarted):
    session, heard, again = await pieces.session("adhoc"), Heard(), Heard()
    chat = await session.generate_one(call("a", top_logprobs=2), heard)
    top = [entry for piece in heard.pieces[0] for entry in piece.top]
    assert [entry[0][0] for entry in top] == chat.completion_ids.tolist()
    assert {len(entry) for entry in top} == {2}
    session = await pieces.reopened(session) if restarted else session
    replayed = await session.generate_one(call("a", top_logprobs=2, retry=True), again)
    assert pieces.engine.calls == 1
    assert [entry for piece in again.pieces[0] for entry in piece.top] == top
    assert [tuple(row) for row in replayed.top.rows()] == top


@pytest.mark.parametrize("heard", [None, Heard()])
async def test_an_engine_that_reports_no_top_logprobs_is_no_engine_for_them(pieces, heard, monkeypatch):
    generate = pieces.engine.generate

    async def silent(request):
        async for piece in generate(request):
            yield replace(piece, top=())

    monkeypatch.setattr(pieces.engine, "generate", silent)
    session = await pieces.session("adhoc")
    with pytest.raises(UnsupportedField) as refused:
        await session.generate_one(call("a", top_logprobs=2), heard)
    assert refused.value.field == "top_logprobs"
    assert await pieces.recorded(session) == ()


async def test_a_renderer_that_reads_whole_replies_gives_the_message_at_the_end(pieces):
    pieces.context = pieces.new_context()
    runtime = pieces.context.policies.runtime("policy")
    object.__setattr__(runtime, "renderer", Foreign())
    pieces.script = says(TEXT)
    session, heard = await pieces.session(), Heard()
    chat = await session.generate_one(call("a", tools=TOOLS), heard)
    assert heard.message() == whole_message(chat.reply)
    assert [bool(piece.delta) for piece in heard.pieces[0]] == [False] * (len(heard.pieces[0]) - 1) + [True]
    assert len(chat.reply.tool_calls) == 2
    with pytest.raises(UnsupportedField, match="parallel_tool_calls"):
        await session.generate_one(call("b", tools=TOOLS, parallel_tool_calls=False))


@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("one é two", "é t", None, "one "),
        ("<think>Hm</think>\n\none two", "wo", "Hm", "one t"),
        ("<think>Hm é two", "two", "Hm é ", ""),
        ("stop", "stop", None, ""),
    ],
)
@pytest.mark.parametrize("foreign", [False, True])
async def test_a_stop_string_cuts_what_any_renderer_reads(pieces, text, stop, reasoning, content, foreign):
    if foreign:
        object.__setattr__(pieces.context.policies.runtime("policy"), "renderer", Foreign())
    pieces.script = says(text)
    session, heard = await pieces.session(), Heard()
    chat = await session.generate_one(call("a", stop=(stop,)), heard)
    assert (chat.reply.reasoning_content, chat.reply.text) == (reasoning, content)
    assert (chat.stop, chat.finish_reason) == (stop, "stop")
    end = text.encode().index(stop.encode()) + len(stop.encode())
    assert chat.completion_ids.tolist() == heard.ids() == list(text.encode()[:end])
    assert heard.message() == whole_message(chat.reply)
    (stored,) = await pieces.recorded(session)
    assert stored.stop == stop


async def test_a_stop_string_is_not_looked_for_among_the_fewest_tokens(pieces):
    pieces.script = says("ab ab ab")
    session = await pieces.session("adhoc")
    assert (await session.generate_one(call("a", stop=("b",), min_tokens=4))).reply.text == "ab a"


async def test_an_engine_is_told_to_stop_and_versions_are_those_of_the_kept_tokens(bench):
    closed = []

    class Endless:
        async def generate(self, request):
            try:
                for n in range(1000):
                    ids = tuple(f"{n} ".encode())
                    yield SampledTokens(ids=ids, logprobs=(-1.0,) * len(ids), version=PolicyVersion(0, n))
            finally:
                closed.append(True)

    bench.engine = Endless()
    bench.context = bench.new_context()
    chat = await (await bench.session()).generate_one(call("a", stop=("12",)))
    assert closed == [True]
    assert bytes(chat.completion_ids.tolist()) == b"0 1 2 3 4 5 6 7 8 9 10 11 12"
    assert sum(span.tokens for span in chat.versions) == len(chat.completion_ids)
    assert chat.versions[-1] == (PolicyVersion(0, 12), 2)


async def test_messages_that_a_template_refuses_are_the_callers_mistake(bench):
    class Refuses(Foreign):
        def render(self, *arguments: Any, **more: Any) -> Any:
            raise TemplateError("roles must alternate")

    object.__setattr__(bench.context.policies.runtime("policy"), "renderer", Refuses())
    with pytest.raises(InvalidRequest, match="must alternate") as caught:
        await (await bench.session()).generate_one(call("a"))
    assert caught.value.field == "messages"


# Choices


async def test_choices_are_samples_of_one_prompt_in_order_and_of_one_time_step(pieces):
    session, heard = await pieces.session(), Heard()
    chats = await session.generate(call("a", choices=4), heard)
    assert [heard.chats[k] for k in range(4)] == list(chats)
    assert [chat.index for chat in chats] == [0, 1, 2, 3]
    assert {chat.time_step for chat in chats} == {0}
    assert len({chat.sampling.seed for chat in chats}) == 4
    assert len({chat.request_digest for chat in chats}) == 4
    again = Session(pieces.context, not_recorded, session.episode_id, session.fence, "train")
    ones = [(await again.generate_one(call("a"))).sampling.seed for _ in range(4)]
    assert ones == [chat.sampling.seed for chat in chats]
    following = await session.generate_one(call("b"))
    assert (following.index, following.time_step) == (4, 1)


async def test_if_one_choice_fails_the_others_are_cancelled_and_a_retry_samples_what_is_missing(pieces):
    session = await pieces.session()
    real, made = pieces.script, []

    def second_fails(prompt, sampling):
        made.append(sampling.seed)
        if len(made) == 2:
            raise EngineFailure("no")
        return real(prompt, sampling)

    pieces.script = second_fails
    with pytest.raises(EngineFailure):
        await session.generate(call("a", choices=2))
    recorded = await pieces.recorded(session)
    pieces.script = real
    heard = Heard()
    chats = await session.generate(call("a", choices=2, retry=True), heard)
    assert [chat.sampling.seed for chat in chats] == made[:2]
    assert len(await pieces.recorded(session)) == 2
    for chat in recorded:
        assert any(chat.index == known.index for known in chats)
    for number in range(2):
        assert heard.message(number) == whole_message(chats[number].reply)


async def test_a_retry_hears_the_recorded_reply(pieces):
    pieces.script = says(TEXT)
    session, first, again = await pieces.session(), Heard(), Heard()
    chat = await session.generate_one(call("a", tools=TOOLS), first)
    assert await session.generate_one(call("a", tools=TOOLS, retry=True), again) is chat
    assert (again.message(), again.ids()) == (first.message(), first.ids())
    assert again.starts[0].index == chat.index
    assert pieces.engine.calls == 1


# Prompts as they are


async def test_a_raw_prompt_is_recorded_with_its_ids_and_goes_on_from_the_call_it_starts_with(pieces):
    pieces.script = says(f"<think>x</think>{CALL}")
    session = await pieces.session()
    first = await session.generate_one(call("a"))
    ids = (*first.ids.tolist(), 65, 66)
    raw = await session.generate_one(call(messages=(), prompt=ids, digest="raw"))
    assert (raw.extends, raw.shared, raw.messages) == (first, first.tokens, ())
    assert raw.prompt_ids.tolist() == list(ids)
    assert (raw.reply.text, raw.reply.tool_calls) == (f"<think>x</think>{CALL}", ())
    further = await session.generate_one(call(messages=(), prompt=(*raw.ids.tolist(), 67), digest="more"))
    assert further.extends is raw
    reopened = await pieces.reopened(session)
    last = await reopened.generate_one(call("a", "", "b"))
    assert last.prompt_ids.tolist()[: first.prompt_tokens] == first.prompt_ids.tolist()
    stored = await pieces.recorded(session)
    assert [chat.messages == () for chat in stored] == [False, True, True, False]
    assert np.array_equal(stored[2].ids, further.ids)


async def test_a_reply_to_a_raw_prompt_is_in_no_conversation(pieces):
    pieces.script = says("r")
    session = await pieces.session()
    raw = await session.generate_one(call(messages=(), prompt="x", digest="raw"))
    assert raw.prompt_ids.tolist() == [ord("x")]
    chat = await session.generate_one(call("a"))
    assert (chat.extends, chat.fork) == (None, None)


@pytest.mark.parametrize("prompt", ["", (), (259,), (-1,)])
async def test_a_raw_prompt_that_is_none_is_refused(pieces, prompt):
    session = await pieces.session()
    with pytest.raises(InvalidRequest, match="prompt") as caught:
        await session.generate_one(call(messages=(), prompt=prompt))
    assert caught.value.field == "prompt"
