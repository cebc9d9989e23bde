"""Merge the cases of `merging` with Palestra's token trie, in three ways; a JSON line for each.

recorded   as a session records: a call refers to its parent and holds only the ids that are new
unknown    no call has a parent and each holds its whole prompt, so that the trie has to compare everything
messages   the request's messages are matched against the episode's history first, then as recorded

Timed: what the session does with each call (`TokenTrie.add`; `CallHistory.match` and `CallHistory.add`), then the rows.
Not timed: making records and messages. Each request's messages are new objects, with strings of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from conversations import Call, Message, Row, Turn, calls, fresh
from merge_runs import Stopwatch, main

from palestra.session.history import CallHistory
from palestra.tokens import TokenTrie, rows_of
from palestra.types.calls import Chat, Ids, PolicyVersion, SamplingParams, VersionSpan
from palestra.types.messages import ChatMessage, text_message

POLICY = "policy"
LOGPROB = -0.5


def chat_of(index: int, turn: Turn, parent: Chat | None, new_messages: Iterable[ChatMessage] = ()) -> Chat:
    """The record of one call."""
    said = len(turn.said)
    return Chat(
        episode_id="e0",
        fence=1,
        index=index,
        time_step=index,
        agent="agent",
        policy=POLICY,
        parent=parent,
        shared=0 if parent is None else parent.tokens,
        shared_messages=0 if parent is None else parent.shared_messages + len(parent.new_messages) + 1,
        new_messages=tuple(new_messages),
        prompt_tail=np.array(turn.seen, np.int32),
        reply=chat_message(turn.reply),
        completion_ids=np.array(turn.said, np.int32),
        logprobs=np.full(said, LOGPROB, np.float32),
        versions=(VersionSpan(PolicyVersion(0, 0), said),),
        finish_reason="stop",
        sampling=SamplingParams(temperature=1.0, max_tokens=said, seed=index),
        request_digest=str(index),
        started_at=0.0,
        finished_at=0.0,
    )


def chat_message(message: Message) -> ChatMessage:
    """As it comes out of a request."""
    return text_message(message.role, fresh(message.text))


def recorded_chats(turns: Sequence[Turn]) -> list[Chat]:
    """The calls as a session records them."""
    chats: list[Chat] = []
    for index, turn in enumerate(turns):
        chats.append(chat_of(index, turn, None if turn.parent is None else chats[turn.parent]))
    return chats


def merge_recorded(turns: Sequence[Turn], watch: Stopwatch) -> list[Row]:
    """Add each call to the trie, and make rows of it."""
    return merged(recorded_chats(turns), watch)


def merge_unknown(turns: Sequence[Turn], watch: Stopwatch) -> list[Row]:
    """The same of calls without parents. Their prompts are views of their conversation, which saves gigabytes."""
    chats = recorded_chats(turns)
    whole: dict[int, Ids] = {}  # by the call's index, the ids of its whole conversation
    for chat in reversed(chats):
        if chat.index not in whole:
            whole[chat.index] = chat.ids
        if chat.parent is not None:
            whole[chat.parent.index] = whole[chat.index]
    prompts = [whole[chat.index][: chat.prompt_tokens] for chat in chats]
    alone = [
        replace(chat, parent=None, shared=0, shared_messages=0, prompt_tail=prompt)
        for chat, prompt in zip(chats, prompts, strict=True)
    ]
    return merged(alone, watch)


def merge_messages(turns: Sequence[Turn], watch: Stopwatch) -> list[Row]:
    """The same with the request's messages, as the agent sends them again with every call."""
    trie, history = TokenTrie(), CallHistory()
    chats: list[Chat] = []
    for call in calls(turns):
        chats.append(play(call, trie, history, chats, watch, watch, watch))
    return rows(trie, watch)


def play(
    call: Call,
    trie: TokenTrie,
    history: CallHistory,
    chats: Sequence[Chat],
    matching: Stopwatch,
    inserting: Stopwatch,
    remembering: Stopwatch,
) -> Chat:
    """One call's way through the session's own functions.

    Raises:
        ValueError: the history did not find the call before it.
    """
    messages = tuple(map(chat_message, call.messages))
    with matching:
        match = history.match(POLICY, messages)
    if match.call is not (None if call.turn.parent is None else chats[call.turn.parent]):
        raise ValueError(f"call {call.number} goes on from call {call.turn.parent}, not from {match}")
    chat = chat_of(call.number, call.turn, match.call, messages[match.messages :])
    with inserting:
        trie.add(chat)
    with remembering:
        history.add(chat)
    return chat


def merged(chats: Sequence[Chat], watch: Stopwatch) -> list[Row]:
    """The rows of a trie of these calls."""
    trie = TokenTrie()
    with watch:
        for chat in chats:
            trie.add(chat)
    return rows(trie, watch)


def rows(trie: TokenTrie, watch: Stopwatch) -> list[Row]:
    """Of a trie."""
    with watch:
        found = rows_of(trie)
    return [(row.ids.tolist(), row.loss_mask.tolist()) for row in found]


if __name__ == "__main__":
    main({"recorded": merge_recorded, "unknown": merge_unknown, "messages": merge_messages})
