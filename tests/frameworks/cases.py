"""What is played with a scripted model, and why each call leaves the exact tokens, if it does.

What is expected stands here; `report.py` writes what was measured into docs/reference/frameworks.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.in_process import Reply

from frameworks.playing import Played, play
from frameworks.shopkeeper import (
    coding_shopkeeper,
    observing_shopkeeper,
    offering_shopkeeper,
    shopkeeper,
    thoughtful_shopkeeper,
    verbose_shopkeeper,
)

NAMES = {"openai_agents": "OpenAI Agents SDK", "langgraph": "LangGraph", "pydantic_ai": "pydantic-ai"}
OTHERS = {
    "autogen": "AutoGen",
    "llamaindex": "LlamaIndex",
    "haystack": "Haystack",
    "litellm": "LiteLLM",
    "smolagents": "smolagents",
    "crewai": "CrewAI",
}  # played in the shop alone, over chat completions
WIRES = {
    "chat": (),
    "chat, streamed": ("--streamed",),
    "responses": ("--api", "responses"),
    "responses, streamed": ("--api", "responses", "--streamed"),
}
EXACT = (None,) * 6
STRIPPED = (None, *["reasoning_stripped"] * 5)
OTHER_FORKS: Mapping[str, tuple[str | None, ...]] = {
    "smolagents": (None, *["edited_message"] * 5),  # calls of tools are sent back as text
    "crewai": (None, None, "edited_message"),  # the text beside a call is dropped
}
KEEP: Mapping[str, Any] = {"rollout": {"changed_history": "keep"}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One agent, played once."""

    framework: str
    what: str  # for the reader
    wire: str  # a key of WIRES
    scenario: str = "talk"
    options: tuple[str, ...] = ()  # beside those of the wire
    reply: Reply = shopkeeper
    settings: Mapping[str, Any] = field(default_factory=dict)
    forks: tuple[str | None, ...] = EXACT  # of each call

    @property
    def name(self) -> str:
        return f"{self.framework}: {self.what}, {self.wire}"

    async def play(self, folder: Path) -> Played:
        wire = WIRES[self.wire]
        return await play(
            self.framework, self.scenario, *wire, *self.options, folder=folder, reply=self.reply, **self.settings
        )


def _thinking(framework: str, wire: str, forks: tuple[str | None, ...], **more: Any) -> Case:
    what = more.pop("what", "a model that thinks")
    return Case(framework=framework, what=what, wire=wire, reply=thoughtful_shopkeeper, forks=forks, **more)


TALKS = tuple(
    Case(framework=framework, what="three questions, four tool calls", wire=wire)
    for framework in NAMES
    for wire in WIRES
)
DROPS_REASONING = {
    ("openai_agents", "chat"),
    ("openai_agents", "chat, streamed"),
    ("langgraph", "chat"),
    ("langgraph", "chat, streamed"),
    ("langgraph", "responses, streamed"),  # langchain-openai reads a streamed reasoning item before its text is there
}
THINKING = (
    *(
        _thinking(framework, wire, STRIPPED if (framework, wire) in DROPS_REASONING else EXACT)
        for framework in NAMES
        for wire in WIRES
    ),
    *(
        _thinking(framework, wire, EXACT, what='the same, `changed_history = "keep"`', settings=KEEP)
        for framework, wire in sorted(DROPS_REASONING)
    ),
    _thinking(
        "openai_agents",
        "chat",
        EXACT,
        what="the same, `should_replay_reasoning_content`",
        options=("--replay-reasoning",),
    ),
)
TEAMS = tuple(
    Case(
        framework=framework,
        what="a planner, two clerks at once",
        wire="chat",
        scenario="team",
        forks=(None, "new_conversation", "new_conversation", None, None, None),
    )
    for framework in NAMES
)
FORGETFUL = tuple(
    Case(
        framework=framework,
        what="only the last question is sent",
        wire="chat",
        scenario="forgetful",
        forks=(None, None, None, "new_conversation", None, "new_conversation"),
    )
    for framework in NAMES
)
OFFERS = tuple(
    Case(
        framework=framework,
        what="an answer as an object",
        wire=wire,
        scenario="offer",
        reply=offering_shopkeeper,
        forks=(None,) if framework == "langgraph" else (None, None),
    )
    for framework in NAMES
    for wire in ("chat", "responses")
)
HANDOFFS = (
    Case(
        framework="openai_agents",
        what="a handoff to an agent with other instructions",
        wire="chat",
        scenario="handoff",
        forks=(None, "edited_message", None, None),
    ),
)
LOW_LIMIT: Mapping[str, Any] = {"policies": {"policy": {"model": "tiny-random", "sampling": {"max_tokens": 20}}}}
CUT = tuple(
    Case(
        framework=framework,
        what="every reply is cut at the token limit",
        wire=wire,
        reply=verbose_shopkeeper,
        settings=LOW_LIMIT,
        forks=(None, None, None),
    )
    for framework in NAMES
    for wire in WIRES
    if framework != "openai_agents" or wire.startswith("chat")  # over responses it raises
)
OTHER_TALKS = (
    *(
        Case(
            framework=framework,
            what="one question" if framework == "crewai" else "three questions",
            wire=wire,
            reply=observing_shopkeeper if framework == "smolagents" else shopkeeper,
            forks=OTHER_FORKS.get(framework, EXACT),
        )
        for framework in OTHERS
        for wire in ("chat", "chat, streamed")
    ),
    *(
        Case(
            framework="smolagents",
            what="three questions, `CodeAgent`",
            wire=wire,
            scenario="code",
            reply=coding_shopkeeper,
        )
        for wire in ("chat", "chat, streamed")
    ),
)
ALL = (*TALKS, *OTHER_TALKS, *THINKING, *CUT, *TEAMS, *HANDOFFS, *FORGETFUL, *OFFERS)
