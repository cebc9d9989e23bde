"""Parser for ChatML replies, whole or while they are sampled: reasoning, content and tool calls.

Parts are emitted as soon as they are certain. A tool call is emitted when its closing tag has arrived: before that it
may turn out to be content.
"""

from __future__ import annotations

import re

from palestra.renderers.base import Attempt, MessageDelta, Reply, ReplyStream, tool_call
from palestra.renderers.tool_calls import CLOSE, OPEN, read_calls, read_object
from palestra.types.calls import Ids
from palestra.types.messages import text_message

THINK, _THOUGHT = "<think>", "</think>"
_LEADING_THOUGHT = re.compile(rf"\s*{THINK}(.*?)(?:{_THOUGHT}|\Z)", re.DOTALL)
_SPACE = " \t\r\n"


def write_thought(reasoning: str) -> str:
    """Return the text of reasoning before an answer."""
    return f"{THINK}\n{reasoning}\n{_THOUGHT}\n\n"


def read_thought(text: str) -> tuple[str | None, str]:
    """Return a reply's reasoning, or None, and the rest of its text, which is empty if the reasoning was cut off."""
    match = _LEADING_THOUGHT.match(text)
    if match is None:
        return None, text
    return match[1].strip("\n") or None, text[match.end() :].lstrip("\n")


def read_reply(text: str, calls: bool) -> tuple[str | None, str, list[Attempt]]:
    """Return reasoning (or None), content and, if `calls` is set, the tool calls of a whole reply."""
    reasoning, content = read_thought(text)
    return (reasoning, content, []) if not calls else (reasoning, *read_calls(content))


class ChatMLStream(ReplyStream):
    """Parses a ChatML reply while it is sampled, with a `ReplySplitter`."""

    def __init__(self, calls: bool, call_ids: str, single_call: bool) -> None:
        """Create a parser. Tool calls are parsed if `calls`, and get ids that begin with `call_ids`; `single_call`: the
        first one ends the reply.
        """
        self._splitter = ReplySplitter(calls, call_ids, single_call)
        self._deltas: list[MessageDelta] = []

    def feed(self, text: str) -> MessageDelta:
        """Return the part of the message that this text makes certain."""
        delta = self._splitter.feed(text)
        self.over = self._splitter.over
        if delta:
            self._deltas.append(delta)
        return delta

    def finish(self, completion_ids: Ids, cut: bool) -> tuple[MessageDelta, Reply]:
        """Return the rest and the whole reply."""
        rest = self._splitter.end()
        deltas = [*self._deltas, rest]
        message = text_message("assistant", "".join(delta.content for delta in deltas)).model_copy(
            update={
                "reasoning_content": "".join(delta.reasoning for delta in deltas) or None,
                "tool_calls": tuple(call for delta in deltas for call in delta.calls),
            }
        )
        return rest, Reply(message=message, malformed=("a tool call could not be read",) * self._splitter.malformed)


class ReplySplitter:
    """Splits text that arrives in pieces into deltas, in linear time."""

    def __init__(self, calls: bool, call_ids: str = "call", single: bool = False) -> None:
        """Create a splitter. Tool calls are parsed if `calls`, and get ids that begin with `call_ids`; `single`: the
        first one ends the reply.
        """
        self._calls, self._call_ids, self._single = calls, call_ids, single
        self._thought = _ThoughtSplitter()
        self._content = _CallSplitter(single)
        self.calls = 0  # number of complete calls
        self.malformed = 0  # number of malformed calls; their text is in the content

    @property
    def over(self) -> bool:
        """Return whether the reply's only call is complete, so that later text is ignored."""
        return self._single and self.calls > 0

    def feed(self, text: str) -> MessageDelta:
        """Return the part of the message that this text makes certain."""
        reasoning, content = self._thought.feed(text)
        return self._delta(reasoning, content, last=False)

    def end(self) -> MessageDelta:
        """Return the rest of the message at the end of the text."""
        reasoning, content = self._thought.end()
        return self._delta(reasoning, content, last=True)

    def _delta(self, reasoning: str, content: str, last: bool) -> MessageDelta:
        if not self._calls:
            return MessageDelta(reasoning=reasoning, content=content)
        if self.over:
            return MessageDelta()
        text, attempts = self._content.feed(content, last)
        good = [attempt for attempt in attempts if attempt.problem is None]
        calls = tuple(tool_call(a, self._call_ids, self.calls + k) for k, a in enumerate(good))
        self.calls += len(calls)
        self.malformed += len(attempts) - len(good)
        return MessageDelta(reasoning=reasoning, content=text, calls=calls)


