"""The runs of a comparison: for each scenario, algorithm and seed the whole configuration of one job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.config import JobConfig, load_config, parse_config, resolve_paths
from palestra.config.loading import read_toml
from palestra.errors import ConfigError, PalestraError
from palestra_lab.config import ComparisonConfig, ScenarioEntry, Table

Load = Callable[[str], Any]  # imports "module:function", or "path/to/file.py:function"
GIVEN = ("rollout", "environment", "reward", "tasks", "validation_tasks", "concurrency", "config")
# Keys of a job that the comparison itself sets; where they may be given instead.
SET_BY_COMPARISON = {
    "name": "the key of the scenario and the algorithm",
    "kind": "training is compared",
    "run_dir": "`output`",
    "seed": "`seeds`",
    "token_budget": "`token_budget` of the scenario",
    "algorithm": "[algorithms.NAME]",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of the grid.

    Attributes:
        play: the function that returns the arguments of `palestra.train`; None: the job's own environment.
        policies: whose rewards are compared, if several are trained; "" is the only one.
    """

    scenario: str
    algorithm: str
    seed: int
    folder: Path
    config: JobConfig
    play: str | None
    arguments: Table
    policies: tuple[str, ...] = ("",)

    @property
    def label(self) -> str:
        """Return the name of the run for people."""
        return f"{self.scenario}  {self.algorithm}  seed {self.seed}"

    @property
    def record(self) -> Path:
        """Return the path of the run's record, next to its folder."""
        return self.folder.with_suffix(".json")

    @property
    def log(self) -> Path:
        """Return the path of the output of the run's process, next to its folder."""
        return self.folder.with_suffix(".log")

    @property
    def settings(self) -> Table:
        """Return all settings that affect the run, as JSON: they identify a finished run."""
        return {"config": settings_of(self.config), "play": self.play, "arguments": self.arguments}


def settings_of(config: JobConfig) -> Table:
    """Return the configuration of a run as JSON, without settings that vary between runs or have no effect."""
    return config.model_dump(mode="json", exclude={"name", "run_dir", "server", "store"})


def plan_runs(comparison: ComparisonConfig, load: Load) -> list[PlannedRun]:
    """Return all runs of a comparison, in order of execution.

    One seed of every scenario and algorithm comes before the next seed, so that a part of the grid is a comparison.
    """
    found: dict[int, list[PlannedRun]] = {}
    for key, scenario in comparison.scenarios.items():
        base, plays = _base_job(key, scenario, load)
        for algorithm in scenario.algorithms or comparison.algorithms:
            for number, seed in enumerate(scenario.seeds or comparison.seeds):
                config = _config(comparison, key, algorithm, seed, base)
                if number == 0:
                    _check_validation(key, config, plays)
                    _check_policies(key, scenario, config)
                run = PlannedRun(
                    scenario=key,
                    algorithm=algorithm,
                    seed=seed,
                    folder=comparison.folder / key / algorithm / f"seed-{seed}",
                    config=config,
                    play=scenario.play,
                    arguments=scenario.arguments,
                    policies=tuple(scenario.policies or config.trained_policies) if config.trains_several else ("",),
                )
                found.setdefault(number, []).append(run)
    return [run for number in sorted(found) for run in found[number]]


