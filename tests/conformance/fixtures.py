"""Conversations, and written out what Qwen2.5's template makes of them.

`make conformance` holds them against the template itself.
"""

from __future__ import annotations

from typing import Any

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b für <b>",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_ADD = (
    '{"type": "function", "function": {"name": "add", "description": "a + b für <b>", "parameters": {"type": "object", '
    '"properties": {"a": {"type": "number"}}, "required": ["a"]}}}'
)
_NOW = (
    '{"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", '
    '"properties": {}}}}'
)


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def _offer(*tools: str) -> str:
    return (
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        + "\n".join(tools)
        + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


# messages, tools, text
QWEN25: list[tuple[list[dict[str, Any]], list[dict[str, Any]], str]] = [
    (
        [{"role": "user", "content": " Hi.\n"}],
        [],
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n Hi.\n<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        [{"role": "user", "content": "1 + 1?"}],
        [ADD, NOW],
        f"<|im_start|>system\n{SYSTEM}{_offer(_ADD, _NOW)}<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        [
            {"role": "system", "content": "Short."},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [_call("add", {"a": 1, "c": "é\n"})]},
            {"role": "tool", "tool_call_id": "x", "content": "2"},
        ],
        [ADD],
        f"<|im_start|>system\nShort.{_offer(_ADD)}<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "c": "é\\n"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        [
            {"role": "system", "content": ""},
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "Both.",
                "tool_calls": [_call("add", {"a": [None, True]}), _call("now", {})],
            },
            {"role": "tool", "tool_call_id": "x", "content": "2"},
            {"role": "tool", "tool_call_id": "x", "content": ""},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": ""},
            {"role": "system", "content": "Now."},
        ],
        [NOW],
        f"<|im_start|>system\n{_offer(_NOW)}<|im_end|>\n<|im_start|>user\n?<|im_end|>\n"
        '<|im_start|>assistant\nBoth.\n<tool_call>\n{"name": "add", "arguments": {"a": [null, true]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>system\nNow.<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
]
