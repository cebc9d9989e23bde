"""The operator's limits on submitted jobs: the largest numbers of a configuration, and the models."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from palestra.agents import installed_agent
from palestra.config import BUILT_IN, JobConfig
from palestra.config.engine import Dtype
from palestra.config.loading import read_toml
from palestra.config.section import Positive, Seconds, Section
from palestra.envs.catalog import catalog_entry
from palestra.errors import ConfigError, InvalidRequest
from palestra.extensions import nearest
from palestra_control.jobs import Resources
from palestra_service.jobs.engine_rules import EngineRules, load_engine_rules
from palestra_service.placement.bases import BaseLimits

DAY, WEEK = 86_400, 604_800  # seconds
HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
OPEN_EPISODES = "rollout.group_size x groups_per_step x (1 + max_staleness)"
TIME_LIMIT = "time_limit_seconds"  # of a job, beside its configuration; no cap unless the operator sets one

CAPS: Mapping[str, float] = {
    "steps": 1_000_000,
    "policies.*.max_context": 262_144,
    "policies.*.sampling.max_tokens": 262_144,
    "environment.settings.*": 1_000,
    "environment.agent_settings.*": 1_000,
    "environment.train_tasks": 100_000,
    "environment.validation_tasks": 10_000,
    "environment.max_concurrency": 1_024,
    "environment.runners": 256,
    "seats.wait_seconds": DAY,
    "rollout.group_size": 1_024,
    "rollout.groups_per_step": 1_024,
    "rollout.max_attempts": 100,
    "rollout.timeout_seconds": WEEK,
    "rollout.max_open_buckets": 16_384,
    "rollout.max_claimed": 1_000_000,
    "judge.max_tokens": 65_536,
    "judge.max_concurrency": 256,
    "algorithm.epochs": 64,
    "algorithm.critic.epochs": 64,
    "algorithm.replay.draws": 1_024,
    "algorithm.replay.episodes": 16_384,
    "checkpoint.keep": 20,
    "engine.threads": 256,
    "engine.replicas": 16,
    "engine.tensor_parallel": 64,
    "engine.startup_seconds": 600,
    "engine.max_batch": 1_024,
    "engine.cache_gib": 512,
    "engine.delay_seconds": 60,
    "engine.reply_tokens": 65_536,
    "trainer.threads": 256,
    "trainer.devices": 64,
    "trainer.stuck_seconds": DAY,
    "trainer.micro_batch_tokens": 262_144,
    "server.max_waiting_calls": 16_384,
    "server.max_body_bytes": 64 * 2**20,
    "pictures.store_gib": 1_024,
    OPEN_EPISODES: 32_768,
}
"""The largest values that a configuration of a service may have, by dotted key; a test has the reason of every number
without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The operator's limits on submitted configurations.

    Attributes:
        models: absolute folder, or name of the hub, by the tenants' name of the model.
        hub_models: whether tenants may name any model of the hub.
        environment_hosts: the key's variable in jobs' processes, by `host:port` of an environment server that jobs may
            connect to. Others are refused, because they could be in the operator's network.
        programs: whether jobs may play environments that start programs (`CatalogEntry.starts_programs`).
        trackers: allowed values of `tracking`: each is a program of the machine, and some connect to servers.
        private_picture_hosts: allowed values of `pictures.private_hosts`, whose addresses are not checked. Never add a
            host of the internet: the owner of its name could redirect it into the operator's network.
        engines: allowed engines apart from the embedded one.
    """

    caps: Mapping[str, float] = field(default_factory=lambda: CAPS)
    models: Mapping[str, str] = field(default_factory=dict)
    hub_models: bool = True
    environment_hosts: Mapping[str, str] = field(default_factory=dict)
    programs: bool = False
    trackers: frozenset[str] = frozenset()
    picture_hosts: frozenset[str] = frozenset()
    private_picture_hosts: frozenset[str] = frozenset()
    bases: BaseLimits = field(default_factory=BaseLimits)
    engines: EngineRules = field(default_factory=EngineRules)

    def check(self, config: JobConfig) -> None:
        """Raise ConfigError for a configuration beyond the operator's limits."""
        self._check_picture_hosts(config)
        self._check_trackers(config)
        if config.environments:
            raise ConfigError("environments has several, and a service plays one; submit a job for each")
        if config.harness is not None:
            raise ConfigError(
                "harness runs a program and your score function, and a service runs neither; leave it out, and play "
                "with `palestra worker --harness NAME --score FILE.py --job ID`"
            )
        name = config.environment.full_name
        if name is not None and catalog_entry(name).reads_folder:
            raise ConfigError(f"environment {name!r} reads a folder of the service's machines, which no job may name")
        if name is not None and catalog_entry(name).starts_programs and not self.programs:
            raise ConfigError(
                f"environment.name is {name!r}, which starts programs on the service's machines; its operator has to "
                "allow that (environment.programs in the rules)"
            )
        if config.environment.agent is not None:
            installed_agent(config.environment.agent)
        rollout = config.rollout
        episodes = rollout.group_size * rollout.groups_per_step * (1 + rollout.max_staleness)
        workers = (("engine", "replicas"), config.engine.worker_count)  # of all tables together
        for path, value in (*_numbers(config.model_dump()), workers, ((OPEN_EPISODES,), episodes)):
            most = self.caps.get(_key(path))
            if most is not None and abs(value) > most:
                raise ConfigError(
                    f"{'.'.join(path)} is {_text(value)}, and this service allows at most {_text(most)}; lower it, or "
                    "ask its operator for more"
                )

    def _check_trackers(self, config: JobConfig) -> None:
        for name in config.tracking:
            if name not in self.trackers:
                known = ", ".join(sorted(self.trackers)) or "none"
                raise ConfigError(f"tracking names {name!r}; the operator of this service allows {known} (trackers)")

    def _check_picture_hosts(self, config: JobConfig) -> None:
        """Raise an error for hosts from which the server would fetch pictures, inside the operator's network."""
        for key, named, allowed in (
            ("hosts", config.pictures.hosts, self.picture_hosts),
            ("private_hosts", config.pictures.private_hosts, self.private_picture_hosts),
        ):
            for host in named:
                if host not in allowed:
                    known = ", ".join(sorted(allowed)) or "none"
                    rule = "picture_hosts" if key == "hosts" else "private_picture_hosts"
                    raise ConfigError(
                        f"pictures.{key} names {host!r}; the operator of this service allows {known} ({rule})"
                    )

    def time_limit(self, asked: float | None) -> float | None:
        """Return the time limit of a job: the requested one, else the cap. `asked`: seconds; None: unlimited."""
        most = self.caps.get(TIME_LIMIT, math.inf)
        if asked is None:
            return None if most == math.inf else most
        if asked > most:
            raise ConfigError(
                f"{TIME_LIMIT} is {_text(asked)}, and this service allows at most {_text(most)}; lower it, or ask its "
                "operator for more"
            )
        return asked

    def host_variable(self, url: str, key: str) -> str:
        """Return the key's variable for a server that jobs may connect to: an environment, or a judge."""
        host = _host(url, key)
        if host not in self.environment_hosts:
            known = ", ".join(sorted(self.environment_hosts)) or "none"
            raise ConfigError(
                f"jobs of this service may not connect to {host}; its operator allows {known} "
                "(environment.allowed_hosts)"
            )
        return self.environment_hosts[host]

    def weights(self, model: str) -> str | None:
        """Return the folder, or the hub's name, of a model in the operator's list; None: the name itself locates it."""
        if model in self.models:
            return self.models[model]
        if model in BUILT_IN or (self.hub_models and HUB_NAME.fullmatch(model)):
            return None
        known = ", ".join(map(repr, (*BUILT_IN, *sorted(self.models))))
        other = " or a name of the Hugging Face hub such as 'org/model'" if self.hub_models else ""
        raise ConfigError(
            f"the model is {model!r}; the server takes {known}{other}, and no folder; a checkpoint of a job is named "
            "with from_job"
        )

    def places(self, config: JobConfig, *, started_from_job: bool) -> dict[str, str]:
        """Return the locations of a job's models, by policy, if they differ from their names; see `weights`.

        References are included, as in `JobConfig.named_models`. `started_from_job`: whether the trained policy's model
        is a folder of the job's own.
        """
        own = config.trained_policies if started_from_job else ()
        found = {name: self.weights(model) for name, model in config.named_models.items() if name not in own}
        return {name: place for name, place in found.items() if place is not None}


