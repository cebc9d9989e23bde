"""What a reply is made to match, as a grammar for `llguidance`: JSON of a schema, or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from palestra.chat import ChatMLRenderer, Renderer
from palestra.errors import InvalidRequest, UnsupportedField
from palestra.session.call import ModelCall

_MAX_CALLS = 8  # of one reply, where calls are required: a small model would go on until its limit


def grammar_of(call: ModelCall, renderer: Renderer) -> str:
    """The grammar that a call asks for; empty: none. A constrained reply has no reasoning in front of it.

    Where there are tools and a `response_schema`, the reply may be calls or an answer, as `tool_choice` says.

    Raises:
        InvalidRequest: a schema that is none, or an unknown tool.
        UnsupportedField: calls can't be constrained in the format of this model.
    """
    required = call.tool_choice == "required"
    if call.response_choices:
        if required or call.callable_tools or call.response_schema is not None:
            raise InvalidRequest("choices can't be had beside tools or a schema", "choices")
        return _checked(f"start: {' | '.join(map(json.dumps, call.response_choices))}\n", "choices")
    if not required and call.response_schema is None:
        return ""
    calls = _calls(call, renderer) if required or call.callable_tools else ""
    if not calls:
        return _checked(_answer(call.response_schema), "response_format")
    if required:
        return _checked("start: calls\n" + calls, "tool_choice")
    answer = f"answer: %json {json.dumps(call.response_schema)}\n"
    return _checked("start: calls | answer\n" + calls + answer, "response_format")


def _answer(schema: Mapping[str, Any] | None) -> str:
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return grammar


def _calls(call: ModelCall, renderer: Renderer) -> str:
    """Rules for one call or several, as ChatML models of the Hermes convention write them."""
    if not isinstance(renderer, ChatMLRenderer):
        field = "tool_choice" if call.tool_choice == "required" else "response_format"
        raise UnsupportedField(
            f"{field}: calls of tools can't be constrained in the format of this model; use tool_choice auto or none",
            field,
        )
    functions = [tool["function"] for tool in call.tools]
    if call.tool_name is not None:
        functions = [function for function in functions if function["name"] == call.tool_name]
    if not functions:
        named = "there are no tools" if call.tool_name is None else f"there is no tool {call.tool_name!r}"
        raise InvalidRequest(f"tool_choice: {named} in this request", "tool_choice")
    one = not call.parallel_tool_calls or call.tool_name is not None
    rules = ["calls: call\n" if one else f'calls: call ("\\n" call){{0,{_MAX_CALLS - 1}}}\n']
    rules.append("call: " + " | ".join(f"call_{k}" for k in range(len(functions))) + "\n")
    for k, function in enumerate(functions):
        head = json.dumps(f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        parameters = {"type": "object"} | (function.get("parameters") or {})
        if "properties" in parameters:  # a small model would make up further ones until its limit
            parameters = {"additionalProperties": False} | parameters
        rules.append(f'call_{k}: {head} arguments_{k} "}}\\n</tool_call>"\n')
        rules.append(f"arguments_{k}: %json {json.dumps(parameters)}\n")
    return "".join(rules)


def _checked(grammar: str, field: str) -> str:
    problem = _problem(grammar)
    if problem:
        raise InvalidRequest(f"{field}: this schema can't be used: {' '.join(problem.split())[:300]}", field)
    return grammar


@lru_cache(maxsize=256)
def _problem(grammar: str) -> str:
    from llguidance import LLMatcher

    problem: str = LLMatcher.validate_grammar(grammar)
    return problem
