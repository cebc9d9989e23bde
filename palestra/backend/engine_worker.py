"""The side of an engine worker: executes what its job asks for, and says how far the engine is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

from palestra.backend.channel import Channel
from palestra.backend.errors import error_fields
from palestra.backend.frames import Frame
from palestra.engine.base import Engine, EngineRequest
from palestra.errors import EngineFailure, PalestraError
from palestra.models.saved_weights import SavedWeights
from palestra.models.weight_file import FileWeights
from palestra.models.weights import WeightSource
from palestra.types.calls import MediaSpan, PolicyVersion, SamplingParams, TokenSequence
from palestra.waiting import cancelled, race

log = logging.getLogger("palestra.engine")
LOAD_SECONDS = 0.2  # between two reports of what the engine has done
GRACE_SECONDS = 0.2  # between the failure of a request and the news that the engine has failed


class EngineWorker:
    """Serves one engine to one job."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        """Prepare to serve.

        Args:
            channel: to the job; what is sent is JSON.
        """
        self._engine, self._channel = engine, channel
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._failure: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Serve until the job has closed the channel, or the engine has failed, which the job learns."""
        self._failure = asyncio.create_task(self._engine.failure())
        try:
            winner = await race(self._receive(), self._report(), asyncio.shield(self._failure))
            if winner.index == 2:
                self._channel.send({"failed": winner.result})
                await self._channel.drain()
        finally:
            await cancelled(self._failure, *self._tasks.values())

    async def _receive(self) -> None:
        async for frame in self._channel.frames():
            for message in frame.header["messages"]:
                if (number := message.get("cancel")) is not None:
                    if (task := self._tasks.get(number)) is not None:
                        task.cancel()
                    continue
                number = message["id"]
                task = self._tasks[number] = asyncio.create_task(self._answer(number, message, frame))
                task.add_done_callback(partial(self._forget, number))

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)

    async def _report(self) -> None:
        """Say what the engine does, whenever it has changed: a job sees by this that the worker makes progress."""
        said: list[int] = []
        while True:
            load = self._engine.load()
            now = [
                load.waiting,
                load.running,
                load.kv_bytes_used,
                load.kv_bytes,
                load.passes,
                load.prefilled_tokens,
                load.sampled_tokens,
            ]
            if now != said:
                said = now
                self._channel.send({"load": now})
            await asyncio.sleep(LOAD_SECONDS)

    async def _answer(self, number: int, message: dict[str, Any], frame: Frame) -> None:
        """Execute one call, and send its answer."""
        try:
            if message["do"] == "generate":
                await self._generate(number, message["with"], frame)
                result = None
            else:
                result = await getattr(self, f"_do_{message['do']}")(message["with"], frame)
        except EngineFailure as error:
            if not await self._has_failed():  # otherwise the end of the channel is the answer, to all calls
                self._channel.send({"id": number, "error": error_fields(error)})
        except PalestraError as error:
            self._channel.send({"id": number, "error": error_fields(error)})
        except Exception as error:
            log.exception("a call of an engine worker failed")
            failed = EngineFailure(f"the engine failed: {type(error).__name__}: {error}")
            self._channel.send({"id": number, "error": error_fields(failed)})
        else:
            self._channel.send({"id": number, "result": result})

    async def _has_failed(self) -> bool:
        """Return whether the whole engine has failed, of which the failure of a call may be the first sign."""
        assert self._failure is not None
        await asyncio.wait((self._failure,), timeout=GRACE_SECONDS)
        return self._failure.done()

    async def _generate(self, number: int, given: Any, frame: Frame) -> None:
        request = _request(given, frame)
        stream = self._engine.generate(request)
        async with contextlib.aclosing(stream) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self._channel.send({"id": number, "piece": [piece.ids, piece.logprobs, piece.version, piece.top]})

    # Calls

    async def _do_score(self, given: Any, frame: Frame) -> list[float]:
        return await self._engine.score(given["policy"], _prompt(given["prompt"], frame))

    async def _do_sync_weights(self, given: Any, frame: Frame) -> None:
        source = source_of(given["source"])
        assert source is not None
        await self._engine.sync_weights(given["policy"], PolicyVersion(*given["version"]), source)

    async def _do_add_policy(self, given: Any, frame: Frame) -> None:
        version = PolicyVersion(*given["version"])
        await self._engine.add_policy(given["name"], given["like"], version, source_of(given["source"]))

    async def _do_remove_policy(self, given: Any, frame: Frame) -> None:
        await self._engine.remove_policy(given["name"])

    async def _do_pause(self, given: Any, frame: Frame) -> None:
        await self._engine.pause()

    async def _do_resume(self, given: Any, frame: Frame) -> None:
        await self._engine.resume()


def _request(given: dict[str, Any], frame: Frame) -> EngineRequest:
    """Return a request of the job that has started this process, whose types therefore are right."""
    sampling = given["sampling"]
    exact = SamplingParams(
        **sampling
        | {
            "stop_ids": tuple(sampling["stop_ids"]),
            "logit_bias": tuple((token, added) for token, added in sampling["logit_bias"]),
        }
    )
    prompt = _prompt(given["prompt"], frame)
    return EngineRequest(policy=given["policy"], prompt=prompt, sampling=exact, streamed=given["streamed"])


def _prompt(given: list[Any], frame: Frame) -> TokenSequence:
    ids, media = given
    return TokenSequence(frame.arrays[ids["array"]], tuple(MediaSpan(*one) for one in media))


def source_of(place: dict[str, str] | None) -> WeightSource | None:
    """Return the weights that a job has named; see `place_of`."""
    if place is None:
        return None
    return FileWeights(Path(place["file"])) if "file" in place else SavedWeights(Path(place["folder"]))


def place_of(source: WeightSource | None) -> dict[str, str] | None:
    """Return where an engine worker finds weights, as a part of a message.

    Args:
        source: weights in a file or a folder; None: none are sent. Of any other source nothing is read.
    """
    if source is None:
        return None
    if isinstance(source, FileWeights):
        return {"file": str(source.path)}
    if isinstance(source, SavedWeights):
        return {"folder": str(source.folder.absolute())}
    raise TypeError(f"weights of a {type(source).__name__} can't be read by another process")
