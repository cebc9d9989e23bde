"""`palestra top` for a service: machines, jobs and why each waits, and the newest running job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx2
from rich.console import Group, RenderableType
from rich.text import Text

from palestra.cli.fitted_table import fitted_table
from palestra.cli.top_view import calls_table, curve_lines, episodes_table, number
from palestra.client.control import ControlClient
from palestra.dashboard.answers import EpisodesAnswer, MetricsAnswer, RunsAnswer, SlowCallsAnswer
from palestra.errors import PalestraError
from palestra.http_clients import http_client
from palestra.terminal import one_line
from palestra.types.control_wire import BaseView, ClusterView, JobView, NodeView, ServerView
from palestra.types.progress import duration

JOBS = 30  # the newest
NEWEST = 8  # episodes
GIB = 2**30
READ_SECONDS = 5.0  # what a job's own server may take for an answer


def service_view(control: ControlClient, width: int, now: float) -> RenderableType:
    """Return the drawing of a service.

    Args:
        control: has a user's key.
        now: Unix seconds.
    """
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
                (one.episode_id, one.task_id, one.state, number(one.reward), str(one.calls), str(one.tokens))
                for one in episodes.episodes
            ],
            width,
        ),
        Text(),
        calls_table(calls.calls, width, now),
    ]


def _read(http: httpx2.Client, path: str, query: dict[str, Any] | None = None) -> bytes:
    return http.get(f"/dashboard/api/runs{path}", params=query).raise_for_status().content
