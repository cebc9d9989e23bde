"""Finds out how a model's template writes calls of tools, so that replies can be constrained to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.renderers.reply_grammar import CallFormat

_NAMES = "first_probe", "second_probe"
_ARGUMENTS = re.compile(r'\{"probe": ?1\}')
_SIGNS = 0xE000  # private characters, each in the place of an added token
PROBE_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {"probe": {"type": "integer"}}, "required": ["probe"]},
        },
    }
    for name in _NAMES
)


def probe_reply(calls: int) -> list[dict[str, Any]]:
    """Return a probe conversation whose last message has one or two calls."""
    return [
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                # Some templates show the id in place of the name, which it then has to contain.
                {
                    "id": f"functions.{name}:{k}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps({"probe": 1})},
                }
                for k, name in enumerate(_NAMES[:calls])
            ],
        },
    ]


def find_call_format(
    reply: Callable[[int], Sequence[int] | None], decode: Callable[[Sequence[int]], str], added: Mapping[str, int]
) -> CallFormat | None:
    """Return how calls are written; None: their arguments are not JSON, or the template omits them.

    Args:
        reply: returns the ids of a reply with a number of probe calls, without its end; None: unsupported by the
            template.
    """
    one, two = reply(1), reply(2)
    if one is None:
        return None
    tokens = sorted({*one, *(two or ())}.intersection(added.values()))
    signs = {token: chr(_SIGNS + k) for k, token in enumerate(tokens)}
    text = _signed(one, signs, decode)
    start, arguments = text.find(_NAMES[0]), _ARGUMENTS.search(text)
    if arguments is None or not 0 <= start < arguments.start():
        return None
    name_end = start + len(_NAMES[0])
    before, call, after = text[:start], text[start : arguments.end()], text[arguments.end() :]
    if _NAMES[0] in call[len(_NAMES[0]) :] + after:
        return None  # named twice
    between = None if two is None else _between(_signed(two, signs, decode), before, call, after)

    return CallFormat(
        before_name=_parts(before, tokens),
        before_arguments=_parts(text[name_end : arguments.start()], tokens),
        between=None if between is None else _parts(between, tokens),
        closing=_parts(after, tokens),
        quoted=before.endswith('"') and text[name_end : name_end + 1] == '"',
    )


def _signed(ids: Sequence[int], signs: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> str:
    """Return the text of ids with a private character for each added token."""
    out: list[str] = []
    run: list[int] = []
    for token in ids:
        if token in signs:
            out += [decode(run), signs[token]]
            run = []
        else:
            run.append(token)
    return "".join([*out, decode(run)])


def _parts(text: str, tokens: Sequence[int]) -> list[str | int]:
    """Return a text with private-use characters as texts and the tokens they represent."""
    found = re.split(f"([{chr(_SIGNS)}-{chr(_SIGNS + len(tokens))}])", text)
    return [part if k % 2 == 0 else tokens[ord(part) - _SIGNS] for k, part in enumerate(found) if part]


def _between(text: str, before: str, call: str, after: str) -> str | None:
    """Return the text between two calls, up to the second one's name; None: it differs from the text around a single
    call.
    """
    second = call.replace(_NAMES[0], _NAMES[1])
    head, tail = before + call, second + after
    if len(text) < len(head) + len(tail) or not text.startswith(head) or not text.endswith(tail):
        return None
    return text[len(head) : len(text) - len(tail)]
