"""A conversation in the shop with LlamaIndex's FunctionAgent."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from shop import INSTRUCTIONS, QUESTIONS, arguments, plain_add, plain_price


async def talk(options: Namespace) -> list[str]:
    model = OpenAILike(
        model=options.model,
        api_base=options.base_url,
        api_key=options.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(
        tools=[plain_price, plain_add], llm=model, system_prompt=INSTRUCTIONS, streaming=options.streamed
    )
    context = Context(agent)
    return [(await agent.run(question, ctx=context)).response.content for question in QUESTIONS]


if __name__ == "__main__":
    print(json.dumps({"answers": asyncio.run(talk(arguments(("talk",))))}))
