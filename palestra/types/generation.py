"""`GenerationRequest`: an agent's request to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from palestra.types.messages import ChatMessage, ToolChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One request for samples: messages, or a prompt that is used unchanged, and how to sample.

    A dialect creates it from a request body. Values that the job fixes are applied later (`sampling_of`).

    Attributes:
        messages: the conversation; () with `prompt`.
        prompt: text or token ids instead of messages; None: there are messages.
        choices: number of samples; each is recorded as a Chat.
        max_tokens: None: the job's limit.
        thinking_budget: limit of the reasoning, in tokens; None: unlimited.
        temperature: used if the job does not fix it; None: the job's.
        seed: used if the job does not fix it; None: derived from the job's.
        stop: strings that end the reply and are not part of it.
        stop_token_ids: tokens that end the reply and are not part of it, in addition to the policy's own.
        top_logprobs: number of probable tokens to report at each position; not recorded.
        tool_choice: with `none`, text that looks like a tool call stays text.
        tool_name: with `required`: the tool to call; None: any.
        parallel_tool_calls: False: the reply ends with its first tool call.
        response_schema: JSON schema of the content; None: any content.
        response_choices: the allowed contents; (): any content.
        agent: the caller; a subagent's name starts with its parent's, as in "planner/search".
        time_step: TimeStep of the environment; None: every call is its own TimeStep.
        digest: of the request body, to recognise a retry.
        retry: whether the client marks the request as a retry.
    """

    policy: str
    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    choices: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    thinking_budget: int | None = None
    temperature: float | None = None
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    response_schema: dict[str, Any] | None = None
    response_choices: tuple[str, ...] = ()
    agent: str = "agent"
    time_step: int | None = None
    digest: str = ""
    retry: bool = False

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools whose calls are parsed in the reply."""
        return () if self.tool_choice == "none" else self.tools

    def choice_digest(self, choice: int) -> str:
        """Return the digest of a choice, by index, to recognise a retry."""
        return self.digest if choice == 0 else f"{self.digest}.{choice}"
