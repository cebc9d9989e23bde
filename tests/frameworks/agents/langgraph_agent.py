"""A shop with LangGraph and langchain-openai: a conversation, a planner with a clerk as its tool, an offer."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from shop import CLERK, INSTRUCTIONS, PLANNER, QUESTIONS, Offer, add, arguments, price

TOOLS = [tool(price), tool(add)]


def graph_of(
    model: ChatOpenAI, instructions: str, tools: list[Any], force: bool = False, forgetful: bool = False
) -> Any:
    """The agent of LangGraph's guide: a model, its tools, and a memory."""
    free = model.bind_tools(tools, strict=True)
    forced = model.bind_tools(tools, strict=True, tool_choice="required", parallel_tool_calls=False)

    def call_model(state: MessagesState) -> dict[str, list[AnyMessage]]:
        messages = state["messages"]
        step = sum(message.type == "human" for message in messages) - 1
        bound = forced if force and isinstance(messages[-1], HumanMessage) else free
        if forgetful:  # the model is shown the last question, and what came after it
            messages = messages[max(at for at, message in enumerate(messages) if message.type == "human") :]
        headers = {"x-palestra-step": str(step)}
        return {"messages": [bound.invoke([SystemMessage(instructions), *messages], extra_headers=headers)]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", call_model)
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    return builder.compile(checkpointer=InMemorySaver())


def ask(graph: Any, question: str, streamed: bool) -> str:
    said: Any = {"messages": [{"role": "user", "content": question}]}
    thread: Any = {"configurable": {"thread_id": "1"}}
    if streamed:
        for _ in graph.stream(said, thread, stream_mode="messages"):
            pass
        last = graph.get_state(thread).values["messages"][-1]
    else:
        last = graph.invoke(said, thread)["messages"][-1]
    assert isinstance(last, AIMessage)
    return last.text


def talk(model: ChatOpenAI, options: Namespace) -> list[str]:
    graph = graph_of(model, INSTRUCTIONS, TOOLS, options.force)
    return [ask(graph, question, options.streamed) for question in QUESTIONS]


def forgetful(model: ChatOpenAI, options: Namespace) -> list[str]:
    graph = graph_of(model, INSTRUCTIONS, TOOLS, forgetful=True)
    return [ask(graph, question, options.streamed) for question in QUESTIONS]


def team(model: ChatOpenAI, options: Namespace) -> list[str]:
    @tool
    def ask_clerk(input: str) -> str:
        """Asks the clerk."""
        clerk = graph_of(client_of(options, "planner/clerk"), CLERK, TOOLS)
        return ask(clerk, input, options.streamed)

    return [ask(graph_of(client_of(options, "planner"), PLANNER, [ask_clerk]), QUESTIONS[0], options.streamed)]


def offer(model: ChatOpenAI, options: Namespace) -> list[str]:
    found = model.with_structured_output(Offer).invoke([SystemMessage(INSTRUCTIONS), HumanMessage(QUESTIONS[0])])
    assert isinstance(found, Offer)
    return [found.model_dump_json()]


def client_of(options: Namespace, agent: str = "agent") -> ChatOpenAI:
    return ChatOpenAI(
        model=options.model,
        base_url=options.base_url,
        api_key=options.api_key,
        use_responses_api=options.api == "responses",
        default_headers={"x-palestra-agent": agent},
    )


PLAYS = {"talk": talk, "team": team, "offer": offer, "forgetful": forgetful}


def main() -> None:
    options = arguments(PLAYS)
    play = PLAYS[options.scenario]
    print(json.dumps({"answers": play(client_of(options), options)}))


if __name__ == "__main__":
    main()
