"""The routes of an SGLang server, as its documentation has them."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from palestra.engine.base import EngineRequest
from palestra.errors import ConfigError, EngineFailure, InvalidRequest
from palestra.terminal import one_line_of, problem
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, SamplingParams, TokenSequence
from palestra_engines.external.api import Chunk, Counters
from palestra_engines.external.connection import (
    LOADING,
    EngineConnection,
    SampleText,
    check_tokenizer,
    check_vocabulary,
)
from palestra_engines.external.process import version_of
from palestra_engines.external.reply import ReplyBounds


def sglang_sampling(sampling: SamplingParams, stop_ids: Collection[int]) -> dict[str, Any]:
    """Return the `sampling_params` of a request.

    The seed is not sent, because SGLang only supports it in its deterministic mode. `stop_ids` end every reply of the
    policy.
    """
    # Its logprobs are those after the temperature, before top p and top k leave tokens out.
    if sampling.top_p < 1.0:
        raise InvalidRequest("SGLang's logprobs are not those of top_p; leave it at 1", "top_p")
    if sampling.top_k:
        raise InvalidRequest("SGLang's logprobs are not those of top_k; leave it at 0", "top_k")
    if sampling.logit_bias:
        raise InvalidRequest("SGLang's /generate has no logit_bias", "logit_bias")
    if sampling.grammar:
        # Which tokens a schema allows differs between SGLang's backends and the trainer's.
        raise InvalidRequest("an engine of the kind 'sglang' has no grammars", "response_format")
    return {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": sorted({*stop_ids, *sampling.stop_ids}),
        "ignore_eos": True,  # the policy's own stop tokens are among those above
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


OLDEST = "0.5"  # it names versions of weights
_KEPT_FREE = 6  # of the context beside the longest prompt, at most
_OF_WEIGHTS = (".safetensors", ".safetensors.index.json")


class SglangApi:
    """An `EngineApi` for SGLang, which does not report which version of the weights sampled a token."""

    splits_versions = sees = False

    def __init__(
        self,
        connection: EngineConnection,
        bounds: ReplyBounds,
        stop_ids: Collection[int],
        folder: Path,
        sample: SampleText | None = None,
    ) -> None:
        """Create the interface. `stop_ids` end every reply of the policy. The configuration in `folder`, the model's,
        is copied next to new weights. `sample` detects another tokenizer; None: not checked.
        """
        self._sample = sample
        self._http, self._bounds, self._stop_ids, self._folder = connection, bounds, stop_ids, folder

    async def inspect(self, dtype: torch.dtype) -> None:
        """Compare the server's version, context and tokenizer with the policy's needs; see `EngineApi`.

        The precision is not compared: SGLang only reports the one it was started with, usually `auto`.
        """
        found = await self._http.identify("/get_model_info", "SGLang")
        if not isinstance(found, dict) or not found.get("is_generation", True):
            raise ConfigError("the engine's server has a model that does not generate")
        settings = await self._settings()
        said = str(settings.get("version", ""))
        if version_of(said) < version_of(OLDEST):
            raise ConfigError(
                f"the engine's server is SGLang {one_line_of(said) or '(unknown)'}; {OLDEST} or newer is needed"
            )
        self._check_context(settings)
        if self._sample is not None:
            await check_tokenizer(self._http, self._sample)

    async def check(self, dtype: torch.dtype) -> None:
        """Inspect the server, and compare its vocabulary with the policy's model; see `EngineApi`."""
        await self.inspect(dtype)
        await self.resume()  # a server that is paused would not answer what is asked next
        await check_vocabulary(self._ask, self._bounds.vocab_size)

    async def _settings(self) -> Mapping[str, Any]:
        try:
            found = await self._http.get("/get_server_info")
        except InvalidRequest:  # newer documentation has a shorter name
            found = await self._http.get("/server_info")
        if not isinstance(found, dict):
            raise ConfigError("the engine's server describes itself in a way that can't be read")
        return found

    def _check_context(self, settings: Mapping[str, Any]) -> None:
        """Refuse a server with less context than the policy, as far as it says how much it has."""
        needed = self._bounds.max_context
        # `context_length` is what the server was started with, none where it has the model's own. The longest prompt is
        # a few tokens less than the context, how many depends on the version.
        limits = {"context_length": 0, "max_total_num_tokens": 0, "max_req_input_len": _KEPT_FREE}
        for key, more in limits.items():
            limit = settings.get(key)
            if isinstance(limit, int) and limit + more < needed:
                raise ConfigError(f"max_context is {needed}, and the engine's server has {key} {one_line_of(limit)}")

    async def _ask(self, token: int) -> None:
        """Let the server continue a token."""
        body = {"input_ids": [token], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        await self._http.post("/generate", body)

    async def generate(self, request: EngineRequest, adapter: str | None) -> AsyncIterator[Chunk]:
        """Stream a reply; each event repeats earlier content, unless the server is configured not to;
        see `EngineApi`.
        """
        top = request.sampling.top_logprobs
        body = {
            "input_ids": request.prompt.ids.tolist(),
            "sampling_params": sglang_sampling(request.sampling, self._stop_ids),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": top,
            "stream": True,
        } | _adapter(adapter)
        seen = 0
        async with aclosing(self._http.stream("/generate", body)) as events:
            async for event in events:
                _check_echo(event, body["input_ids"])
                chunk, seen = _chunk(event, seen, top)
                yield chunk

    async def score(self, prompt: TokenSequence, adapter: str | None) -> list[float]:
        """Let the server compute a prompt, and drop one sampled token; see `EngineApi`."""
        ids = prompt.ids.tolist()
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        } | _adapter(adapter)
        found = await self._http.post("/generate", body, LOADING)
        _check_echo(found, ids)
        try:
            said = found["meta_info"]["input_token_logprobs"]
            if [each[1] for each in said] != ids:
                raise EngineFailure("the engine scored other tokens than those that it was asked for")
            return [float(each[0]) for each in said[1:]]
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise EngineFailure(f"the engine's scores can't be read: {problem(error)}") from error

    async def pause(self) -> None:
        """Stop, and requeue running replies, to be recomputed later; see `EngineApi`."""
        await self._http.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Continue after `pause`; see `EngineApi`."""
        await self._http.post("/continue_generation", {})

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Let the server read a folder with the new weights and the model's other files; see `EngineApi`."""
        folder = path.with_suffix("")
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        try:
            await in_thread(lambda: self._fill(folder, path))
            answer = await self._http.post("/update_weights_from_disk", body, LOADING)
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise EngineFailure(f"the server did not take version {version}: {one_line_of(answer)}")
        finally:
            await in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))

    def _fill(self, folder: Path, weights: Path) -> None:
        """Make a model's folder around a file of weights."""
        folder.mkdir()
        os.link(weights, folder / "model.safetensors")
        for file in self._folder.iterdir():
            if file.is_file() and not file.name.endswith(_OF_WEIGHTS):
                shutil.copy(file, folder)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Let the server read the folder; see `EngineApi`."""
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await self._http.post("/load_lora_adapter", body, LOADING)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineFailure(
                f"the server did not take the adapter: {one_line_of(answer)}; docs/how-to/sglang.md has its command"
            )

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; see `EngineApi`."""
        await self._http.post("/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, version: PolicyVersion) -> None:
        """No effect: answers name no version; see `EngineApi`."""

    async def counters(self) -> Counters:
        """Check the server's health; see `EngineApi`."""
        await self._http.get_text("/health")
        return Counters()

    async def close(self) -> None:
        """Close the connections; see `EngineApi`."""
        await self._http.close()


def _adapter(name: str | None) -> dict[str, str]:
    """Return the field of a request that names an adapter."""
    return {} if name is None else {"lora_path": name}


def _check_echo(event: Any, ids: list[int]) -> None:
    """Raise an error for an answer to another prompt, if the server reports the prompt or its length."""
    meta = event.get("meta_info") if isinstance(event, dict) else None
    count = meta.get("prompt_tokens") if isinstance(meta, dict) else None
    said = event.get("prompt_token_ids") if isinstance(event, dict) else None
    if count not in (None, len(ids)) or said not in (None, ids):
        raise EngineFailure("the engine answers to another prompt than the one that it was sent")


def _chunk(event: Any, seen: int, top: int) -> tuple[Chunk, int]:
    """Return the new part of an event, and the reply's number of tokens including it."""
    try:
        meta = event["meta_info"]
        said, count = meta.get("output_token_logprobs") or [], meta["completion_tokens"]
        first = seen if len(said) == count else 0  # with --stream-output an event has only what is new
        new = said[first:]
        if seen + len(new) != count:
            raise EngineFailure(f"the engine sent {len(new)} tokens after {seen}, and says that there are {count}")
        tops = (meta.get("output_top_logprobs") or [])[first:] if top else []
        finish = meta.get("finish_reason")
        return (
            Chunk(
                ids=tuple(each[1] for each in new),
                logprobs=tuple(float(each[0]) for each in new),
                top=tuple(tuple((int(one[1]), float(one[0])) for one in (each or ())) for each in tops),
                finish=None if finish is None else str(finish["type"]),
            ),
            count,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise EngineFailure(f"the engine sent a reply that can't be read: {problem(error)}") from error
