"""What a session may rely on, whichever renderer a model has."""

from __future__ import annotations

import numpy as np
import pytest
from rendering import messages_of

from palestra.models.causal_lm import load_tokenizer
from palestra.renderers import (
    ByteTokenizer,
    ChatMLRenderer,
    MessageDelta,
    NotInThisFormat,
    PackageRenderer,
    Renderer,
    ReplyForm,
    select_renderer,
    whole_message,
)
from palestra.renderers.long_text import TooManyTokens
from palestra.types.calls import Ids, TokenSequence
from palestra.types.messages import ChatMessage, text_message

pytestmark = pytest.mark.ci

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":  [1, 2]}'}}
ASKED = messages_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}])
MORE = messages_of([{"role": "user", "content": "And 2 + 2?"}])


def package_renderer(name: str) -> PackageRenderer:
    """A renderer of the package, with a tokenizer that has the control tokens of its format."""
    from conformance import families

    made: PackageRenderer = families._made(name, None)[0]
    return made


RENDERERS = {
    "bytes": lambda: ChatMLRenderer(ByteTokenizer()),
    "tiny-random": lambda: select_renderer(load_tokenizer("tiny-random")),
    "SmolLM2": lambda: select_renderer(load_tokenizer("SmolLM2-135M-Instruct")),
    "package: qwen3": lambda: package_renderer("qwen3"),
    "package: llama-3": lambda: package_renderer("llama-3"),
    "package: default": lambda: _default(),
}


def _default() -> PackageRenderer:
    from conformance import families

    made: PackageRenderer = families._default()[0]
    return made


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.model) if name == "SmolLM2" else name for name in RENDERERS],
)
def renderer(request) -> Renderer:
    return RENDERERS[request.param]()


def completion_of(renderer: Renderer, text: str, stop: bool = True) -> Ids:
    ids = renderer._writer.encode(text) if isinstance(renderer, ChatMLRenderer) else renderer._tokenizer.encode(text)
    return np.array([*ids, *([renderer.stop_ids[0]] if stop else [])], np.int32)


def never() -> Ids:
    raise AssertionError("the prompt was asked for")


def test_a_prompt_is_a_sequence_of_tokens_of_the_vocabulary(renderer):
    prompt = renderer.render(ASKED)
    assert isinstance(prompt, TokenSequence)
    assert (prompt.ids.dtype, prompt.media) == (np.int32, ())
    assert 0 <= prompt.ids.min() <= prompt.ids.max() < len(renderer.vocabulary)
    assert "1 + 1?" in renderer.vocabulary.decode(prompt.ids.tolist())
    assert (renderer.render(ASKED).ids == prompt.ids).all()
    assert len(renderer.render(ASKED, [TOOL]).ids) >= len(prompt.ids)


def test_stop_tokens_are_tokens_and_a_reply_is_its_text_without_them(renderer):
    assert renderer.stop_ids
    assert all(0 <= token < len(renderer.vocabulary) for token in renderer.stop_ids)
    prompt = renderer.render(ASKED).ids
    for stop in (True, False):
        reply = renderer.parse(completion_of(renderer, "It is 2.", stop), lambda: prompt)
        assert (reply.message, reply.malformed) == (text_message("assistant", "It is 2."), ())


def test_a_bridge_is_what_follows_or_nothing(renderer):
    prompt = renderer.render(ASKED).ids
    completion = completion_of(renderer, "It is 2.")
    rest = renderer.extend(lambda: prompt, completion, MORE)
    if rest is None:
        assert isinstance(renderer, PackageRenderer)
        return
    text = renderer.vocabulary.decode([*prompt, *completion, *rest.ids])
    said = [*ASKED, text_message("assistant", "It is 2."), *MORE]
    assert text == renderer.vocabulary.decode(renderer.render(said).ids.tolist())


def test_ours_goes_on_from_anything_and_never_asks_for_the_prompt():
    for name in ("bytes", "tiny-random"):
        renderer = RENDERERS[name]()
        for completion in ([], [3], [3, renderer.stop_ids[0]], [renderer.stop_ids[0], 4]):
            for new in ([], MORE, [text_message("assistant", "2"), *MORE]):
                assert renderer.extend(never, np.array(completion, np.int32), new) is not None


@pytest.mark.parametrize(
    "text",
    ["It is 2.", "", " \n", "<think>\nHm\n</think>\n\nSo.", "é漢", '{"name": "add", "arguments": {}}', "<tool_call>"],
)
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_a_reply_that_is_streamed_is_the_reply_that_is_parsed(renderer, text, tools):
    prompt = renderer.render(ASKED, tools).ids
    completion = completion_of(renderer, text)
    wanted = renderer.parse(completion, lambda: prompt, tools, "call_x")
    stream = renderer.stream(lambda: prompt, tools, "call_x")
    written = renderer.vocabulary.decode(completion[:-1].tolist())
    deltas = [stream.feed(written[k : k + 3]) for k in range(0, len(written), 3)]
    rest, reply = stream.finish(completion, cut=False)
    assert (reply.message, len(reply.malformed)) == (wanted.message, len(wanted.malformed))
    assert sum([*deltas, rest], MessageDelta()) == whole_message(wanted.message)
    if not renderer.incremental:
        assert not any(deltas)


def test_a_reply_that_was_cut_ends_with_the_text_before_the_cut(renderer):
    prompt = renderer.render(ASKED).ids
    stream = renderer.stream(lambda: prompt)
    deltas = [stream.feed("It is")]
    rest, reply = stream.finish(completion_of(renderer, "It is 2 STOP here"), cut=True)
    assert reply.message == text_message("assistant", "It is")
    assert sum([*deltas, rest], MessageDelta()) == whole_message(reply.message)


