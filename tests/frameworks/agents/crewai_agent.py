"""One question in the shop for a crew of CrewAI."""

from __future__ import annotations

import json
import os
from argparse import Namespace

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from shop import INSTRUCTIONS, QUESTIONS, arguments, plain_add, plain_price


def talk(options: Namespace) -> list[str]:
    model = LLM(
        model=f"openai/{options.model}", base_url=options.base_url, api_key=options.api_key, stream=options.streamed
    )
    tools = [tool("price")(plain_price), tool("add")(plain_add)]
    clerk = Agent(role="clerk", goal="tell prices", backstory=INSTRUCTIONS, tools=tools, llm=model, max_iter=4)
    task = Task(description=QUESTIONS[0], expected_output="a number", agent=clerk)
    return [str(Crew(agents=[clerk], tasks=[task]).kickoff())]


if __name__ == "__main__":
    print(json.dumps({"answers": talk(arguments(("talk",)))}))
