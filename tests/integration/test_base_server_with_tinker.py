"""Scripts of the Tinker SDK and ordinary jobs on one base, which is killed: each gets the bits that it gets alone."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from base_servers import ALONE, Base, assert_same
from servers import Job, Plane, free_port, run_through, until

os.environ["TINKER_TELEMETRY"] = "0"
tinker = pytest.importorskip("tinker")
types = tinker.types
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
STEPS, PROMPT = 6, [5, 6, 7]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Find the connections that the SDK does not close here, and not in a later test."""
    yield
    gc.collect()


class TinkerBase(Base):
    """A base server that serves the Tinker API as well."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()

    def start(self, fault: str | None = None, *more: object) -> Any:
        return super().start(fault, "--tinker-port", self.port, *more)

    @property
    def tinker_key(self) -> str:
        return (self.folder / "base" / "tinker" / "keys" / "default").read_text()

    def script(self, number: int) -> Script:
        return Script(f"http://127.0.0.1:{self.port}", self.tinker_key, number)


class Script(threading.Thread):
    """A loop of reinforcement learning, as a user of the SDK writes it."""

    def __init__(self, url: str, key: str, number: int) -> None:
        super().__init__()
        self.url, self.key, self.number = url, key, number
        self.seen: list[Any] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with tinker.ServiceClient(base_url=self.url, api_key=self.key) as service:
                self.train(service)
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self.error = error

    def train(self, service: Any) -> None:
        rank, seed = (4, 1)[self.number], self.number  # `check_determinism` refuses others on some machines
        client = service.create_lora_training_client(base_model="tiny-random", rank=rank, seed=seed).result()
        for step in range(STEPS):
            sampler = client.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=6 + self.number, seed=100 * seed + step, stop=[])
            found = sampler.sample(types.ModelInput.from_ints(PROMPT), 3, params).result()
            replies = [(list(one.tokens), list(one.logprobs)) for one in found.sequences]
            computed = client.forward_backward([datum(*reply) for reply in replies], "importance_sampling")
            stepped = client.optim_step(types.AdamParams(learning_rate=3e-2))
            self.seen.append((replies, computed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]))
        self.seen.append(client.save_state("end").result().path.rpartition("/")[2])

    def result(self) -> list[Any]:
        """Wait for the script, and return everything that it has seen."""
        self.join(240)
        assert not self.is_alive(), f"the script has done {len(self.seen)} steps"
        if self.error is not None:
            raise self.error
        return self.seen


def datum(tokens: list[int], logprobs: list[float]) -> Any:
    ids, before = PROMPT + tokens, [0.0] * (len(PROMPT) - 1)
    columns = {
        "target_tokens": ("int64", ids[1:]),
        "logprobs": ("float32", before + logprobs),
        "advantages": ("float32", before + [(-1.0) ** token for token in tokens]),
    }
    inputs = {
        name: types.TensorData(data=data, dtype=kind, shape=[len(data)]) for name, (kind, data) in columns.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[TinkerBase]:
    base = TinkerBase(folder)
    try:
        yield base
    finally:
        for process in base.processes:
            process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[tuple[Job, list[Any]]]:
    """The job with an engine and a trainer of its own, and what each script sees that has the server for itself."""
    seen = []
    with serving(tmp_path_factory.mktemp("scripts")) as base:
        base.start()
        for number in range(2):
            script = base.script(number)
            script.start()
            seen.append(script.result())
    with Job(tmp_path_factory.mktemp("job"), ALONE) as job:
        run_through(job, [])
        yield job, seen


def together(
    base: TinkerBase, alone: tuple[Job, list[Any]], disturb: Callable[[list[Job], list[Script]], None]
) -> None:
    """Run two jobs and two scripts at the same time, and compare each with itself alone."""
    with contextlib.ExitStack() as stack:
        scripts = [base.script(number) for number in range(2)]
        jobs = [stack.enter_context(base.job(name)) for name in ("first", "second")]
        for job in jobs:  # which wait for a base server that is not there, and so come first
            job.start()
            job.work()
        for script in scripts:
            script.start()
        disturb(jobs, scripts)
        for job in jobs:
            job.finish()
            assert len(job.servers) == 1, "a light job survives in its own process"
            assert_same(job, alone[0])
        assert [script.result() for script in scripts] == alone[1]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, id="at any moment", marks=pytest.mark.long),
        pytest.param("before_step:5", id="right before weights change"),
    ],
)
def test_scripts_and_jobs_get_what_they_get_alone_and_survive_the_death_of_their_base(
    tmp_path, alone, monkeypatch, fault
):
    with serving(tmp_path) as base:
        monkeypatch.setenv("PALESTRA_BASE_KEY_FILE", str(base.key))
        dying = base.start(fault)

        def kill(jobs: list[Job], scripts: list[Script]) -> None:
            if fault is None:
                until(lambda: all(script.seen for script in scripts), "each script has trained", 240)
                until(lambda: any(job.manifests() for job in jobs), "a job trains", 240)
                dying.kill()
            assert dying.wait() < 0
            base.start()

        together(base, alone, kill)


def test_a_checkpoint_of_a_script_is_served_by_a_light_job_on_the_base_that_has_trained_it(tmp_path, monkeypatch):
    with serving(tmp_path) as base:
        monkeypatch.setenv("PALESTRA_BASE_KEY_FILE", str(base.key))
        base.start(None, "--loaded-adapters", 1)
        script = base.script(0)
        script.start()
        script.result()
        (saved,) = (base.folder / "base" / "tinker" / "weights").glob("*/step-*")
        copied = tmp_path / "other" / saved.name  # which is another adapter for the server
        shutil.copytree(saved, copied)
        models = {"trained": saved, "copy": copied, "plain": "tiny-random"}
        policies = {name: {"model": str(model), "base": base.address} for name, model in models.items()}
        settings = {"name": "served", "kind": "inference", "policies": policies}
        with Job(tmp_path / "served", settings, tasks=(), validation=()) as job, Plane(job.url) as plane:
            job.start()
            body = {"messages": [{"role": "user", "content": "1"}], "temperature": 0, "max_tokens": 4, "logprobs": True}
            found = {}
            for name in ("trained", "copy", "plain", "trained"):
                answer = plane.post("/v1/chat/completions", {"model": name, **body})
                assert answer.status_code == 200, answer.text
                found[name] = [one["logprob"] for one in answer.json()["choices"][0]["logprobs"]["content"]]
            assert found["trained"] == found["copy"] != found["plain"]
