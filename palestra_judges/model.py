"""`JudgeModel`: the language model that judges, asked over HTTP within the limits of its table."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import httpx2
import orjson

from palestra.client.exchange import asked_pause, is_passing, trouble_of
from palestra.config.judge import Meter
from palestra.errors import ConfigError, JudgeFailed, JudgeUnavailable
from palestra.http_clients import async_http_client
from palestra.pictures.containers import media_type_of
from palestra_judges.bounds import OF_POLICY
from palestra_judges.questions import Question

if TYPE_CHECKING:
    from palestra_judges.config import ModelJudge

T = TypeVar("T")
MOST_BYTES = 256 * 1024  # of an answer
MOST_TOKENS = 2**40  # of one call; the store's integers end at 2^63
RETRIES = 1  # how often a question is asked again that got no verdict: two failures are no chance
LONGEST_PAUSE_SECONDS = 10.0
CONNECT_SECONDS = 10.0
OUTAGE_SECONDS = 60.0  # for which a server that can't be asked is waited for
REFUSED = (401, 403, 404)  # asking again, or about another episode, would change nothing
TOO_MUCH = (400, 413, 422)  # this question can't be answered, perhaps because it is too long


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered(Generic[T]):
    """An answer that could be read, and what it has cost."""

    value: T
    calls: int
    tokens: int
    seconds: float


class JudgeModel:
    """Asks one model. A question that gets no answer, or none that can be read, is asked again, and then fails."""

    def __init__(
        self,
        config: ModelJudge,
        url: str,
        key: Callable[[], str],
        model: str | None,
        meter: Meter | None = None,
        pictures: Callable[[str], bytes] | None = None,
    ) -> None:
        """Prepare to ask; nothing is sent yet.

        Args:
            url: of the server, without /v1.
            key: returns its present key, which may change; empty: it needs none.
            model: its name there; None: the only one that the server lists.
            meter: what the calls are charged to; None: they are not counted.
            pictures: returns the bytes of a picture by its digest; None: no question has pictures.
        """
        self._config, self._url, self._key, self._model = config, url, key, model
        self._meter, self._pictures = meter, pictures
        # Of a machine that is down nothing comes back: that is an outage, and no slow answer.
        connect = min(CONNECT_SECONDS, config.timeout_seconds / 2)
        self._http = async_http_client(timeout=httpx2.Timeout(None, connect=connect))
        self._free = asyncio.Semaphore(config.max_concurrency)
        self._answered = -math.inf  # when the last request was sent that the server answered, monotonic seconds

    @property
    def version(self) -> str:
        """Return who is asked; of a server it is the name that the model has there."""
        return f"{OF_POLICY}{self._model}" if self._config.policy is not None else str(self._model)

    async def open(self) -> None:
        """Find the model. Raises ConfigError: the server does not say which one it has, or has several."""
        if self._model is None:
            try:
                answer = await self._sent("GET", "/v1/models", None)
                names = [str(one["id"]) for one in answer["data"]]
            except (TimeoutError, httpx2.RequestError, _Unavailable, JudgeFailed, KeyError, TypeError) as error:
                said = str(error) or type(error).__name__
                raise ConfigError(f"judge: {self._url} does not say which models it has: {said}") from error
            if len(names) != 1:
                raise ConfigError(f"judge.model names one of the models of {self._url}: {', '.join(names) or 'none'}")
            self._model = names[0]

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, question: Question, read: Callable[[str], T], repeat: int = 0) -> Answered[T]:
        """Ask until an answer can be read.

        Args:
            repeat: how often the same question was asked before, each time with another seed.
            read: returns what an answer says; raises JudgeFailed.

        Raises:
            JudgeFailed: no answer could be read, or the server could not answer this question for OUTAGE_SECONDS, and
                has answered others.
            BudgetSpent: the question does not fit into the job's budget.
            JudgeUnavailable: the server could not be asked for OUTAGE_SECONDS.
        """
        number, calls, tokens, started = 0, 0, 0, time.monotonic()
        outage: _Outage | None = None
        while True:
            try:
                # Not held while an outage is waited for: the answers to other questions tell whether it is one.
                async with self._free:
                    while True:
                        calls += 1
                        try:
                            text, used = await self._once(question, number, repeat)
                            tokens += used
                            if not text.strip():
                                raise JudgeFailed("the judge said nothing")
                            value = read(text)
                        except JudgeFailed as error:
                            if number == RETRIES or isinstance(error, _Final):
                                raise JudgeFailed(str(error)) from error
                            await asyncio.sleep(min(0.1 * 4**number, LONGEST_PAUSE_SECONDS))
                            number, outage = number + 1, None
                        else:
                            seconds = time.monotonic() - started
                            return Answered(value=value, calls=calls, tokens=tokens, seconds=seconds)
            except _Unavailable as error:
                outage = outage or _Outage()
                await outage.wait(error, self._answered)

    async def _once(self, question: Question, number: int, repeat: int) -> tuple[str, int]:
        """Return the model's text, which may be empty, and the tokens of prompt and reply."""
        first = number == repeat == 0
        body = {
            "model": self._model,
            "messages": await asyncio.to_thread(self._messages, question) if question.pictures else question.messages,
            "temperature": 0.0 if first else 0.7,  # the same prompt would get the same answer again
            "max_tokens": self._config.max_tokens,
            "seed": question.seed + number + 1000 * repeat,
        }
        try:
            answer = await self._bought(body)
        except TimeoutError:
            raise JudgeFailed(f"the judge did not answer within {self._config.timeout_seconds:g} s") from None
        except httpx2.RequestError as error:
            trouble = trouble_of(self._url, error)
            assert trouble is not None
            if not trouble.passing:
                raise trouble.error from error
            raise _Unavailable(f"the judge can't be asked: {trouble.error}") from error
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise JudgeFailed("the judge's server answered with something that is no chat completion") from None
        text = text if isinstance(text, str) else ""
        return text, _tokens(answer, question, text)

    def _messages(self, question: Question) -> list[dict[str, Any]]:
        """Return the messages of a question with its pictures behind the data, each after a line with its digest."""
        assert self._pictures is not None
        system, user = question.messages
        parts: list[dict[str, Any]] = [{"type": "text", "text": user["content"]}]
        for name in question.pictures:
            data = self._pictures(name)
            url = f"data:{media_type_of(data)};base64,{base64.b64encode(data).decode()}"
            parts += [
                {"type": "text", "text": f"Picture {name}:"},
                {"type": "image_url", "image_url": {"url": url}},
            ]
        return [system, {"role": "user", "content": parts}]

    async def _bought(self, body: Mapping[str, Any]) -> Any:
        """Return what the server answers to a question, whose tokens are charged to the job's budget.

        A byte of the question is a token at most. A question without an answer costs what it may have cost, unless the
        server was not reached or has refused it.
        """
        if self._meter is None:
            return await self._sent("POST", "/v1/chat/completions", body)
        most = len(json.dumps(body, ensure_ascii=False).encode(errors="replace")), self._config.max_tokens
        reserved = await self._meter.reserve(*most)
        used = most
        try:
            answer = await self._sent("POST", "/v1/chat/completions", body)
            used = _usage(answer, most)
        except (_Final, _Unavailable, ConfigError, httpx2.ConnectError, httpx2.ConnectTimeout):
            used = (0, 0)
            raise
        finally:
            await asyncio.shield(self._meter.pay(reserved, *used))
        return answer

    async def _sent(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """Return the JSON that the server answers within `timeout_seconds`, which exclude waiting for the budget."""
        content, sent = None if body is None else json.dumps(body).encode(), time.monotonic()
        headers = {"content-type": "application/json"}
        if key := self._key():
            headers["authorization"] = f"Bearer {key}"
        async with (
            asyncio.timeout(self._config.timeout_seconds),
            self._http.stream(method, self._url + path, content=content, headers=headers) as reply,
        ):
            data = b""
            async for piece in reply.aiter_bytes():
                data += piece
                if len(data) > MOST_BYTES:
                    raise JudgeFailed(f"the judge's answer has more than {MOST_BYTES // 1024} KiB")
        status, said = reply.status_code, data[:200].decode(errors="replace")
        if is_passing(status):
            busy, pause = status == 429, asked_pause(reply)
            raise _Unavailable(f"the judge's server answered {status}: {said!r}", pause, busy)
        self._answered = max(self._answered, sent)
        if status in REFUSED:
            raise ConfigError(f"judge: {self._url} refuses to judge ({status}): {said!r}")
        if status in TOO_MUCH:
            raise _Final(f"the judge's server refused the question ({status}): {said!r}")
        if status != 200:
            raise JudgeFailed(f"the judge's server answered {status}: {said!r}")
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            raise JudgeFailed(f"the judge's server answered with no JSON: {said!r}") from None


class _Final(JudgeFailed):
    """A failure that asking again would not mend."""


class _Unavailable(Exception):
    """The server can't be asked now.

    Attributes:
        pause: seconds for which it asks to wait.
        busy: it has too many requests, whatever they ask.
    """

    def __init__(self, text: str, pause: float = 0.0, busy: bool = False) -> None:
        super().__init__(text)
        self.pause, self.busy = pause, busy


class _Outage:
    """The time since a question can't be asked."""

    def __init__(self) -> None:
        self._since, self._pause = time.monotonic(), 0.1

    async def wait(self, error: _Unavailable, answered: float) -> None:
        """Wait before the next attempt.

        Args:
            answered: when the last request was sent that the server answered, monotonic seconds.

        Raises:
            JudgeFailed: it has lasted too long for this question alone.
            JudgeUnavailable: it has lasted too long for all.
        """
        if error.busy:
            self._since = max(self._since, answered)
        left = self._since + OUTAGE_SECONDS - time.monotonic()
        if left <= 0:
            if answered > self._since:
                raise JudgeFailed(f"{error} (for {OUTAGE_SECONDS:g} s, and has answered other questions)") from error
            raise JudgeUnavailable(
                f"{error} (for {OUTAGE_SECONDS:g} s); no episode was discarded: when the judge can be asked again, go "
                "on with --resume (in a script resume=True)"
            ) from error
        await asyncio.sleep(min(max(error.pause, self._pause), left))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


def _usage(answer: Any, most: tuple[int, int]) -> tuple[int, int]:
    """Return the tokens of prompt and reply that a server reports, or those of replies at most; or `most`."""
    prompt, reply, total = (_count(answer, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    if prompt is not None and reply is not None:
        return prompt, reply
    return most if total is None else (total - min(total, most[1]), min(total, most[1]))


def _count(answer: Any, name: str) -> int | None:
    """Return a number of tokens that a server reports; None: it reports none that can be true."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    tokens = usage.get(name) if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens <= MOST_TOKENS else None


def _tokens(answer: Any, question: Question, text: str) -> int:
    """Return the tokens of a request; where the server does not say, about as many as the text has."""
    if (found := _count(answer, "total_tokens")) is not None:
        return found
    return (sum(len(message["content"]) for message in question.messages) + len(text)) // 4
