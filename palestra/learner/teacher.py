"""A teacher on another server, which returns log-probabilities of the student's own tokens.

It uses the part of OpenAI's completions API that vLLM, SGLang and Palestra share, and that evaluation harnesses use: a
prompt of token ids, echoed with the log-probability of each. One further token is sampled, because some servers require
it, and dropped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import numpy as np

from palestra.client.async_client import drive_async
from palestra.client.exchange import Endpoint, checked_url, exchange, key_in
from palestra.config import TeacherServerConfig
from palestra.config.judge import Meter
from palestra.errors import ConfigError, PalestraError, TeacherFailed
from palestra.http_clients import async_http_client
from palestra.session import PolicyRuntime
from palestra.types.calls import Floats
from palestra.types.records import TrainSample

# Texts whose tokens differ between tokenizers: numbers, code, white space, long words, repetitions.
PROBE = (
    "The 3 quick foxes (x1, x22, x12345)\n\tdef jump(over: list[str]) -> None:  # antidisestablishmentarianism\n\n!!!!"
)
TOKEN_ID = "token_id:"  # with which a server of vLLM may write tokens
RETRY_SECONDS = 60.0  # for which a request is sent again while the server can't be reached or is busy: one restart


class ServedTeacher:
    """Asks a server's model for the log-probabilities of rows."""

    def __init__(self, config: TeacherServerConfig, student: PolicyRuntime, meter: Meter | None = None) -> None:
        """Create the client without sending anything. The teacher must have the tokenizer of `student`, the learning
        policy. `meter`: what the calls are charged to; None: they are not counted.
        """
        self._meter = meter
        key = key_in(config.key_variable, "algorithm.teacher_server.key_variable")
        url = checked_url(config.url, "http://127.0.0.1:8000")
        self._config, self._student, self._model = config, student, config.model
        self._endpoint = Endpoint(url, key, RETRY_SECONDS)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = async_http_client(headers=headers, timeout=config.timeout_seconds)
        self._room = asyncio.Semaphore(config.max_concurrency)

    async def check(self) -> None:
        """Check the server's models, and compare the tokens of an echoed text with the student's."""
        url = self._endpoint.url
        listed = await self._sent({"method": "GET", "url": f"{url}/v1/models"}, lambda answer: answer["data"])
        names = [str(model["id"]) for model in listed]
        if self._model is None and len(names) != 1:
            raise ConfigError(f"algorithm.teacher_server.model names one of the models of {url}: {', '.join(names)}")
        self._model = names[0] if self._model is None else self._model
        if self._model not in names:
            raise ConfigError(
                f"algorithm.teacher_server: {url} has no model {self._model!r}; it has {', '.join(names)}"
            )
        vocabulary = self._student.renderer.vocabulary
        ids = vocabulary.encode(PROBE).tolist()
        try:
            choice = await self._choice(ids)
            _logprobs(choice, len(ids))
        except TeacherFailed as error:
            raise ConfigError(
                f"algorithm.teacher_server: the model {self._model!r} of {url} can't teach: {error}"
            ) from error
        if not _same_text(choice, ids, vocabulary.decode(ids)):
            raise ConfigError(
                f"algorithm.teacher_server: the model {self._model!r} of {url} has another tokenizer than "
                f"{self._student.config.model!r}: it reads other texts from the same ids; take one of the same family"
            )

    def unanswerable(self, samples: Sequence[TrainSample]) -> dict[str, str]:
        """Return the episodes with tokens that the server cannot score, each with the reason."""
        found = {}
        for sample in samples:
            if sample.grammars:
                found[sample.episode_id] = "a reply was held to a grammar, which the teacher's server does not know"
            elif (sample.temperatures[sample.loss_mask] != 1.0).any():
                found[sample.episode_id] = "a reply was sampled at another temperature than the teacher's, which is 1"
            elif sample.media:
                found[sample.episode_id] = "it has images, and only token ids are sent to the teacher"
        return found

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[Floats]:
        """Return the teacher's log-probabilities of each row's trained tokens, float32 [N] a row, NaN elsewhere.
        `samples` are accepted by `unanswerable`.
        """
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(self._of_row(sample)) for sample in samples]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _of_row(self, sample: TrainSample) -> Floats:
        places = np.flatnonzero(sample.loss_mask)
        column = np.full(len(sample.ids), np.nan, np.float32)
        if not len(places):
            return column
        last = int(places[-1])
        choice = await self._choice(sample.ids[: last + 1].tolist())
        found = _logprobs(choice, last + 1)
        column[places] = [found[place] for place in places.tolist()]
        return column

    async def _choice(self, ids: Sequence[int]) -> Mapping[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(ids),
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "temperature": 1.0,
        }
        request = {"method": "POST", "url": f"{self._endpoint.url}/v1/completions", "json": body}
        async with self._room:
            reserved = None if self._meter is None else await self._meter.reserve(len(ids), 1)
            try:
                choice: Mapping[str, Any] = await self._sent(request, lambda answer: answer["choices"][0])
            finally:  # also of a request without an answer: the server may have computed it
                if self._meter is not None:
                    await asyncio.shield(self._meter.pay(reserved, len(ids), 1))
            return choice

    async def _sent(self, request: dict[str, Any], part: Any) -> Any:
        """Send a request by the rule of all clients, and return a part of its answer."""

        def read(reply: httpx2.Response) -> Any:
            try:
                return part(reply.json())
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"no {error}") from error

        steps = exchange(self._endpoint, lambda: request, read)
        try:
            return await drive_async(self._http, steps)
        except PalestraError as error:
            raise TeacherFailed(
                f"algorithm.teacher_server: the teacher did not answer: {error}; the weights are as before the step: "
                "go on with --resume (in a script resume=True)"
            ) from error


def _logprobs(choice: Mapping[str, Any], length: int) -> list[float]:
    """Return the log-probabilities of a prompt's tokens from an echo, NaN for the first."""
    found = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(found, list) or len(found) not in (length, length + 1):
        said = "no log-probabilities" if not isinstance(found, list) else f"{len(found)} log-probabilities"
        raise TeacherFailed(
            f"it gave {said} for a prompt of {length} tokens (`echo` of /v1/completions); does its server add or cut "
            "tokens, or echo none?"
        )
    numbers = [math.nan if value is None else float(value) for value in found[:length]]
    if not all(map(math.isfinite, numbers[1:])):
        raise TeacherFailed(f"a log-probability of its prompt of {length} tokens is no finite number")
    return numbers


def _same_text(choice: Mapping[str, Any], ids: Sequence[int], text: str) -> bool:
    """Return whether a server has decoded the ids to the same text, as far as its answer tells."""
    tokens = (choice.get("logprobs") or {}).get("tokens") or []
    shown = [str(token) for token in tokens[: len(ids)]]
    if shown and all(token.startswith(TOKEN_ID) for token in shown):
        shown = []  # ids say nothing of texts
    # Servers differ in the white space of tokens that are decoded one by one.
    told = [squeezed for part in ("".join(shown), str(choice.get("text") or "")) if (squeezed := "".join(part.split()))]
    return not told or any(part.startswith("".join(text.split())) for part in told)
