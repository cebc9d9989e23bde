"""A recorded call as a conversation that can be sent to a model again, whole or cut at a message."""

from __future__ import annotations

from pydantic import JsonValue

from palestra.dashboard.answers import ConversationAnswer
from palestra.dashboard.runs import Run
from palestra.errors import Conflict, NotFound
from palestra.store.browsing import read_episode
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
