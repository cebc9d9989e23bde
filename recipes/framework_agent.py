"""An agent of a framework: a LangGraph graph with a tool, which keeps its code and gets another base URL.

    pip install langgraph langchain-openai
    python recipes/framework_agent.py [--steps 2] [--model SmolLM2-135M-Instruct]

The graph is that of LangGraph's guide: a model, its tools, and an edge back. Of Palestra it needs a base URL, a key and
a model's name. The first call has to use the tool, which a grammar enforces and the trainer goes through, too.
docs/reference/frameworks.md has the OpenAI Agents SDK and pydantic-ai. What a run prints is in README.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import palestra

try:
    from langchain_core.messages import AnyMessage, HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
except ModuleNotFoundError as error:
    sys.exit(f"{error}. This recipe needs LangGraph:  pip install langgraph langchain-openai")

PRICES = {"lamp": 20, "chair": 45, "desk": 130}


@tool
def price(item: str, count: int) -> str:  # YOURS 1: the tools, and the graph below
    """Say what a number of equal things cost."""
    return str(count * PRICES.get(item.removesuffix("s"), 0))


def graph_of(model: ChatOpenAI) -> Any:
    """Return the agent: the model is called, its tools are run, and the model is called again."""
    free = model.bind_tools([price], strict=True)
    forced = model.bind_tools([price], strict=True, tool_choice="required", parallel_tool_calls=False)

    async def call_model(state: MessagesState) -> dict[str, list[AnyMessage]]:
        bound = forced if isinstance(state["messages"][-1], HumanMessage) else free
        return {"messages": [await bound.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", call_model)
    builder.add_node("tools", ToolNode([price]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    return builder.compile()


async def rollout(task: dict[str, Any], endpoint: palestra.ModelEndpoint) -> float:
    """Ask the agent, and return 1 if its last message has the right number."""
    model = ChatOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model, max_tokens=48)
    question = {"role": "user", "content": task["question"]}
    result = await graph_of(model).ainvoke({"messages": [question]}, {"recursion_limit": 12})
    return float(task["answer"] in re.findall(r"\d+", result["messages"][-1].text))  # YOURS 2: the reward


def demonstrate(steps: int, model: str) -> None:
    """Train on a shop's questions."""
    orders = [(count, item) for count in range(2, 10) for item in PRICES]
    tasks = [
        {"question": f"What do {n} {item}s cost?", "answer": str(n * PRICES[item])} for n, item in orders
    ]  # YOURS 3
    policy = {"model": model, "max_context": 1024, "sampling": {"max_tokens": 48}}
    settings = {"name": "langgraph", "steps": steps, "policies": {"policy": policy}}
    settings |= {"rollout": {"groups_per_step": 2, "group_size": 4}, "server": {"unknown_fields": "ignore"}}
    palestra.train(rollout, tasks, palestra.JobConfig.model_validate(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An agent written with LangGraph is trained.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    demonstrate(arguments.steps, arguments.model)
