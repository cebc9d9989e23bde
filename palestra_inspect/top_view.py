"""Drawings of `palestra top`: a line for each run, then curves, episodes and calls of one; or a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from palestra.dashboard.answers import RunAnswer, SlowCall
from palestra.errors import PalestraError
from palestra.terminal import one_line
from palestra.types.metrics import names_of_policies
from palestra.types.progress import duration, of_steps, short_number
from palestra.types.summaries import EpisodeSummary
from palestra_control.control import ControlClient
from palestra_control.wire import BaseView, ClusterView, JobView, NodeView
from palestra_inspect.episode_list import reward_text
from palestra_inspect.episode_view import RunReader
from palestra_inspect.served_run import ServedRun

BARS = "▁▂▃▄▅▆▇█"
CURVES = (
    ("train/reward_mean", "reward"),
    ("validation/reward_mean", "validation"),
    ("train/entropy", "entropy"),
    ("train/grad_norm", "gradient"),
    ("rollout/tokens_per_second", "tokens/s"),
    ("time/step_seconds", "step, s"),
)
NEWEST = 8  # episodes
LABEL = 12
BROADEST = 200  # columns of a curve
JOBS = 30  # the newest
GIB = 2**30


class WatchedRun:
    """A run that is drawn again and again; the metrics that were read are kept."""

    def __init__(self, run: RunReader) -> None:
        """Create without reading the run."""
        self.run, self._rows = run, list[dict[str, float]]()

    def drawn(self, width: int, now: float) -> list[RenderableType]:
        """Return its curves, its newest episodes and its slowest calls; a part that cannot be read says why.

        Args:
            now: Unix seconds.
        """
        parts: tuple[Callable[[], list[RenderableType]], ...] = (
            lambda: curve_lines(self._metrics(), width),
            lambda: [
                line
                for names, rows in self.run.tables()
                for line in (Text(), fitted_table(names, rows, width, names[2:], names[1:2]))
            ],
            lambda: [Text(), episodes_table(self.run.ended(NEWEST), width, now)],
            lambda: [Text(), calls_table(self.run.slow_calls(), width, now)],
        )
        return [line for part in parts for line in _readable(part)]

    def _metrics(self) -> list[dict[str, float]]:
        """Return the metrics of all steps, after reading those of the steps that have ended since."""
        new = self.run.metrics(int(self._rows[-1]["step"]) if self._rows else -1)
        names = {
            "step",
            *(name for curve, _ in CURVES for name in names_of_policies([dict.fromkeys(new.columns, 0.0)], curve)),
        }
        self._rows += [
            {name: value for name in names if (value := new.columns[name][place]) is not None}
            for place in range(new.rows)
        ]
        return self._rows


def _readable(draw: Callable[[], list[RenderableType]]) -> list[RenderableType]:
    """Return what is drawn of a run; if it cannot be read, why."""
    try:
        return draw()
    except PalestraError as error:
        return [Text(one_line(str(error)))]


def view_of(runs: Sequence[WatchedRun], width: int, now: float) -> RenderableType:
    """Return the drawing of runs: a line for each, and the one that changed last in full; a running one comes first.

    Args:
        now: Unix seconds.
    """
    found = [run.run.described() for run in runs]
    newest = max(range(len(runs)), key=lambda place: (found[place].state == "running", found[place].changed_at or 0.0))
    title = Text(one_line(found[newest].run), style="bold")
    return Group(_table(found, width, now), Text(), title, *runs[newest].drawn(width, now))


def _table(found: Sequence[RunAnswer], width: int, now: float) -> Table:
    names = ("run", "state", "step", "reward", "validation", "left", "warnings", "changed")
    rows = [
        (
            one.title,
            one.state if one.reason is None else f"{one.state}: {one.reason}",
            of_steps(one.step, one.steps),
            _rewards(one.reward, one.rewards),
            _rewards(one.validation, one.validations),
            "" if one.seconds_left is None else duration(one.seconds_left),
            str(len(one.warnings) or ""),
            "" if one.changed_at is None else f"{duration(now - one.changed_at)} ago",
        )
        for one in found
    ]
    return fitted_table(names, rows, width, names[2:], ("run", "state", "validation", "reward"), ("changed", "left"))


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


def episodes_table(found: Sequence[EpisodeSummary], width: int, now: float) -> Table:
    """Return a table of episodes that ended. `now`: Unix seconds."""
    names, rows = ("episodes that ended", "task", "state", "reward", "calls", "tokens", "ended"), []
    for one in found:
        ended = "" if one.ended_at is None else f"{duration(now - one.ended_at)} ago"
        if one.damaged is None:
            rows.append(
                (one.episode_id, one.task_id, one.state, reward_text(one), str(one.calls), str(one.tokens), ended)
            )
        else:
            rows.append((one.episode_id, "", "damaged", "", "", "", ended))
    return fitted_table(names, rows, width, names[3:6], ("task", "reward", names[0]), ("ended", "calls"))


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


def service_view(control: ControlClient, width: int, now: float) -> RenderableType:
    """Return the drawing of a service. `now`: Unix seconds."""
    jobs = list(islice(control.jobs(), JOBS))
    cluster: ClusterView = control.request("GET", "/cluster", ClusterView)
    parts: list[RenderableType] = [_machines(cluster, width), Text(), _jobs(jobs, width, now)]
    running = next((job for job in jobs if job.state == "running"), None)
    if running is not None:
        run = ServedRun(control, running.job_id)
        parts += [Text(), Text(one_line(f"{running.job_id} {running.name}"), style="bold")]
        parts += [_progress(run.described()), *WatchedRun(run).drawn(width, now)]
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


def _progress(run: RunAnswer) -> Text:
    left = "" if run.seconds_left is None else f", about {duration(run.seconds_left)} left"
    return Text(f"step {of_steps(run.step, run.steps)}{left}, {len(run.warnings)} warnings")


# Tables fitted to the terminal: truncated texts end with an ellipsis, and important columns stay.

BETWEEN = 2  # columns of the terminal between those of a table
SHORTEST, WORDS = 8, 24  # columns of the terminal that a cut cell has at least; one that has to be read


def fitted_table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    right: Sequence[str] = (),
    cut: Sequence[str] = (),
    dropped: Sequence[str] = (),
) -> Table:
    """Return a borderless table that fits the terminal, as far as its columns allow.

    Args:
        cut: columns whose texts may be truncated, the least important first; the last one keeps some words.
        dropped: columns to leave out if that is not enough, the least important first.
    """
    texts = [[one_line(cell) for cell in row] for row in rows]
    sizes = {name: max(map(cell_len, (name, *(row[at] for row in texts)))) for at, name in enumerate(names)}

    def over() -> int:
        return sum(sizes.values()) + BETWEEN * (len(sizes) - 1) - width

    shortest = dict.fromkeys(cut, SHORTEST) | dict.fromkeys(cut[-1:], WORDS)
    least = {name: min(sizes[name], max(size, cell_len(name))) for name, size in shortest.items()}
    for name in dropped:
        if over() > sum(sizes[one] - least[one] for one in cut if one in sizes):
            del sizes[name]
    for name in cut:
        if name in sizes:
            sizes[name] = max(least[name], sizes[name] - max(over(), 0))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, size in sizes.items():
        table.add_column(name, no_wrap=True, justify="right" if name in right else "left", max_width=size)
    for row in texts:
        table.add_row(*(Text(cell) for name, cell in zip(names, row, strict=True) if name in sizes))
    return table
