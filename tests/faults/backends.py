"""Jobs whose engines and trainers are processes of their own, one of which is hurt while the job stands still."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
from engines.models import vllm_python, write_model
from outcome import assert_complete, assert_same_metrics
from servers import SCRIPTED, TINY, Job, run_through, until
from service import lives

from faults.cells import ENGINE_WORKER, TRAINER_RANK, VLLM_SERVER, Cell
from faults.standing import others_continue, stopped

STUCK_SECONDS, SILENT_SECONDS = 3.0, 20.0
OVER_SECONDS = 240.0  # in which a job is over whatever was hurt
Settings = dict[str, Any]


def settings_of(component: str) -> Settings:
    """The job of a component; a checkpoint after each step, so that little has to be repeated."""
    pool = {"replicas": 2, "stuck_seconds": STUCK_SECONDS}
    trained: dict[str, Settings] = {
        ENGINE_WORKER: SCRIPTED | {"engine": SCRIPTED["engine"] | pool | {"delay_seconds": 0.05}},
        TRAINER_RANK: TINY
        | {"trainer": {"threads": 1, "devices": 2, "dtype": "float32", "stuck_seconds": SILENT_SECONDS}},
    }
    return trained[component] | {"checkpoint": {"every_steps": 1}}


PROGRAMS = {ENGINE_WORKER: "palestra.runtime.engine_process", TRAINER_RANK: "palestra_sharded.processes"}


def on_vllm(folder: Path) -> Settings:
    """The job whose only inference worker is a vLLM server; skips the test where there is no vLLM."""
    policy = TINY["policies"]["policy"] | {"model": str(write_model(folder / "model"))}
    engine = {"kind": "vllm", "python": str(vllm_python()), "dtype": "float32", "max_batch": 16, "threads": 1}
    engine["stuck_seconds"] = SILENT_SECONDS
    return (
        {name: value for name, value in TINY.items() if name != "deterministic"}
        | {"policies": {"policy": policy}, "engine": engine}
        | {"trainer": {"threads": 1, "dtype": "float32"}, "checkpoint": {"every_steps": 1}}
    )


def victim_of(component: str, children: list[psutil.Process], held: psutil.Process) -> psutil.Process:
    """Which of the processes of a job is hurt: the one that stands still, if it is one of the component."""
    if component == VLLM_SERVER:
        (keeper,) = (one for one in children if any(word.endswith("process/keeper.py") for word in one.cmdline()))
        return max(keeper.children(recursive=True), key=lambda one: one.memory_info().rss)
    backends = [one for one in children if PROGRAMS[component] in one.cmdline()]
    return held if held in backends else backends[0]


def undisturbed(component: str, folder: Path) -> Job:
    """The job of a component, played to its end."""
    with Job(folder, settings_of(component), fresh=True) as job:
        run_through(job, [])
        assert_complete(job)
    return job


def play(cell: Cell, folder: Path, other: Callable[[str], Job]) -> None:
    """Provoke a fault, wait until the job is over, and look at what it leaves.

    `other` returns the job of a component that nothing has disturbed.
    """
    at_start, cancelled = cell.moment.point == "during_start", cell.moment.asks_to_cancel
    # What vLLM samples depends on what it computes together, so that no two jobs are alike.
    on_server = cell.component == VLLM_SERVER
    wanted = None if cancelled or on_server else other(cell.component)
    settings = on_vllm(folder) if on_server else settings_of(cell.component)
    with Job(folder, settings | ({"steps": 100_000} if cancelled else {}), fresh=True) as job:
        server = job.serve(fault=cell.moment.fault(cell.component))
        if not at_start:
            until_it_listens(job)
            job.work()
        if cancelled:
            until(lambda: job.checkpoints() or server.popen.poll() is not None, "it trains", OVER_SECONDS)
            server.send(signal.SIGINT)
        top = psutil.Process(server.popen.pid)

        def processes() -> list[psutil.Process]:
            return [top, *top.children(recursive=True)]

        held = until(lambda: next(stopped(processes), None), f"it stops {cell.moment.name}", OVER_SECONDS)
        children = top.children(recursive=True)
        victim = victim_of(cell.component, children, held)
        victim.send_signal(cell.signal)
        with others_continue(processes, victim, 0.05):
            if at_start:
                until_it_listens(job)
                job.work()
            if cancelled:
                server.wait(OVER_SECONDS)
                assert_what_was_trained_is_there(job)
            else:
                job.finish(OVER_SECONDS)
        until(lambda: not any(map(lives, children)), "its processes are gone")
    if not cancelled:
        assert_complete(job)
        assert len(job.servers) == 1, "a backend's death is not the job's"
    if wanted is not None:
        assert_same_metrics(job, wanted)
        assert weights_of(job) == weights_of(wanted)


def until_it_listens(job: Job) -> None:
    """Wait until the newest server of a job listens; one of vLLM compiles its model first."""
    server = job.servers[-1]
    until(lambda: "data plane at" in server.output or server.popen.poll() is not None, "it listens", OVER_SECONDS)
    assert "data plane at" in server.output, server.output


def assert_what_was_trained_is_there(job: Job) -> None:
    """The newest checkpoint is of the last step that the job tells of, or of the next, and nothing accepted is lost.

    A step is told of when it is validated, after its checkpoint: a job that ends between them validates on resuming.
    """
    told, saved = int(job.metrics()[-1]["step"]), int(job.checkpoints()[-1].name.removeprefix("step-"))
    assert told <= saved <= told + 1, job.servers[-1].output
    rows = job.query("SELECT episode_id FROM episodes WHERE state = 'completed'")
    assert {one["episode"] for one in job.worker_log("ended")} <= {row["episode_id"] for row in rows}


def weights_of(job: Job) -> str | dict[str, list[int]]:
    """What the newest checkpoint has, bit by bit."""
    folder = job.checkpoints()[-1]
    if (folder / "weights.txt").exists():
        return job.weights()
    found = safetensors.torch.load_file(folder / "model.safetensors")
    return {name: tensor.flatten().view(torch.int32).tolist() for name, tensor in found.items()}