class _Table(Section):
    """A table of the operator's file: values have the type of their key, and are not converted."""

    model_config = ConfigDict(strict=True)


class _Environments(_Table):
    allowed_hosts: dict[
        Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$"), AfterValidator(str.lower)],
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
    ] = Field(default_factory=dict)
    programs: bool = False


class _Bases(_Table):
    cpus: float | None = None  # None: as usual
    gpus: float | None = None
    memory_gib: float | None = None
    dtype: Dtype | None = None
    slots: Positive | None = None
    adapters: Positive | None = None
    waiting: Positive | None = None
    idle_seconds: Seconds | None = None

    @property
    def limits(self) -> BaseLimits:
        """Return what is given, and what else base servers have."""
        given = self.model_dump(exclude_unset=True)
        amounts = {name: given.pop(name) for name in ("cpus", "gpus", "memory_gib") if name in given}
        return BaseLimits(resources=Resources(**amounts), **given)


class _RulesFile(_Table):
    hub_models: bool = True
    trackers: list[str] = Field(default_factory=list)
    picture_hosts: list[str] = Field(default_factory=list)
    private_picture_hosts: list[str] = Field(default_factory=list)
    models: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    caps: dict[str, Any] = Field(default_factory=dict)
    environment: _Environments = Field(default_factory=_Environments)
    bases: _Bases = Field(default_factory=_Bases)
    engines: dict[str, Any] = Field(default_factory=dict)


