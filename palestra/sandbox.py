"""Sandboxes: isolated boxes in which programs of a model, and what scores them, run.

    async with SandboxSpec(image="python:3.12-slim").open() as box:
        await box.put({"test.py": code}, "/tests")
        done = await box.run(["python3", "/tests/test.py"], seconds=30)

A provider makes the boxes. Packages bring providers by entry points of `palestra.sandboxes`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension, nearest

GROUP = "palestra.sandboxes"
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
# Before a colon, these make podman read a path of this machine and not an image by its name.
TRANSPORTS = ("dir", "oci", "oci-archive", "docker-archive", "docker-daemon", "containers-storage", "ostree", "sif")
Network = Literal["none", "endpoint", "open"]


def is_archive(image: str) -> bool:
    """Return whether an image is the path of an archive, and not a name."""
    return image.endswith(_ARCHIVES)


def is_image_path(image: str) -> bool:
    """Return whether an image is a path: of an archive, or of a folder with a Dockerfile."""
    return is_archive(image) or image.startswith(("./", "../", "~", "/"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Limits of a box; None: the provider keeps no such limit.

    Attributes:
        cpus: processors that all processes together may use, such as 0.5.
        memory_mib: memory of all processes together, in MiB.
        processes: of all users together, threads included.
        disk_mib: what the box may write, in MiB.
        seconds: for one command, unless `run` says otherwise.
        output_bytes: for standard output and standard error of one command, each.
    """

    cpus: float | None = None
    memory_mib: int = 512
    processes: int = 128
    disk_mib: int | None = 256
    seconds: float = 60.0
    output_bytes: int = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """What a box is made of.

    Attributes:
        image: name of an image, or path of an archive (`.tar`, `.tar.gz`, `.tgz`) of an image or a root folder.
        build: folder with a Dockerfile, from which the image is built once; `image` or `build`, not both.
        folder: its files are copied into `workdir`.
        user: name or number of the user that commands run as; None: the image's.
        environment: variables of every command.
        workdir: folder in the box in which commands start; None: the image's, or the provider's.
        network: `none`; `endpoint`: only the server at `endpoint`; `open`: what the machine reaches.
        endpoint: base URL of a model's server, which the box reaches through a socket of this process.
        endpoint_key: its key, which stays outside: programs in the box send `Sandbox.endpoint_key` in its place.
        limits: of the box.
    """

    image: str | None = None
    build: Path | None = None
    folder: Path | None = None
    user: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    network: Network = "none"
    endpoint: str | None = None
    endpoint_key: str | None = None
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def open(self, provider: str | SandboxProvider | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Open a box for a block; see `sandbox`."""
        return sandbox(self, provider)

    def check(self) -> None:
        """Raise ConfigError for values that no provider can use."""
        limits = self.limits
        numbers = (limits.memory_mib, limits.processes, limits.seconds, limits.output_bytes)
        optional = tuple(one for one in (limits.cpus, limits.disk_mib) if one is not None)
        if not all(math.isfinite(one) and one > 0 for one in numbers + optional):
            raise ConfigError(f"limits of a sandbox are above 0: {limits}")
        if self.image is not None and self.build is not None:
            raise ConfigError("a sandbox has an image or a folder to build one from, not both")
        if self.image is not None and (self.image[:1] in ("", "-") or self.image.split(":")[0] in TRANSPORTS):
            raise ConfigError(f"{self.image!r} is no name of an image")
        if (self.network == "endpoint") != (self.endpoint is not None):
            raise ConfigError('the endpoint of a sandbox and network = "endpoint" belong together')
        if self.endpoint_key is not None and self.endpoint is None:
            raise ConfigError("the key of a sandbox's endpoint needs the endpoint")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ConfigError(f"the working folder of a sandbox is an absolute path, and not {self.workdir!r}")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: there is no such folder for a sandbox")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a command ended.

    Attributes:
        code: exit code; 128 + the signal for a killed command, and for one that was ended here (137).
        output: standard output, its beginning.
        errors: standard error, its beginning.
        timed_out: whether it ran too long, and was ended.
        cut: whether it wrote too much, and was ended.
    """

    code: int
    output: bytes
    errors: bytes
    timed_out: bool = False
    cut: bool = False


class Sandbox(Protocol):
    """An open box.

    All methods raise EpisodeForfeited if the box does not work and what ran in it may be the reason: it was ended at a
    limit, say, or its shell is gone. They raise EnvironmentFailed if that can't be the reason: it was removed from
    outside, or its engine does not answer.
    """

    @property
    def workdir(self) -> str:
        """Return the folder in which commands start."""
        ...

    @property
    def endpoint(self) -> str | None:
        """Return the base URL of the model's server for programs in the box; None: they reach none."""
        ...

    @property
    def endpoint_key(self) -> str | None:
        """Return what programs in the box send as the server's key; it is worth nothing outside."""
        ...

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        user: str | None = None,
        seconds: float | None = None,
    ) -> Finished:
        """Run a command to its end. Processes that it leaves in the background go on.

        Args:
            command: program and arguments; no shell reads them.
            input: standard input.
            environment: further variables.
            folder: to start in; None: `workdir`.
            user: None: that of the box.
            seconds: limit; None: that of the box.
        """
        ...

    async def put(self, files: Mapping[str, bytes], folder: str) -> None:
        """Write files, which are executable and belong to the box's user.

        Args:
            files: content by path below `folder`.
            folder: absolute path; it is made if it is missing.

        Raises:
            InvalidRequest: a path leads out of the folder.
        """
        ...

    async def get(self, folder: str, most_bytes: int) -> dict[str, bytes]:
        """Return the regular files below a folder by relative path, without following links; {}: no such folder.

        Args:
            folder: absolute path.
            most_bytes: of all files together.

        Raises:
            PayloadTooLarge: there are more bytes, or too many files.
        """
        ...

    async def archive(self, folder: str, most_bytes: int) -> bytes:
        """Return a tar archive of a folder, links and modes included, that no program of the box has made; b"": there
        is no such folder. Its first entry is the folder.

        Raises:
            PayloadTooLarge: it has more bytes.
        """
        ...

    async def stop_processes(self) -> None:
        """End all processes in the box, also those that left their session; the files stay. Call it before scoring."""
        ...

    async def close(self) -> None:
        """End the box and remove it."""
        ...


