"""Which models the policies of a job begin with: models by name, checkpoints, and what runs have trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from palestra.config import SAVED_CONFIG, JobConfig, load_config
from palestra.errors import ConfigError
from palestra.runtime.run_dir import newest_of_policy, newest_of_run


def with_models(config: JobConfig, models: str | Mapping[str, str]) -> JobConfig:
    """Return the job with other models for its policies.

    The folder of a run stands for the newest good checkpoint of the run. If the run has trained several policies, each
    policy takes the checkpoint of the policy of its own name; `RUN/checkpoints/NAME` names that of another one.

    Args:
        models: a model's name or folder, for the one policy that is not frozen; or the folder of a run that has trained
            several policies, for all policies of the job that are not frozen; or models by the policy's name.

    Raises:
        ConfigError: the job or the run has no policy of a name, or it is not clear whose model is meant.
        NotFound: a run has no checkpoint yet.
        CheckpointError: all checkpoints of a run are damaged.
    """
    if isinstance(models, str):
        if len(trained_in(models)) < 2:
            return config.with_model(newest_of_run(models))
        models = dict.fromkeys(config.trained_policies, models)
    policies = dict(config.policies)
    for name, model in models.items():
        if name not in policies:
            known = ", ".join(map(repr, policies))
            raise ConfigError(f"a model is given for {name!r}, and there is no such policy; there are {known}")
        policies[name] = policies[name].model_copy(update={"model": _model_for(name, model)})
    return config.model_copy(update={"policies": policies})


def with_checkpoints(config: JobConfig) -> JobConfig:
    """Return the job with the newest good checkpoint in place of each `policies.NAME.model` that is of a run.

    That is the folder of a run that has trained one policy, or `RUN/checkpoints/NAME`. The checkpoint is looked up
    before the run begins, and the run's own configuration names it.

    Raises:
        NotFound: a run has no checkpoint yet.
        ConfigError: a run has trained several policies, and none of them is named.
        CheckpointError: all checkpoints of a run are damaged.
    """
    found = {name: newest_of_run(policy.model) for name, policy in config.policies.items()}
    policies = {name: policy.model_copy(update={"model": found[name]}) for name, policy in config.policies.items()}
    return config.model_copy(update={"policies": policies})


def trained_in(folder: str) -> tuple[str, ...]:
    """Return the names of the policies that a run has trained; of what is not the folder of a run, none."""
    run = Path(folder)
    if not ((run / "run.db").is_file() and (run / SAVED_CONFIG).is_file()):
        return ()
    return load_config(run / SAVED_CONFIG).trained_policies


def _model_for(policy: str, model: object) -> str:
    """Return the model of one policy, with the newest checkpoint in place of a run's folder."""
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"the model of {policy!r} is {model!r}; give the name of a model, or the folder that it is in"
        )
    trained = trained_in(model)
    if len(trained) < 2 or policy not in trained:  # of several none is clearly meant, which is refused
        return newest_of_run(model)
    return str(newest_of_policy(Path(model), policy)[0])
