"""`harbor` in the catalogue: tasks of a folder, or those that ship, and their check by oracle and nop."""

from __future__ import annotations

import asyncio
import atexit
import functools
import hashlib
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from palestra.envs.acting import Actions
from palestra.envs.catalog import CatalogEntry, settings_checked
from palestra.envs.tasks import Split
from palestra.errors import ConfigError, EnvironmentFailed, EpisodeForfeited, InvalidEnvironment
from palestra.sandbox import SandboxLimits, SandboxSpec, sandbox_provider
from palestra_worlds.harbor.boxes import BoxRules
from palestra_worlds.harbor.environment import HarborEnvironment
from palestra_worlds.harbor.task import read_tasks, task_data

SHIPPED = Path(__file__).parent / "tasks"
SHARED = Path(__file__).parent / "shared"  # files of each of these tasks that has no others in their place
_BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")


def harbor_tasks(folder: Callable[[], Path], split: Split, count: int, seed: int) -> list[dict[str, Any]]:
    """Return tasks of a folder in an order that the seed gives; all of the split, where it has fewer than `count`.

    A quarter, chosen by a hash of the names, is for validation: none of fewer than four tasks.

    Raises:
        ConfigError: the folder has no tasks, or some that can't be played.
    """
    if split not in ("train", "validation"):
        raise ConfigError(f"the splits are train and validation; there is no {split!r}")
    tasks = read_tasks(folder())
    names = sorted(tasks, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = len(names) // 4
    chosen = sorted(names[:held_out] if split == "validation" else names[held_out:])
    random.Random(f"{split} {seed}").shuffle(chosen)
    return [task_data(tasks[name]) for name in chosen[:count]]


@functools.cache
def shipped_folder() -> Path:
    """Return a folder with the tasks that ship, whose images are made of this machine's busybox.

    Raises:
        ConfigError: busybox is not installed.
    """
    busybox = _busybox()
    folder = Path(tempfile.mkdtemp(prefix="palestra-harbor-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = Path(shutil.copyfile(busybox, folder / "busybox"))
    program.chmod(0o755)
    for task in SHIPPED.iterdir():
        for source in (SHARED, task):
            shutil.copytree(source, folder / task.name, dirs_exist_ok=True)
        os.link(program, folder / task.name / "environment" / "busybox")
    return folder


def _busybox() -> str:
    """Return this machine's busybox, which has to be linked statically: an image of it has no libraries."""
    for path in _BUSYBOX:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                if b"ld-linux" not in file.read(4096):
                    return path
    raise ConfigError("the tasks that ship need busybox, linked statically; run: apt-get install busybox-static")


def check_harbor(make: Callable[[], Any], tasks: Sequence[Mapping[str, Any]]) -> None:
    """Play each task twice: with its own solution, which has to earn 1, and without any action, which has to earn 0.

    Raises:
        InvalidEnvironment: a task earns something else, or fails.
    """
    with ThreadPoolExecutor(1, "palestra-check") as thread:  # an event loop may be running in the caller's
        for task in tasks:
            thread.submit(asyncio.run, _check(make(), task)).result()


async def _check(environment: HarborEnvironment, task: Mapping[str, Any]) -> None:
    for player, expected in (("oracle", 1.0), ("nop", 0.0)):
        try:
            await environment.start(task)
            if player == "oracle" and not await environment.solve():
                warnings.warn(f"task {task['id']!r} has no solution/solve.sh, so only nop plays it", stacklevel=2)
                continue
            verdict = await environment.verdict()
        except (EnvironmentFailed, EpisodeForfeited) as error:
            raise InvalidEnvironment(f"{player}: {error}") from error
        finally:
            await environment.close()
        if verdict.total != expected:
            said = " ".join(verdict.output.split())[-200:]
            raise InvalidEnvironment(
                f"task {task.get('id')!r}: {player} earns {verdict.total:g}, and has to earn {expected:g}; the "
                f"verifier said: {said or 'nothing'}"
            )


def _check_installed(provider: str | None = None, *, ships: bool) -> None:
    """Raise ConfigError if this machine has no container engine, or no busybox for the tasks that ship."""
    sandbox_provider(SandboxSpec(image="scratch", limits=SandboxLimits(disk_mib=None)), provider)
    if ships:
        _busybox()


def _entry(folder: Path | None) -> CatalogEntry:
    """Return the entry of a folder; None: of the tasks that ship."""

    def found() -> Path:
        return shipped_folder() if folder is None else folder

    def make(
        *,
        actions: Actions = "tools",
        max_steps: int = 20,
        command_seconds: float = 60.0,
        network: bool = False,
        variables: str = "",
        limit_disk: bool = True,
        provider: str | None = None,
    ) -> HarborEnvironment:
        _check_installed(provider, ships=folder is None)
        names = frozenset(filter(None, (name.strip() for name in variables.split(","))))
        rules = BoxRules(network=network, variables=names, limit_disk=limit_disk, provider=provider)
        return HarborEnvironment(found(), rules, actions=actions, max_steps=max_steps, command_seconds=command_seconds)

    return CatalogEntry(
        summary="tasks of Harbor's format in containers, scored by their tests; harbor/FOLDER has those of a folder",
        make=settings_checked("harbor", make),
        generate=partial(harbor_tasks, found),
        check_installed=partial(_check_installed, ships=folder is None),
        starts_programs=True,
        reads_folder=folder is not None,
        check=check_harbor,
        part=_of_folder if folder is None else None,
    )


def _of_folder(path: str) -> CatalogEntry:
    return _entry(Path(path))


HARBOR = _entry(None)
