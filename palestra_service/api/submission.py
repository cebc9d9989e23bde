"""Check and complete submissions, so that a mistake is answered immediately and not found when the job starts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from palestra.algorithms.registry import create_algorithm
from palestra.config import AlgorithmConfig, JobConfig, not_frozen, parse_config
from palestra.errors import ConfigError, InvalidRequest
from palestra_control.jobs import JobKind, JobRecord, JobRequest, Resources
from palestra_control.wire import SubmitJob
from palestra_service.accounts.identity import Identity
from palestra_service.api.access import ControlPlane
from palestra_service.jobs.budgets import unpriced
from palestra_service.jobs.job_resources import resources_of
from palestra_service.jobs.launcher import RUN
from palestra_service.jobs.rules import Rules
from palestra_service.jobs.shared_jobs import adapters_of, check_shared
from palestra_service.jobs.sources import JOB_ID, check_recorded, recorded_job, step_meant

# For a key of N parts, the parser takes time and memory in proportion to N squared. Quotes are looked for nearby only,
# so that the search is linear.
_LONG_KEY = re.compile(
    r"""(?<![\w"'-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.){0,64}+"|'[^'\n]{0,64}+')[ \t]*+\.[ \t]*+){50}""", re.ASCII
)


async def request_of(plane: ControlPlane, body: SubmitJob, by: Identity) -> JobRequest:
    """Return the validated and completed job of a request body.

    Raises:
        ConfigError, InvalidRequest: the job cannot run, for the reason in the message.
        NotFound: `from_job` is not a job of this tenant, or has no such checkpoint; or `from_run` has no episode.
    """
    if body.from_step is not None and body.from_job is None:
        raise InvalidRequest("from_step is a checkpoint of from_job, which is missing", "from_step")
    source = None if body.from_job is None else await plane.job(by, body.from_job)
    # A configuration may be as long as a body, and is read several times.
    kind, given, adapters, resources = await plane.pool.run(_completed, body, source, by, plane.rules)
    if (why := await plane.pool.run(unpriced, await plane.scheduler.quota_of(by.tenant), given)) is not None:
        raise InvalidRequest(why, "config.prices")
    step = None
    if source is not None:
        run, trained = plane.scheduler.folder_of(source.job_id) / RUN, not_frozen(given["policies"])
        step = await asyncio.to_thread(step_meant, run, source.job_id, body.from_step, trained)
    await check_recorded_source(plane, by, kind, given)
    written = given.get("name") if body.config_toml is not None else None
    return JobRequest(
        name=body.name or written or ("job" if source is None else source.name),
        kind=kind,
        priority=body.priority,
        config=given,
        resources=resources,
        attached=body.attached,
        restarts_limit=body.restarts,
        time_limit_seconds=plane.rules.time_limit(body.time_limit_seconds),
        from_job=body.from_job,
        from_step=step,
        from_newest=body.from_step is None and source is not None,
        adapters=adapters,
    )


def _completed(
    body: SubmitJob, source: JobRecord | None, by: Identity, rules: Rules
) -> tuple[JobKind, dict[str, Any], int, Resources]:
    """Return a submission's kind and whole configuration, its adapters on a shared base, and its resources."""
    given = _config(body, source)
    config = _checked(given, rules)
    if source is not None:
        given = _with_model_of(source, given, config)
    adapters = adapters_of(config)
    return config.kind, allowed(given, by, rules), adapters, resources_of(body.resources, config, adapters)


def allowed(given: dict[str, Any], by: Identity, rules: Rules) -> dict[str, Any]:
    """Return a configuration that the operator allows, with `max_claimed` lowered to the key's limit."""
    config = parse_config(given)
    rules.check(config)
    most = min(by.limits.episodes_in_flight, config.rollout.max_claimed or by.limits.episodes_in_flight)
    if config.kind != "training" or config.rollout.max_claimed == most:
        return given
    return given | {"rollout": given.get("rollout", {}) | {"max_claimed": most}}


async def check_recorded_source(plane: ControlPlane, by: Identity, kind: JobKind, given: dict[str, Any]) -> None:
    """Refuse a new job that learns from episodes that are not there. `kind`: a served model reads no episodes.

    Raises:
        NotFound: there is no such job in the caller's tenant, or it has no episodes.
    """
    if kind != "training" or (name := recorded_job(given)) is None:
        return
    source = await plane.job(by, name)
    run = plane.scheduler.folder_of(source.job_id) / RUN
    await asyncio.to_thread(check_recorded, run, source.job_id, plane.store.clock.now())


def _config(body: SubmitJob, source: JobRecord | None) -> dict[str, Any]:
    written = _written(body)
    if written is not None:
        given = dict(written)
        kind = given.get("kind", body.kind)
        if body.kind is not None and kind != body.kind:
            raise ConfigError(f"kind is {body.kind!r}, and config.kind is {kind!r}; leave one of them out")
        return given if kind is None else given | {"kind": kind}
    if source is None:
        raise InvalidRequest("a job has a config, or from_job, whose configuration it takes", "config")
    kind = body.kind or "inference"
    left_out = ("environment", "algorithm") if kind == "inference" else ()
    return {key: value for key, value in source.config.items() if key not in left_out} | {"kind": kind}


