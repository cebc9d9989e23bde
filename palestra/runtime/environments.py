"""The environment that a job's configuration names: one that ships, or one of an environment server."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from palestra.config import JobConfig
from palestra.config.rollout import SERVERS, EnvironmentConfig
from palestra.envs import ConcurrentEnvironment, Environment
from palestra.envs.catalog import catalog_maker
from palestra.envs.remote import RemoteEnvironment
from palestra.errors import ConfigError
from palestra.extensions import extensions, load_extension


def environment_of(config: JobConfig) -> Callable[[], Environment | ConcurrentEnvironment] | None:
    """Return a factory of the environment that the job names; None: external workers play.

    Raises:
        ModuleNotFoundError: the environment needs a package that is not installed.
    """
    chosen = config.environment
    if chosen.url is not None and chosen.protocol != "palestra":
        return _partner(chosen, chosen.url)
    if chosen.url is not None:
        key = os.environ.get(chosen.key_variable)
        if not key:
            raise ConfigError(
                f"environment.key_variable is {chosen.key_variable!r}, and that variable is not set here; it has to "
                f"hold the key of {chosen.url}"
            )
        return RemoteEnvironment(chosen.url, key, system=chosen.system)
    if chosen.protocol != "palestra":
        raise ConfigError(f"environment.protocol is {chosen.protocol!r}, which is of a server; give environment.url")
    if chosen.name is None:
        return None
    return catalog_maker(chosen.name, chosen.settings, chosen.system)


def _partner(chosen: EnvironmentConfig, url: str) -> Callable[[], Environment | ConcurrentEnvironment]:
    """Return a factory of an environment on another project's server."""
    make = load_extension(extensions(SERVERS)[chosen.protocol])
    known = [name for name in inspect.signature(make).parameters if name not in ("url", "key", "system", "clock")]
    if unknown := [name for name in chosen.settings if name not in known]:
        raise ConfigError(f"environment.settings has no {unknown[0]!r}; {chosen.protocol} has {', '.join(known)}")
    given: dict[str, Any] = {
        "key": os.environ.get(chosen.key_variable) or None,
        "system": chosen.system,
        **chosen.settings,
    }
    make(url, **given)  # a wrong setting is refused now
    return partial(make, url, **given)
