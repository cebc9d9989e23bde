"""`palestra top` for runs: a line for each, and curves, episodes and calls of the one that changed last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from itertools import islice, pairwise
from typing import Any
from urllib.parse import quote

import httpx2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection, select

from palestra.cli.episode_list import reward_text
from palestra.cli.fitted_table import fitted_table
from palestra.client.control import ControlClient
from palestra.dashboard.answers import EpisodesAnswer, MetricsAnswer, RunAnswer, RunsAnswer, SlowCall, SlowCallsAnswer
from palestra.dashboard.progress import describe_run
from palestra.dashboard.runs import DAMAGED, Run
from palestra.dashboard.slow_calls import slow_calls
from palestra.errors import PalestraError
from palestra.http_clients import http_client
from palestra.store.browsing import EpisodeSummary, last_of_states
from palestra.store.counting import KINDS, SETTLED_STATES
from palestra.store.run_log import readable_metrics
from palestra.store.search import readable_summaries
from palestra.store.tables import episodes
from palestra.terminal import one_line
from palestra.types.control_wire import BaseView, ClusterView, JobView, NodeView, ServerView
from palestra.types.metrics import names_of_policies
from palestra.types.progress import duration, short_number
from palestra.types.states import EpisodeState

BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("train/reward_mean", "reward"),
    ("validation/reward_mean", "validation"),
    ("train/entropy", "entropy"),
    ("train/grad_norm", "gradient"),
    ("rollout/tokens_per_second", "tokens/s"),
    ("time/step_seconds", "step, s"),
)
ENDED = (EpisodeState.UNJUDGED, *SETTLED_STATES)
NEWEST, LOOKED_AT = 8, 500  # episodes, and those of each kind and state among which they are looked for
LABEL = 12
BROADEST = 200  # columns of a curve


def view_of(runs: Sequence[Run], width: int, now: float) -> RenderableType:
    """Return the drawing; a run that cannot be read says why. `now`: Unix seconds."""
    found = [describe_run(run) for run in runs]
    newest = max(range(len(runs)), key=lambda place: (found[place].state == "running", found[place].changed_at or 0.0))
    return Group(_table(found, width, now), Text(), *_one(runs[newest], width, now))


def _table(found: Sequence[RunAnswer], width: int, now: float) -> Table:
    names = ("run", "state", "step", "reward", "validation", "left", "warnings", "changed")
    rows = [
        (
            one.title,
            one.state if one.reason is None else f"{one.state}: {one.reason}",
            f"{one.step}/{one.steps}",
            _rewards(one.reward, one.rewards),
            _rewards(one.validation, one.validations),
            "" if one.seconds_left is None else duration(one.seconds_left),
            str(len(one.warnings) or ""),
            "" if one.changed_at is None else f"{duration(now - one.changed_at)} ago",
        )
        for one in found
    ]
    return fitted_table(names, rows, width, names[2:], ("run", "state", "validation", "reward"), ("changed", "left"))


def _one(run: Run, width: int, now: float) -> list[RenderableType]:
    parts: tuple[Callable[[Connection], list[RenderableType]], ...] = (
        lambda connection: curve_lines(_rows(run, connection), width),
        lambda connection: [Text(), _ended(connection, width, now)],
        lambda connection: [Text(), calls_table(slow_calls(connection), width, now)],
    )
    return [Text(one_line(run.name), style="bold"), *(line for part in parts for line in _part(run, part))]


def _part(run: Run, draw: Callable[[Connection], list[RenderableType]]) -> list[RenderableType]:
    """Return what is drawn of a run; if it cannot be read, why."""
    try:
        with run.open() as connection:
            return draw(connection)
    except PalestraError as error:
        return [Text(one_line(str(error)))]
    except DAMAGED as error:
        return [Text(one_line(f"a record can't be read: {type(error).__name__}: {error}"))]


def _rows(run: Run, connection: Connection) -> list[dict[str, float]]:
    """Return the metrics that have a curve, of all steps; those of steps that were read before are kept."""
    known = run.memory.rows
    new = readable_metrics(connection, after=int(known[-1]["step"]) if known else -1).rows
    names = ["step", *(name for curve, _ in CURVES for name in names_of_policies(new, curve))]
    known += [{name: row[name] for name in names if name in row} for row in new]
    return known


def sparkline(values: Sequence[float], width: int) -> str:
    """Return numbers, oldest first, as bars; means of consecutive numbers if there are more than `width`."""
    if not values or width < 1:
        return ""
    count = min(len(values), width)
    edges = [place * len(values) // count for place in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[len(BARS) // 2] * count
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in means)


def curve_lines(rows: Sequence[Mapping[str, float]], width: int) -> list[RenderableType]:
    """Return a line for each metric curve of a run: its name, bars, the newest value and the range."""
    lines: list[RenderableType] = []
    found = [
        (f"{whole.removesuffix(name).removesuffix('/')} {label}".lstrip(), whole)
        for name, label in CURVES
        for whole in names_of_policies(rows, name)
    ]
    room = max((LABEL, *(len(label) + 1 for label, _ in found)))
    for label, name in found:
        values = [row[name] for row in rows if name in row]
        bars = sparkline(values, min(max(width - room - 30, 8), BROADEST))
        last, least, most = map(short_number, (values[-1], min(values), max(values)))
        text = f"{one_line(label):<{room}}{bars} {last} ({least} to {most})"
        lines.append(Text(text))
    return lines


def _ended(connection: Connection, width: int, now: float) -> Table:
    newest = last_of_states(connection, KINDS, ENDED, LOOKED_AT, episodes.c.episode_id, episodes.c.ended_at)
    names = [row.episode_id for row in nlargest(NEWEST, newest, key=lambda row: row.ended_at or 0.0)]
    wanted = select(episodes).where(episodes.c.episode_id.in_(names)).order_by(episodes.c.ended_at.desc())
    rows, found = connection.execute(wanted).all(), []
    for row, one in zip(rows, readable_summaries(connection, rows), strict=True):
        ended = f"{duration(now - row.ended_at)} ago" if isinstance(row.ended_at, float) else ""
        if isinstance(one, EpisodeSummary):
            counts = (str(one.calls), str(one.completion_tokens))
            found.append((one.episode_id, one.task_id, one.state, reward_text(one), *counts, ended))
        else:
            found.append((one.episode_id, "", "damaged", "", "", "", ended))
    return episodes_table("episodes that ended", found, width, "ended")


def episodes_table(title: str, rows: Sequence[Sequence[str]], width: int, *more: str) -> Table:
    """Return a table of episodes. `rows`: id, task, state, reward, calls and tokens of each, then the columns of
    `more`.
    """
    names = (title, "task", "state", "reward", "calls", "tokens", *more)
    return fitted_table(
        names, rows, width, ("reward", "calls", "tokens"), ("task", "reward", title), ("ended", "calls")
    )


def calls_table(calls: Sequence[SlowCall], width: int, now: float) -> Table:
    """Return a table of slow calls. `now`: Unix seconds."""
    rows = [
        (one.episode_id, str(one.call), one.agent, f"{one.seconds:.2f}", f"{duration(now - one.ended)} ago")
        for one in calls
    ]
    names = ("slowest calls", "call", "agent", "seconds", "ended")
    return fitted_table(names, rows, width, ("call", "seconds"), ("agent", "slowest calls"), ("ended",))


def _rewards(sole: float | None, by_policy: Mapping[str, float]) -> str:
    """Return a mean reward as text; each policy's if several are trained."""
    if not by_policy:
        return short_number(sole)
    return one_line(" ".join(f"{policy} {short_number(value)}" for policy, value in by_policy.items()))


