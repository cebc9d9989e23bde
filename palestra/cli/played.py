"""What `palestra worker` plays: a function, an environment, agents in an environment, or the job's environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cli.options import environment_settings, load_environment
from palestra.errors import ConfigError
from palestra.extensions import load_function

if TYPE_CHECKING:
    from palestra.client.worker import Rollout
    from palestra.rollout import RolloutSpec
    from palestra.types.wire import RolloutFacts

PLAYED = (
    "a rollout function, an environment, an agent or a RolloutSpec: module:name, or path/to/file.py:name; or an "
    "environment that ships (palestra environments); without it, the environment that the job names"
)
Played = Callable[["RolloutFacts"], "Rollout | RolloutSpec"]
"""Returns what is played, when it is known what the job says of itself. Raises ConfigError where they do not fit."""


def load_played(reference: str | None, environment: str | None, settings: str) -> Played:
    """Import what a worker plays. `environment`: in which an agent acts, if `reference` names an agent; None: the
    job's. `settings`: of the environment, as a JSON object.
    """
    given = environment_settings(settings)
    if reference is None or ":" not in reference:
        if environment is not None:
            raise ConfigError("--environment is for an agent; name one of yours, or leave it out")
        return _environment(reference, given)
    found = load_function(reference)
    if environment is None and inspect.isroutine(found) and _takes(found, 2):
        return lambda facts: found  # which the light client plays, without what environments and agents need
    from palestra.agents import Agent
    from palestra.rollout import RolloutSpec

    made = found if isinstance(found, type) else type(found)
    if issubclass(made, Agent):
        try:
            agent = found() if isinstance(found, type) else found
        except TypeError as error:
            raise ConfigError(f"{reference} can't be made without arguments ({error}); name one that is made") from None
        spec = _environment(environment, given)
        return lambda facts: RolloutSpec(environment=spec(facts).environment, agents={"": agent})
    if environment is not None:
        raise ConfigError(f"--environment is for an agent, and {reference} is none; leave it out")
    if isinstance(found, RolloutSpec):
        return lambda facts: found
    if not isinstance(found, type) and callable(found) and _takes(found, 2):
        return lambda facts: found
    return _own(reference, found, given)


def load_harness(name: str, score: str | None, settings: str) -> Played:
    """Return the rollout function of a harness.

    Args:
        score: file of the score function.
        settings: other keys of `HarnessConfig`, as a JSON object.
    """
    from palestra.client.harness import harness_rollout
    from palestra.config.harness import HarnessConfig

    if score is None:
        raise ConfigError("--harness needs --score FILE.py, whose function `score(task, result)` returns the reward")
    given = {**environment_settings(settings), "name": name, "score": Path(score)}
    rollout = harness_rollout(HarnessConfig(**given))
    return lambda facts: rollout


def _own(reference: str, found: Any, settings: Mapping[str, Any]) -> Callable[[RolloutFacts], RolloutSpec]:
    """Return the environment of a user's own class, or of a function that makes one."""
    from palestra.envs import ConcurrentEnvironment, Environment
    from palestra.rollout import RolloutSpec

    known = Environment | ConcurrentEnvironment
    if isinstance(found, known) and not callable(found):
        name = type(found).__name__
        raise ConfigError(f"{reference} is one {name}, and each episode needs its own; name the class {name}")
    if not (issubclass(found, known) if isinstance(found, type) else callable(found) and _takes(found, 0)):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise ConfigError(
            f"{reference} is a {kind}, and none that can be played: name a rollout function (task, endpoint), an "
            "environment's class, an agent, or a RolloutSpec"
        )
    make = partial(found, **settings)
    return lambda facts: RolloutSpec(environment=make)


def _environment(reference: str | None, settings: Mapping[str, Any]) -> Callable[[RolloutFacts], RolloutSpec]:
    """Return the environment of a name of the catalogue, or of a class, or the one that the job names."""
    from palestra.agents import named_agents
    from palestra.envs.catalog import catalog_maker
    from palestra.rollout import RolloutSpec

    if reference is None:

        def named(facts: RolloutFacts) -> RolloutSpec:
            if facts.environment is None:
                raise ConfigError("the job names no environment (environment.name); say what is played: " + PLAYED)
            return RolloutSpec(
                environment=catalog_maker(facts.environment, {**facts.settings, **settings}, facts.system),
                agents=named_agents(facts.agent, facts.agent_settings),
            )

        return named
    if ":" in reference:
        return _own(reference, load_environment(reference), settings)
    catalog_maker(reference, settings)  # what is wrong is said before the job is asked
    return lambda facts: RolloutSpec(environment=catalog_maker(reference, settings, facts.system))


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function in C that does not say what it takes
        return True
    return True
