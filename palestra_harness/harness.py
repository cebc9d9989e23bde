"""`Harness`: the command, variables and files of a program, and what one run of it left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.client import harness as installed
from palestra.config import HarnessConfig, SandboxConfig
from palestra.errors import ConfigError
from palestra.extensions import extensions
from palestra.sandbox import SandboxLimits, SandboxSpec, is_archive, is_image_path

if TYPE_CHECKING:
    from palestra_harness.rollout import HarnessRollout

_FIELD = re.compile(r"\{(base_url|anthropic_url|api_key|model|task|workspace|home|max_tokens|max_context)\}")
# Variables of this process that a program gets; all others, such as keys of providers, are not passed on.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
TEMPORARY = "tmp"  # folder in a program's home for its temporary files, which are removed with it
Scored = float | Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness(installed.HarnessProgram):
    """An agent that is a program.

    In the command, the variables and the files, these names in braces stand for values: `{base_url}` (it ends with
    `/v1`), `{anthropic_url}` (without it), `{api_key}`, `{model}`, `{task}`, `{workspace}`, `{home}`, and the job's
    limits `{max_tokens}` of a reply and `{max_context}` of a prompt and its reply.

    Attributes:
        command: program and arguments. It runs in the workspace, without input.
        variables: environment variables beside PATH, the language, HOME, TMPDIR and the folders of XDG.
        files: texts to write before the program starts, by their path below its home.
        tried: the version that was tried.
        install: how to install it.
        script: replies of the model in `palestra harness check`, in the format of its chat template, where the program
            has no tool that runs a command, or ends in a way of its own. They write `palestra` into `palestra.txt`.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    tried: str = ""
    install: str = ""
    script: tuple[str, ...] = ()

    def rollout(self, score: Score, settings: HarnessConfig) -> HarnessRollout:
        """Return a rollout function with the settings of a job.

        Args:
            score: see `HarnessRollout`.
            settings: its limits and its folder.

        Raises:
            ConfigError: the program is not installed, or there is no such folder.
        """
        made: type[HarnessRollout] = import_module("palestra_harness.rollout").HarnessRollout  # which needs this module
        return made(
            self,
            score,
            folder=settings.folder,
            timeout_seconds=settings.timeout_seconds,
            max_calls=settings.max_calls,
            max_tokens=settings.max_tokens,
            box=box_of(settings.sandbox),
        )

    def filled(self, text: str, values: Mapping[str, Any]) -> str:
        """Return a text of the harness with values in the place of their names.

        Values are not searched for names: a task may contain `{api_key}`.
        """
        return _FIELD.sub(lambda found: str(values[found[1]]), text)

    def environment(self, home: Path, values: Mapping[str, Any]) -> dict[str, str]:
        """Return all environment variables of the program.

        Args:
            home: its own, empty but for `files` and a folder of temporary files.
            values: by name, for the variables.
        """
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        own = {"HOME": str(home), "TMPDIR": str(home / TEMPORARY), "TERM": "dumb"}
        own |= {
            f"XDG_{name}_HOME": str(home / folder)
            for name, folder in {
                "CONFIG": ".config",
                "DATA": ".local/share",
                "STATE": ".local/state",
                "CACHE": ".cache",
            }.items()
        }
        return passed | own | {name: self.filled(text, values) for name, text in self.variables.items()}

    def find_program(self) -> str:
        """Return the path of the program, or its name if it is looked for in the workspace.

        Raises:
            ConfigError: it is not installed; the message says how to install it.
        """
        program = self.command[0]
        if "/" in program and not os.path.isabs(program):
            return program
        if (found := shutil.which(program, path=self.variables.get("PATH"))) is None:
            hint = f"; install it: {self.install}" if self.install else ""
            raise ConfigError(f"the program {program!r} of {self.name} is not installed{hint}")
        return found


PROCESSES = 256  # threads included: a coding agent with its language servers and a test run stays far below


def box_of(settings: SandboxConfig | None) -> SandboxSpec | None:
    """Return the box of a job's harness, without its workspace and its endpoint."""
    if settings is None:
        return None
    limits = SandboxLimits(
        cpus=settings.cpus,
        memory_mib=settings.memory_mib,
        processes=PROCESSES,
        disk_mib=settings.disk_mib,
    )
    image = settings.image
    if image is not None and is_image_path(image) and not is_archive(image):
        return SandboxSpec(build=Path(image), limits=limits)
    return SandboxSpec(image=image, limits=limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessResult:
    """What one run of a program left.

    Attributes:
        exit_code: of the program, or minus the signal. Most coding agents end with 0 whatever they achieved, so score
            the workspace.
        output: the end of what it wrote, standard error included.
        workspace: its folder, which is removed after the episode was scored.
        diff: what it changed in the workspace, in the format of `git diff`; empty: nothing.
        seconds: that it ran.
        answer: text of the model's newest reply; empty: there is none.
        refused: model calls that the server has refused, by error and field.
        truncated: whether it was ended at the limit of calls or tokens.
    """

    exit_code: int
    output: str
    workspace: Path
    diff: str
    seconds: float
    answer: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)
    truncated: bool = False


Score = Callable[[dict[str, Any], HarnessResult], Scored | Awaitable[Scored]]


def known_harnesses() -> dict[str, Harness]:
    """Return the installed harnesses by name, sorted.

    Raises:
        ConfigError: an entry point leads to something else.
    """
    return {name: find_harness(name) for name in extensions(installed.GROUP)}


def find_harness(name: str) -> Harness:
    """Return an installed harness.

    Raises:
        ConfigError: there is none of this name.
    """
    found = installed.installed_harness(name)
    if not isinstance(found, Harness):
        raise ConfigError(f"{name!r} of {installed.GROUP} is a {type(found).__name__}, and has to be a Harness")
    return found