JOBS = 30  # the newest
GIB = 2**30
READ_SECONDS = 5.0  # what a job's own server may take for an answer


def service_view(control: ControlClient, width: int, now: float) -> RenderableType:
    """Return the drawing of a service. `now`: Unix seconds."""
    jobs = list(islice(control.jobs(), JOBS))
    cluster: ClusterView = control.request("GET", "/cluster", ClusterView)
    parts: list[RenderableType] = [_machines(cluster, width), Text(), _jobs(jobs, width, now)]
    running = next((job for job in jobs if job.state == "running"), None)
    if running is not None:
        parts += [Text(), Text(one_line(f"{running.job_id} {running.name}"), style="bold")]
        try:
            parts += _job(control.job(running.job_id).server(), width, now)
        except PalestraError as error:
            parts.append(Text(one_line(str(error))))
    return Group(*parts)


def _machines(cluster: ClusterView, width: int) -> RenderableType:
    names, rows = ("machine", "state", "cpus held", "gpus held", "gpus busy", "gpu memory", "jobs"), []
    for node in cluster.nodes:
        state = "gone" if not node.alive else "draining" if node.draining or cluster.draining else "up"
        cpus, gpus = node.cpus - node.free_cpus, node.gpus - node.free_gpus
        held = (f"{cpus:g}/{node.cpus:g}", f"{gpus:g}/{node.gpus}", *_gpu_figures(node), str(node.jobs))
        rows.append((node.node_id, state, *held))
    table = fitted_table(names, rows, width, names[2:], ("machine", "gpu memory", "gpus busy"), ("gpu memory",))
    most, mine = cluster.quota, cluster.in_use
    amounts = (("jobs", mine.jobs, most.jobs), ("cpus", mine.cpus, most.cpus), ("gpus", mine.gpus, most.gpus))
    quota = ", ".join(f"{name} {held:g}{'' if limit is None else f' of {limit:g}'}" for name, held, limit in amounts)
    waiting = Text(f"your tenant holds: {quota}; {cluster.queued} jobs of all tenants wait")
    return Group(table, *([Text(), _bases(cluster.bases, width)] if cluster.bases else []), waiting)


