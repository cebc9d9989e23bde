"""Images of boxes: by name, from an archive, or built from a folder with a Dockerfile, each made once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from palestra.errors import ConfigError
from palestra.sandbox import TRANSPORTS, SandboxSpec, is_archive
from palestra.threads import in_thread
from palestra_sandboxes.child import last_words_of
from palestra_sandboxes.container.engine import ContainerEngine

REPOSITORY = "localhost/palestra-sandbox"  # whose images are a cache; their tags are digests of what they are made of
BUILD_SECONDS = 1800.0
_OF_IMAGES = ("manifest.json", "index.json", "oci-layout")  # in an archive of an image, and not of a root folder
# What lets podman read this machine while it builds: it follows links and `..` of mounts, and fetches what ADD names.
_MOUNT = "--mount"
_FETCHED = re.compile(r"(?im)^\s*(?:onbuild\s+)?add\s.*(?:://|git@|\$)")
_STORED = re.compile(rf"(?im)(?:^\s*from\s.*?|--from=)(?<![\w.\-/])(?:{'|'.join(TRANSPORTS)}):")
_Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image that is here: how it is called, and what its commands get; user and folder may be empty."""

    reference: str
    user: str
    workdir: str


_known: dict[_Key, Image] = {}
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Lock]] = WeakKeyDictionary()


async def image_of(engine: ContainerEngine, spec: SandboxSpec) -> Image:
    """Return the image of a box; it is loaded, pulled or built if it is not here.

    Raises:
        ConfigError: it can't be; the message has the last lines that the engine wrote.
    """
    source = _source(spec)
    reference = str(spec.image) if source is None else f"{REPOSITORY}:{await in_thread(lambda: _digest(source))}"
    key = (engine.program, reference)
    lock = _locks.setdefault(asyncio.get_running_loop(), {}).setdefault(key, asyncio.Lock())
    async with lock:
        if key not in _known:
            if (found := await _inspect(engine, reference)) is None:
                await _make(engine, reference, source, spec.build is not None)
                found = await _inspect(engine, reference)
            if found is None:
                raise ConfigError(f"the image {reference} of a sandbox is not there after it was made")
            _known[key] = found
        return _known[key]


def forget_image(engine: ContainerEngine, image: Image) -> None:
    """Look for an image again when it is needed: a box could not be started from it."""
    _known.pop((engine.program, image.reference), None)


async def _inspect(engine: ContainerEngine, reference: str) -> Image | None:
    done = await engine.ask("image", "inspect", "--format", "{{.Config.User}}|{{.Config.WorkingDir}}", reference)
    if done.code:
        return None
    user, _, workdir = done.output.decode().strip().partition("|")
    return Image(reference=reference, user=user, workdir=workdir)


async def _make(engine: ContainerEngine, reference: str, source: Path | None, build: bool) -> None:
    """Pull an image, build it from a folder, or load or import it from an archive."""
    if source is None:
        what, command = f"the image {reference!r} can't be pulled", ["pull", reference]
    elif build:
        if engine.is_podman:
            await in_thread(lambda: check_dockerfile(source))
        what, command = f"the image of {source} can't be built", ["build", "--tag", reference, str(source)]
    elif await in_thread(lambda: _is_image(source)):
        what, command = f"{source} can't be loaded as an image", ["load", "--input", str(source)]
    else:
        what, command = f"{source} can't be imported as an image", ["import", str(source), reference]
    done = await engine.ask(*command, seconds=BUILD_SECONDS, tail=True)
    if done.timed_out:
        raise ConfigError(f"{what}: it took more than {BUILD_SECONDS:g} s; at last it wrote:\n{last_words_of(done)}")
    if not done.code and command[0] == "load":
        loaded = done.output.decode().strip().splitlines()[-1].partition(": ")[2]
        done = await engine.ask("tag", loaded, reference)
    if done.code:
        raise ConfigError(f"{what}:\n{last_words_of(done)}")


def check_dockerfile(folder: Path) -> None:
    """Raise ConfigError for a Dockerfile by which podman would read this machine's files or servers."""
    path = next(folder / name for name in ("Containerfile", "Dockerfile") if (folder / name).is_file())
    if path.is_symlink():
        raise ConfigError(f"{path} is a link; copy what it leads to")
    lines = (
        line
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if not line.lstrip().startswith("#")
    )
    text = re.sub(r"[\\`][ \t]*\n", "", "\n".join(lines))  # of instructions on several lines
    for wrong, why in (
        (_MOUNT in re.sub(r"[\\`'\"]", "", text).lower(), "a mount (--mount) may lead to this machine's files"),
        (_FETCHED.search(text), "ADD of an address reaches this machine's servers; fetch it with RUN"),
        (_STORED.search(text), "an image by a path is this machine's file; name it by its registry"),
    ):
        if wrong:
            raise ConfigError(f"{path} is not built: {why}, or build the image yourself and give its name")


def _source(spec: SandboxSpec) -> Path | None:
    """Return the absolute path of the archive or the folder that an image is made from; None: it has a name."""
    source = Path(spec.image) if spec.image is not None and is_archive(spec.image) else spec.build
    return None if source is None else Path(os.path.abspath(source))


def _is_image(archive: Path) -> bool:
    """Return whether an archive has an image and not a root folder."""
    try:
        with tarfile.open(archive) as opened:
            return any(entry.name.removeprefix("./") in _OF_IMAGES for entry in opened)
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{archive} is no archive of an image: {error}") from error


def _digest(source: Path) -> str:
    """Return a digest of an archive, or of all that is in a folder with a Dockerfile."""
    found = hashlib.sha256()
    try:
        if source.is_file():
            with source.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
        if not any((source / name).is_file() for name in ("Dockerfile", "Containerfile")):
            raise ConfigError(f"{source}: there is no Dockerfile to build an image from")
        for folder, folders, files in os.walk(source):
            folders.sort()
            for name in sorted([*folders, *files]):
                path = Path(folder) / name
                state = path.lstat()
                content = os.readlink(path).encode() if path.is_symlink() else b""
                if path.is_file() and not path.is_symlink():
                    content = path.read_bytes()
                about = f"{path.relative_to(source)}\0{state.st_mode}\0{len(content)}\0"
                found.update(about.encode(errors="surrogateescape") + content)
    except OSError as error:
        raise ConfigError(f"{source}: no image can be made from it: {error}") from error
    return found.hexdigest()[:32]
