"""The operator's rules for engines that are programs or servers of other projects: no job names one itself."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palestra.config import JobConfig, parse_config
from palestra.engine.sglang.config import SglangEngineConfig
from palestra.engine.vllm.config import VllmEngineConfig
from palestra.errors import ConfigError, InvalidRequest

Server = VllmEngineConfig | SglangEngineConfig
_KINDS: Mapping[str, type[Server]] = {"vllm": VllmEngineConfig, "sglang": SglangEngineConfig}
# Keys of a job's engine that would name a program, a variable or a folder of the service.
_OPERATORS = {
    "python": "a program",
    "key_variable": "a variable of the server's environment",
    "weights_dir": "a folder of the server",
    "weights_address": "an address of the service's machines",
}
_OF_SERVER = ("kind", "url", "key_variable", "weights_dir")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRules:
    """Which engines jobs may use beside the embedded one.

    Attributes:
        vllm_python: interpreter that has vLLM, at the same path on all machines; None: jobs start no vLLM.
        servers: those that run already and that jobs may name, by URL, with the variable of the key, and the folder for
            new weights.
    """

    vllm_python: Path | None = None
    servers: Mapping[str, Server] = field(default_factory=dict)

    def check(self, config: JobConfig) -> None:
        """Refuse an engine that is a program of the tenant's choice, or a server inside of the operator's network.

        Raises:
            InvalidRequest: it is; the message names the key.
        """
        tables = config.engine.tables
        for number, table in enumerate(tables):
            if not isinstance(table, VllmEngineConfig | SglangEngineConfig):
                continue
            key = "config.engine" if len(tables) == 1 else f"config.engine.workers.{number}"
            for name, what in _OPERATORS.items():
                if getattr(table, name, None) is not None:
                    raise InvalidRequest(
                        f"{key}.{name} names {what}, which only the operator of this service does; leave it out",
                        f"{key}.{name}",
                    )
            if table.url is not None and isinstance(table, VllmEngineConfig) and table.weight_transfer != "file":
                raise InvalidRequest(
                    f"{key}.weight_transfer is {table.weight_transfer!r}, and new weights come to a server that runs "
                    "already as files, in the folder that the operator of this service names; leave it out",
                    f"{key}.weight_transfer",
                )
            try:
                self._place_of(table)
            except ConfigError as error:
                raise InvalidRequest(f"{key}: {error}", f"{key}.{'kind' if table.url is None else 'url'}") from error

    def warnings(self, passed: Collection[str], variables: Mapping[str, str]) -> list[str]:
        """Return what jobs of these engines would lack on this machine, one line for each rule.

        A warning and no error: jobs may run on other machines, and the rest of the service works.

        Args:
            passed: names of the variables that jobs get from this process.
        """
        found = []
        if self.vllm_python is not None and not os.access(self.vllm_python, os.X_OK):
            found.append(
                f"engines.vllm.python is {str(self.vllm_python)!r}, and there is no such program on this machine; jobs "
                "with engine.kind = 'vllm' fail where there is none"
            )
        if self.vllm_python is not None and self.vllm_python.is_dir():
            found.append(
                f"engines.vllm.python is {str(self.vllm_python)!r}, a folder; give the interpreter in it, such as its "
                "bin/python"
            )
        for url, server in self.servers.items():
            variable = server.key_variable
            if variable is None or (variable in passed and variables.get(variable)):
                continue
            remedy = "is not set here" if variable in passed else f"jobs do not get; add --pass-env {variable}"
            found.append(f"engines.servers: the key of {url} is in the variable {variable}, which {remedy}")
        return found

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of a job that starts, with the operator's interpreter, variables and folders.

        Args:
            config: a JobConfig as JSON, which was checked when it was submitted.

        Raises:
            ConfigError: the operator does not allow the engine any more.
        """
        given = config.get("engine")
        if given is None or given.get("kind") == "fake":
            return dict(config)
        own = given.get("workers", [given])
        filled = [
            one | self._place_of(table) if isinstance(table, VllmEngineConfig | SglangEngineConfig) else one
            for one, table in zip(own, parse_config(config).engine.tables, strict=True)
        ]
        return {**config, "engine": filled[0] if "workers" not in given else {**given, "workers": filled}}

    def _place_of(self, table: Server) -> dict[str, str]:
        """Return the keys that say where the servers of an engine are, and how they are reached."""
        if table.url is None:
            if self.vllm_python is None:
                raise ConfigError(
                    "this service starts no vLLM; take engine.kind = 'embedded', or ask its operator (engines.vllm in "
                    "the rules)"
                )
            return {"python": str(self.vllm_python)}
        known = [url for url, server in self.servers.items() if server.kind == table.kind]
        for url in table.url:
            if url not in known:
                raise ConfigError(
                    f"url names {url}; the operator of this service allows {', '.join(sorted(known)) or 'none'} "
                    f"(engines.servers in the rules, of kind {table.kind!r})"
                )
        places = [
            {
                name: str(value)
                for name in ("key_variable", "weights_dir")
                if (value := getattr(self.servers[url], name))
            }
            for url in table.url
        ]
        if any(place != places[0] for place in places):
            raise ConfigError(
                f"url names {' and '.join(table.url)}, which have not the same key or folder; write each as a table of "
                "engine.workers"
            )
        return places[0]


