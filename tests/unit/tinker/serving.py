"""A Tinker server in a thread of this process, and a client of plain HTTP, whose requests a test writes itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from palestra.config import TrainerConfig
from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra_bases.models import SharedModelOptions, shared_models
from palestra_bases.tinker import protobuf
from palestra_bases.tinker.records import TinkerLimits
from palestra_bases.tinker.serving import TinkerOptions, TinkerServer, tinker_server
from unit.tinker.messages import batch_message, datum

TINY = "tiny-random"
FLOAT32 = {"dtype": "float32", "threads": 1, "device": "cpu"}


_OPEN: list[httpx2.Client] = []  # of all clients, which end with the server


class Failed(Exception):
    """A future that has failed."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["error"])
        self.category = answer["category"]


@dataclass
class Running:
    """A server, and the loop in which it runs."""

    server: TinkerServer
    loop: asyncio.AbstractEventLoop
    folder: Path

    @property
    def url(self) -> str:
        return self.server.url

    def key(self, tenant: str = "ada") -> str:
        return (self.folder / "keys" / tenant).read_text()

    def do(self, work: Callable[[], Any]) -> Any:
        """Await what `work` returns in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(60)


@contextlib.contextmanager
def running(
    folder: Path,
    limits: TinkerLimits | None = None,
    *,
    deterministic: bool = False,
    loaded_adapters: int = 16,
    slots: int | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve `tiny-random` to the tenants ada and ben."""
    known = limits or TinkerLimits(poll_seconds=5.0)
    started: list[Any] = []
    ready, over = threading.Event(), threading.Event()

    def serve() -> None:
        async def main() -> None:
            settings = TinkerOptions(
                folder=folder,
                port=0,
                tenants=("ada", "ben"),
                limits=known,
                **options,
            )
            models = SharedModelOptions(
                models=(TINY,),
                engine=EmbeddedEngineConfig.model_validate(FLOAT32),
                trainer=TrainerConfig.model_validate(FLOAT32),
                deterministic=deterministic,
                loaded_adapters=loaded_adapters,
                slots=slots,
            )
            async with tinker_server(settings, shared_models(models)) as server:
                started.append(Running(server, asyncio.get_running_loop(), folder))
                ready.set()
                while not over.is_set():
                    await asyncio.sleep(0.02)

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - raised where the server was wanted
            started.append(error)
            ready.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert ready.wait(60)
        if isinstance(started[0], BaseException):
            raise started[0]
        yield started[0]
    finally:
        while _OPEN:
            _OPEN.pop().close()
        over.set()
        thread.join(60)
    if len(started) > 1:
        raise started[1]


@dataclass
class Client:
    """One tenant's client: it counts its requests as the SDK does."""

    url: str
    key: str
    session_id: str = ""
    models: int = 0
    samplers: int = 0
    http: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx2.Client(base_url=f"{self.url}/api/v1/", headers={"x-api-key": self.key}, timeout=60)
        _OPEN.append(self.http)

    def post(self, route: str, body: Any) -> httpx2.Response:
        if isinstance(body, dict | list):
            return self.http.post(route, json=body)
        return self.http.post(route, content=body, headers={"content-type": protobuf.CONTENT_TYPE})

    def good(self, route: str, body: Any) -> dict[str, Any]:
        """Post something, and return the answer, which is none of an error."""
        answer = self.post(route, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self) -> str:
        self.session_id = self.good("create_session", {"tags": [], "sdk_version": "test"})["session_id"]
        return self.session_id

    def result(self, request_id: str) -> Any:
        """Wait for a result: JSON, or the bytes of a message."""
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id})
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == protobuf.CONTENT_TYPE:
                return answer.content
            found = answer.json()
            if "error" in found:
                raise Failed(found)
            if found.get("type") != "try_again":
                return found

    def model(self, rank: int = 4, seed: int = 1, **lora: Any) -> Model:
        """Make a model in the present session."""
        if not self.session_id:
            self.session()
        body = {
            "session_id": self.session_id,
            "model_seq_id": self.models,
            "base_model": TINY,
            "lora_config": {"rank": rank, "seed": seed, **lora},
        }
        self.models += 1
        accepted = self.good("create_model", body)
        return Model(self, self.result(accepted["request_id"])["model_id"])

    def sampler(self, **what: str) -> str:
        """Make a sampling session of a base model or a path."""
        if not self.session_id:
            self.session()
        body = {"session_id": self.session_id, "sampling_session_seq_id": self.samplers, **what}
        self.samplers += 1
        return self.good("create_sampling_session", body)["sampling_session_id"]

    def sample(self, sampler: str, prompt: Sequence[int], number: int = 0, samples: int = 1, **more: Any) -> Any:
        """Sample, and return the message `SampleResponse`."""
        params = {name: more.pop(name) for name in list(more) if name in SAMPLING}
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "num_samples": samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": params,
            **more,
        }
        accepted = self.good("asample", body)
        assert len(accepted["sample_sequence_ids"]) == samples
        return protobuf.parse("SampleResponse", self.result(accepted["request_id"]))


SAMPLING = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")


@dataclass
class Model:
    """A model, and the number of its last request."""

    client: Client
    model_id: str
    seq_id: int = 0

    def ask(self, route: str, **fields: Any) -> str:
        """Send a request in JSON, and return its id."""
        self.seq_id += 1
        body = {"model_id": self.model_id, "seq_id": self.seq_id, **fields}
        return self.client.good(route, body)["request_id"]

    def computes(self, data: Sequence[Any], loss: str = "cross_entropy", seq_id: int | None = None, **more: Any) -> str:
        """Send a `forward_backward`, and return its id."""
        if seq_id is None:
            self.seq_id += 1
        message = batch_message(data, loss, model_id=self.model_id, seq_id=seq_id or self.seq_id, **more)
        return self.client.good("forward_backward", message.SerializeToString())["request_id"]

    def output(self, request_id: str) -> Any:
        return protobuf.parse("ForwardBackwardOutput", self.client.result(request_id))

    def steps(self, rate: float = 1e-2, **params: float) -> str:
        return self.ask("optim_step", adam_params={"learning_rate": rate, **params})

    def train(self, number: int = 1, rate: float = 1e-2) -> None:
        """Do some steps on different data, the same in each call."""
        for each in range(number):
            self.computes(data_of(each))
            self.client.result(self.steps(rate))

    def logprobs(self) -> np.ndarray:
        """What the model says of fixed data now."""
        output = self.output(self.computes(data_of(0), forward_only=True))
        return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")

    def saves(self, name: str, **more: Any) -> str:
        return self.client.result(self.ask("save_weights", path=name, **more))["path"]

    def samples_as(self, name: str, **more: Any) -> str:
        return self.client.result(self.ask("save_weights_for_sampler", path=name, **more))["path"]


def data_of(number: int) -> list[Any]:
    """Two data that depend on a number."""
    draw = np.random.default_rng(number)
    rows = [draw.integers(0, 250, length).tolist() for length in (8, 5)]
    return [datum(row[:-1], row[1:], weights=[1.0] * (len(row) - 1)) for row in rows]
