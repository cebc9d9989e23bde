"""The episodes that a job's own process plays: checks against the job, and its runners."""

from __future__ import annotations

from functools import partial

from palestra.agents import ModelAgent
from palestra.algorithms.base import Algorithm
from palestra.algorithms.registry import create_algorithm
from palestra.config import JobConfig
from palestra.errors import ConfigError
from palestra.process.child import ProcessStarter
from palestra.rollout import RolloutSpec
from palestra.runners import Runner, RunnerPool
from palestra.runtime.early_checks import agents_of, check_roles
from palestra.runtime.runner_fleet import RunnerFleet, RunnerOrder, run_runner, start_here
from palestra.runtime.tasks import played_of
from palestra.server import DataPlane
from palestra.session import Sessions
from palestra.types.progress import JobProgress

MOST_AT_ONCE = 256  # episodes played concurrently, unless the job sets another number


def plays_of(config: JobConfig, play: RolloutSpec | None) -> dict[str, RolloutSpec]:
    """Return what this process plays, by environment as in `each_environment`; "": all. Empty: others play. `play`:
    what the user has given; None: what the job names.
    """
    if play is not None:
        return {"": play}
    named = {name: played_of(job) for name, job in config.each_environment.items()}
    return {name: spec for name, spec in named.items() if spec is not None}


def check_played_roles(config: JobConfig, play: RolloutSpec | None) -> None:
    """Check that roles, external players and policies fit the environment."""
    if config.roles or config.seats.roles or len(config.policies) > 1:
        of_each = [agents_of(spec.environment) for spec in plays_of(config, play).values()]
        # Where the agents of one are not known before an episode, nothing can be said.
        check_roles(config, tuple(dict.fromkeys(name for names in of_each for name in names)) if all(of_each) else ())


def algorithms_of(config: JobConfig, play: RolloutSpec | None, own_code: bool) -> dict[str, Algorithm]:
    """Return the algorithm of each trained policy, by name; arguments as in `local_job`."""
    found: dict[str, Algorithm] = {}
    for name in config.trained_policies:
        found[name] = create_algorithm(config.algorithm_of(name), config.rollout.step_order, own_code=own_code)
        if found[name].every_choice:
            _check_choices(config, name, play)
    return found


def _check_choices(config: JobConfig, policy: str, play: RolloutSpec | None) -> None:
    """Raise ConfigError if no agent's replies are restricted to choices, but an algorithm trains every choice.

    For external workers this is only checked at the first step.
    """
    specs = plays_of(config, play).values()
    if not specs:
        return
    # Of a user's function that makes environments it is not known what they give; of a class and an environment it is.
    made = [spec.environment if play is not None else spec.environment() for spec in specs]
    given = all(getattr(environment, "gives_choices", False) for environment in made)
    agents = {name: agent for spec in specs for name, agent in (spec.agents or {"": ModelAgent()}).items()}
    if not any(agent.may_choose or (isinstance(agent, ModelAgent) and given) for agent in agents.values()):
        raise ConfigError(
            f"{config.algorithm_key(policy)}.name is {config.algorithm_of(policy).name!r}, which needs replies that "
            "are held to finitely many choices, and no agent is: give one `choices`, as in "
            "RolloutSpec(agents={'agent': ModelAgent(choices=[...])})"
        )


def runners_of(
    config: JobConfig, sessions: Sessions, progress: JobProgress, play: RolloutSpec | None
) -> RunnerPool | None:
    """Return the pool that plays episodes here, if any."""
    if config.kind == "inference":
        return None
    plays = plays_of(config, play)
    if not plays:
        if sessions.seats is not None:
            raise ConfigError(
                "seats.roles names agents of an environment that the server plays, and the job has none; name one in "
                "environment.name, or give it to palestra.train"
            )
        return None
    return RunnerPool(
        sessions,
        Runner(sessions, plays, algorithm_of=config.algorithm_of, timeout_seconds=config.rollout.timeout_seconds),
        max_concurrency=_concurrency(config),
        progress=progress.rollouts,
    )


def _concurrency(config: JobConfig) -> int:
    """Return how many episodes of a job are played at the same time."""
    due = config.rollout.group_size * config.rollout.groups_per_step * (1 + config.rollout.max_staleness)
    return config.environment.max_concurrency or min(due, MOST_AT_ONCE)


def plays_apart(config: JobConfig) -> bool:
    """Return whether processes of their own play what the job names; a served model plays nothing."""
    return config.kind != "inference" and (config.environment.runners is not None or config.harness is not None)


def fleet_of(config: JobConfig, plane: DataPlane, url: str, start: ProcessStarter | None) -> RunnerFleet:
    """Return the processes of a job that `plays_apart`: runners of its environment, or one for its harness. `start`:
    None: on this machine.
    """
    count = config.environment.runners or 1
    order = RunnerOrder(
        url=url,
        key=lambda: plane.keys.job_key,
        concurrency=-(-_concurrency(config) // count),
        harness=config.harness,
    )
    return RunnerFleet(count, order, partial(run_runner, start or start_here), plane)
