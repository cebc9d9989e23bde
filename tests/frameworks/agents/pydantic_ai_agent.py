"""A shop with pydantic-ai: a conversation, a planner with a clerk as its tool, an offer as an object."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterable
from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import AgentStreamEvent, ModelMessage, UserPromptPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from shop import CLERK, INSTRUCTIONS, PLANNER, QUESTIONS, Offer, add, arguments, price

TOOLS: Any = [price, add]


async def read(context: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
    async for _ in events:
        pass


async def ask(agent: Agent[None, Any], question: str, streamed: bool, **more: Any) -> Any:
    """The output, and all messages so far."""
    done = await agent.run(question, event_stream_handler=read if streamed else None, **more)
    return done.output, done.all_messages()


async def converse(agent: Agent[None, str], streamed: bool) -> list[str]:
    history: list[ModelMessage] = []
    answers = []
    for step, question in enumerate(QUESTIONS):
        named = ModelSettings(extra_headers={"x-palestra-step": str(step)})
        answer, history = await ask(agent, question, streamed, message_history=history, model_settings=named)
        answers.append(answer)
    return answers


async def talk(model: Model, options: Namespace) -> list[str]:
    def settings(context: RunContext[None]) -> ModelSettings:
        return ModelSettings(tool_choice="required" if context.run_step == 1 else "auto", parallel_tool_calls=False)

    agent = Agent(model, instructions=INSTRUCTIONS, tools=TOOLS, model_settings=settings if options.force else None)
    return await converse(agent, options.streamed)


async def forgetful(model: Model, options: Namespace) -> list[str]:
    """The model is shown the last question, and what came after it."""

    def last_question(messages: list[ModelMessage]) -> list[ModelMessage]:
        asked = [at for at, message in enumerate(messages) if isinstance(message.parts[0], UserPromptPart)]
        return messages[asked[-1] :]

    agent = Agent(model, instructions=INSTRUCTIONS, tools=TOOLS, capabilities=[ProcessHistory(last_question)])
    return await converse(agent, options.streamed)


async def team(model: Model, options: Namespace) -> list[str]:
    def named(agent: str) -> ModelSettings:
        return ModelSettings(extra_headers={"x-palestra-agent": agent})

    clerk = Agent(model, instructions=CLERK, tools=TOOLS, model_settings=named("planner/clerk"))
    planner = Agent(model, instructions=PLANNER, model_settings=named("planner"))

    @planner.tool_plain
    async def ask_clerk(input: str) -> str:
        """Asks the clerk."""
        answer, _ = await ask(clerk, input, options.streamed)
        return str(answer)

    answer, _ = await ask(planner, QUESTIONS[0], options.streamed)
    return [answer]


async def offer(model: Model, options: Namespace) -> list[str]:
    agent = Agent(model, instructions=INSTRUCTIONS, tools=TOOLS, output_type=Offer)
    found, _ = await ask(agent, QUESTIONS[0], options.streamed)
    return [found.model_dump_json()]


PLAYS = {"talk": talk, "team": team, "offer": offer, "forgetful": forgetful}


async def main() -> None:
    options = arguments(PLAYS)
    provider = OpenAIProvider(base_url=options.base_url, api_key=options.api_key)
    kind = OpenAIResponsesModel if options.api == "responses" else OpenAIChatModel
    play = PLAYS[options.scenario]
    print(json.dumps({"answers": await play(kind(options.model, provider=provider), options)}))


if __name__ == "__main__":
    asyncio.run(main())
