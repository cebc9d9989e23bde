"""The agent of a call: subagents by the ids that coding agents send, and auxiliary calls by their prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from palestra.config import MAX_AGENT
from palestra.errors import InvalidRequest
from palestra.server.dialects.fields import AGENT_HEADER
from palestra.types.messages import GenerationRequest

AUXILIARY = "auxiliary"  # last part of the name of an agent whose calls are not part of the task
# The header of a subagent's id, and the header that only a subagent sends; "": the id itself is such a header.
ID_HEADERS: Mapping[str, str] = {"x-claude-code-agent-id": "", "x-session-id": "x-parent-session-id"}
# Beginnings of system messages for titles and the like, by harness: a task that begins so is not meant. Summaries that
# replace a long history are part of the task.
AUXILIARY_PROMPTS = (
    "Generate a concise, sentence-case title (",  # Claude Code
    "Generate a short kebab-case name (",  # Claude Code
    "You are a title generator. You output ONLY a thread title.",  # opencode
    "Summarize what was done in this conversation. Write like a pull request description",  # opencode
)
_LONGEST_ID = 40
_OTHERS = re.compile(r"[^\w.:-]")


def caller_name(
    agent: str, call: GenerationRequest, headers: Mapping[str, str], ids: Mapping[str, str], prompts: Sequence[str]
) -> str:
    """Return the name of the agent of a call.

    Args:
        agent: the episode's, a seat's, or the one that the header `x-palestra-agent` names.
        headers: with names in lower case.
        ids: more headers of ids, as in `ID_HEADERS`.
        prompts: more beginnings, of system messages or last messages.

    Raises:
        InvalidRequest: the whole name is too long.
    """
    for header, required in ({**ID_HEADERS, **ids} if ids else ID_HEADERS).items():
        found = headers.get(header)
        if found and headers.get(required or header):
            agent = f"{agent}/{_OTHERS.sub('-', found)[:_LONGEST_ID]}"
            break
    if call.messages and not call.tools:
        first, last = call.messages[0], call.messages[-1]
        system = first.role in ("system", "developer")
        if (system and first.text.lstrip().startswith((*AUXILIARY_PROMPTS, *prompts))) or (
            prompts and last.role != "assistant" and last.text.lstrip().startswith(tuple(prompts))
        ):
            agent = f"{agent}/{AUXILIARY}"
    if len(agent) > MAX_AGENT:
        raise InvalidRequest(f"the name of an agent below others has more than {MAX_AGENT} characters", AGENT_HEADER)
    return agent
