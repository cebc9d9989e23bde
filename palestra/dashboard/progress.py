"""The progress of a run: its entry in the list of runs, and its metrics in columns."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Connection, func, select

from palestra.config import SAVED_CONFIG, JobConfig
from palestra.dashboard.answers import MetricsAnswer, RunAnswer, SettingsAnswer
from palestra.dashboard.runs import DAMAGED, Run
from palestra.errors import PalestraError
from palestra.learner.metrics import metric_tables
from palestra.store.browsing import last_state
from palestra.store.run_log import object_of, readable_metrics
from palestra.store.tables import events
from palestra.types.metrics import Metric, of_policy
from palestra.types.progress import ENDLESS
from palestra.types.summaries import HealthWarning

RECENT = 10  # steps whose pace says how long the others will take
MOST_WARNINGS = 20
ROUNDED = 64 * 2**20  # bytes: what other programs write must not make the line of a run a new one each time
NEWEST = 200  # rows among which the newest value of a metric is looked for


def describe_run(run: Run) -> RunAnswer:
    """Return the progress of a run; a run that cannot be read says why."""
    try:
        config = run.config
        with run.open() as connection:
            return _described(run, config, connection)
    except PalestraError as error:
        return unreadable(run, str(error))
    except DAMAGED as error:
        return unreadable(run, f"a record can't be read: {type(error).__name__}: {error}"[:500])


def unreadable(run: Run, why: str) -> RunAnswer:
    """Return the entry of a run that cannot be read."""
    return RunAnswer(run=run.name, title=run.title or run.name, folder=str(run.folder), state="unreadable", reason=why)


def _described(run: Run, config: JobConfig, connection: Connection) -> RunAnswer:
    rows, damaged = readable_metrics(connection, NEWEST)
    newest = rows[-1] if rows else {}
    live = run.live() if run.live is not None else None
    state, reason = _state(run, connection)
    if live is not None:
        state, reason = live.state, live.reason
    step = int(newest.get("step", 0)) if live is None else live.step
    pace = _pace(rows)
    left = _seconds_left(rows, config) if state == "running" else None
    number = connection.execute(select(func.coalesce(func.max(events.c.event_id), 0))).scalar_one()
    return RunAnswer(
        run=run.name,
        title=run.title or run.name,
        folder=str(run.folder),
        kind=config.kind,
        state=state,
        reason=reason,
        step=step,
        steps=config.steps,
        models={name: policy.model for name, policy in config.policies.items()},
        reward=newest_value(rows, "train/reward_mean"),
        validation=newest_value(rows, "validation/reward_mean"),
        rewards=_of_each(rows, "train/reward_mean", config.players.rivals),
        validations=_of_each(rows, "validation/reward_mean", config.players.rivals),
        seconds=newest_value(rows, "wall_seconds"),
        seconds_per_step=pace,
        seconds_left=left if live is None or live.seconds_left is None else live.seconds_left,
        tokens_per_second=newest_value(rows, "rollout/tokens_per_second"),
        episodes=run.memory.counts.read(connection),
        warnings=_warnings(connection),
        store_bytes=run.store_bytes,
        disk_free_bytes=shutil.disk_usage(run.folder).free // ROUNDED * ROUNDED,
        serve=serve_command(run, config) if run.serve is None else run.serve,
        damaged=damaged,
        started_at=_time_of(connection, func.min(events.c.event_id)),
        changed_at=_time_of(connection, func.max(events.c.event_id)),
        last_event=number,
        live=live,
    )


def serve_command(run: Run, config: JobConfig) -> str:
    """Return the command that serves a run's newest checkpoint; empty: it trains nothing."""
    settings = serving_settings(run.folder, config)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return shlex.join(["palestra", "run", str(run.folder / SAVED_CONFIG), *words]) if settings else ""


def serving_settings(folder: Path, config: JobConfig) -> dict[str, str]:
    """Return the configuration changes that serve a run's trained model; empty: no model."""
    trained = config.trained_policies if config.kind == "training" else ()
    if not trained:
        return {}
    models = {name: folder if len(trained) == 1 else folder / "checkpoints" / name for name in trained}
    settings = {"kind": "inference", "run_dir": f"{folder}-served", "server.port": "0"}
    return settings | {model_key(name): str(model) for name, model in models.items()}


def model_key(policy: str) -> str:
    """Return the configuration key of a policy's model, with quotes around a name with a dot."""
    return f'policies."{policy}".model' if "." in policy else f"policies.{policy}.model"


