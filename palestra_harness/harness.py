"""`Harness`: the command, variables and files of a program, and what one run of it left."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension, nearest

GROUP = "palestra.harnesses"
_FIELD = re.compile(r"\{(base_url|anthropic_url|api_key|model|task|workspace|home|max_tokens|max_context)\}")
# Variables of this process that a program gets; all others, such as keys of providers, are not passed on.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")
TEMPORARY = "tmp"  # folder in a program's home for its temporary files, which are removed with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """An agent that is a program.

    In the command, the variables and the files, these names in braces stand for values: `{base_url}` (it ends with
    `/v1`), `{anthropic_url}` (without it), `{api_key}`, `{model}`, `{task}`, `{workspace}`, `{home}`, `{max_tokens}`
    and `{max_context}`.

    Attributes:
        command: program and arguments. It runs in the workspace, without input.
        variables: environment variables beside PATH, the language, HOME, TMPDIR and the folders of XDG.
        files: texts to write before the program starts, by their path below its home.
        tried: the version that was tried.
        install: how to install it.
        max_tokens: most tokens of a reply that the program should ask for.
        max_context: tokens that the program should take the model's context to have.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    tried: str = ""
    install: str = ""
    max_tokens: int = 4096
    max_context: int = 32_768

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
    """

    exit_code: int
    output: str
    workspace: Path
    diff: str
    seconds: float


def known_harnesses() -> dict[str, Harness]:
    """Return the installed harnesses by name, sorted.

    Raises:
        ConfigError: an entry point leads to something else.
    """
    return {name: _loaded(name) for name in extensions(GROUP)}


def find_harness(name: str) -> Harness:
    """Return an installed harness.

    Raises:
        ConfigError: there is none of this name.
    """
    known = extensions(GROUP)
    if name not in known:
        raise ConfigError(f"there is no harness {name!r}{nearest(name, known)}; installed: {', '.join(known)}")
    return _loaded(name)


def _loaded(name: str) -> Harness:
    found = load_extension(extensions(GROUP)[name])
    if not isinstance(found, Harness):
        raise ConfigError(f"{name!r} of {GROUP} is a {type(found).__name__}, and has to be a Harness")
    return found
