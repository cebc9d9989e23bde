"""A conversation in the shop with LiteLLM, which any loop of one's own may use."""

from __future__ import annotations

import json
from argparse import Namespace

import litellm
from shop import INSTRUCTIONS, QUESTIONS, arguments, plain_add, plain_price

TOOLS = {"price": plain_price, "add": plain_add}
DESCRIBED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": kind} for field, kind in fields.items()},
                "required": list(fields),
            },
        },
    }
    for name, description, fields in (
        ("price", "What a number of equal things cost.", {"item": "string", "count": "integer"}),
        ("add", "The sum of two numbers.", {"a": "integer", "b": "integer"}),
    )
]


def talk(options: Namespace) -> list[str]:
    messages: list[dict[str, object]] = [{"role": "system", "content": INSTRUCTIONS}]
    return [ask(options, messages, question) for question in QUESTIONS]


def ask(options: Namespace, messages: list[dict[str, object]], question: str) -> str:
    messages.append({"role": "user", "content": question})
    while True:
        reply = litellm.completion(
            model=f"openai/{options.model}",
            api_base=options.base_url,
            api_key=options.api_key,
            messages=messages,
            tools=DESCRIBED,
            stream=options.streamed,
        )
        if options.streamed:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


if __name__ == "__main__":
    print(json.dumps({"answers": talk(arguments(("talk",)))}))