class SandboxProvider(Protocol):
    """Makes boxes. An entry point of `palestra.sandboxes` leads to a class, which is called without arguments.

    Attributes:
        name: what users write.
    """

    name: str

    def check(self, spec: SandboxSpec) -> None:
        """Raise ConfigError for a promise of `spec` that this provider can't keep on this machine."""
        ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Start a box.

        Raises:
            ConfigError: the image can't be had or built.
            EnvironmentFailed: the box did not start.
        """
        ...


def sandbox_provider(spec: SandboxSpec, name: str | None = None) -> SandboxProvider:
    """Return a provider that was checked to keep what a box needs.

    Args:
        name: of the provider; None: `container` for an image, else `bubblewrap`.

    Raises:
        ConfigError: there is no such provider, it can't keep the spec, or a program is missing.
    """
    spec.check()
    known = extensions(GROUP)
    wanted = name or ("bubblewrap" if spec.image is None and spec.build is None else "container")
    if wanted not in known:
        raise ConfigError(f"there is no sandbox provider {wanted!r}{nearest(wanted, known)}; installed: {list(known)}")
    made = load_extension(known[wanted])()
    if not all(callable(getattr(made, method, None)) for method in ("check", "open")):
        raise ConfigError(f"{wanted!r} of {GROUP} makes a {type(made).__name__}, and has to make a SandboxProvider")
    provider: SandboxProvider = made
    provider.check(spec)
    return provider


@asynccontextmanager
async def sandbox(spec: SandboxSpec, provider: str | SandboxProvider | None = None) -> AsyncIterator[Sandbox]:
    """Open a box for the block; it ends with the block, and with this process.

    Args:
        provider: its name, or the provider; None: chosen by what the box needs.

    Raises:
        ConfigError: the spec can't be kept, or its image can't be had.
        EnvironmentFailed: the box did not start.
    """
    if provider is None or isinstance(provider, str):
        provider = sandbox_provider(spec, provider)
    else:
        spec.check()
        provider.check(spec)
    box = await provider.open(spec)
    try:
        yield box
    finally:
        await box.close()
