"""The operator's rules for engines that are programs or servers of other projects: no job names one itself."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palestra.config import JobConfig, PooledEngineConfig, parse_config
from palestra.config.engine import sections
from palestra.errors import ConfigError, InvalidRequest
from palestra_control.jobs import JobRecord


class ServersInUse:
    """Which live job uses which servers."""

    def __init__(self) -> None:
        self._held: dict[str, frozenset[str]] = {}

    def hold(self, job: JobRecord) -> None:
        """Assign the servers that a starting or running job names."""
        if named := _named(job.config):
            self._held[job.job_id] = named

    def release(self, job_id: str) -> None:
        """Release the servers of an ended job, if it had any."""
        self._held.pop(job_id, None)

    def waiting(self, jobs: Iterable[JobRecord]) -> dict[str, str]:
        """Return why jobs cannot start now, by the id of each that names a server in use."""
        held = frozenset[str]().union(*self._held.values())
        taken = {job.job_id: min(found) for job in jobs if (found := _named(job.config) & held)}
        return {job_id: f"waits for the engine's server {url}, which another job uses" for job_id, url in taken.items()}


def _named(config: Mapping[str, Any]) -> frozenset[str]:
    engine = config.get("engine") or {}
    urls = [table.get("url") for table in engine.get("workers", [engine])]
    return frozenset(url for one in urls if one is not None for url in ([one] if isinstance(one, str) else one))


_OF_SERVER = ("kind", "url", "key_variable", "weights_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRules:
    """Which engines jobs may use apart from the embedded one.

    Attributes:
        programs: that jobs start servers with, by kind, at the same path on all machines; other kinds can't be started.
        servers: running servers that jobs may name, by URL, with the key's variable and the folder for new weights.
    """

    programs: Mapping[str, Path] = field(default_factory=dict)
    servers: Mapping[str, PooledEngineConfig] = field(default_factory=dict)

    def check(self, config: JobConfig) -> None:
        """Raise InvalidRequest, naming the key, for a tenant's program, or a server in the operator's network."""
        for key, table in config.engine.keyed_tables.items():
            key = f"config.{key}"
            for name, what in table.operator_keys.items():
                if getattr(table, name) is not None:
                    raise InvalidRequest(
                        f"{key}.{name} names {what}, which only the operator of this service does; leave it out",
                        f"{key}.{name}",
                    )
            if table.urls and table.transfer != "file":
                raise InvalidRequest(
                    f"{key}.weight_transfer is {table.transfer!r}, and new weights come to a server that runs "
                    "already as files, in the folder that the operator of this service names; leave it out",
                    f"{key}.weight_transfer",
                )
            try:
                self._place_of(table)
            except ConfigError as error:
                raise InvalidRequest(f"{key}: {error}", f"{key}.{'url' if table.urls else 'kind'}") from error

    def warnings(self, passed: Collection[str], variables: Mapping[str, str]) -> list[str]:
        """Return what jobs of these engines would lack on this machine, one line for each rule.

        These are warnings: jobs may run on other machines, and the rest of the service works.
        """
        found = []
        for kind, program in self.programs.items():
            key = f"engines.{kind}.{sections()[kind].program_key}"
            if not os.access(program, os.X_OK):
                found.append(
                    f"{key} is {str(program)!r}, and there is no such program on this machine; jobs with engine.kind = "
                    f"{kind!r} fail where there is none"
                )
            if program.is_dir():
                found.append(f"{key} is {str(program)!r}, a folder; give the interpreter in it, such as its bin/python")
        for url, server in self.servers.items():
            variable = getattr(server, "key_variable", None)
            if variable is None or (variable in passed and variables.get(variable)):
                continue
            remedy = "is not set here" if variable in passed else f"jobs do not get; add --pass-env {variable}"
            found.append(f"engines.servers: the key of {url} is in the variable {variable}, which {remedy}")
        return found

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a starting job's configuration with the operator's interpreter, variables and folders."""
        given = config.get("engine")
        if given is None:
            return dict(config)
        own, tables = given.get("workers", [given]), parse_config(config).engine.tables
        filled = [one | self._place_of(table) for one, table in zip(own, tables, strict=True)]
        return {**config, "engine": filled[0] if "workers" not in given else {**given, "workers": filled}}

    def _place_of(self, table: PooledEngineConfig) -> dict[str, str]:
        """Return the keys that locate an engine's servers; {}: it has none."""
        if not table.urls:
            if table.program_key is None:
                return {}
            if (program := self.programs.get(table.kind)) is None:
                raise ConfigError(
                    f"this service starts no {table.product}; take engine.kind = 'embedded', or ask its operator "
                    f"(engines.{table.kind} in the rules)"
                )
            return {table.program_key: str(program)}
        known = [url for url, server in self.servers.items() if server.kind == table.kind]
        for url in table.urls:
            if url not in known:
                raise ConfigError(
                    f"url names {url}; the operator of this service allows {', '.join(sorted(known)) or 'none'} "
                    f"(engines.servers in the rules, of kind {table.kind!r})"
                )
        places = [
            {
                name: str(value)
                for name in ("key_variable", "weights_dir")
                if (value := getattr(self.servers[url], name, None))
            }
            for url in table.urls
        ]
        if any(place != places[0] for place in places):
            raise ConfigError(
                f"url names {' and '.join(table.urls)}, which have not the same key or folder; write each as a table "
                "of engine.workers"
            )
        return places[0]