@pytest.mark.parametrize("before", ["It is\n\n", "<think>\nHm\n</think>\n\n"])
def test_a_cut_within_a_token_leaves_what_was_before_it_as_it_was(renderer, before):
    prompt = renderer.render(ASKED).ids
    word = next(
        text
        for token in range(len(renderer.vocabulary) - 1, 0, -1)
        if (text := renderer.vocabulary.decode([token])).isalpha() and text.isascii()
    )
    stream = renderer.stream(lambda: prompt)
    deltas = [stream.feed(before + word[:1])]
    rest, reply = stream.finish(completion_of(renderer, f"{before}{word} more"), cut=True)
    assert reply.message == renderer.parse(completion_of(renderer, before + word[:1]), lambda: prompt).message
    assert sum([*deltas, rest], MessageDelta()) == whole_message(reply.message)


def test_whether_a_single_call_can_end_a_reply_is_what_incremental_says(renderer):
    prompt = renderer.render(ASKED, [TOOL]).ids
    if not renderer.incremental:
        with pytest.raises(NotInThisFormat):
            renderer.stream(lambda: prompt, [TOOL], single_call=True)
        return
    stream = renderer.stream(lambda: prompt, [TOOL], single_call=True)
    said = renderer.render(
        [*ASKED, ChatMessage.model_validate({"role": "assistant", "tool_calls": [CALL, CALL]})], [TOOL]
    )
    written = renderer.vocabulary.decode(said.ids[len(prompt) :].tolist())
    for character in written:
        stream.feed(character)
        if stream.over:
            break
    _, reply = stream.finish(said.ids, cut=True)
    assert [call.function.arguments for call in reply.message.tool_calls] == ['{"a":  [1, 2]}']


def test_a_schema_has_a_grammar_in_every_format_and_calls_in_some(renderer):
    assert renderer.grammar(ReplyForm(schema={"type": "integer"})).startswith('start: %json {"type": "integer"')
    assert renderer.grammar(ReplyForm(choices=("a", 'b"'))) == 'start: "a" | "b\\""\n'
    try:
        both = renderer.grammar(ReplyForm(tools=[TOOL], most_calls=8, schema={"type": "integer"}))
    except NotInThisFormat:
        assert isinstance(renderer, PackageRenderer)
        return
    assert both.startswith("start: calls | answer\n")
    assert renderer.grammar(ReplyForm(tools=[TOOL])).startswith("start: calls\ncalls: ")


def test_a_prompt_for_which_there_is_no_room_is_refused_or_whole(renderer):
    long = [text_message("user", "so " * 100_000)]
    if isinstance(renderer, PackageRenderer) and not renderer.vocabulary.long_text.fewest(long[0].text):
        assert len(renderer.render(long, room=50).ids) > 50  # nothing is known of how few tokens a text can have
        return
    with pytest.raises(TooManyTokens) as refused:
        renderer.render(long, room=50)
    assert refused.value.tokens > 50
    assert len(renderer.render(ASKED, room=10_000).ids) < 10_000


def test_a_text_can_not_make_control_tokens(renderer):
    typed = renderer.vocabulary.decode(renderer.stop_ids[:1])
    one, other = (renderer.render([text_message("user", f"a {text} b")]).ids for text in (typed, "xyzzy"))
    for token in renderer.stop_ids:
        assert (one == token).sum() == (other == token).sum()


def test_the_vocabulary_says_what_a_token_stands_for(renderer):
    vocabulary = renderer.vocabulary
    ids = vocabulary.encode("It is 2, und schön.")
    body = ids if vocabulary.decode(ids.tolist()).startswith("It") else ids[1:]
    assert b"".join(map(vocabulary.bytes_of, body.tolist())).decode() == vocabulary.decode(body.tolist())
    assert (vocabulary.encode("word " * 3000, room=100_000) == vocabulary.encode("word " * 3000)).all()


@pytest.mark.parametrize("name", ["bytes", "tiny-random", pytest.param("SmolLM2", marks=pytest.mark.model)])
class TestChatML:
    """What only ours promises."""

    def test_a_call_that_was_written_is_read_as_the_same_call(self, name):
        renderer = RENDERERS[name]()
        said = ChatMessage.model_validate(
            {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": [CALL, CALL]}
        )
        prompt = renderer.render(ASKED, [TOOL]).ids
        whole = renderer.render([*ASKED, said], [TOOL]).ids
        assert whole[: len(prompt)].tolist() == prompt.tolist()
        completion = whole[len(prompt) :]
        completion = completion[: completion.tolist().index(renderer.stop_ids[0]) + 1]
        reply = renderer.parse(completion, never, [TOOL], "c")
        assert (reply.message.text, reply.message.reasoning_content) == ("So.", "Hm.")
        assert [(c.function.name, c.function.arguments) for c in reply.message.tool_calls] == [
            ("add", '{"a":  [1, 2]}')
        ] * 2
        cut = renderer.parse(completion[:-8], never, [TOOL], "c")
        assert (len(cut.message.tool_calls), len(cut.malformed)) == (1, 1)

    def test_a_bridge_over_results_of_tools_is_the_rest_of_the_full_render(self, name):
        renderer = RENDERERS[name]()
        said = ChatMessage.model_validate({"role": "assistant", "tool_calls": [CALL, CALL]})
        results = messages_of([{"role": "tool", "tool_call_id": "c", "content": text} for text in ("2", "")])
        prompt = renderer.render(ASKED, [TOOL]).ids
        whole = renderer.render([*ASKED, said, *results], [TOOL]).ids
        completion = whole[len(prompt) :]
        completion = completion[: completion.tolist().index(renderer.stop_ids[0]) + 1]
        rest = renderer.extend(never, completion, results, [TOOL])
        assert [*prompt, *completion, *rest.ids] == whole.tolist()
