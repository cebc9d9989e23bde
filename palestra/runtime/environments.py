"""The environment that a job's configuration names: one that ships, or one of an environment server."""

from __future__ import annotations

import os
from collections.abc import Callable

from palestra.config import JobConfig
from palestra.envs import ConcurrentEnvironment, Environment
from palestra.envs.catalog import catalog_maker
from palestra.envs.remote import RemoteEnvironment
from palestra.errors import ConfigError


def environment_of(config: JobConfig) -> Callable[[], Environment | ConcurrentEnvironment] | None:
    """Return what makes an environment that the job names; None where workers outside play.

    Args:
        config: the job.

    Raises:
        ConfigError: there is no such environment, or a setting is wrong, or there is no key of the server.
        ModuleNotFoundError: the environment needs a package that is not installed.
    """
    chosen = config.environment
    if chosen.url is not None:
        key = os.environ.get(chosen.key_variable)
        if not key:
            raise ConfigError(
                f"environment.key_variable is {chosen.key_variable!r}, and that variable is not set here; it has to "
                f"hold the key of {chosen.url}"
            )
        return RemoteEnvironment(chosen.url, key, system=chosen.system)
    if chosen.name is None:
        return None
    return catalog_maker(chosen.name, chosen.settings, chosen.system)
