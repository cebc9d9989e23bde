"""Merge the cases of `merging` with verifiers v1's message graph; a JSON line for each.

Timed: `prepare_turn` and `commit` of each call, then each branch's ids, mask and logprobs, as its consumers read them.
Not timed: making messages and `TurnTokens`, which are new for every call, as they are when a request has been parsed.
In its favour: equal ids are one object in all prompts, so that comparing lists of them is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence

import verifiers.v1 as vf
from conversations import Call, Row, Turn, calls, fresh
from merge_runs import Stopwatch, main
from verifiers.v1 import graph
from verifiers.v1.types import TurnTokens

KINDS = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
LOGPROB = -0.5


def merge(turns: Sequence[Turn], watch: Stopwatch) -> list[Row]:
    """One row for each branch of the graph."""
    task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt="x"))
    trace = vf.Trace(agent=vf.AgentInfo(config=vf.AgentConfig()), task=task)
    for call in calls(turns):
        messages = [KINDS[message.role](content=fresh(message.text)) for message in call.messages]
        reply = response(call)
        with watch:
            graph.prepare_turn(trace, messages).commit(reply)
    with watch:
        rows = [(branch.token_ids, branch.sampled_mask, branch.logprobs) for branch in trace.branches]
    return [(ids, sampled) for ids, sampled, _ in rows]


def response(call: Call) -> vf.Response:
    """What the model answered, with the ids that a renderer gives."""
    tokens = TurnTokens.model_construct(
        prompt_ids=call.prompt,
        completion_ids=call.turn.said,
        completion_logprobs=[LOGPROB] * len(call.turn.said),
        message_spans=[(message.start, message.stop) for message in call.messages],
    )
    message = vf.AssistantMessage(content=fresh(call.turn.reply.text))
    return vf.Response(id=str(call.number), created=0, model="m", message=message, finish_reason="stop", tokens=tokens)


if __name__ == "__main__":
    main({"verifiers": merge})
