"""Servers that speak vLLM's and SGLang's routes from a script, and engines on them."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file

from palestra.engine.base import Engine
from palestra.models.causal_lm import load_tokenizer
from palestra.types.calls import PolicyVersion, SamplingParams
from palestra_engines.external.connection import Address, EngineConnection, SampleText
from palestra_engines.external.engine import ExternalEngine
from palestra_engines.external.reply import ReplyBounds
from palestra_engines.external.served_policy import ExternalPolicy, ServedAdapter
from palestra_engines.sglang.api import SglangApi
from palestra_engines.vllm.api import VllmApi, VllmPolicy
from palestra_engines.vllm.weight_rounds import ServedBroadcast, WeightRounds
from palestra_engines.vllm.worker.palestra_weight_group import WeightGroup, WeightLayout, own_address, reach_store
from unit.building import engine_request

VOCABULARY, STOP, KEY = 259, 258, "key-of-the-server"
BOUNDS = ReplyBounds(vocab_size=VOCABULARY, stop_ids=frozenset((STOP,)), max_context=64)
SHAPES = {"model.norm.weight": (4,)}
PROMPT = np.arange(40, 44, dtype=np.int32)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
ADAPTED = SHAPES | {"model.q_proj.weight": (6, 4), "model.down_proj.weight": (4, 6)}


class ScriptedServer:
    """What both servers have in common: a log of the routes, a pause, and replies of the ids 100, 101, …

    Attributes:
        asked: routes that change something, in their order, with what was sent.
        bodies: of the requests for replies.
        read: tensors of the last update.
        answers: status and body that a route answers with instead of what it would, by its path.
        gate: unset while no further token is sampled.
        open: replies that are being sent.
        lie: changes the event of a reply before it is sent.
        noise: sent before the events of a reply.
        adapters: that are loaded, by name.
        seconds: that a token takes.
        logprob: of a sampled token.
        score: logprob of a token of a prompt that is scored.
        tokens: makes them of a text.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.bodies: list[dict] = []
        self.read: dict[str, torch.Tensor] = {}
        self.answers: dict[str, tuple[int, object]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.version, self.open, self.paused = "default", 0, False
        self.lie = lambda number, event: event
        self.cut_after: int | None = None
        self.noise = b""
        self.seconds = 0.0
        self.logprob = lambda token: -1.0
        self.score = lambda token: -token / 100
        self.tokens = lambda text: list(text.encode())
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}

    async def route(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.answers:
            status, said = self.answers[request.path]
            return web.json_response(said, status=status)
        body = await request.json() if request.method == "POST" and request.can_read_body else {}
        if request.path.endswith("load_lora_adapter"):
            return self.change_adapter(request.path, body)
        if request.path == "/tokenize":
            assert body["add_special_tokens"] is False
            return web.json_response({"tokens": self.tokens(body["prompt"])})
        return await self.answer(request, body)

    def change_adapter(self, path: str, body: dict) -> web.Response:
        self.asked.append((path, body))
        if path.endswith("/unload_lora_adapter"):
            del self.adapters[body["lora_name"]]
        else:
            self.adapters[body["lora_name"]] = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
        if path.startswith("/v1/"):  # vLLM answers in words
            return web.Response(text=f"Success: LoRA adapter {body['lora_name']!r} added successfully.")
        return web.json_response({"success": True})

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        raise NotImplementedError

    async def send(self, request: web.Request, events) -> web.StreamResponse:
        """Send events until there is no more, each when the gate is open."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        try:
            await response.write(self.noise)
            for number, event in enumerate(events):
                await self.gate.wait()
                if number == self.cut_after:
                    request.transport.close()
                    return response
                await response.write(f"data: {json.dumps(self.lie(number, event()))}\n\n".encode())
                await asyncio.sleep(self.seconds)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.open -= 1
        return response


def of_tiny_random(server: ScriptedServer) -> ScriptedServer:
    """Let a server tokenize as tiny-random does, and score as any model of small random weights."""
    tokenizer = load_tokenizer("tiny-random")
    server.tokens = lambda text: tokenizer.encode(text, add_special_tokens=False)
    server.score = lambda token: -math.log(VOCABULARY)
    return server


OWNER = "0a1b"  # of an engine


class ScriptedVllm(ScriptedServer):
    """vLLM's routes. Like the real one, it can't go on after an update without a pause."""

    info: ClassVar[dict] = {
        "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
        "weight_transfer_config": {"backend": "palestra_file"},
        "lora_config": {"max_lora_rank": 16},
    }
    number = "0.32.0+cpu"
    metrics = 'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:prompt_tokens_total{a="b"} 12.0\n'

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        path = request.path
        if path == "/version":
            return web.json_response({"version": self.number})
        if path == "/server_info":
            return web.json_response({"vllm_config": self.info})
        if path == "/metrics":
            return web.Response(text=self.metrics)
        if path == "/health":
            return web.Response()
        if path == "/v1/models":
            return web.json_response({"data": []})
        if path == "/inference/v1/generate":
            return await self.generate(request, body)
        self.asked.append((path, body or dict(request.query)))
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/start_weight_update" and not self.paused:
            self.answers = dict.fromkeys(("/health", "/update_weights"), (500, "dead"))
        elif path == "/update_weights":
            self.read = load_file(body["update_info"]["path"])
        elif path == "/finish_weight_update":
            self.version = body["weight_version"]
        return web.json_response({})

    async def generate(self, request: web.Request, body: dict) -> web.StreamResponse:
        params, prompt = body["sampling_params"], body["token_ids"]
        if too_large := [token for token in prompt if token >= VOCABULARY]:
            said = {"error": {"message": f"Token id {too_large[0]} is out of vocabulary", "code": 400}}
            return web.json_response(said, status=400)
        assert body.get("model") in (None, *self.adapters)
        if not body.get("stream"):
            while self.paused:
                await asyncio.sleep(0.01)
            scores = [None, *({str(token): {"logprob": self.score(token)}} for token in prompt[1:])]
            echo = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
            return web.json_response({"prompt_logprobs": scores, "choices": []} | echo)
        self.bodies.append(body)
        versions: list[str] = []

        def event(number: int):
            def made() -> dict:
                versions.append(self.version)
                last = number == params["max_tokens"] - 1
                own = self.logprob(100 + number)
                top = [{"token_id": 7, "logprob": -0.25}, {"token_id": 100 + number, "logprob": own}]
                content = {"token_id": 100 + number, "logprob": own, "rank": 1, "top_logprobs": top}
                choice = {"index": 0, "token_ids": [100 + number], "logprobs": {"content": [content]}}
                spans = [
                    {"version": name, "start": versions.index(name), "end": versions.index(name) + versions.count(name)}
                    for name in dict.fromkeys(versions)
                ]
                ended = {"finish_reason": "length" if last else None, "weight_versions": spans if last else None}
                return {"choices": [choice | ended]}

            return made

        return await self.send(request, [event(number) for number in range(params["max_tokens"])])


class ScriptedGroup(ScriptedVllm):
    """vLLM's routes with workers that take part in broadcasts, which are threads.

    Attributes:
        workers: number of them.
        groups: of each group that a worker has joined: its name, and the number of ranks.
        received: of each worker the tensors of the last broadcast, by name.
        hurt: called in a worker's thread before it takes a tensor, with the number of the tensor.
    """

    torch_version, replicas = torch.__version__, 1

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.workers, self.ranks = workers, dict[int, WeightGroup]()
        self.groups: list[tuple[str, int]] = []
        self.received: dict[int, dict[str, torch.Tensor]] = {}
        self.hurt = lambda number: None

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/server_info":
            parallel = {"parallel_config": {"world_size": self.workers, "data_parallel_size": self.replicas}}
            said = {"vllm_config": self.info | parallel, "system_env": {"torch_version": self.torch_version}}
            return web.json_response(said)
        if request.path != "/collective_rpc":
            return await super().answer(request, body)
        self.asked.append((body["method"], json.loads(body["args"][0])))
        work = {"palestra_join": self.join, "palestra_receive": self.receive}[body["method"]]

        def problem(number: int) -> str:
            try:
                work(number, **json.loads(body["args"][0]))
            except (RuntimeError, OSError) as error:
                return str(error)
            return ""

        found = await asyncio.gather(*(asyncio.to_thread(problem, number) for number in range(self.workers)))
        return web.json_response({"results": found})

    def join(self, number: int, host: str, port: int, seconds: float, name: str = "", **group) -> None:
        address = own_address(host, port, seconds)
        if name:
            store, rank = reach_store(host, port, seconds), group["first_rank"] + number
            size = group["size"]
            self.ranks[number] = WeightGroup(store, name, group["backend"], rank, size, address, seconds)
            self.groups.append((name, size))

    def receive(self, number: int, **layout) -> None:
        self.received[number] = {}
        for place, (name, tensor) in enumerate(self.ranks[number].receive(WeightLayout(**layout))):
            self.hurt(place)
            self.received[number][name] = tensor


class ScriptedSglang(ScriptedServer):
    """SGLang's routes as its documentation has them; an event repeats the tokens of those before."""

    incremental = False
    info: ClassVar[dict] = {"version": "0.5.7", "context_length": None, "max_req_input_len": 62}

    async def answer(self, request: web.Request, body: dict) -> web.StreamResponse:
        path = request.path
        if path == "/get_model_info":
            return web.json_response({"model_path": "m", "is_generation": True})
        if path == "/get_server_info":
            return web.json_response(self.info)
        if path == "/health":
            return web.Response()
        if path == "/generate":
            return await self.generate(request, body)
        self.asked.append((path, body))
        if path == "/update_weights_from_disk":
            folder = Path(body["model_path"])
            assert json.loads((folder / "config.json").read_text()) == {"vocab_size": VOCABULARY}
            self.read = load_file(folder / "model.safetensors")
            return web.json_response({"success": True, "message": "", "num_paused_requests": 0})
        return web.json_response({"message": "ok"})

    async def generate(self, request: web.Request, body: dict) -> web.StreamResponse:
        params, prompt = body["sampling_params"], body["input_ids"]
        if any(token >= VOCABULARY for token in prompt):
            said = f"The input_ids {prompt} contains values greater than the vocab size ({VOCABULARY})."
            return web.json_response({"error": {"message": said}}, status=400)
        assert body.get("lora_path") in (None, *self.adapters)
        if not body.get("stream"):
            scores = [[None, prompt[0], None], *([self.score(token), token, None] for token in prompt[1:])]
            meta = {"prompt_tokens": len(prompt), "input_token_logprobs": scores}
            return web.json_response({"text": "", "meta_info": meta})
        self.bodies.append(body)

        def event(number: int):
            first = number if self.incremental else 0
            said = [[self.logprob(100 + place), 100 + place, None] for place in range(first, number + 1)]
            top = [[[-0.25, 7, None], one] for one in said]
            length = params["max_new_tokens"]
            finish = {"type": "length", "length": length} if number == length - 1 else None
            meta = {"completion_tokens": number + 1, "finish_reason": finish, "output_token_logprobs": said}
            meta |= {"prompt_tokens": len(prompt), "output_top_logprobs": top}
            return lambda: {"text": "", "meta_info": meta}

        return await self.send(request, [event(number) for number in range(params["max_new_tokens"])])


@asynccontextmanager
async def listening(server: ScriptedServer, port: int = 0):
    """The port of a scripted server."""
    app = web.Application(client_max_size=0)  # a request may have many pictures
    app.router.add_route("*", "/{tail:.*}", server.route)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


def write_files(folder: Path) -> Path:
    """Write a model's folder, of which a scripted server reads the configuration alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    (folder / "model.safetensors").write_bytes(b"old")
    return folder


@asynccontextmanager
async def on_server(
    server: ScriptedServer,
    folder: Path,
    *,
    key: str = KEY,
    finish: bool = False,
    adapter=None,
    pictures=None,
    stuck_seconds: float = 60.0,
    sample: SampleText | None = None,
    rendezvous=None,
):
    """An engine whose policy is sampled by a scripted server.

    Args:
        server: the server.
        folder: for the files of the model, and of weights.
        key: that the engine sends.
        finish: see `ExternalEngine`.
        adapter: the policy's; None: its server gets whole weights.
        pictures: see `VllmApi`.
        stuck_seconds: see `ExternalEngine`.
        sample: see `VllmApi`.
        rendezvous: see `VllmApi`.
    """
    model, files = write_files(folder / "model"), folder / "weights"
    files.mkdir()
    async with listening(server) as port:
        connection = EngineConnection(Address(url=f"http://127.0.0.1:{port}", key=key))
        api = (
            VllmApi(
                connection,
                BOUNDS,
                BOUNDS.stop_ids,
                VllmPolicy(
                    owner=OWNER,
                    seeded=False,
                    sample=sample,
                    rank=None if adapter is None else adapter.rank,
                    pictures=pictures,
                ),
                rendezvous=rendezvous,
            )
            if isinstance(server, ScriptedVllm)
            else SglangApi(connection, BOUNDS, BOUNDS.stop_ids, model, sample)
        )
        known = {
            "name": "policy",
            "api": api,
            "bounds": BOUNDS,
            "shapes": SHAPES if adapter is None else ADAPTED,
            "folder": files,
            "dtype": torch.float32,
            "process": None,
            "kv_bytes": 1000,
            "most_calls": 4,
            "version": PolicyVersion(0, 0),
        }
        if rendezvous is not None:
            policy = ServedBroadcast(**known, rounds=WeightRounds(rendezvous, bucket_bytes=64))
        elif adapter is None:
            policy = ExternalPolicy(**known)
        else:
            policy = ServedAdapter(**known, adapter=adapter, base=str(model), first=None)
        engine = ExternalEngine({"policy": policy}, finish, stuck_seconds)
        try:
            yield engine
        finally:
            await engine.close()


async def pieces_of(engine: Engine, **sampling):
    """The pieces of a reply to `PROMPT`."""
    params = SamplingParams(**({"temperature": 1.0, "max_tokens": 6, "seed": 3} | sampling))
    return [piece async for piece in engine.generate(engine_request(PROMPT, params))]
