"""What a reply is made to match, as a grammar for `llguidance`: JSON of a schema, or calls of tools."""

from __future__ import annotations

import json
from typing import NamedTuple

from palestra.chat import ChatMLRenderer, Renderer
from palestra.errors import GrammarRefused, InvalidRequest, UnsupportedField
from palestra.session.call import GenerationRequest

_MAX_CALLS = 8  # of one reply, where calls are required: a small model would go on until its limit


class Constraint(NamedTuple):
    """What a reply has to match.

    Attributes:
        grammar: in a form that `llguidance` reads; it is not compiled yet. Empty: anything.
        field: of the request, for errors.
    """

    grammar: str
    field: str


def constraint_of(call: GenerationRequest, renderer: Renderer) -> Constraint:
    """Return what a call asks for. A constrained reply has no reasoning in front of it.

    Where there are tools and a `response_schema`, the reply may be calls or an answer, as `tool_choice` says.

    Raises:
        InvalidRequest: an unknown tool, or choices beside a schema.
        GrammarRefused: a schema that is nested too deep.
        UnsupportedField: calls can't be constrained in the format of this model.
    """
    required = call.tool_choice == "required"
    if call.response_choices:
        if required or call.callable_tools or call.response_schema is not None:
            raise InvalidRequest("choices can't be had beside tools or a schema", "choices")
        return Constraint(f"start: {' | '.join(map(json.dumps, call.response_choices))}\n", "choices")
    field = "tool_choice" if required else "response_format"
    if not required and call.response_schema is None:
        return Constraint("", field)
    try:
        return Constraint(_grammar(call, renderer, required), field)
    except RecursionError:
        raise GrammarRefused(f"{field}: over the bound of a grammar: it is nested too deep", field) from None


def _grammar(call: GenerationRequest, renderer: Renderer, required: bool) -> str:
    calls = _calls(call, renderer) if required or call.callable_tools else ""
    if not calls:
        return json.dumps({"grammars": [{"json_schema": call.response_schema}]})
    if required:
        return "start: calls\n" + calls
    answer = f"answer: %json {json.dumps(call.response_schema)}\n"
    return "start: calls | answer\n" + calls + answer


def _calls(call: GenerationRequest, renderer: Renderer) -> str:
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
