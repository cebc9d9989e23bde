"""Placeholders of images: equal ids behind which different images stand are different tokens, from prompt to row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from palestra.renderers import ByteTokenizer, ChatMLRenderer
from palestra.session import EpisodeSession
from palestra.tokens import TokenRun, common_tokens
from palestra.types.calls import MediaSpan, TokenSequence
from palestra.types.messages import ChatMessage, GenerationRequest, ImagePart, TextPart, text_message
from unit.building import ids, one_policy, rows_of
from unit.session.conftest import says

WIDTH = 3  # placeholders of an image


class Seeing(ChatMLRenderer):
    """Writes the images of a conversation in front of it."""

    takes_images = True

    def __init__(self) -> None:
        super().__init__(ByteTokenizer())

    def render(self, messages, tools=(), room=None):
        digests = [part.digest for m in messages for part in m.content if isinstance(part, ImagePart)]
        text = super().render(list(map(_text_of, messages)), tools, room).ids
        media = tuple(MediaSpan(k * WIDTH, WIDTH, digest) for k, digest in enumerate(digests))
        return TokenSequence(np.concatenate((np.zeros(WIDTH * len(digests), np.int32), text)), media)


class SeeingWithoutBridge(Seeing):
    def extend(self, prompt_ids, completion_ids, new_messages, tools=(), room=None):
        return None


class SeeingBehind(Seeing):
    """Its bridge writes images behind the new messages."""

    def extend(self, prompt_ids, completion_ids, new_messages, tools=(), room=None):
        said = list(map(_text_of, new_messages))
        rest = super().extend(prompt_ids, completion_ids, said, tools, room).ids
        digests = [part.digest for m in new_messages for part in m.content if isinstance(part, ImagePart)]
        media = tuple(MediaSpan(len(rest) + k * WIDTH, WIDTH, digest) for k, digest in enumerate(digests))
        return TokenSequence(np.concatenate((rest, np.zeros(WIDTH * len(digests), np.int32))), media)


def _text_of(message: ChatMessage) -> ChatMessage:
    return message.model_copy(update={"content": tuple(part for part in message.content if isinstance(part, TextPart))})


def shows(image: str, text: str) -> ChatMessage:
    return ChatMessage(role="user", content=(ImagePart(digest=image), TextPart(text=text)))


async def seeing(bench, renderer) -> EpisodeSession:
    session = await bench.session()
    runtime = replace(bench.context.policies.runtime("policy"), renderer=renderer)
    bench.context = replace(bench.context, policies=one_policy(runtime))
    bench.script = says("r")
    return EpisodeSession(bench.context, session.episode)


def asks(*messages: ChatMessage) -> GenerationRequest:
    return GenerationRequest(policy="policy", messages=messages)


async def test_two_images_with_the_same_placeholders_share_no_token(bench):
    session = await seeing(bench, Seeing())
    one = await session.generate_one(asks(shows("one", "what is it?")))
    other = await session.generate_one(asks(shows("other", "what is it?")))
    assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
    assert (other.parent, other.shared) == (None, 0)
    assert (one.media, other.media) == ((MediaSpan(0, WIDTH, "one"),), (MediaSpan(0, WIDTH, "other"),))
    again = await session.generate_one(asks(shows("one", "what is it?")))
    assert (again.parent, again.shared, again.media) == (one, one.prompt_tokens, ())
    rows = rows_of([one, other, again])
    assert sorted({row.media[0].digest for row in rows}) == ["one", "other"]


async def test_a_conversation_that_is_rendered_anew_goes_on_from_the_same_image_only(bench):
    session = await seeing(bench, SeeingWithoutBridge())
    first = await session.generate_one(asks(shows("one", "a")))
    second = await session.generate_one(asks(shows("one", "a"), first.reply, text_message("user", "b")))
    assert (second.extends, second.fork, second.media) == (first, None, ())
    assert second.all_media == (MediaSpan(0, WIDTH, "one"),)
    other = await session.generate_one(asks(shows("other", "a"), first.reply, text_message("user", "b")))
    assert (other.extends, other.fork.position) == (None, 0)


async def test_images_of_a_bridge_stand_at_their_places_in_the_whole_prompt(bench):
    session = await seeing(bench, SeeingBehind())
    first = await session.generate_one(asks(text_message("user", "a")))
    second = await session.generate_one(asks(text_message("user", "a"), first.reply, shows("one", "b")))
    assert second.extends is first
    assert second.media == (MediaSpan(second.prompt_tokens - WIDTH, WIDTH, "one"),)
    (row,) = rows_of([first, second])
    assert row.media == second.media


@pytest.mark.parametrize("renderer", [SeeingWithoutBridge, SeeingBehind])
async def test_the_engine_is_given_all_images_of_a_prompt_those_of_earlier_calls_too(bench, renderer):
    session = await seeing(bench, renderer())
    asked, generate = [], bench.engine.generate
    bench.engine.generate = lambda request: asked.append(request) or generate(request)
    first = await session.generate_one(asks(shows("one", "a")))
    second = await session.generate_one(asks(shows("one", "a"), first.reply, shows("other", "b")))
    for request, chat in zip(asked, (first, second), strict=True):
        assert request.prompt.ids.tolist() == chat.prompt_ids.tolist()
        digests = TokenRun.of(*chat.sequence)[: chat.prompt_tokens]
        assert TokenRun.of(*request.prompt).key == digests.key
    assert {span.digest for span in asked[1].prompt.media} == {"one", "other"}


A = MediaSpan(1, 2, "a")


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (TokenSequence(ids(1, 2, 3)), TokenSequence(ids(1, 2, 4)), 2),
        (TokenSequence(ids(5, 0, 0, 6), (A,)), TokenSequence(ids(5, 0, 0, 6), (A,)), 4),
        (TokenSequence(ids(5, 0, 0, 6), (A,)), TokenSequence(ids(5, 0, 0, 6), (MediaSpan(1, 2, "b"),)), 1),
        (TokenSequence(ids(5, 0, 0, 6), (A,)), TokenSequence(ids(5, 0, 0, 6)), 1),
        (TokenSequence(ids(5, 0, 0, 0), (A,)), TokenSequence(ids(5, 0, 0, 0), (MediaSpan(1, 3, "a"),)), 3),
        (TokenSequence(ids(5), ()), TokenSequence(ids(5, 0, 0), (A,)), 1),
        (TokenSequence(ids()), TokenSequence(ids(5)), 0),
    ],
)
def test_tokens_are_common_as_far_as_both_ids_and_images_are(one, other, common):
    assert common_tokens(one, other) == common_tokens(other, one) == common
