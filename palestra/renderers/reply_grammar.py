"""Grammars of constrained replies, in the Lark syntax of `llguidance`: their tokens, JSON and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# White space at one place of JSON: enough for a line break and its indentation. Small models write nothing else if
# they may.
WHITE_SPACE = r"[ \n\r\t]{1,20}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """How a model writes calls with JSON arguments, as sequences of texts and ids of added tokens.

    Attributes:
        before_name: between the beginning of the reply and the name of its first call.
        between: between the arguments of a call and the name of the next one; None: a reply has one call.
        quoted: whether the name is a JSON string, with quotes in the texts around it.
    """

    before_name: Sequence[str | int]
    before_arguments: Sequence[str | int]
    between: Sequence[str | int] | None
    closing: Sequence[str | int]
    quoted: bool

    def rules(self, tools: Sequence[Mapping[str, Any]], most_calls: int) -> str:
        """Return grammar rules; the rule `calls` matches one to `most_calls` calls of these tools."""
        functions = [tool["function"] for tool in tools]
        most = 1 if self.between is None else most_calls
        more = "" if most == 1 else f"({_written(self.between or ())} call){{0,{most - 1}}}"
        rules = [f"calls: {_written(self.before_name)} call {more} {_written(self.closing)}\n"]
        rules.append("call: " + " | ".join(f"call_{k}" for k in range(len(functions))) + "\n")
        for k, function in enumerate(functions):
            name = json.dumps(function["name"])[1:-1] if self.quoted else function["name"]
            rules.append(f"call_{k}: {_written([name, *self.before_arguments])} arguments_{k}\n")
            rules.append(f"arguments_{k}: {json_rule(_arguments(function))}\n")
        return "".join(rules)


def text_rule(text: str) -> str:
    """Return the rule for a text of ordinary tokens."""
    return json.dumps(text)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the rule for JSON of a schema, with bounded white space."""
    options = schema.get("x-guidance", {})
    if isinstance(options, dict) and options.get("whitespace_flexible") is not False:
        options = {**options, "whitespace_pattern": WHITE_SPACE}
    if isinstance(options, dict):  # their patterns may have white space without end
        options = {key: value for key, value in options.items() if key not in ("item_separator", "key_separator")}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def with_ordinary_tokens(rules: str, value: Any, added: Collection[str]) -> str:
    """Return rules whose texts are written with ordinary tokens, even if they spell added tokens.

    Where only one text may follow, `llguidance` only allows its canonical tokens. If these include an added token, it
    does not count as text, and the rules are refused. `value` has all schemas, names and texts of the caller, as JSON;
    `added` are the contents of the tokenizer's added tokens.
    """
    given = json.dumps(value, ensure_ascii=False)
    spelled = any(token in given or json.dumps(token, ensure_ascii=False)[1:-1] in given for token in added)
    return '%llguidance {"no_forcing": true}\n' + rules if spelled else rules


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments; a tool without `parameters` has none, as in OpenAI's API."""
    given = function.get("parameters") or {"properties": {}}
    if "properties" in given:  # a small model would invent more until its limit
        given = {"additionalProperties": False} | given
    return {"type": "object"} | given


def _written(parts: Sequence[str | int]) -> str:
    """Return texts and tokens as the expressions of a rule; texts that follow one another are one."""
    found: list[str] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        found += [json.dumps(text)] if text else []
        found.append(f"<[{part}]>")
        text = ""
    return " ".join([*found, *([json.dumps(text)] if text else [])])


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
    """Return how calls are written; None: their arguments are not JSON, or the template omits them. `reply` returns the
    ids of a reply with a number of probe calls, without its end; None: unsupported by the template.
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
    """Return the text between two calls, up to the second's name; None: around a single call it differs."""
    second = call.replace(_NAMES[0], _NAMES[1])
    head, tail = before + call, second + after
    if len(text) < len(head) + len(tail) or not text.startswith(head) or not text.endswith(tail):
        return None
    return text[len(head) : len(text) - len(tail)]