def newest_value(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the newest value of a metric; None: no row has it."""
    return next((row[name] for row in reversed(rows) if name in row), None)


def _of_each(rows: Sequence[Mapping[str, float]], name: str, rivals: Sequence[str]) -> dict[str, float]:
    """Return the newest value of a metric of each of several trained policies that has one."""
    found = {policy: newest_value(rows, of_policy(name, policy)) for policy in rivals}
    return {policy: value for policy, value in found.items() if value is not None}


def _pace(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Return the mean duration of the last steps in seconds; None until two are finished."""
    recent = [row["time/step_seconds"] for row in rows if "time/step_seconds" in row][-RECENT:]
    return sum(recent) / len(recent) if len(recent) > 1 else None


def _seconds_left(rows: Sequence[Mapping[str, float]], config: JobConfig) -> float | None:
    """Estimate the remaining seconds by the pace of recent rows; None until two steps are finished."""
    known = [row for row in rows if "wall_seconds" in row][-RECENT - 1 :]
    if len(known) < 2 or not known[-1]["step"] > known[0]["step"]:
        return None
    step, done = known[-1]["step"], known[-1]["step"] - known[0]["step"]
    if step < 2 or config.steps >= ENDLESS:
        return None
    left = max(config.steps - step, 0.0)
    sampled = known[-1].get("rollout/sampled_tokens", 0.0)
    if config.token_budget is not None and sampled:
        left = min(left, max(config.token_budget - sampled, 0.0) / (sampled / step))
    return left * max(known[-1]["wall_seconds"] - known[0]["wall_seconds"], 0.0) / done


def _state(run: Run, connection: Connection) -> tuple[str, str | None]:
    """Return the state of a run without a process here, with the reason of a failure."""
    last = last_state(connection)
    if run.in_use() and (last is None or last.kind != "completed"):
        return "running", None
    if last is None or last.kind == "running":
        return "stopped", None
    reason = object_of(last.data).get("reason")
    return last.kind, None if reason is None else str(reason)


def _time_of(connection: Connection, number: ColumnElement[int]) -> float | None:
    """Return the time of the event of a number, in Unix seconds; None: there is none, or its time is damaged."""
    found = connection.execute(select(events.c.at).where(events.c.event_id == select(number).scalar_subquery()))
    at = found.scalar()
    return at if isinstance(at, int | float) else None


def _warnings(connection: Connection) -> list[HealthWarning]:
    wanted = select(events.c.data).where(events.c.kind == "warning").order_by(events.c.event_id.desc())
    return [_warned(object_of(data)) for data in connection.execute(wanted.limit(MOST_WARNINGS)).scalars()]


def _warned(data: Mapping[str, Any]) -> HealthWarning:
    try:
        return HealthWarning.model_validate({"step": 0, "code": ""} | dict(data))
    except ValidationError:
        return HealthWarning(step=0, code="damaged", text="the record of this warning is damaged")


def read_columns(run: Run, after: int) -> MetricsAnswer:
    """Return the metrics of a run by step."""
    with run.open() as connection:
        # The number is read first: an event that comes between the two is then sent once more, and never left out.
        number = connection.execute(select(func.coalesce(func.max(events.c.event_id), 0))).scalar_one()
        rows, damaged = readable_metrics(connection, after=after)
    names = sorted({name for row in rows for name in row})
    known = _known_metrics()
    for policy in run.config.players.rivals:
        own = {of_policy(name, policy): metric for name, metric in known.items()}
        known = known | {name: metric for name, metric in own.items() if name in names}
    return MetricsAnswer(
        run=run.name,
        rows=len(rows),
        columns={name: [row.get(name) for row in rows] for name in names},
        units={name: metric.unit for name, metric in known.items()},
        formulas={name: metric.formula for name, metric in known.items()},
        damaged=damaged,
        last_event=number,
    )


@lru_cache(maxsize=1)
def _known_metrics() -> dict[str, Metric]:
    return {metric.name: metric for table in metric_tables().values() for metric in table}


def read_settings(run: Run) -> SettingsAnswer:
    """Return the configuration of a run, and the keys that differ from their defaults."""
    config = run.config
    mine, plain = config.model_dump(mode="json"), JobConfig().model_dump(mode="json")
    known = _leaves(plain)
    changed = [key for key, value in _leaves(mine).items() if known.get(_of_default_policy(key)) != value]
    return SettingsAnswer(run=run.name, config=mine, changed=changed)


def _of_default_policy(key: str) -> str:
    """Return a policy's key as the default policy's."""
    parts = key.split(".", 2)
    return f"policies.policy.{parts[2]}" if parts[0] == "policies" and len(parts) == 3 else key


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by dotted key."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