def given_by(play: str, arguments: Table, load: Load) -> dict[str, Any]:
    """Call the function of a scenario and return the arguments of `palestra.train`."""
    try:
        found = load(play)(**arguments)
    except PalestraError:
        raise
    except TypeError as error:
        raise ConfigError(f"{play}: {error}") from error
    except (Exception, SystemExit) as error:  # of its file as well; sys.exit(0) would look like a finished comparison
        raise ConfigError(f"{play} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping) or set(found) - set(GIVEN):
        what = f"the keys {', '.join(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ConfigError(f"{play} returns {what}; expected a mapping with some of {', '.join(GIVEN)}")
    return dict(found)


def _base_job(key: str, scenario: ScenarioEntry, load: Load) -> tuple[Table, dict[str, Any]]:
    """Return the job of a scenario as nested tables, without an algorithm, and the arguments of `palestra.train`."""
    given = {} if scenario.play is None else given_by(scenario.play, scenario.arguments, load)
    made = given.pop("config", None)
    if (made is None) == (scenario.job is None):
        raise ConfigError(
            f"scenario {key}: {scenario.play} returns no `config`; add it, or name a base job"
            if made is None
            else f"scenario {key}: both `job` and the `config` of {scenario.play} say what is trained; leave one out"
        )
    if scenario.job is not None:
        load_config(scenario.job)  # so that a mistake in the file is said with the name of the file
        data = read_toml(scenario.job)
        resolve_paths(data, scenario.job.parent)
    else:
        job = made if isinstance(made, JobConfig) else parse_config(made, source=str(scenario.play))
        data = job.model_dump(mode="json", exclude_unset=True)
    data.pop("algorithm", None)
    return _merged(data, _checked(scenario.overrides, f"scenarios.{key}")), given


def _config(comparison: ComparisonConfig, key: str, algorithm: str, seed: int, base: Table) -> JobConfig:
    """Return the whole configuration of one run."""
    scenario, entry = comparison.scenarios[key], comparison.algorithms[algorithm]
    tuned = scenario.tuned.get(algorithm)
    data = _merged(base, _checked(entry.overrides, f"algorithms.{algorithm}"))
    settings = {"name": entry.name or algorithm} | entry.settings
    if tuned is not None:
        data = _merged(data, _checked(tuned.overrides, f"scenarios.{key}.tuned.{algorithm}"))
        settings |= tuned.settings
    data |= {"name": f"{key}-{algorithm}", "seed": seed, "algorithm": settings}
    data["token_budget"] = scenario.token_budget
    every = max(1, scenario.token_budget // comparison.evaluations)
    data["evaluation"] = {**data.get("evaluation", {}), "every_tokens": every}
    config = parse_config(data, source=f"scenario {key}, algorithm {algorithm}")
    updates: Table = {"run_dir": comparison.folder / key / algorithm / f"seed-{seed}"}
    if "steps" not in entry.overrides and (tuned is None or "steps" not in tuned.overrides):
        # The base job's number of steps is of another budget. Each episode samples at least one token.
        updates["steps"] = math.ceil(
            scenario.token_budget / (config.rollout.group_size * config.rollout.groups_per_step)
        )
    return config.model_copy(update=updates)


def _checked(overrides: Table, place: str) -> Table:
    """Return overrides that set no key of the comparison itself."""
    for name in overrides:
        if name in SET_BY_COMPARISON:
            raise ConfigError(f"{place}.overrides sets {name!r}, which a comparison gives: {SET_BY_COMPARISON[name]}")
    return overrides


def _check_validation(key: str, config: JobConfig, given: Mapping[str, Any]) -> None:
    """Raise an error for a scenario without held-out tasks."""
    jobs = config.each_environment.values()
    made = any(job.environment.name is not None and job.environment.validation_tasks for job in jobs)
    if not (given.get("validation_tasks") or any(job.tasks.validation for job in jobs) or made):
        raise ConfigError(f"scenario {key} has no validation tasks, and a comparison is of their rewards")


def _check_policies(key: str, scenario: ScenarioEntry, config: JobConfig) -> None:
    """Raise an error for a scenario that compares an untrained policy."""
    for name in scenario.policies or ():
        if name not in config.trained_policies:
            known = " and ".join(map(repr, config.trained_policies))
            raise ConfigError(f"scenarios.{key}.policies names {name!r}, and the job trains {known}")


def _merged(base: Table, over: Table) -> Table:
    """Return nested tables, with values of the first replaced by the second's."""
    found = dict(base)
    for key, value in over.items():
        known = found.get(key)
        found[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return found
