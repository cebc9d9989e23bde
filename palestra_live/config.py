"""`[live]`, and the job that a file with `kind = "live"` describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, field_validator

from palestra.config import JobConfig, JudgeConfig, parse_config
from palestra.config.loading import with_overrides
from palestra.config.section import Seconds, Section, explain
from palestra.errors import ConfigError
from palestra.types.progress import ENDLESS
from palestra_live.gate.config import GateConfig, bounds_of

KIND = "live"
LONGEST_IDLE = 3000.0  # the lease of a session's episode lasts an hour, and each call renews it


class LiveConfig(Section):
    """How sessions end, what is never recorded, and how long feedback may come."""

    idle_seconds: Seconds = Field(600.0, le=LONGEST_IDLE, description="A session ends after so long without a call.")
    wait_seconds: float = Field(
        3600.0, ge=0, le=30 * 86400.0, description="Feedback is taken for so long after a session's end."
    )
    keep_days: float | None = Field(
        None, gt=0, description="Days after which the content of a session is deleted. None: it is kept."
    )
    redact: str | list[str] = Field(
        [],
        description="What is private: regular expressions, or a function of yours, FILE.py:FUNCTION, from a text to "
        "the text without what is private. A call with a text or a reply that has a match, or that the function "
        "changes, is answered, but neither recorded nor trained.",
    )
    judged: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the sessions without feedback that `[judge]` scores, to train them; the gate does not "
        "count its scores. A relative judge scores none.",
    )
    gate: GateConfig | None = Field(
        None, description="What a new version has to show before it serves. None: the newest version always serves."
    )

    @field_validator("redact")
    @classmethod
    def _are_patterns(cls, redact: str | list[str]) -> str | list[str]:
        for pattern in [] if isinstance(redact, str) else redact:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return redact


class LiveParts(NamedTuple):
    """The parts of a configuration with `kind = "live"`.

    Attributes:
        judge: compares versions in the shadow, or scores sessions without feedback; None: neither is done.
    """

    job: JobConfig
    live: LiveConfig
    judge: JudgeConfig | None


def read_live(tables: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> LiveParts:
    """Return the parts of a configuration with `kind = "live"`. `settings`: by dotted key, they replace values of
    `tables`. Raises ConfigError for a wrong value, or a job that cannot learn from sessions.
    """
    own = with_overrides(
        tables.get(KIND, {}),
        {key.removeprefix("live."): value for key, value in settings.items() if key.startswith("live.")},
        source,
    )
    try:
        live = LiveConfig.model_validate(own)
    except ValidationError as error:
        raise ConfigError(f"{source}: live: {explain(error, LiveConfig)}") from error
    job = {key: value for key, value in tables.items() if key not in (KIND, "kind")}
    of_gate = {} if live.gate is None else {"checkpoint": {"every_steps": 1}}  # each may be offered
    for key, values in (_DEFAULTS | of_gate).items():
        given = job.get(key)
        if isinstance(values, dict):
            job[key] = values | given if isinstance(given, dict) else values if given is None else given
        elif given is None:
            job[key] = values
    rest = {key: value for key, value in settings.items() if key != "kind" and not key.startswith("live.")}
    config = parse_config(job, rest, source)
    _check(config, source)
    judge, config = config.judge, config.model_copy(update={"judge": None})  # it scores no episode that is played
    _check_judge(config, live, judge, source)
    if live.gate is not None:
        config = _gated(config, live.gate, judge if judge is not None and judge.compares else None, source)
    elif _plays(config):
        raise ConfigError(f"{source}: environment {_UNGATED}")
    return LiveParts(config, live, judge)


_DEFAULTS: dict[str, Any] = {
    "steps": ENDLESS,
    "algorithm": {"name": KIND},
    "rollout": {"group_size": 1, "max_staleness": 4, "timeout_seconds": 60 * 86400.0},
    "evaluation": {"every_steps": 0},
    "environment": {"train_tasks": 1},  # none is played
    "watchdog": {"stuck_seconds": 0},  # nobody may use the application for a night
}


_UNGATED = "tests versions for a gate, and the run has none; add [live.gate]"


def _check_judge(config: JobConfig, live: LiveConfig, judge: JudgeConfig | None, source: str) -> None:
    """Raise ConfigError for a judge that has nothing to do, or can't do it."""
    scores = judge is not None and judge.compares is None
    if "judged" in live.model_fields_set and not scores:
        raise ConfigError(
            f"{source}: live.judged is set, and no judge scores sessions; add a [judge] that is not relative"
        )
    if judge is None:
        return
    if not scores and live.gate is None:
        raise ConfigError(f"{source}: judge {_UNGATED}")
    if scores and not judge.bounded:
        raise ConfigError(f"{source}: a session's score is from 0 to 1, and this judge's may be outside; use a rubric")
    if judge.asks_policy and not config.server.port_is_given:
        raise ConfigError(f"{source}: judge.policy is asked at the run's own address; give server.port")


def _plays(config: JobConfig) -> bool:
    return config.environment.name is not None or config.environment.url is not None


def _gated(config: JobConfig, gate: GateConfig, judge: JudgeConfig | None, source: str) -> JobConfig:
    """Return the job with evaluations of each version on held-out tasks, if it has any.

    Raises:
        ConfigError: the gate would never be offered a version.
    """
    try:
        bounds_of(gate, judge)
    except ConfigError as error:
        raise ConfigError(f"{source}: live.gate: {str(error).removeprefix('GateBounds: ')}") from error
    if config.evaluation.is_on:
        raise ConfigError(f"{source}: evaluation is set, and the gate has every version evaluated; leave it out")
    every, most = config.checkpoint.every_steps, config.rollout.max_staleness
    if every > most + 1:
        raise ConfigError(
            f"{source}: the gate is offered a version every {every} steps (checkpoint.every_steps), and sessions of "
            f"the live version are trained for {most + 1} steps (rollout.max_staleness + 1): set every_steps to "
            f"{most + 1} or less"
        )
    if not _plays(config):
        return config
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every_steps": every})})


def _check(config: JobConfig, source: str) -> None:
    """Raise ConfigError for a job that cannot learn from sessions."""
    if config.rollout.group_size != 1:
        raise ConfigError(f"{source}: a session has no group to be compared with; leave rollout.group_size out")
    if len(config.trained_policies) != 1:
        raise ConfigError(f"{source}: a live run trains one policy; set frozen = true for all others")
    name = config.algorithm_of(config.trained_policies[0]).name
    if name != KIND:
        raise ConfigError(f"{source}: algorithm.name is {name!r}; sessions are learned from by 'live': leave it out")
    for key, given in (
        ("environments", config.environments),
        ("harness", config.harness),
        ("tasks.train", config.tasks.train),
        ("tasks.validation without an environment", config.tasks.validation if not _plays(config) else None),
        ("seats", config.seats.roles),
    ):
        if given:
            raise ConfigError(f"{source}: {key} is set, and the episodes of a live run are sessions; leave it out")