def load_engine_rules(path: Path, table: Any) -> EngineRules:
    """Return the rules of `[engines]`. `path` is the file's, for errors and a relative interpreter."""
    started = {kind: section.program_key for kind, section in sections().items() if section.program_key is not None}
    if not isinstance(table, dict) or not table.keys() <= {*started, "servers"}:
        raise ConfigError(f"{path}: [engines] has the tables {', '.join(started)} and [[servers]], and no others")
    servers = table.get("servers", [])
    programs = {kind: _program(path, kind, key, table[kind]) for kind, key in started.items() if kind in table}
    if not isinstance(servers, list):
        raise ConfigError(f"{path}: [[engines.servers]] is a list of tables")
    found = [_server(f"{path}: engines.servers.{number}", one) for number, one in enumerate(servers)]
    urls = [url for server in found for url in server.urls]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise ConfigError(f"{path}: engines.servers names {twice[0]} twice")
    return EngineRules(programs=programs, servers=dict(zip(urls, found, strict=True)))


def _program(path: Path, kind: str, key: str, table: Any) -> Path:
    if not isinstance(table, dict) or not table.keys() <= {key}:
        raise ConfigError(f"{path}: [engines.{kind}] has the key {key}, and no other")
    given = table.get(key)
    if not isinstance(given, str) or not given:
        raise ConfigError(f"{path}: engines.{kind}.{key} is {given!r}; it has to be the path of an interpreter")
    # Made absolute without resolving links: that of an environment leads out of it.
    return Path(os.path.abspath(path.parent / Path(given).expanduser()))


def _server(where: str, given: Any) -> PooledEngineConfig:
    """Return a server that runs already."""
    if not isinstance(given, dict) or not given.keys() <= set(_OF_SERVER) or not isinstance(given.get("url"), str):
        raise ConfigError(f"{where} has the keys kind and url, perhaps key_variable and weights_dir, and no others")
    kind = given.get("kind")
    kinds = {name: section for name, section in sections().items() if "url" in section.model_fields}
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where}.kind is {kind!r}; it is {' or '.join(map(repr, kinds))}")
    try:
        found = kinds[kind](**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    folder = getattr(found, "weights_dir", None)
    if folder is None and not _is_loopback(given["url"]):
        raise ConfigError(
            f"{where}: {given['url']} is perhaps another machine; give weights_dir, a folder that it and all machines "
            "of this service see"
        )
    if folder is not None and not folder.is_absolute():
        raise ConfigError(f"{where}.weights_dir is {str(folder)!r}; it has to be an absolute path")
    return found


def _is_loopback(url: str) -> bool:
    """Return whether a URL is a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
