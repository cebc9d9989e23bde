"""A conversation in the shop with smolagents: with its ToolCallingAgent, and with its CodeAgent."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace

from shop import INSTRUCTIONS, QUESTIONS, arguments, plain_add, plain_price
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


def talk(options: Namespace) -> list[str]:
    kind = CodeAgent if options.scenario == "code" else ToolCallingAgent
    model = OpenAIModel(model_id=options.model, api_base=options.base_url, api_key=options.api_key)
    agent = kind(
        tools=[tool(plain_price), tool(plain_add)],
        model=model,
        instructions=INSTRUCTIONS,
        max_steps=6,
        stream_outputs=options.streamed,
        verbosity_level=0,
    )
    return [str(agent.run(question, reset=number == 0)) for number, question in enumerate(QUESTIONS)]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # a streamed reply is shown as it comes
        answers = talk(arguments(("talk", "code")))
    print(json.dumps({"answers": answers}))
