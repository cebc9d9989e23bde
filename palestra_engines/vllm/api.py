"""The routes of a vLLM server, from 0.32 on."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from palestra.engine.base import EngineRequest
from palestra.errors import (
    ConfigError,
    EngineFailure,
    EngineKeyRefused,
    EngineServerError,
    InvalidRequest,
    PalestraError,
)
from palestra.terminal import one_line_of, problem
from palestra.threads import in_thread
from palestra.types.calls import PolicyVersion, TokenSequence
from palestra_engines.external.api import Chunk, Counters
from palestra_engines.external.connection import (
    LOADING,
    QUICK,
    Body,
    EngineConnection,
    SampleText,
    check_tokenizer,
    check_vocabulary,
)
from palestra_engines.external.process import version_of
from palestra_engines.external.reply import ReplyBounds
from palestra_engines.vllm.pictures import VllmPictures
from palestra_engines.vllm.rendezvous import Rendezvous
from palestra_engines.vllm.sampling import chunk_of, list_of, vllm_sampling
from palestra_engines.vllm.worker.palestra_weight_group import WeightLayout

GENERATE = "/inference/v1/generate"
BACKEND = "palestra_file"  # see worker/palestra_vllm_worker.py
OLDEST = "0.32"
_DAY = 86_400.0  # for broadcasts, whose caller looks at their progress, and gives up earlier
_UPLOADS = 2  # requests with pictures that are prepared and sent at the same time, of hundreds of MB each
_PIECE = 1 << 20  # bytes of a request with pictures that are sent at a time
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MOST_RANKS, _MOST_COUNT = 1024, 1e18  # that a server may say it has, and that it may count
_METRICS = {
    "vllm:kv_cache_usage_perc": "kv_share",
    "vllm:prompt_tokens_total": "prefilled_tokens",
    "vllm:iteration_tokens_total_count": "passes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmPolicy:
    """What `VllmApi` knows of the policy of its server.

    Attributes:
        owner: name of this engine alone. A reply that names another owner was sampled from another job's weights.
        seeded: whether the seeds of calls are sent.
        sample: by which another tokenizer is found; None: the server was started with the policy's model.
        rank: of the adapters that it gets; None: it gets whole weights.
        pictures: prepares those of prompts; None: the model reads text only.
        folder: of the model with which the server was started; None: it is not compared.
    """

    owner: str
    seeded: bool
    sample: SampleText | None = None
    rank: int | None = None
    pictures: VllmPictures | None = None
    folder: Path | None = None


class VllmApi:
    """An `EngineApi` for vLLM.

    Attributes:
        ranks: number of the server's workers, each of which gets new weights; known after `check`.
    """

    splits_versions = True

    def __init__(
        self,
        connection: EngineConnection,
        bounds: ReplyBounds,
        stop_ids: Collection[int],
        policy: VllmPolicy,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Prepare to ask a server. `stop_ids` end every reply of the policy. At `rendezvous` the server's workers meet
        the trainer, which broadcasts new weights; None: they read files.
        """
        self._folder, self._owner = policy.folder, policy.owner
        self._http, self._bounds = connection, bounds
        self._stop_ids, self._seeded, self._sample, self._rank = stop_ids, policy.seeded, policy.sample, policy.rank
        self._pictures, self._weights, self.sees = policy.pictures, "", policy.pictures is not None
        self._uploads = asyncio.Semaphore(_UPLOADS)
        self._rendezvous, self.ranks = rendezvous, 1

    @property
    def address(self) -> str:
        """Return where the server listens, for messages."""
        return self._http.address

    async def inspect(self, dtype: torch.dtype) -> None:
        """Compare the server's version, settings, context and tokenizer with the policy's needs; see `EngineApi`."""
        found = await self._http.identify("/version", "vLLM")
        said = str(found.get("version", "")) if isinstance(found, dict) else ""
        if version_of(said) < version_of(OLDEST):
            raise ConfigError(
                f"the engine's server is vLLM {one_line_of(said) or '(unknown)'}; {OLDEST} or newer is needed"
            )
        try:
            settings = await self._http.get("/server_info?config_format=json")
        except PalestraError as error:
            raise ConfigError(f"the engine's server needs VLLM_SERVER_DEV_MODE=1: {error}") from error
        try:
            self._check_settings(settings["vllm_config"], str(dtype).removeprefix("torch."))
            if self._rendezvous is not None:
                self._check_torch(str(settings["system_env"]["torch_version"]))
                self._check_replicas(settings["vllm_config"]["parallel_config"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the engine's server describes itself in a way that can't be read: {problem(error)}"
            ) from error
        with contextlib.suppress(InvalidRequest):  # behind a proxy that lets only some routes through, say
            await self._http.get("/v1/models")  # asks for the key, as replies do, and the routes above do not
        if self._sample is not None:
            await check_tokenizer(self._http, self._sample)

    async def check(self, dtype: torch.dtype) -> None:
        """Inspect the server, let its workers reach the trainer, and compare its vocabulary; see `EngineApi`."""
        await self.inspect(dtype)
        if self._rendezvous is not None:
            try:
                await self._greet({}, QUICK)
            except EngineKeyRefused:
                raise
            except EngineServerError as error:
                raise ConfigError(f"the engine's server can't be sent weights: {error}") from error
            except EngineFailure as error:
                raise ConfigError(
                    f"the engine's server needs the --worker-extension-cls of this version of Palestra: {error}"
                ) from error
        await self.resume()  # a server that is paused would not answer what is asked next
        await check_vocabulary(self._ask, self._bounds.vocab_size)

    def _check_settings(self, settings: Mapping[str, Any], dtype: str) -> None:
        """Compare the server's settings with the policy's needs, and its precision with `engine.dtype`."""
        model = settings["model_config"]
        computes_in = str(model.get("dtype", dtype)).removeprefix("torch.")
        if computes_in != dtype:
            raise ConfigError(
                f"engine.dtype is {dtype!r}, and the engine's server computes in {one_line_of(computes_in)}; start it "
                f"with --dtype {dtype}, or change engine.dtype"
            )
        if model["logprobs_mode"] != "processed_logprobs":
            raise ConfigError("the engine's server needs --logprobs-mode processed_logprobs")
        if self._rank is not None:
            if ((settings.get("lora_config") or {}).get("max_lora_rank") or 0) < self._rank:
                raise ConfigError(
                    f"the engine's server needs --enable-lora --max-lora-rank {lora_rank(self._rank)} and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, because the policy is an adapter"
                )
        elif (settings.get("weight_transfer_config") or {}).get("backend") != BACKEND:
            raise ConfigError(
                f"the engine's server needs --weight-transfer-config '{{\"backend\": \"{BACKEND}\"}}' and Palestra's "
                "--worker-extension-cls; docs/how-to/vllm-server.md has the command"
            )
        if self._folder is not None and model.get("model", str(self._folder)) != str(self._folder):
            raise ConfigError(
                f"the engine's server has loaded {one_line_of(model['model'])}, and not the model in {self._folder}"
            )
        if type(model["max_model_len"]) is not int:
            raise ConfigError(f"the engine's server has a --max-model-len of {one_line_of(model['max_model_len'])}")
        if model["max_model_len"] < self._bounds.max_context:
            raise ConfigError(
                f"max_context is {self._bounds.max_context}, and the engine's server has --max-model-len "
                f"{model['max_model_len']}"
            )

    def _check_replicas(self, parallel: Mapping[str, Any]) -> None:
        """Store the number of workers; refuse replicas in one server, of which vLLM only reports the first."""
        if parallel["data_parallel_size"] != 1:
            raise ConfigError(
                "the engine's server has --data-parallel-size, with which weights can't be broadcast; start a server "
                "for each replica, or set engine.weight_transfer = 'file'"
            )
        self.ranks = parallel["world_size"]
        if type(self.ranks) is not int or not 1 <= self.ranks <= _MOST_RANKS:
            raise ValueError(f"world_size is {self.ranks}")

    def _check_torch(self, said: str) -> None:
        """Compare the server's torch with this process's, because ranks of a group have to speak the same protocol."""
        if version_of(said) != version_of(torch.__version__):
            raise ConfigError(
                f"the engine's server has torch {one_line_of(said)}, and this process {torch.__version__}: to "
                "broadcast weights both need the same version; install it, or set engine.weight_transfer = 'file'"
            )

    async def _ask(self, token: int) -> None:
        """Let the server continue a token."""
        body = {"sampling_params": {"max_tokens": 1, "detokenize": False}, "return_token_ids": True}
        _check_echo(await self._http.post(GENERATE, {"token_ids": [token], **body}), [token])

    async def generate(self, request: EngineRequest, adapter: str | None) -> AsyncIterator[Chunk]:
        """Stream a reply, one or more tokens per chunk; see `EngineApi`."""
        top = request.sampling.top_logprobs
        params = vllm_sampling(request.sampling, self._stop_ids, self._seeded, request.streamed)
        async with AsyncExitStack() as upload:
            body = await self._body(request.prompt, adapter, {"sampling_params": params, "stream": True}, upload)
            ids = request.prompt.ids.tolist()
            async with aclosing(self._http.stream(GENERATE, body)) as events:
                async for event in events:
                    _check_echo(event, ids)
                    for choice in list_of(event, "choices"):
                        # vLLM names the versions of its own weights, which adapters leave as they are.
                        yield chunk_of(choice, top, self._owner if self._rank is None else None)

    async def score(self, prompt: TokenSequence, adapter: str | None) -> list[float]:
        """Let the server compute a prompt, and drop one sampled token; see `EngineApi`."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        ids = prompt.ids.tolist()
        async with AsyncExitStack() as upload:
            body = await self._body(prompt, adapter, {"sampling_params": params}, upload)
            found = await self._http.post(GENERATE, body, LOADING)
        _check_echo(found, ids)
        said = list_of(found, "prompt_logprobs")
        if len(said) != len(ids):
            raise EngineFailure(f"the engine scored {len(said)} of {len(ids)} tokens")
        try:
            return [float(each[str(token)]["logprob"]) for token, each in zip(ids[1:], said[1:], strict=True)]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EngineFailure("the engine scored other tokens than those that it was asked for") from error

    async def pause(self) -> None:
        """Stop between two passes, and keep all requests; their keys and values are recomputed; see `EngineApi`."""
        await self._http.post("/pause", {}, query={"mode": "keep"})

    async def resume(self) -> None:
        """Continue after `pause`; see `EngineApi`."""
        await self._http.post("/resume", {})

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Let Palestra's module in the server's workers read the file; see `EngineApi`."""
        await self._http.post("/start_weight_update", {}, LOADING)
        await self._http.post("/update_weights", {"update_info": {"path": str(path)}}, LOADING)
        await self.finish_update(version)

    async def join(self, name: str, first_rank: int, size: int) -> None:
        """Let the server's workers join a group, and wait until all of its ranks have met. `first_rank` is that of this
        server's workers, whose number is `ranks`.
        """
        assert self._rendezvous is not None
        group = {"name": name, "first_rank": first_rank, "size": size, "backend": self._rendezvous.backend}
        await self._greet(group, 2 * self._rendezvous.seconds)

    async def _greet(self, group: Mapping[str, Any], seconds: float) -> None:
        """Tell the server's workers where the trainer is, and which group to join."""
        assert self._rendezvous is not None
        told = {"host": self._rendezvous.host, "port": self._rendezvous.port, "seconds": self._rendezvous.seconds}
        await self._ask_workers("palestra_join", told | dict(group), seconds)

    async def receive(self, layout: WeightLayout) -> None:
        """Let the paused server's workers receive all weights from rank 0 of their group; `finish_update` follows."""
        await self._ask_workers("palestra_receive", asdict(layout), _DAY)

    async def _ask_workers(self, method: str, argument: Mapping[str, Any], seconds: float) -> None:
        """Call a method of Palestra's module in all workers of the server."""
        body = {"method": method, "args": [orjson.dumps(argument).decode()]}
        problems = list_of(await self._http.post("/collective_rpc", body, seconds), "results")
        if wrong := [one_line_of(problem) for problem in problems if problem]:
            raise EngineServerError(f"{self.address}: {wrong[0]}")

    async def finish_update(self, version: PolicyVersion) -> None:
        """Let the server use its new weights, and drop everything computed with the old ones."""
        await self._http.post("/finish_weight_update", {"weight_version": f"{version}-{self._owner}"}, LOADING)
        self._weights = str(version)
        await self._http.post("/reset_prefix_cache", {})

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Let vLLM read the folder; see `EngineApi`."""
        await self._http.order("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, LOADING)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; see `EngineApi`."""
        await self._http.order("/v1/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, version: PolicyVersion) -> None:
        """Set the version of the server's weights; see `EngineApi`."""
        await self._http.post("/init_weight_transfer_engine", {"init_info": {}})
        await self._http.post("/update_weight_version", {"new_version": f"{version}-{self._owner}"})
        self._weights = str(version)

    async def counters(self) -> Counters:
        """Read the server's metrics, after its health; see `EngineApi`."""
        await self._http.get_text("/health")
        found: dict[str, float] = {}
        for line in (await self._http.get_text("/metrics")).splitlines():
            if (key := _METRICS.get(line.partition("{")[0])) is not None:
                found[key] = min(found.get(key, 0.0) + _count(line), _MOST_COUNT)
        return Counters(
            kv_share=min(max(found.get("kv_share", 0.0), 0.0), 1.0),
            prefilled_tokens=int(found.get("prefilled_tokens", 0)),
            passes=int(found.get("passes", 0)),
        )

    async def close(self) -> None:
        """Close the connections; see `EngineApi`."""
        await self._http.close()

    async def _body(
        self, prompt: TokenSequence, adapter: str | None, settings: dict[str, Any], upload: AsyncExitStack
    ) -> Body:
        """Return a request with a prompt.

        Its pictures may be hundreds of megabytes. So only a few such requests are prepared and sent at a time, and a
        sent request is not kept while the server answers it.
        """
        body = settings | {"token_ids": prompt.ids.tolist()} | ({} if adapter is None else {"model": adapter})
        if not prompt.media:
            return body
        assert self._pictures is not None  # otherwise the engine has refused them
        await upload.enter_async_context(self._uploads)
        pictures, weights = self._pictures, self._weights
        return _pieces(
            await in_thread(lambda: orjson.dumps(body | {"features": pictures.features(prompt, weights)})), upload
        )


async def _pieces(data: bytes, upload: AsyncExitStack) -> AsyncIterator[bytes]:
    """Yield a request in pieces, and close its upload after the last one."""
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]
    await upload.aclose()


def lora_rank(rank: int) -> int:
    """Return the `--max-lora-rank` for a rank: vLLM only supports some."""
    for room in _LORA_RANKS:
        if rank <= room:
            return room
    raise ConfigError(f"vLLM has adapters of rank {_LORA_RANKS[-1]} at most, and the policy's has {rank}")


def _count(line: str) -> float:
    """Return the number at the end of a line of metrics."""
    said = line.rpartition(" ")[2]
    try:
        found = float(said)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise EngineFailure(f"the engine's metrics have {said[:40]!r} where a number is expected")
    return found


def _check_echo(event: Any, ids: list[int]) -> None:
    """Refuse an answer to another prompt than was sent, where the server repeats the prompt."""
    said = event.get("prompt_token_ids") if isinstance(event, dict) else None
    if said is not None and said != ids:
        raise EngineFailure("the engine answers to another prompt than the one that it was sent")
