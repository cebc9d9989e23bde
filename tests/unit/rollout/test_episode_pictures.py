"""Pictures of an episode leave their files in the run's folder; of a tool's damaged ones the model is told in words."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.errors import InvalidRequest
from palestra.pictures.blobs import KeptPictures
from palestra.pictures.parts import Picture
from palestra.rollout.played import EpisodePictures
from palestra.types.messages import ChatMessage, ImagePart, TextPart

GOOD = Picture.of(np.full((6, 8, 3), (200, 30, 30), np.uint8))
DAMAGED = Picture.of(GOOD.data[:-20] + b"\0\0\0\0" + GOOD.data[-16:])


def of_tool(*parts, name="look"):
    return ChatMessage(role="tool", content=parts, tool_call_id="a", name=name)


@pytest.fixture
def kept(tmp_path):
    return KeptPictures(tmp_path)


@pytest.fixture
def pictures(kept):
    async def keep(picture):
        kept.keep(picture.data)

    return EpisodePictures(keep)


async def test_pictures_leave_their_files_where_they_are_kept(pictures, kept):
    message = ChatMessage(role="user", content=(TextPart(text="a"), GOOD))
    (bare,) = await pictures.without_files((message,))
    assert kept.get(GOOD.digest) == GOOD.data
    assert type(bare.content[1]) is ImagePart
    assert bare.content[1].digest == GOOD.digest
    assert "data" not in message.model_dump_json()
    assert "PNG" not in repr(message)


async def test_messages_without_pictures_stay_as_they_are(pictures):
    messages = (of_tool(TextPart(text="a")),)
    assert not pictures.change(messages)
    assert await pictures.without_files(messages) == messages


async def test_a_tool_is_said_to_have_returned_what_can_not_be_read(pictures, kept):
    (said,) = await pictures.without_files((of_tool(GOOD, TextPart(text="and"), DAMAGED),))
    first, between, words = said.content
    assert (type(first), between.text) == (ImagePart, "and")
    assert words.text.startswith(
        "Error: picture 2 of the 2 that look returned could not be read: the file (image/png) is damaged: "
    )
    assert list(kept) == [GOOD.digest]
    # An environment server sends the file of a picture once, and names it by its digest the next time.
    again = of_tool(ImagePart(digest=DAMAGED.digest))
    (said,) = await pictures.without_files((again,))
    assert said.text.startswith("Error: the picture that look returned could not be read: the file")
    assert said.tool_call_id == "a"


async def test_an_environment_may_show_no_picture_that_can_not_be_read(pictures):
    await pictures.without_files((of_tool(DAMAGED),))
    with pytest.raises(InvalidRequest, match="damaged"):
        await pictures.without_files((ChatMessage(role="user", content=(DAMAGED,)),))


async def test_a_folder_that_is_full_is_no_fault_of_the_tool(tmp_path):
    full = KeptPictures(tmp_path, max_bytes=1)

    async def keep(picture):
        full.keep(picture.data)

    with pytest.raises(Exception, match="store_gib"):
        await EpisodePictures(keep).without_files((of_tool(GOOD),))
