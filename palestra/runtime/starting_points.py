"""Which models the policies of a job begin with: models by name, and the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from palestra.config import SAVED_CONFIG, UNSET, JobConfig, load_config, load_saved_config
from palestra.errors import ConfigError
from palestra.learner.reporting import CHECKPOINTS, checkpoints_of
from palestra.runtime.run_dir import weights_of_policy, weights_of_run
from palestra.trainer.checkpoint import newest_path, not_held, step_of


class RunCheckpoint(NamedTuple):
    """A checkpoint of a run."""

    policy: str
    step: int
    folder: Path


def all_checkpoints(config: JobConfig, run_dir: Path) -> dict[str, RunCheckpoint]:
    """Return the checkpoints of a run that no audit holds back.

    Their names are such as `policy@step-20`, each policy's newest first.
    """
    known = {policy: checkpoints_of(run_dir, policy, config) for policy in config.trained_policies}
    return {
        f"{policy}@step-{step_of(path)}": RunCheckpoint(policy, step_of(path), path)
        for policy, folder in known.items()
        for path in reversed(not_held(folder))
    }


def newest_checkpoints(config: JobConfig) -> dict[str, Path]:
    """Return the newest undamaged checkpoint of each trained policy, by name; policies without one are left out."""
    found = {name: newest_path(checkpoints_of(config.folder, name, config)) for name in config.trained_policies}
    return {name: path for name, path in found.items() if path is not None}


def with_models(config: JobConfig, models: str | Mapping[str, str]) -> JobConfig:
    """Return the job with other models for its policies.

    The folder of a run means its best validated weights, or else its newest undamaged checkpoint. If the run has
    trained several policies, each policy takes the checkpoint of its own name; `RUN/checkpoints/NAME` names another
    one.

    Args:
        models: a model's name or folder, for the only policy that is not frozen; the folder of a run with several
            trained policies, for all policies that are not frozen; or models by policy name.

    Raises:
        NotFound: a run has no checkpoint.
    """
    if isinstance(models, str):
        if len(trained_in(models)) < 2:
            return config.with_model(weights_of_run(models))
        models = dict.fromkeys(config.trained_policies, models)
    policies = dict(config.policies)
    for name, model in models.items():
        if name not in policies:
            known = ", ".join(map(repr, policies))
            raise ConfigError(f"a model is given for {name!r}, and there is no such policy; there are {known}")
        policies[name] = policies[name].model_copy(update={"model": _model_for(name, model)})
    return config.model_copy(update={"policies": policies})


def with_checkpoints(config: JobConfig) -> JobConfig:
    """Return the job with a checkpoint in place of each `policies.NAME.model` that names a run; see `with_models`.

    It may be the folder of a run with one trained policy, or `RUN/checkpoints/NAME`. The checkpoint is resolved before
    the run begins, and the run's own configuration names it.
    """
    found = {name: weights_of_run(policy.model) for name, policy in config.policies.items()}
    policies = {name: policy.model_copy(update={"model": found[name]}) for name, policy in config.policies.items()}
    return config.model_copy(update={"policies": policies})


def trained_in(folder: str) -> tuple[str, ...]:
    """Return the names of the policies that a run has trained; empty for another folder."""
    run = Path(folder)
    if not ((run / "run.db").is_file() and (run / SAVED_CONFIG).is_file()):
        return ()
    return load_config(run / SAVED_CONFIG).trained_policies


def run_of(model: str) -> Path | None:
    """Return a folder's run, if it is a run or one of its checkpoints; None: it is neither."""
    place = Path(model)
    for run in (place, *place.parents):
        if (run / "run.db").is_file() and (run / SAVED_CONFIG).is_file():
            return run if run == place or (run / CHECKPOINTS) in (place, *place.parents) else None
    return None


def config_of_run(
    model: str, environment: str | None = None, overrides: Mapping[str, Any] | None = None
) -> JobConfig | None:
    """Return the settings with which a run plays its episodes, to evaluate its result.

    Addresses, folders, trackers and external players are left out. For the checkpoint of one of several policies, only
    this policy is included. None: `model` does not belong to a run.

    Args:
        model: folder of a run or of one of its checkpoints.
        environment: name of the environment to play. The run's own is only used if it has this name.
        overrides: values by dotted key, which replace those of the run.
    """
    if (run := run_of(model)) is None:
        return None
    saved = load_saved_config(run)
    left_out = ["run_dir", "tracking", "seats", "server", "environment.url", "environment.runners"]
    left_out += ["environments", "curriculum"]
    left_out += [f'policies."{name}".base' for name in saved.policies]
    if saved.engine.urls:  # of servers that may work for the run, and would get another owner
        left_out.append("engine")
    (name, *_) = Path(model).relative_to(run).parts[1:] or ("",)
    if name in saved.policies and len(saved.trained_policies) > 1:
        left_out += ["roles", *(f'policies."{other}"' for other in saved.policies if other != name)]
    if environment is not None:
        left_out.append("harness")
    changes: dict[str, Any] = dict.fromkeys(left_out, UNSET) | {"environment.name": environment}
    if environment != saved.environment.name:
        changes |= {"environment.settings": {}, "environment.path": UNSET, "tasks": UNSET}
    return load_config(run / SAVED_CONFIG, changes | dict(overrides or {}))


def _model_for(policy: str, model: object) -> str:
    """Return the model of one policy, with a checkpoint in place of a run's folder."""
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"the model of {policy!r} is {model!r}; give the name of a model, or the folder that it is in"
        )
    trained = trained_in(model)
    if len(trained) < 2 or policy not in trained:  # of several none is clearly meant, which is refused
        return weights_of_run(model)
    return str(weights_of_policy(Path(model), policy)[0])
