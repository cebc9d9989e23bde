"""A conversation in the shop with AutoGen's AssistantAgent."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from shop import INSTRUCTIONS, QUESTIONS, arguments, plain_add, plain_price

ABILITIES = ModelInfo(
    vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True
)  # what AutoGen can't look up for a model that it doesn't know


async def talk(options: Namespace) -> list[str]:
    client = OpenAIChatCompletionClient(
        model=options.model, base_url=options.base_url, api_key=options.api_key, model_info=ABILITIES
    )
    agent = AssistantAgent(
        "clerk",
        model_client=client,
        tools=[plain_price, plain_add],
        system_message=INSTRUCTIONS,
        model_client_stream=options.streamed,
        max_tool_iterations=5,
    )
    return [(await agent.run(task=question)).messages[-1].content for question in QUESTIONS]


if __name__ == "__main__":
    print(json.dumps({"answers": asyncio.run(talk(arguments(("talk",))))}))
