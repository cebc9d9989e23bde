"""A base server as a process that tests kill and start again, and light jobs on it."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from outcome import assert_complete
from servers import PALESTRA, TINY, Job, Process, until

POLICY = TINY["policies"]["policy"] | {"adapter": {"rank": 4}, "optimizer": {"learning_rate": 3e-2}}
ALONE = TINY | {"policies": {"policy": POLICY}, "trainer": {"threads": 1}}


class Base:
    """A base server's process, which may be started again in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[Process]()

    @property
    def address(self) -> str:
        return f"unix:{self.folder / 'base' / 'socket'}"

    @property
    def key(self) -> Path:
        return self.folder / "base" / "keys" / "default"

    def start(self, fault: str | None = None, *more: object) -> Process:
        log = self.folder / f"base-{len(self.processes)}.log"
        options: list[object] = [
            "--dir",
            self.folder / "base",
            "--runs",
            self.folder,
            "--deterministic",
            "--threads",
            "1",
        ]
        options += more
        process = Process.start([PALESTRA, "base", "tiny-random", *options], log, fault)
        self.processes.append(process)
        until(lambda: "key of" in process.output or process.popen.poll() is not None, "the base server listens")
        assert process.popen.poll() is None, process.output
        return process

    def job(self, name: str, **changes: object) -> Job:
        policy = POLICY | {"base": self.address}
        settings = {key: value for key, value in TINY.items() if key not in ("engine", "trainer")}
        return Job(self.folder / name, settings | {"name": name, "policies": {"policy": policy}} | changes)


def tensors(job: Job) -> dict[str, torch.Tensor]:
    found = safetensors.torch.load_file(job.checkpoints()[-1] / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in found.items() if "lora_B" in name)
    return found


def assert_same(job: Job, alone: Job) -> None:
    assert_complete(job)
    found, wanted = tensors(job), tensors(alone)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
