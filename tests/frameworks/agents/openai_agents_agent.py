"""A shop with the OpenAI Agents SDK: a conversation, a planner with a clerk as its tool, an offer as an object."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.run import CallModelData, ModelInputData
from openai import AsyncOpenAI
from shop import CLERK, INSTRUCTIONS, PLANNER, PORTER, QUESTIONS, Offer, add, arguments, price

TOOLS = [function_tool(price), function_tool(add)]


async def ask(agent: Agent[Any], said: Any, streamed: bool, config: RunConfig | None = None) -> Any:
    if not streamed:
        return await Runner.run(agent, said, run_config=config)
    result = Runner.run_streamed(agent, said, run_config=config)
    async for _ in result.stream_events():
        pass
    return result


async def talk(model: Model, options: Namespace, shown: Any = None) -> list[str]:
    """Three questions. `shown`: what of the history the model is shown; None: all."""
    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False)  # the SDK: for the first call of a run
    settings = forced if options.force else ModelSettings()
    agent = Agent(name="Shop", instructions=INSTRUCTIONS, model=model, tools=TOOLS, model_settings=settings)
    history: list[Any] = []
    answers = []
    for step, question in enumerate(QUESTIONS):
        named = ModelSettings(extra_headers={"x-palestra-step": str(step)})
        config = RunConfig(model_settings=named, call_model_input_filter=shown)
        result = await ask(agent, [*history, {"role": "user", "content": question}], options.streamed, config)
        history = result.to_input_list()
        answers.append(result.final_output)
    return answers


async def forgetful(model: Model, options: Namespace) -> list[str]:
    """The model is shown the last question, and what came after it."""

    def last_question(data: CallModelData[Any]) -> ModelInputData:
        items: list[Any] = data.model_data.input
        start = max(at for at, item in enumerate(items) if item.get("role") == "user")
        return ModelInputData(input=items[start:], instructions=data.model_data.instructions)

    return await talk(model, options, last_question)


async def team(model: Model, options: Namespace) -> list[str]:
    named = ModelSettings(extra_headers={"x-palestra-agent": "planner/clerk"})
    clerk = Agent(name="Clerk", instructions=CLERK, model=model, tools=TOOLS, model_settings=named)
    planner = Agent(
        name="Planner",
        instructions=PLANNER,
        model=model,
        tools=[clerk.as_tool(tool_name="ask_clerk", tool_description="Asks the clerk.")],
        model_settings=ModelSettings(extra_headers={"x-palestra-agent": "planner"}),
    )
    return [(await ask(planner, QUESTIONS[0], options.streamed)).final_output]


async def handoff(model: Model, options: Namespace) -> list[str]:
    """The porter passes the conversation on to the clerk, who has other instructions and tools."""
    clerk = Agent(name="Clerk", instructions=CLERK, model=model, tools=TOOLS)
    porter = Agent(name="Porter", instructions=PORTER, model=model, handoffs=[clerk])
    return [(await ask(porter, QUESTIONS[0], options.streamed)).final_output]


async def offer(model: Model, options: Namespace) -> list[str]:
    agent = Agent(name="Shop", instructions=INSTRUCTIONS, model=model, tools=TOOLS, output_type=Offer)
    return [(await ask(agent, QUESTIONS[0], options.streamed)).final_output.model_dump_json()]


PLAYS = {"talk": talk, "team": team, "offer": offer, "forgetful": forgetful, "handoff": handoff}


async def main() -> None:
    options = arguments(PLAYS)
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=options.base_url, api_key=options.api_key)
    model: Model = OpenAIResponsesModel(options.model, client)
    if options.api == "chat":
        replay = (lambda _: True) if options.replay_reasoning else None  # None: as the SDK thinks best
        model = OpenAIChatCompletionsModel(options.model, client, should_replay_reasoning_content=replay)
    play = PLAYS[options.scenario]
    print(json.dumps({"answers": await play(model, options)}))


if __name__ == "__main__":
    asyncio.run(main())
