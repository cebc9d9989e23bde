"""`GenerationRequest`: what an agent asks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from palestra.types.messages import ChatMessage, ToolChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One request for samples: messages, or a prompt that is used unchanged, and how to sample.

    A dialect makes it from the body of a request. Values that the job fixes are applied later (`sampling_of`).

    Attributes:
        policy: name of the policy.
        messages: the conversation; () with `prompt`.
        prompt: text or token ids in place of messages; None: there are messages.
        choices: how many samples; each is recorded as a Chat.
        max_tokens: longest reply; None: as the job allows.
        min_tokens: shortest reply.
        thinking_budget: longest reasoning in tokens that the caller wants; None: not given.
        temperature: used if the job does not fix it; None: the job's.
        seed: used if the job does not fix it; None: derived from the job's.
        top_p: 1: all tokens.
        top_k: 0: all tokens.
        stop: strings that end the reply and are not a part of it.
        stop_token_ids: tokens that end the reply and are not a part of it, in addition to the policy's own.
        presence_penalty: see `SamplingParams`.
        frequency_penalty: see `SamplingParams`.
        logit_bias: pairs of a token and what is added to its score.
        top_logprobs: how many probable tokens to report to the listener at each position; they are not recorded.
        tools: tools that the prompt describes, in OpenAI's shape.
        tool_choice: with `none`, text that looks like a tool call stays text.
        tool_name: with `required`: the tool to call; None: any.
        parallel_tool_calls: False: the reply ends with its first tool call.
        response_schema: JSON schema that the content has to match; None: any content.
        response_choices: texts of which the content has to be one; (): any content.
        agent: the agent that asks; a subagent's name starts with its parent's, as in "planner/search".
        time_step: interaction with the environment; None: every call is a TimeStep of its own.
        digest: of the request's body, to recognise a retry.
        retry: whether the client says that it has sent this request before.
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
        """Return the digest by which a retry recognises a choice, by its number."""
        return self.digest if choice == 0 else f"{self.digest}.{choice}"