def _gpu_figures(node: NodeView) -> tuple[str, str]:
    """Return how busy the cards of a machine are, and their memory, one after the other; a dash: it is not known."""
    busy = ["-" if card.utilisation is None else f"{card.utilisation:.0%}" for card in node.gpu_use]
    memory = [
        f"{'-' if (used := card.memory_used_bytes) is None else f'{used / GIB:.0f}'}/{card.memory_bytes / GIB:.0f} GiB"
        for card in node.gpu_use
        if card.memory_bytes is not None
    ]
    return " ".join(busy) or "-", " ".join(memory) or "-"


def _bases(bases: Sequence[BaseView], width: int) -> RenderableType:
    """Return the base servers that the caller may see, as a table."""
    names, rows = ("base server", "model", "state", "jobs", "adapters", "waiting", "since"), []
    for base in bases:
        counts = (str(base.jobs), str(base.adapters), str(base.waiting), duration(base.longest_wait_seconds))
        rows.append((base.base_id, base.model, base.state, *counts))
    return fitted_table(names, rows, width, names[3:], ("base server", "model"), ("since",))


def _jobs(jobs: Sequence[JobView], width: int, now: float) -> RenderableType:
    if not jobs:
        return Text("no jobs")
    rows = []
    for job in jobs:
        since = f"{duration(max(now - job.changed_at, 0.0))} ago"
        rows.append((job.job_id, job.name, job.user, job.state, since, job.reason))
    names = ("job", "name", "user", "state", "since", "why")
    return fitted_table(names, rows, width, (), ("name", "user", "why"), ("since", "user"))


def _job(server: ServerView, width: int, now: float) -> list[RenderableType]:
    """Return curves, episodes and slow calls of a running job, as its own page has them."""
    headers = {"authorization": f"Bearer {server.api_key}"}
    try:
        with http_client(base_url=server.url, headers=headers, timeout=READ_SECONDS) as http:
            run = RunsAnswer.model_validate_json(_read(http, "")).runs[0]
            base = f"/{quote(run.run, safe='')}"
            metrics = MetricsAnswer.model_validate_json(_read(http, f"{base}/metrics"))
            query = {"state": "completed", "limit": NEWEST}
            episodes = EpisodesAnswer.model_validate_json(_read(http, f"{base}/episodes", query))
            calls = SlowCallsAnswer.model_validate_json(_read(http, f"{base}/calls"))
    except httpx2.HTTPError as error:
        return [Text(one_line(f"its server at {server.url} can't be read from here: {error}"))]
    columns = metrics.columns
    rows = [
        {name: value for name, column in columns.items() if (value := column[place]) is not None}
        for place in range(metrics.rows)
    ]
    left = "" if run.seconds_left is None else f", about {duration(run.seconds_left)} left"
    return [
        Text(f"step {run.step} of {run.steps}{left}, {len(run.warnings)} warnings"),
        *curve_lines(rows, width),
        Text(),
        episodes_table(
            "newest episodes",
            [
                (one.episode_id, one.task_id, one.state, short_number(one.reward), str(one.calls), str(one.tokens))
                for one in episodes.episodes
            ],
            width,
        ),
        Text(),
        calls_table(calls.calls, width, now),
    ]


def _read(http: httpx2.Client, path: str, query: dict[str, Any] | None = None) -> bytes:
    return http.get(f"/dashboard/api/runs{path}", params=query).raise_for_status().content
