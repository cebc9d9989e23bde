"""The four dialects tell the same of the same reply, whole and streamed: text, calls, why it ended, usage, logprobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st

from palestra.engine.fake import FakeEngine
from property.test_bodies import Served

STOP = 258
TOOL: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "a"}


class Said(NamedTuple):
    """What an answer says of a reply; `calls` have their arguments as values."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, Any], ...]
    why: str  # length, calls or stop
    prompt_tokens: int
    sampled: int
    thought: int = 0  # tokens of the reasoning; the messages of Anthropic do not say


class Reply(NamedTuple):
    text: str
    max_tokens: int
    stop: list[str]
    piece_tokens: int


class Engine(FakeEngine):
    """Says what the test sets."""

    def __init__(self) -> None:
        self.reply = Reply("", 1, [], 0)
        super().__init__(lambda *_: [*self.reply.text.encode(), STOP])

    def says(self, reply: Reply) -> None:
        self.reply, self._piece = reply, reply.piece_tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Any]:
    made = Served(tmp_path_factory.mktemp("agreeing"), Engine())
    yield made
    made.close()


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def ask(served: Any, path: str, body: dict[str, Any]) -> Any:
    headers = [(b"x-api-key", served.key.encode()), (b"idempotency-key", served.request.encode())]
    answer = served.ask("POST", path, json.dumps({"model": "policy", **body}).encode(), headers)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if body.get("stream") else json.loads(answer.text)


def told(read: Callable[..., Any], served: Any, reply: Reply) -> Any:
    """What a dialect tells, alike whole and streamed, and once more when each request is repeated by its key."""
    answers = []
    for stream in (False, True):
        served.request, before = uuid4().hex, served.engine.calls
        answers += [read(served, reply, stream) for _ in range(2)]
        assert served.engine.calls == before + 1
    assert answers == answers[:1] * 4
    return answers[0]


