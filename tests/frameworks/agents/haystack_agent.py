"""A conversation in the shop with Haystack's Agent."""

from __future__ import annotations

import json
import os
from argparse import Namespace

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from shop import INSTRUCTIONS, QUESTIONS, arguments, plain_add, plain_price


def talk(options: Namespace) -> list[str]:
    model = OpenAIChatGenerator(
        model=options.model,
        api_base_url=options.base_url,
        api_key=Secret.from_token(options.api_key),
        streaming_callback=(lambda piece: None) if options.streamed else None,
    )
    tools = [create_tool_from_function(plain_price), create_tool_from_function(plain_add)]
    agent = Agent(chat_generator=model, tools=tools, system_prompt=INSTRUCTIONS)
    history: list[ChatMessage] = []
    answers = []
    for question in QUESTIONS:
        messages = agent.run(messages=[*history, ChatMessage.from_user(question)])["messages"]
        history = [message for message in messages if message.role.value != "system"]  # the agent adds it again
        answers.append(messages[-1].text)
    return answers


if __name__ == "__main__":
    print(json.dumps({"answers": talk(arguments(("talk",)))}))
