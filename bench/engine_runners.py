"""The contestants of `engine`, each a process that is started once and asked for one piece of work after another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from processes import HERE, ROOT, STOP_SECONDS, BenchError, shown

from palestra.models.catalog import SMOLLM2, model_folder

# What Palestra asks of malloc itself (palestra/models/device.py), asked of the others' processes from outside.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
PALESTRA, GENERATE, VLLM = "Palestra", "generate", "vLLM"
VLLM_PYTHON = ROOT / ".venv-peers" / "vllm" / "bin" / "python"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """How a runner is started."""

    name: str
    command: tuple[object, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command as one would type it."""
        return shown(self.command, {"PYTHONPATH": "bench", **self.environment})


class Runner:
    """A contestant's process."""

    def __init__(self, one: Contestant, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.contestant, self._process, self._log = one, process, log
        self._answer()  # that it is ready

    def seconds(self, work: str, number: int) -> list[float]:
        """Seconds of each repeat of a piece of work, in round `number`.

        Raises:
            BenchError: the process failed; the message has its output.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: no answer will come
            print(json.dumps({"work": work, "round": number}), file=self._process.stdin, flush=True)
        found: list[float] = self._answer()["seconds"]
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise BenchError(f"{self.contestant.name} ended with {self._process.wait()}:\n{self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def contestants(threads: int) -> list[Contestant]:
    """Palestra, `generate`, and vLLM where its environment is there."""
    arguments = ("--model", model_folder(SMOLLM2), "--threads", threads)
    ours = (sys.executable, HERE / "engine_palestra.py", *arguments)
    generate = (sys.executable, HERE / "peers" / "engine_generate.py", *arguments)
    found = [
        Contestant(name=PALESTRA, command=ours),
        Contestant(name=GENERATE, command=generate, environment=KEPT_HEAP),
    ]
    if VLLM_PYTHON.exists():
        vllm = (VLLM_PYTHON, HERE / "peers" / "engine_vllm.py", *arguments)
        found.append(Contestant(name=VLLM, command=vllm))
    return found


@contextmanager
def running(one: Contestant) -> Iterator[Runner]:
    """Its process, with the model loaded; it ends when its input does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"PYTHONPATH": str(HERE), **one.environment}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(map(str, one.command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        try:
            yield Runner(one, process, log)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