def arguments(calls: Sequence[dict[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls)


def chat(served: Any, reply: Reply, stream: bool) -> tuple[Said, list[Any], list[int]]:
    body = {"messages": [USER], "tools": [{"type": "function", "function": TOOL}], "max_tokens": reply.max_tokens}
    body |= {"stop": reply.stop, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "stream": stream}
    found = ask(served, "/v1/chat/completions", body | ({"stream_options": {"include_usage": True}} if stream else {}))
    if not stream:
        choice, usage = found["choices"][0], found["usage"]
        message, calls = choice["message"], choice["message"].get("tool_calls", [])
        reasoning, text, logprobs = (
            message.get("reasoning_content", ""),
            message["content"],
            choice["logprobs"]["content"],
        )
        ids, why = choice["token_ids"], choice["finish_reason"]
    else:
        reasoning, text, logprobs, ids, calls = "", "", [], [], []
        for event in found[:-1]:
            choice = event["choices"][0]
            reasoning += choice["delta"].get("reasoning_content", "")
            text += choice["delta"].get("content", "")
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            logprobs += (choice["logprobs"] or {}).get("content", [])
            ids += choice.get("token_ids", [])
        why, usage = found[-2]["choices"][0]["finish_reason"], found[-1]["usage"]
    assert len({call["id"] for call in calls}) == len(calls)
    why = {"tool_calls": "calls"}.get(why, why)
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    tokens = (usage["prompt_tokens"], usage["completion_tokens"], thought)
    said = Said(reasoning, text or "", arguments(calls), why, *tokens)
    return said, logprobs, ids


def responses(served: Any, reply: Reply, stream: bool) -> Said:
    body = {"input": [USER], "tools": [{"type": "function", **TOOL}], "max_output_tokens": reply.max_tokens}
    found = ask(served, "/v1/responses", body | {"stream": stream})
    if stream:
        whole = found[-1]["response"]
        done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
        assert done == whole["output"]
        for item, kind in (("message", "response.output_text"), ("reasoning", "response.reasoning_text")):
            written = "".join(event["delta"] for event in found if event["type"] == f"{kind}.delta")
            assert written == "".join(p["text"] for one in done if one["type"] == item for p in one["content"])
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        found = whole
    parts: dict[str, str] = {"reasoning": "", "message": ""}
    calls = []
    for item in found["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            parts[item["type"]] += "".join(part["text"] for part in item["content"])
    cut = found["status"] == "incomplete"
    assert found["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    why = "length" if cut else "calls" if calls else "stop"
    usage = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    tokens = (usage["input_tokens"], usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"])
    return Said(parts["reasoning"], parts["message"], tuple(calls), why, *tokens)


DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial",
}


def anthropic(served: Any, reply: Reply, stream: bool) -> tuple[Said, str | None]:
    tool = {"name": "add", "input_schema": TOOL["parameters"]}
    body = {"messages": [USER], "tools": [tool], "max_tokens": reply.max_tokens, "stop_sequences": reply.stop}
    found = ask(served, "/v1/messages", body | {"stream": stream})
    if stream:
        message, blocks = found[0]["message"], list[dict[str, Any]]()
        for event in found:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[-1]
                key = DELTAS[delta["type"]]
                block[key] = block.get(key, "") + delta["partial_json" if key == "partial" else key]
        for block in blocks:
            if "partial" in block:
                block["input"] = json.loads(block["partial"])
        ended = next(event for event in found if event["type"] == "message_delta")
        found = message | ended["delta"] | {"content": blocks, "usage": ended["usage"]}
    of: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in found["content"]:
        of[block["type"]].append(block)
    assert all(block["signature"] for block in of["thinking"]), "clients drop reasoning without one"
    calls = tuple((block["name"], block["input"]) for block in of["tool_use"])
    reasons = {"max_tokens": "length", "tool_use": "calls", "end_turn": "stop", "stop_sequence": "stop"}
    usage = found["usage"]
    said = Said(
        "".join(block["thinking"] for block in of["thinking"]),
        "".join(block["text"] for block in of["text"]),
        calls,
        reasons[found["stop_reason"]],
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"],
        usage["output_tokens"],
    )
    assert (found["stop_reason"] == "stop_sequence") <= (found["stop_sequence"] is not None)
    return said, found["stop_sequence"]


def completions(served: Any, reply: Reply, stream: bool) -> tuple[str, str, int, list[Any], list[int]]:
    body = {"prompt": "a", "max_tokens": reply.max_tokens, "stop": reply.stop, "logprobs": 2, "return_token_ids": True}
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    found = ask(served, "/v1/completions", body | more)
    chunks = found[:-1] if stream else [found]
    usage = (found[-1] if stream else found)["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for key, value in (choice["logprobs"] or {}).items():
            logprobs[key] = logprobs.get(key, []) + value
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], usage["completion_tokens"], sorted(logprobs.items()), ids


def expected(reply: Reply) -> tuple[list[int], str, str]:
    """The tokens of a reply, its text and why it ends, of a raw prompt: a byte is a token."""
    data = reply.text.encode()
    found = [(reply.text.find(s) + len(s), -len(s), s) for s in reply.stop if s in reply.text]
    if found:
        end, length, _ = min(found)
        tokens = list(reply.text[:end].encode())
        if len(tokens) <= reply.max_tokens:
            return tokens, reply.text[: end + length], "stop"
    tokens = [*data, STOP][: reply.max_tokens]
    why = "stop" if tokens[-1] == STOP else "length"
    return tokens, bytes(token for token in tokens if token != STOP).decode(errors="replace"), why


ARGUMENTS = ["{}", '{"a": 1}', '{"a": "</tool_call> é"}', '{"a": 123456789012345678901234567890}', '{"a": 1e999}',
             r'{"a": "\ud800"}', '{"b": [1,  2.50], "b": null}']  # fmt: skip
calls = st.sampled_from(ARGUMENTS).map(lambda a: f'<tool_call>\n{{"name": "add", "arguments": {a}}}\n</tool_call>')
piece = st.one_of(
    calls,
    calls,
    st.sampled_from(
        ["\n", " ", "END", "EN", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "漢", "👩‍💻"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
texts = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "", "<think>hm, é\n</think>\n\n", "<think>"]), st.lists(piece, max_size=5).map("".join)
    ),
)


@st.composite
def replies(draw: Any) -> Reply:
    text = draw(texts)
    size = len(text.encode()) + 1
    most = draw(st.one_of(st.just(size + 5), st.integers(1, size)))
    stop = draw(
        st.one_of(st.just([]), st.lists(st.sampled_from(["END", "N", "</tool_call>", "漢", "\n\n"]), max_size=2))
    )
    return Reply(text, most, stop, draw(st.sampled_from([0, 1, 3])))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@examples(8, 150, deadline=None)
@given(reply=replies())
@example(reply=Reply(f"{CALL}\n{CALL} and", len(f"{CALL}\n{CALL}"), [], 0))
@example(reply=Reply(f"{CALL} b", 500, ["</tool_call>"], 3))
@example(reply=Reply("a\x85b\u2028c\u2029d", 500, [], 1))  # ends of lines for some clients
@example(reply=Reply(CALL.replace("1", "9" * 30), 500, [], 1))
@example(reply=Reply("<think>hm, é", 12, [], 0))
@example(reply=Reply("<think>think</think>x", 500, [], 0))
@example(reply=Reply("<think>hm, é\n</think>\n\nhm", 500, [], 0))
@example(reply=Reply(f"Well.\n{CALL}\nEND", 500, ["END"], 1))
def test_whatever_is_replied_is_told_alike(served, reply):
    served.engine.says(reply)
    tokens, raw, why = expected(reply)
    said, logprobs, ids = told(chat, served, reply)
    assert ids == tokens
    assert said.sampled == len(tokens)
    assert said.why == ("calls" if said.calls and why == "stop" else why)
    assert [entry["logprob"] for entry in logprobs] == [-1.0] * len(tokens)
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    messages = told(anthropic, served, reply)
    assert messages[0] == said._replace(thought=0)
    end = raw.find(said.reasoning, raw.find(">") + 1) + len(said.reasoning)
    assert said.thought == (min(len(raw[:end].encode()), len(tokens)) if said.reasoning else 0)
    assert (messages[1] in reply.stop) if messages[1] is not None else (why != "stop" or tokens[-1] == STOP)
    if not reply.stop:  # a field that responses do not have
        assert told(responses, served, reply) == said
    plain = told(completions, served, reply)
    assert (plain[0], plain[1], plain[2], plain[4]) == (raw, why, len(tokens), tokens)
    shown = dict(plain[3])
    assert shown["tokens"] == [entry["token"] for entry in logprobs] or any(127 < token < STOP for token in tokens)
    assert shown["token_logprobs"] == [entry["logprob"] for entry in logprobs]
    assert len(shown["top_logprobs"]) == len(shown["text_offset"]) == len(tokens)
    assert all(len(most) == 2 for most in shown["top_logprobs"])
