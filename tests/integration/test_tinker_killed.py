"""A Tinker server that is killed at any moment: no step is done twice, none is lost, and every future is answered."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import servers
from servers import PALESTRA, free_port
from unit.tinker.serving import TINY, Client, Model, data_of

STEPS = 5
PROMPT = [5, 6, 7]


class Process:
    """A server as a process, which is started again when it was killed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: servers.Started | None = None
        self.kills = 0

    def start(self, fault: str | None = None) -> None:
        words = ["tinker", TINY, "--dir", str(self.folder), "--port", str(self.port), "--dtype", "float32"]
        words += ["--threads", "1", "--deterministic", "--checkpoint-steps", "2"]
        started = servers.Process.start([PALESTRA, *words], self.folder.parent / "log", fault, fresh=False)
        self.process = started.popen
        for _ in range(600):
            with contextlib.suppress(httpx2.TransportError):
                httpx2.get(f"http://127.0.0.1:{self.port}/api/v1/healthz")
                return
            assert self.process.poll() is None or fault, (self.folder.parent / "log").read_text()
            if self.process.poll() is not None:
                return
            time.sleep(0.1)
        raise AssertionError((self.folder.parent / "log").read_text())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def again(self, send: Callable[[], httpx2.Response]) -> httpx2.Response:
        """Send a request until it is answered, as the SDK does; a server that has died is started again."""
        while True:
            with contextlib.suppress(httpx2.TransportError):
                return send()
            assert self.process is not None
            if self.process.poll() is None:  # it is dying, or the connection was one to the process before
                time.sleep(0.02)
                continue
            self.kills += 1
            self.start()


class Persistent(Client):
    """A client that sends every request until it is answered."""

    def __init__(self, server: Process) -> None:
        self.server = server
        super().__init__(f"http://127.0.0.1:{server.port}", (server.folder / "keys" / "default").read_text())

    def post(self, route: str, body: Any) -> httpx2.Response:
        return self.server.again(lambda: super(Persistent, self).post(route, body))


@contextlib.contextmanager
def server_in(folder: Path, fault: str | None = None) -> Iterator[Process]:
    server = Process(folder / "tinker")
    server.start(fault)
    try:
        yield server
    finally:
        server.kill()


def loop(server: Process, between: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train, save and sample; return everything that a client has seen."""
    client = Persistent(server)
    client.session()
    between()
    model: Model = client.model(rank=4)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for number in range(STEPS):
        between()
        computed = model.computes(data_of(number))
        between()
        stepped = model.steps(1e-2)
        between()
        seen["losses"].append(model.output(computed).metrics["loss:sum"])
        between()
        seen["norms"].append(client.result(stepped)["metrics"])
    between()
    path = model.samples_as("last")
    between()
    saved = model.saves("last")
    between()
    sampler = client.sampler(model_path=path)
    between()
    sample = client.sample(sampler, PROMPT, samples=3, max_tokens=6, seed=1)
    seen["samples"] = [(one.tokens, one.logprobs) for one in sample.sequences]
    between()
    seen["logprobs"] = model.logprobs().tolist()
    seen["steps"] = rows_of(server, model)
    between()
    again = client.result(client.good("load_weights", load_of(client, saved))["request_id"])
    seen["loaded"] = Model(client, again["model_id"]).logprobs().tolist()
    client.http.close()
    return seen


def load_of(client: Client, path: str) -> dict[str, Any]:
    return {"session_id": client.session_id, "model_seq_id": 7, "path": path, "optimizer": True}


def rows_of(server: Process, model: Model) -> int:
    run = server.folder / "models" / model.model_id.replace(":", "-")
    return len((run / "metrics.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with server_in(tmp_path_factory.mktemp("undisturbed")) as server:
        return loop(server)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found == wanted
    np.testing.assert_array_equal(found["loaded"], found["logprobs"])
    assert found["steps"] == STEPS


# Requests of the loop: 1 creation, 5 x 2, 2 saves, 1 sample, 1 forward, 1 load, 1 forward.
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("before_tinker_accept:1", id="a model is asked for, and that is nowhere yet"),
        pytest.param("after_tinker_accept:1", id="a model is asked for, and that is not answered yet"),
        pytest.param("before_tinker_result:1", id="a model is made, and that is nowhere yet"),
        pytest.param("after_tinker_accept:4", id="a gradient is accepted"),
        pytest.param("before_tinker_result:4", id="a gradient is computed, and that is nowhere yet"),
        pytest.param("after_tinker_result:4", id="a gradient is computed, and its future is answered after the kill"),
        pytest.param("after_tinker_accept:5", id="a step is accepted"),
        pytest.param("before_step:2", id="right before the weights change"),
        pytest.param("after_step:2", id="the weights have changed, and that is nowhere yet"),
        pytest.param("before_tinker_result:5", id="a step is done, and its result is nowhere yet"),
        pytest.param("after_tinker_result:5", id="a step is done, and its future is answered after the kill"),
        pytest.param("before_checkpoint_rename:1", id="while the first checkpoint is written"),
        pytest.param("after_pool_rename:1", id="weights for a sampler are saved, and that is nowhere yet"),
        pytest.param("before_tinker_result:13", id="a checkpoint is saved, and that is nowhere yet"),
        pytest.param("during_generation:2", id="while replies are sampled"),
        pytest.param("before_tinker_result:14", id="replies are sampled, and that is nowhere yet"),
    ],
)
def test_a_kill_changes_nothing_that_a_client_sees(tmp_path, undisturbed, fault):
    with server_in(tmp_path, fault) as server:
        found = loop(server)
        assert server.kills == 1
    assert_same(found, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)  # it starts 25 servers
def test_a_kill_between_any_two_requests_changes_nothing(tmp_path, undisturbed):
    with server_in(tmp_path) as server:

        def between() -> None:
            server.kill()
            server.start()

        found = loop(server, between)
    assert_same(found, undisturbed)
