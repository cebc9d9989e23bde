"""`task.toml`: the tables of Harbor's format (schema 1.x), and what of it is not played here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from palestra.errors import ConfigError
from palestra.sandbox import SandboxSpec, is_image_path

RECIPE = "recipes/harbor_agents.py plays it with Harbor itself"
Network = Literal["public", "no-network"]
_MEMORY_UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}  # in MiB
_LONGEST_SECONDS = 86_400.0


class _Table(BaseModel):
    """A table of task.toml. A key that the format does not have is refused: it may change what a task means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Artifact(_Table):
    """A file or folder of the agent's box that the verifier's own box gets."""

    source: str
    destination: str | None = None  # where Harbor keeps it on the host; has no meaning here
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _stays_below(cls, source: str) -> str:
        if not source or ".." in PurePosixPath(source).parts or "\0" in source:
            raise ValueError(f"{source!r} is no path of an artifact")
        return source


class BoxTable(_Table):
    """`[environment]`, or `[verifier.environment]`."""

    build_timeout_sec: float = Field(600.0, gt=0, le=_LONGEST_SECONDS)
    docker_image: str | None = Field(None, min_length=1)
    os: str = "linux"
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    storage_mb: int | None = Field(None, gt=0)
    env: Mapping[str, str] = {}
    workdir: str | None = None
    network_mode: Network = "public"

    @field_validator("docker_image")
    @classmethod
    def _is_name(cls, image: str | None) -> str | None:
        """Refuse a path: it would be a file of this machine."""
        if image is not None and is_image_path(image):
            raise ValueError(f"{image[:200]!r} is a path, and has to be the name of an image")
        try:
            SandboxSpec(image=image).check()
        except ConfigError as error:
            raise ValueError(str(error)[:200]) from None
        return image

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, data: Any) -> Any:
        """Take the names of schema 1.0: `allow_internet`, and `memory` and `storage` with a unit."""
        if not isinstance(data, dict):
            return data
        found = dict(data)
        internet = found.pop("allow_internet", None)
        if internet is not None and "network_mode" not in found:
            found["network_mode"] = "public" if internet else "no-network"
        for name in ("memory", "storage"):
            if (size := found.pop(name, None)) is not None:
                found.setdefault(f"{name}_mb", _mebibytes(size))
        return found


class AgentTable(_Table):
    """`[agent]`."""

    timeout_sec: float | None = Field(None, gt=0, le=_LONGEST_SECONDS)
    user: str | int | None = None
    network_mode: Network | None = None


class VerifierTable(_Table):
    """`[verifier]`."""

    timeout_sec: float = Field(600.0, gt=0, le=_LONGEST_SECONDS)
    env: Mapping[str, str] = {}
    user: str | int | None = None
    network_mode: Network | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: BoxTable | None = None

    @model_validator(mode="after")
    def _one_mode(self) -> VerifierTable:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode is 'shared', and there is a [verifier.environment]; leave one out")
        return self

    @property
    def is_separate(self) -> bool:
        """Return whether the verifier has a box of its own."""
        return self.environment_mode == "separate" or self.environment is not None


class SolutionTable(_Table):
    """`[solution]`."""

    env: Mapping[str, str] = {}


class TaskTable(_Table):
    """A whole task.toml. `task` and `metadata` are for people, but for `metadata.least_reward`."""

    schema_version: str = "1.4"
    source: str | None = None
    task: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    environment: BoxTable = BoxTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    solution: SolutionTable = SolutionTable()
    artifacts: tuple[Artifact, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, data: Any) -> Any:
        """Take `version`, the first name of `schema_version`, and artifacts that are a path alone."""
        if not isinstance(data, dict):
            return data
        found = dict(data)
        if "version" in found:
            found.setdefault("schema_version", found.pop("version"))
        artifacts = found.get("artifacts")
        if isinstance(artifacts, list):
            found["artifacts"] = [{"source": one} if isinstance(one, str) else one for one in artifacts]
        return found

    @field_validator("schema_version")
    @classmethod
    def _first_major(cls, version: str) -> str:
        if not re.fullmatch(r"1(\.\d{1,4}){0,2}", version):
            raise ValueError(f"{version!r} is not 1.x, which is what is read here")
        return version


def parse_table(name: str, data: dict[str, Any], folder: Path) -> TaskTable:
    """Return the checked tables of a task.

    Args:
        name: the task's name, for messages.
        data: the contents of task.toml.
        folder: the task's folder, in which files may ask for more than task.toml does.

    Raises:
        ConfigError: a value is wrong, or the task needs a part of the format that is not played here.
    """
    if (needed := next(_unsupported(data, folder), None)) is not None:
        raise ConfigError(f"task {name!r} needs {needed}, which this environment does not have; {RECIPE}")
    try:
        table = TaskTable.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"task {name!r}: task.toml has the key {place[:200]!r}, which is not known") from None
        raise ConfigError(f"task {name!r}: task.toml: {place[:200]}: {first['msg'][:300]}") from None
    box, verifier = table.environment, table.verifier
    agents = table.agent.network_mode or box.network_mode
    if not verifier.is_separate and (verifier.network_mode or agents) != agents:
        raise ConfigError(
            f"task {name!r}: the verifier has another network_mode than the agent, in the same box, whose network "
            "can't change; set verifier.environment_mode = 'separate'"
        )
    return table


def _mebibytes(size: Any) -> Any:
    """Return a size such as `2G` in MiB; another value as it is, which validation then refuses."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([GMK])\s*", str(size).upper())
    return size if found is None else int(float(found[1]) * _MEMORY_UNITS[found[2]])


_OF_BOXES = {
    "gpus": "GPUs",
    "gpu_types": "GPUs",
    "tpu": "TPUs",
    "mcp_servers": "mcp_servers",
    "skills_dir": "skills_dir",
    "healthcheck": "a healthcheck",
    "allowed_hosts": "an allowlist of hosts",
}
_OF_TASKS = {"steps": "steps", "multi_step_reward_strategy": "steps"}
_FILES = {
    "environment/docker-compose.yaml": "compose",
    "environment/docker-compose.yml": "compose",
    "tests/docker-compose.yaml": "compose",
    "tests/docker-compose.yml": "compose",
    "steps": "steps",
    "trajectory.json": "a trajectory that the agent begins with",
    ".harborignore": "a .harborignore",
    "tests/.harborignore": "a .harborignore",
    "solution/.harborignore": "a .harborignore",
}


def _unsupported(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield what a task needs and this environment does not have."""
    verifier = _table(data, "verifier")
    boxes = (_table(data, "environment"), _table(verifier, "environment"))
    yield from (what for key, what in _OF_TASKS.items() if data.get(key))
    for box in (*boxes, _table(data, "agent"), verifier):
        yield from (what for key, what in _OF_BOXES.items() if box.get(key))
        if box.get("network_mode") == "allowlist":
            yield "an allowlist of hosts"
    for box in boxes:
        if str(box.get("os", "linux")).lower() != "linux":
            yield f"the system {str(box['os'])[:40]}"
    if verifier.get("collect"):
        yield "commands that collect (verifier.collect)"
    artifacts = data.get("artifacts")
    for artifact in artifacts if isinstance(artifacts, list) else ():
        if isinstance(artifact, dict) and artifact.get("service") not in (None, "main"):
            yield "compose"
    yield from (what for file, what in _FILES.items() if (folder / file).exists())


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}
