"""A recorded call as a conversation that can be sent to a model again, and the pictures that its model got."""

from __future__ import annotations

import threading
from dataclasses import replace

from pydantic import JsonValue
from starlette.responses import Response

from palestra.dashboard.answers import ConversationAnswer
from palestra.dashboard.runs import Run
from palestra.errors import Conflict, NotFound
from palestra.http.app import file_answer
from palestra.pictures.blobs import FOLDER, Blobs
from palestra.pictures.containers import OF_A_RUN, InvalidPicture
from palestra.pictures.pixels import decode_picture, encode_picture
from palestra.renderers.picture_layout import layout_fact, read_layout
from palestra.store.browsing import read_episode
from palestra.store.run_log import read_fact
from palestra.types.messages import ChatMessage, ImagePart

MOST_TOOL_CALLS = 200  # of a message
WITHOUT_IMAGES = "its images are left out: the page does not send images"


def read_call(run: Run, episode_id: str, index: int) -> ConversationAnswer:
    """Return the messages of a call and its reply. Raises Conflict if the prompt was token ids or raw text instead of
    messages.
    """
    with run.open() as connection:
        chats = read_episode(connection, episode_id).trajectory.chats
    chat = next((chat for chat in chats if chat.index == index), None)
    if chat is None:
        raise NotFound(f"the episode {episode_id} has {len(chats)} calls; there is no call {index}")
    if not chat.messages:
        raise Conflict(f"the prompt of call {index} is token ids or raw text, and no conversation to go on from")
    messages = [*chat.messages, chat.reply]
    cut = sum(max(len(message.tool_calls) - MOST_TOOL_CALLS, 0) for message in messages)
    with_images = any(isinstance(part, ImagePart) for message in messages for part in message.content)
    return ConversationAnswer(
        run=run.name,
        policy=chat.policy,
        temperature=chat.sampling.temperature,
        max_tokens=chat.sampling.max_tokens,
        messages=[_openai(message) for message in messages],
        tools=[dict(tool) for tool in chat.tools],
        notes=[
            *([WITHOUT_IMAGES] if with_images else []),
            *(
                [f"{cut} of its tool calls are left out: of a message the first {MOST_TOOL_CALLS} are sent"]
                if cut
                else []
            ),
        ],
    )


def _openai(message: ChatMessage) -> dict[str, JsonValue]:
    """Return a message in the form of OpenAI's chat completions; fields that it does not have are left out."""
    found = message.model_dump(mode="json", exclude_none=True, exclude={"content", "tool_calls"})
    found["content"] = message.text
    if message.tool_calls:
        found["tool_calls"] = [call.model_dump(mode="json") for call in message.tool_calls[:MOST_TOOL_CALLS]]
    return found


TILES = "x-palestra-tiles"  # rows and columns of its parts: tiles, or the squares of embeddings
WORDS = "x-palestra-seen"
# Of what is decoded for the page: a run may allow more, in files of a few bytes, and a service shows the runs of all
# tenants from one process. 15 bytes a pixel are needed for a moment, where something is transparent.
LIMITS = replace(OF_A_RUN, max_pixels=1 << 24)
_DECODING = threading.Lock()  # one picture at a time, whosever run it is of


def seen_picture(run: Run, digest: str, policy: str) -> Response:
    """Return a response with the pixels that a model got of a picture, as PNG. Blocks for disk and decoder.

    Raises:
        NotFound: there is no such picture, or the run has not recorded the model's image settings.
        InvalidPicture: too many pixels for the page.
        InvalidRequest: the model does not accept this size.
    """
    with run.open() as connection:
        noted = read_fact(connection, layout_fact(policy))
    if noted is None:
        raise NotFound(f"this run does not say how the model of {policy!r} gets pictures")
    layout = read_layout(noted)
    file = Blobs(run.folder / FOLDER).get(digest)
    with _DECODING:
        image = decode_picture(file, LIMITS)
        wide, high = layout.largest_size(*image.size)
        if wide * high > LIMITS.max_pixels:
            raise InvalidPicture(
                f"for the model the picture is brought to {wide:,} × {high:,} pixels, and the page shows "
                f"{LIMITS.max_pixels:,}"
            )
        seen = encode_picture(layout.seen(image))
    rows, columns = layout.cells(*image.size)
    said = layout.in_words(*image.size).replace("×", "x")
    return file_answer(seen, **{TILES: f"{rows} {columns}", WORDS: said})
