"""Tasks of Harbor's format in a folder, and a box in memory in the place of a container."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from palestra.sandbox import Finished, SandboxSpec
from palestra_worlds.harbor import boxes

CLOSED = '[environment]\nnetwork_mode = "no-network"\n'


def write_task(folder: Path, toml: str = CLOSED, **files: str | None) -> Path:
    """A whole task; `files` by path, with `__` for `/` and `_DOT_` for `.`, of which None is left out."""
    shown = {
        "task.toml": toml,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "#!/bin/sh\n",
        "solution/solve.sh": "#!/bin/sh\n",
    }
    given = {name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()}
    for name, text in (shown | given).items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


Verifier = Callable[["MemoryBox"], Finished | None]


@dataclass
class MemoryBox:
    """Files by path; commands are those of `boxes` and `scoring`, and `verifier` is what /tests/test.sh does."""

    spec: SandboxSpec
    verifier: Verifier
    provider: str | None = None
    workdir: str = "/app"
    endpoint: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    async def run(self, command, *, input=b"", environment=None, folder=None, user=None, seconds=None) -> Finished:
        text = " ".join(command)
        self.done.append(text)
        self.variables.update(environment or {})
        if "rm -rf" in text:
            self.files = {path: data for path, data in self.files.items() if not path.startswith(("/tests", "/logs/v"))}
        if "cp -L" in text and command[-1] in self.files:
            copied = {f"/logs/copies/{PurePosixPath(command[-1]).name}": self.files[command[-1]]}
            kept = {path: data for path, data in self.files.items() if not path.startswith("/logs/copies/")}
            self.files = kept | copied
        if "/tests/test.sh" in text:
            return self.verifier(self) or Finished(code=0, output=b"tested", errors=b"")
        return Finished(code=0, output=b"", errors=b"")

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        self.files.update({f"{folder}/{name}": data for name, data in files.items()})

    async def get(self, folder: str, most_bytes: int) -> dict[str, bytes]:
        begin = f"{folder}/"
        return {path.removeprefix(begin): data for path, data in self.files.items() if path.startswith(begin)}

    async def stop_processes(self) -> None:
        self.done.append("stop")

    async def close(self) -> None:
        self.done.append("close")


def in_memory(monkeypatch, verifier: Verifier) -> list[MemoryBox]:
    """Have boxes in memory, and return those that were opened."""
    opened: list[MemoryBox] = []

    @asynccontextmanager
    async def sandbox(spec, provider=None):
        opened.append(box := MemoryBox(spec, verifier, provider))
        try:
            yield box
        finally:
            await box.close()

    monkeypatch.setattr(boxes, "sandbox", sandbox)
    return opened


def writes(**files: str) -> Verifier:
    """A verifier that leaves files in /logs/verifier; `_` stands for `.`."""

    def verifier(box: MemoryBox) -> None:
        box.files |= {f"/logs/verifier/{name.replace('_', '.')}": text.encode() for name, text in files.items()}

    return verifier