def load_rules(path: Path) -> Rules:
    """Read the operator's TOML file; all of its keys and tables are optional."""
    data = read_toml(path)
    try:
        found = _RulesFile(**data)
        bases = found.bases.limits
    except (ConfigError, InvalidRequest) as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('_RulesFile: ')}") from error
    caps = dict(CAPS)
    for key, value in _flat(found.caps, ""):
        if key not in (*CAPS, TIME_LIMIT):
            near = nearest(key, (*CAPS, TIME_LIMIT), "{!r}", 0.5)
            raise ConfigError(f"{path}: unknown key {key!r} of [caps]{near}")
        caps[key] = _cap(path, key, value)
    return Rules(
        caps=caps,
        models={name: _place(path, name, place) for name, place in found.models.items()},
        hub_models=found.hub_models,
        environment_hosts=found.environment.allowed_hosts,
        programs=found.environment.programs,
        trackers=frozenset(found.trackers),
        picture_hosts=frozenset(map(str.lower, found.picture_hosts)),
        private_picture_hosts=frozenset(map(str.lower, found.private_picture_hosts)),
        bases=bases,
        engines=load_engine_rules(path, found.engines),
    )


def _host(url: str, key: str) -> str:
    """Return `host:port` of a URL, with the port that its scheme has by default."""
    try:
        parsed = urlsplit(url)
        port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
    except (ValueError, KeyError):
        raise ConfigError(f"{key} is {url!r}, and is no URL of a server") from None
    if not parsed.hostname or parsed.username is not None:
        raise ConfigError(f"{key} is {url!r}, and is no URL of a server")
    host = f"[{parsed.hostname}]" if ":" in parsed.hostname else parsed.hostname
    return f"{host}:{port}"


def _cap(path: Path, key: str, value: Any) -> float:
    """Return a cap of the file; `none` is infinite."""
    if value == "none":
        return float("inf")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{path}: caps.{key} is {value!r}; it has to be a number above 0, or 'none'")
    return value


def _place(path: Path, name: str, place: str) -> str:
    if name in BUILT_IN:
        raise ConfigError(f"{path}: models.{name} is the name of a model that Palestra has; take another name")
    folder = path.parent / Path(place).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if place.startswith((".", "/", "~")) or place.count("/") != 1:
        raise ConfigError(f"{path}: models.{name} is {place!r}: no such folder, and no name of the hub")
    return place


def _numbers(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield all numbers of a configuration with their paths, as tuples: names that users chose may contain dots."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, (*path, name))
        elif isinstance(value, list | tuple):
            yield from _numbers({str(place): one for place, one in enumerate(value)}, (*path, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, name), value


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _key(path: tuple[str, ...]) -> str:
    """Return the key of `CAPS` for a path in a configuration, with `*` for a name that a user chose."""
    if path[0] == "policies":
        own = path[2:]  # a policy's own algorithm has the caps of the job's
        return ".".join(own if own[0] == "algorithm" else ("policies", "*", *own))
    if path[:2] == ("engine", "workers"):
        return ".".join(("engine", *path[3:]))  # workers of one kind have the caps of an engine of that kind
    if path[0] == "environment" and path[1:2] in (("settings",), ("agent_settings",)):
        return ".".join((*path[:2], "*"))
    return ".".join(path)


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"