def _written(body: SubmitJob) -> dict[str, Any] | None:
    if body.config_toml is None:
        return body.config
    if body.config is not None:
        raise InvalidRequest("config and config_toml are the same thing; leave one of them out", "config_toml")
    if _LONG_KEY.search(body.config_toml):
        raise ConfigError("config_toml: there is a key of 50 parts or more, or a text that looks like one")
    try:
        found = tomllib.loads(body.config_toml)
        orjson.dumps(found)  # refuses integers of over 64 bits, of which Python makes no text, and deep nesting
    except RecursionError:
        raise ConfigError("config_toml: its lists or tables are nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of too many digits
        raise ConfigError(f"config_toml: not valid TOML: {error}") from error
    except TypeError as error:
        raise ConfigError(f"config_toml: no configuration has this: {error}") from error
    return found


def _checked(given: dict[str, Any], rules: Rules) -> JobConfig:
    for section, keys in (("tasks", ("train", "validation")), ("run_dir", ())):
        value = given.get(section)
        if value is not None and (not keys or (isinstance(value, dict) and any(value.get(key) for key in keys))):
            raise InvalidRequest(f"config.{section} names files, which the server does not read", f"config.{section}")
    _check_recorded_sources(given)
    config = parse_config(given)
    if config.audit is not None:
        raise InvalidRequest("a service audits no rewards; leave config.audit out", "config.audit")
    for name, policy in config.policies.items():
        with _about(f"policies.{name}.model"):
            rules.weights(policy.model)
    check_shared(config, rules.bases)
    _check_servers(config, rules)
    rules.engines.check(config)
    _check_algorithm("algorithm", config.algorithm, rules)
    for name, policy in config.policies.items():
        if policy.algorithm is not None:
            _check_algorithm(f"policies.{name}.algorithm", policy.algorithm, rules)
    return config


@contextlib.contextmanager
def _about(key: str) -> Iterator[None]:
    """Refuse a request for what the operator's rules do not allow, naming the key."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequest(str(error), f"config.{key}") from error


def _check_servers(config: JobConfig, rules: Rules) -> None:
    """Raise an error for a server that jobs may not connect to, or a file of the server of this API."""
    judge = config.judge
    if judge is not None and (named := [name for name, value in judge if isinstance(value, Path)]):
        raise InvalidRequest(f"config.judge.{named[0]} names a file, which the server does not read", "config.judge")
    for key, url in (("environment.url", config.environment.url), ("judge.url", None if judge is None else judge.url)):
        if url is not None:
            with _about(key):
                rules.host_variable(url, key)


def _check_recorded_sources(given: dict[str, Any]) -> None:
    """Raise an error for recorded episodes that are not a job's."""
    policies = given.get("policies")
    tables = {"algorithm": given.get("algorithm")}
    for name, policy in (policies if isinstance(policies, dict) else {}).items():
        tables[f"policies.{name}.algorithm"] = policy.get("algorithm") if isinstance(policy, dict) else None
    for key, table in tables.items():
        recorded = table.get("from_run") if isinstance(table, dict) else None
        if recorded is None:
            continue
        if key != "algorithm":
            raise InvalidRequest(
                f"config.{key}.from_run is taken from [algorithm] only; write it there", f"config.{key}.from_run"
            )
        if not (isinstance(recorded, str) and JOB_ID.fullmatch(recorded)):
            raise InvalidRequest(
                f"config.algorithm.from_run is {recorded!r}, and the server reads no folder for it; name the ID of a "
                "job, such as 'job-1f3a5c7e9b2d4f60'",
                "config.algorithm.from_run",
            )


def _check_algorithm(key: str, algorithm: AlgorithmConfig, rules: Rules) -> None:
    """Raise an error for an algorithm that needs something forbidden to tenants."""
    # It would be asked from inside of the operator's network, with a variable of the server's environment as its key.
    if algorithm.served_teacher is not None:
        raise InvalidRequest(
            f"config.{key}.teacher_server names a server, and this one calls no other for its users; take a frozen "
            "policy as the teacher",
            f"config.{key}.teacher_server",
        )
    if algorithm.kl is not None and algorithm.kl.reference is not None:
        with _about(f"{key}.kl.reference"):
            rules.weights(algorithm.kl.reference)
    create_algorithm(algorithm)  # refuses code of the tenant's own


def _with_model_of(source: JobRecord, given: dict[str, Any], config: JobConfig) -> dict[str, Any]:
    before = parse_config(source.config)
    policies = dict(given.get("policies", {}))
    for name, trained in _starting_points(config.trained_policies, before).items():
        own, model = config.policies[name], before.policies[trained].model
        if "model" in own.model_fields_set and own.model != model:
            raise ConfigError(
                f"policies.{name}.model is {own.model!r}, and from_job trains {model!r}; leave one of them out"
            )
        policies[name] = policies.get(name, {}) | {"model": model}
    rest = {key: value for key, value in given.items() if key != "model"}  # else it would replace the checkpoint
    return rest | {"policies": policies}


def _starting_points(names: Sequence[str], before: JobConfig) -> dict[str, str]:
    """Return, for each policy that is not frozen, the other job's policy whose weights it starts from."""
    if before.trains_several:
        if unknown := [name for name in names if name not in before.trained_policies]:
            raise ConfigError(
                f"from_job trains {' and '.join(map(repr, before.trained_policies))}, and a policy starts from the "
                f"weights of its name: rename {unknown[0]!r}, or set `frozen` for it"
            )
        return {name: name for name in names}
    if not before.trained_policies:
        raise ConfigError("from_job is a job that trains nothing, and so has no weights of its own")
    if len(names) != 1:
        raise ConfigError(
            "from_job gives its weights to one policy; set `frozen` for the others, which are served as they are"
        )
    return {names[0]: before.trained_policies[0]}