def load_engine_rules(path: Path, table: Any) -> EngineRules:
    """Return the rules of `[engines]`.

    Args:
        path: of the file, for errors; a relative interpreter is looked for from its folder.

    Raises:
        ConfigError: it has another key, or a value that can't be.
    """
    if not isinstance(table, dict) or not table.keys() <= {"vllm", "servers"}:
        raise ConfigError(f"{path}: [engines] has the tables vllm and [[servers]], and no others")
    vllm, servers = table.get("vllm", {}), table.get("servers", [])
    if not isinstance(vllm, dict) or not vllm.keys() <= {"python"}:
        raise ConfigError(f"{path}: [engines.vllm] has the key python, and no other")
    python = vllm.get("python")
    if python is not None and (not isinstance(python, str) or not python):
        raise ConfigError(f"{path}: engines.vllm.python is {python!r}; it has to be the path of an interpreter")
    if not isinstance(servers, list):
        raise ConfigError(f"{path}: [[engines.servers]] is a list of tables")
    found = [_server(f"{path}: engines.servers.{number}", one) for number, one in enumerate(servers)]
    urls = [url for server in found for url in server.url or ()]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise ConfigError(f"{path}: engines.servers names {twice[0]} twice")
    return EngineRules(
        # Made absolute without resolving links: that of an environment leads out of it.
        vllm_python=None if python is None else Path(os.path.abspath(path.parent / Path(python).expanduser())),
        servers=dict(zip(urls, found, strict=True)),
    )


def _server(where: str, given: Any) -> Server:
    """Return a server that runs already."""
    if not isinstance(given, dict) or not given.keys() <= set(_OF_SERVER) or not isinstance(given.get("url"), str):
        raise ConfigError(f"{where} has the keys kind and url, perhaps key_variable and weights_dir, and no others")
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{where}.kind is {kind!r}; it is 'vllm' or 'sglang'")
    try:
        found = _KINDS[kind](**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if found.weights_dir is None and not _is_loopback(given["url"]):
        raise ConfigError(
            f"{where}: {given['url']} is perhaps another machine; give weights_dir, a folder that it and all machines "
            "of this service see"
        )
    if found.weights_dir is not None and not found.weights_dir.is_absolute():
        raise ConfigError(f"{where}.weights_dir is {str(found.weights_dir)!r}; it has to be an absolute path")
    return found


def _is_loopback(url: str) -> bool:
    """Return whether a URL is of the machine itself, whichever that is."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
