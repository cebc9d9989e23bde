"""An agent in conversation with a model: which prompts begin with the exact ids of the calls before them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from conformance.conversations import Conversation, Exchange
from conformance.sampling import sample
from palestra.types.calls import Ids
from palestra.types.messages import ChatMessage, text_message


@dataclass(kw_only=True)
class Tally:
    """Prompts that follow an earlier call of their conversation, and how many of them are not its continuation."""

    turns: int = 0
    edited: int = 0  # prompts whose history was changed before any reply: they can follow no call, and are no turns
    changed: int = 0  # turns whose new messages begin with a reply: the agent changed what the model said
    drift_without: int = 0  # rendered afresh each time
    drift_with: int = 0  # the bridge, and where it refuses, rendered afresh
    refused: int = 0
    inexact: int = 0  # among the refused: the package's bridge returned other ids than those it was to extend
    malformed: int = 0  # tool calls that could not be understood
    calls: int = 0  # tool calls that could

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class _Call:
    messages: list[ChatMessage]  # with its reply
    prompt: Ids  # with the bridge
    fresh_prompt: Ids  # without
    completion: Ids


@dataclass
class _Agent:
    """The client's side: it knows messages only."""

    conversation: Conversation
    messages: list[ChatMessage] = field(default_factory=list)

    def open(self) -> None:
        if self.conversation.system is not None:
            self.messages.append(text_message("system", self.conversation.system))
        self.messages.append(text_message("user", self.conversation.question))

    def go_on(self, reply: ChatMessage, exchange: Exchange) -> None:
        if exchange.edit == "system":
            kept = self.messages[1:] if self.messages[0].role == "system" else self.messages
            self.messages = [text_message("system", "Changed. " + exchange.result), *kept]
        said = reply
        if exchange.edit == "reply":
            said = text_message("assistant", "Changed. " + exchange.result)
        self.messages.append(said)
        for call in said.tool_calls:
            self.messages.append(text_message("tool", exchange.result).model_copy(update={"tool_call_id": call.id}))
        asks = exchange.asks or (() if said.tool_calls else ("Go on.",))
        self.messages += [text_message("user", ask) for ask in asks]


def simulate(renderer: Any, tokenizer: Any, runs: Iterable[Conversation]) -> Tally:
    """Play all conversations."""
    total = Tally()
    for number, conversation in enumerate(runs):
        total.add(_play(renderer, tokenizer, conversation, Random(number)))
    return total


def _play(renderer: Any, tokenizer: Any, conversation: Conversation, random: Random) -> Tally:
    tally, calls, tools = Tally(), list[_Call](), conversation.tools
    agent = _Agent(conversation)
    agent.open()
    for number, exchange in enumerate(conversation.exchanges):
        messages = list(agent.messages)
        fresh = renderer.render(messages, tools).ids
        prompt = _prompt(renderer, messages, tools, calls, fresh, tally)
        completion = np.array(
            sample(renderer, tokenizer, fresh.tolist(), _plain(messages), list(tools) or None, exchange.intent, random),
            np.int32,
        )
        reply = renderer.parse(completion, lambda p=prompt: p, tools, f"call_{number}")
        tally.malformed += len(reply.malformed)
        tally.calls += len(reply.message.tool_calls)
        said = reply.message
        if not conversation.echoes_reasoning:
            said = said.model_copy(update={"reasoning_content": None})
        calls.append(_Call([*messages, said], prompt, fresh, completion))
        agent.go_on(said, exchange)
    return tally


def _prompt(
    renderer: Any, messages: list[ChatMessage], tools: Any, calls: list[_Call], fresh: Ids, tally: Tally
) -> Ids:
    base = max(
        (c for c in calls if messages[: len(c.messages)] == c.messages), key=lambda c: len(c.messages), default=None
    )
    if base is None:
        tally.edited += bool(calls)
        return fresh
    new = messages[len(base.messages) :]
    tally.turns += 1
    tally.changed += any(m.role == "assistant" for m in new)
    tally.drift_without += not _begins(fresh, np.concatenate((base.fresh_prompt, base.completion)))
    history = np.concatenate((base.prompt, base.completion))
    rest = renderer.extend(lambda: base.prompt, base.completion, new, tools)
    if rest is not None:
        return np.concatenate((history, rest.ids))
    tally.refused += 1
    bridged = renderer._inner.bridge_to_next_turn(  # ours never refuses
        base.prompt.tolist(), base.completion.tolist(), _plain(new), tools=list(tools) or None
    )
    tally.inexact += bridged is not None
    tally.drift_with += not _begins(fresh, history)
    return fresh


def _begins(ids: Ids, history: Ids) -> bool:
    return len(ids) >= len(history) and bool((ids[: len(history)] == history).all())


def _plain(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [
        {**m.model_dump(exclude_none=True, exclude={"content", "tool_calls"}), "content": m.text}
        | ({"tool_calls": [call.model_dump() for call in m.tool_calls]} if m.tool_calls else {})
        for m in messages
    ]
