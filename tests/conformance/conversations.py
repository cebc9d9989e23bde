"""Conversations drawn by seed: what the agent says and does, and what the model would like to answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

_WORDS = (
    "the sum is", "Łódź", "漢字", "👩‍💻", "é", "e\u0301", "  ", "\n", "\n\n", "\t", "1", "12 345", "don't", "<b>",
    "{}", '"', "\\n", "</", "don’t", " ,", ".", "naïve", "Ωmega", "مرحبا", "\u200b", "```json\n", "[1, 2]", "I",
    "We'll see:", "\r\n", "|",
)  # fmt: skip
_NAMES = ("weather", "add", "search_files", "now")
_TYPES = ("string", "number", "object", "array", "boolean")


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A reply as the model means it; in which ids it comes is another matter."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]  # names and JSON texts of arguments
    truncated: bool
    split: bool  # in other ids than the tokenizer would choose

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        if self.calls:
            out["tool_calls"] = [
                {"id": f"call_{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for k, (name, arguments) in enumerate(self.calls)
            ]
        return out


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A reply, and what the agent does after it."""

    intent: Intent
    edit: str  # "", "system" (another system prompt), "reply" (changes what the model said)
    asks: tuple[str, ...]  # what the user says next; besides it each call is answered
    result: str  # what each tool answers


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One run of an agent."""

    system: str | None
    question: str
    tools: tuple[dict[str, Any], ...]
    echoes_reasoning: bool
    exchanges: tuple[Exchange, ...]


def conversations(seed: int, count: int) -> Iterator[Conversation]:
    """`count` conversations, the same for the same seed."""
    for number in range(count):
        yield _conversation(Random(f"{seed}/{number}"))


def _text(random: Random, most: int = 8) -> str:
    if random.random() < 0.12:
        return ""
    return "".join(random.choice(_WORDS) + random.choice(("", " ")) for _ in range(random.randint(1, most)))


def _tool(random: Random, name: str) -> dict[str, Any]:
    properties = {key: {"type": random.choice(_TYPES), "description": _text(random, 3)} for key in ("a", "where")}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    return {
        "type": "function",
        "function": {"name": name, "description": _text(random, 5), "parameters": parameters},
    }


def _arguments(random: Random, tool: dict[str, Any]) -> str:
    values: dict[str, Any] = {
        "string": _text(random, 3),
        "number": random.choice((random.randint(-5, 99), 2.5)),
        "object": {"k": _text(random, 2)},
        "array": [1, "é", None],
        "boolean": random.random() < 0.5,
    }
    properties = tool["function"]["parameters"]["properties"]
    keys = random.sample(sorted(properties), random.randint(1, len(properties)))
    arguments = {key: values[properties[key]["type"]] for key in keys}
    separators = random.choice(((", ", ": "), (",", ":"), (",  ", " : ")))
    return json.dumps(arguments, ensure_ascii=random.random() < 0.3, separators=separators)


def _intent(random: Random, tools: tuple[dict[str, Any], ...]) -> Intent:
    called = [random.choice(tools) for _ in range(random.choice((0, 0, 1, 1, 2, 3)))] if tools else []
    return Intent(
        content=_text(random) if not called or random.random() < 0.5 else "",
        reasoning=_text(random) or "Hm." if random.random() < 0.4 else None,
        calls=tuple((tool["function"]["name"], _arguments(random, tool)) for tool in called),
        truncated=random.random() < 0.2,
        split=random.random() < 0.6,
    )


def _exchange(random: Random, tools: tuple[dict[str, Any], ...]) -> Exchange:
    return Exchange(
        intent=_intent(random, tools),
        edit=random.choices(("", "system", "reply"), (8, 1, 1))[0],
        asks=tuple(_text(random) for _ in range(random.choice((0, 0, 0, 1, 2)))),
        result=_text(random),
    )


def _conversation(random: Random) -> Conversation:
    count = random.choice((0, 1, 3)) if random.random() < 0.9 else 4
    tools = tuple(_tool(random, name) for name in random.sample(_NAMES, count))
    return Conversation(
        system=_text(random) if random.random() < 0.6 else None,
        question=_text(random),
        tools=tools,
        echoes_reasoning=random.random() < 0.5,
        exchanges=tuple(_exchange(random, tools) for _ in range(random.randint(2, 6))),
    )