class _ThoughtSplitter:
    """Splits a reply into reasoning and the rest while it arrives, with the same result as `read_thought`."""

    def __init__(self) -> None:
        self._state = "start"  # then: "thinking", "between" (blank lines after reasoning), "content"
        self._held = ""
        self._begun = False  # whether the reasoning has a character other than a line feed

    def feed(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that are certain with this text."""
        if self._state == "content":
            return "", text
        text = self._held + text
        self._held = ""
        if self._state == "start":
            rest = text.lstrip()
            if len(rest) < len(THINK) and THINK.startswith(rest):
                self._held = text
                return "", ""
            if not rest.startswith(THINK):
                self._state = "content"
                return "", text
            self._state, text = "thinking", rest[len(THINK) :]
        reasoning = ""
        if self._state == "thinking":
            reasoning, found, text = self._think(text)
            if not found:
                return reasoning, ""
            self._state = "between"
        text = text.lstrip("\n")
        if text:
            self._state = "content"
        return reasoning, text

    def end(self) -> tuple[str, str]:
        """Return the text that was held back, as reasoning or as content."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return (held if self._begun else held.lstrip("\n")).rstrip("\n"), ""
        return "", held

    def _think(self, text: str) -> tuple[str, bool, str]:
        """Return reasoning, whether it is closed, and the text after it, without line feeds around the reasoning."""
        thought, found, rest = text.partition(_THOUGHT)
        if not found:
            certain = len(text) - _ending(text, _THOUGHT)
            thought = text[:certain].rstrip("\n")
            self._held = text[len(thought) :]
        if not self._begun:
            thought = thought.lstrip("\n")
        thought = thought.rstrip("\n")
        self._begun = self._begun or bool(thought)
        return thought, bool(found), rest


class _CallSplitter:
    """Splits text into content and tool calls while it arrives, with the same result as `read_calls`."""

    def __init__(self, single: bool) -> None:
        self._single = single
        self._held = ""  # text that may be an opening tag, or an open call from its opening tag on
        self._line = ""  # the line feed before that call, which is not content if the call is good
        self._call: _CallScanner | None = None

    def feed(self, text: str, last: bool) -> tuple[str, list[Attempt]]:
        """Return content and attempted calls that are certain with this text, or all of them if it is the `last`."""
        content: list[str] = []
        attempts: list[Attempt] = []
        self._held += text
        while True:
            if self._call is None and not self._open(content, last):
                break
            assert self._call is not None
            end = self._call.end(self._held)
            if end is None:
                break
            _, (attempt, *_) = read_calls(self._held[:end])
            self._close(attempt, content)
            attempts.append(attempt)
            if self._single and attempt.problem is None:
                return "".join(content), attempts
        if last:
            rest, found = read_calls(self._line + self._held)
            if self._single:
                rest, found = read_calls(_until_first_call(self._line + self._held, found))
            content.append(rest)
            attempts += found
            self._held, self._line, self._call = "", "", None
        return "".join(content), attempts

    def _open(self, content: list[str], last: bool) -> bool:
        """Give out content up to the next opening tag. Returns False if there is no such tag yet."""
        start = self._held.find(OPEN)
        if start < 0:
            certain = len(self._held) - (0 if last else _ending(self._held, OPEN))
            if certain and not last and self._held[certain - 1] == "\n":
                certain -= 1
            content.append(self._held[:certain])
            self._held = self._held[certain:]
            return False
        before = self._held[:start]
        self._line = "\n" if before.endswith("\n") else ""
        content.append(before.removesuffix("\n"))
        self._held = self._held[start:]
        self._call = _CallScanner()
        return True

    def _close(self, attempt: Attempt, content: list[str]) -> None:
        if attempt.problem is not None:
            content.append(self._line + attempt.text)
        self._held = self._held[len(attempt.text) :]
        self._line, self._call = "", None


class _CallScanner:
    """Finds the end of a call, by looking at each character once and parsing the JSON once."""

    def __init__(self) -> None:
        self._at = len(OPEN)
        self._depth = 0
        self._string = False
        self._escaped = False
        self._object_end: int | None = None  # end of the call's JSON object, if it can be parsed
        self._broken = False  # whether the call has no JSON object that can be parsed
        self._searched = len(OPEN)  # no tag begins before this place this place

    def end(self, text: str) -> int | None:
        """Return the length of the call at the beginning of `text`, or None if later text can still decide it."""
        if self._object_end is None and not self._broken:
            self._scan(text)
        if self._object_end is not None:
            rest = text[self._object_end :]
            closing = rest.lstrip()
            if closing.startswith(CLOSE):
                return self._object_end + len(rest) - len(closing) + len(CLOSE)
            return None if CLOSE.startswith(closing) else self._object_end
        return self._next_tag(text) if self._broken else None

    def _next_tag(self, text: str) -> int | None:
        """Return the end of a call that cannot be parsed: after its closing tag, or before the next opening tag."""
        following, closing = text.find(OPEN, self._searched), text.find(CLOSE, self._searched)
        self._searched = max(self._searched, len(text) - len(CLOSE))
        if closing >= 0 and (following < 0 or closing < following):
            return closing + len(CLOSE)
        return following if following >= 0 else None

    def _scan(self, text: str) -> None:
        while self._at < len(text):
            character = text[self._at]
            self._at += 1
            if self._depth == 0:
                if character in _SPACE:
                    continue
                self._broken = character != "{"
                if self._broken:
                    return
                self._depth = 1
            elif self._string:
                self._string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._read(text)
                    return

    def _read(self, text: str) -> None:
        try:
            self._object_end = read_object(text, len(OPEN))[1]
        except ValueError:
            self._broken = True


def _until_first_call(text: str, attempts: list[Attempt]) -> str:
    """Return the text up to the end of the first well-formed call, or all of it."""
    at = 0
    for attempt in attempts:
        at = text.index(attempt.text, at) + len(attempt.text)
        if attempt.problem is None:
            return text[:at]
    return text


def _ending(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` are a proper beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
