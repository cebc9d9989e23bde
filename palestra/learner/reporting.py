"""Records each step of a run: its row in the store and in `metrics.jsonl`, an event, the curve, and warnings.

The store is authoritative; the files of the run's folder are for people and other programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from palestra.config import SAVED_CONFIG, JobConfig, Roles, dump_saved_config, load_config, name_differences
from palestra.disk import write_whole, writing
from palestra.doctor.examination import OF_A_JOB, OF_A_POLICY, health_of
from palestra.doctor.rule import KEPT, START, VALIDATION, JobSize, RunHistory
from palestra.doctor.store_facts import opponent_facts
from palestra.errors import ConfigError
from palestra.learner.open_run import OpenRun
from palestra.store.calls import TrainedCall
from palestra.store.casting import results
from palestra.types.calls import Floats
from palestra.types.metrics import Metric, of_policies, of_policy, row_of_policy
from palestra.types.records import TrainSample, Trajectory
from palestra.types.summaries import HealthWarning


class PlayingTime:
    """Measures the time in which each step's episodes were played, as far as this process has seen it.

    If episodes are played ahead of training, a step hardly waits for its own: they were played since the previous
    step's were complete.
    """

    def __init__(self, ahead: bool, now: Callable[[], float] = time.monotonic) -> None:
        """Begin before the first step. `ahead`: episodes are played while earlier steps are trained."""
        self._ahead, self._now = ahead, now
        self._gathered_at: float | None = None  # when this process had the episodes of a step together; None: not yet
        self._seconds: float | None = None  # in which those of the newest step were played; None: not known
        self.resumed = False  # episodes of the first step that is gathered may have been played before the restart

    def gathered(self, started: float) -> None:
        """Record that a step's episodes are complete. The step began to wait for them at `started`."""
        before, self._gathered_at = self._gathered_at, self._now()
        if before is None and self.resumed:
            self._seconds = None
        else:
            self._seconds = self._gathered_at - (before if before is not None and self._ahead else started)

    def not_played(self) -> None:
        """Record that a step needed no playing: its batch was fixed before a restart, or its episodes are recorded."""
        self._seconds = None

    def rate(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the newest step's tokens per second as a metric, by full name; empty if unknown."""
        if not self._seconds:
            return {}
        return {
            "rollout/tokens_per_second": (row["rollout/prompt_tokens"] + row["rollout/completion_tokens"])
            / self._seconds
        }


ROLE_METRICS = (
    Metric(
        "rollout/reward/AGENT",
        "reward",
        "Mean reward of the agent AGENT over the batch's episodes in which several agents are rewarded, with any "
        "policy; of each such agent without a parent, at most 16.",
    ),
    Metric(
        "rollout/pool/VERSION/win_rate",
        "ratio",
        "Mean over the batch's episodes in which the past version VERSION (`white@5`) plays: 1 where the agents that "
        "learn have a higher mean reward than those of the version, 0.5 where both have the same, 0 otherwise.",
    ),
    Metric("rollout/pool/VERSION/episodes", "episodes", "The batch's episodes in which VERSION plays and is rewarded."),
)
MOST_AGENTS = 16  # agents of which a row has the mean reward; their names come from environments and workers


def role_metrics(trajectories: Sequence[Trajectory], roles: Roles) -> dict[str, float]:
    """Return the mean reward of each agent, and how often each past version was beaten, by full name.

    Subagents are left out, and episodes in which only one agent is rewarded.
    """
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    points: defaultdict[str, list[float]] = defaultdict(list)
    for episode in (trajectory.episode for trajectory in trajectories):
        rewards: Mapping[str, float] = episode.rewards or {}
        named = {agent: reward for agent, reward in rewards.items() if "/" not in agent}
        if len(named) > 1:
            for agent, reward in named.items():
                by_agent[agent].append(reward)
        for version, won in results(roles, episode.players, rewards).items():
            points[version].append(won)
    found = {f"rollout/reward/{agent}": fmean(by_agent[agent]) for agent in sorted(by_agent)[:MOST_AGENTS]}
    for version, won_by in sorted(points.items()):
        found[f"rollout/pool/{version}/win_rate"] = fmean(won_by)
        found[f"rollout/pool/{version}/episodes"] = float(len(won_by))
    return found


TrainedRow = tuple[TrainSample, Floats]  # a row, and the logprobs [N] of its trained tokens when it was trained


def trained_calls(rows: Iterable[TrainedRow]) -> list[TrainedCall]:
    """Return the trained tokens of rows by call.

    Rows trained on unsampled tokens are left out: their logprobs are not of sampled tokens.
    """
    found: dict[tuple[str, int], list[tuple[int, Floats]]] = {}
    for row, logprobs in rows:
        if row.targets is not None:
            continue
        places = np.flatnonzero(row.loss_mask)
        calls = row.calls[places]
        for index in np.unique(calls).tolist():
            # A row is a path from the root, so a place in the row is the same place in the call's prompt and reply.
            own = places[calls == index]
            start, stop = int(own[0]), int(own[-1]) + 1
            values = np.where(
                row.loss_mask[start:stop] & (row.calls[start:stop] == index), logprobs[start:stop], np.nan
            )
            found.setdefault((row.episode_id, index), []).append((start, values.astype(np.float32)))
    return [_joined(name, index, parts) for (name, index), parts in found.items()]


def _joined(episode_id: str, index: int, parts: Sequence[tuple[int, Floats]]) -> TrainedCall:
    """Return a call of several parts: two rows train a reply where a later prompt has only its beginning."""
    start = min(place for place, _ in parts)
    values = np.full(max(place + len(part) for place, part in parts) - start, np.nan, np.float32)
    for place, part in parts:
        here = values[place - start : place - start + len(part)]
        here[:] = np.where(np.isnan(part), here, part)
    return TrainedCall(episode_id=episode_id, index=index, start=start, logprobs=values)


Row = Mapping[str, float]
REWARD = "train/reward_mean"
CHECKPOINTS = "checkpoints"  # in the folder of a run


def checkpoints_of(run_dir: Path, policy: str, config: JobConfig) -> Path:
    """Return the path of a policy's checkpoints; each of several trained policies has its own folder."""
    folder = run_dir / CHECKPOINTS
    return folder / policy if config.trains_several else folder


class RunFolder:
    """The files of a run for people and other programs."""

    def __init__(self, path: Path) -> None:
        """Create the folder, accessible only to its owner, because a run contains its users' prompts."""
        self.path = path
        with writing(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # An older Palestra made runs readable for others: mend that. Folders without a run stay as they are.
            if self.store.exists():
                with contextlib.suppress(PermissionError):  # the folder belongs to another user
                    path.chmod(0o700)

    @property
    def store(self) -> Path:
        """Return the path of the run store."""
        return self.path / "run.db"

    @property
    def pools(self) -> Path:
        """Return the path of past versions."""
        return self.path / "pool"

    def write_config(self, config: JobConfig) -> None:
        """Write the whole configuration to `config.toml`, including defaults."""
        write_whole(self.path / SAVED_CONFIG, dump_saved_config(config).encode())

    def why_not_resumed(self, config: JobConfig) -> str:
        """Return why the run cannot be resumed with a configuration of another digest."""
        try:
            found = name_differences(load_config(self.path / SAVED_CONFIG), config)
        except ConfigError:  # the file was removed or edited
            found = ""
        differs = f": {found}" if found else f", which {self.path / SAVED_CONFIG} does not have any more"
        return (
            f"the run in {self.path} was started with another configuration of what is trained{differs}; use its "
            "config.toml or the values of its start, or choose another run_dir (docs/reference/configuration.md has "
            "the keys that may change)"
        )

    def write_metrics(self, rows: Sequence[Row]) -> None:
        """Write all rows to `metrics.jsonl`, replacing the file, as after a restart."""
        write_whole(self.path / "metrics.jsonl", b"".join(_line(row) for row in rows))

    def append_metrics(self, row: Row) -> None:
        """Append the row of one step to `metrics.jsonl`."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("ab") as file:
            file.write(_line(row))

    def draw_curve(self, rows: Sequence[Row], title: str) -> None:
        """Draw the rewards of sampled and validation episodes over steps, and write them to `curve.png`."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        ends = [_draw_line(axes, rows, name, label, style) for name, label, style in _lines_of(rows)]
        known = sorted((end for end in ends if end is not None), key=lambda end: end[1])
        sides = [("center", 0)] if len(known) == 1 else [("top", -1), ("bottom", 1)]  # labels apart
        for end, (side, up) in zip(known, itertools.cycle(sides), strict=False):
            axes.annotate(f"{end[1]:.2f}", end, textcoords="offset points", xytext=(6, up), va=side)
        axes.set(xlabel="training step", ylabel="mean reward", title=title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.06)
        if axes.lines:
            axes.legend(frameon=False, loc="best")
        drawn = io.BytesIO()
        figure.savefig(drawn)
        write_whole(self.path / "curve.png", drawn.getvalue())


def _lines_of(rows: Sequence[Row]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the lines of the curve, as metric name, label and style: two for each trained policy."""
    sampled, scored = "sampled episodes (training tasks)", "greedy, held-out tasks"
    policies = list(dict.fromkeys(name for row in rows for name in of_policies(row, REWARD) if name))
    if not policies:
        return [
            (REWARD, sampled, {"color": "#9aa5b1", "marker": ".", "lw": 1.2}),
            (VALIDATION, scored, {"color": "#c0392b", "marker": "o", "lw": 2.2}),
        ]
    found: list[tuple[str, str, dict[str, Any]]] = []
    for number, policy in enumerate(policies):
        style = {"color": f"C{number}"}
        found.append(
            (of_policy(REWARD, policy), f"{policy}: {sampled}", style | {"marker": ".", "lw": 1.2, "alpha": 0.5})
        )
        found.append((of_policy(VALIDATION, policy), f"{policy}: {scored}", style | {"marker": "o", "lw": 2.2}))
    return found


def _draw_line(
    axes: Any, rows: Sequence[Row], name: str, label: str, style: Mapping[str, Any]
) -> tuple[float, float] | None:
    """Draw a metric over steps, and return its last point; None: no row has it."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    if not points:
        return None
    x, y = zip(*points, strict=True)
    axes.plot(x, y, label=label, **style)
    return points[-1]


def _finite(row: Mapping[str, float | None]) -> dict[str, float]:
    """Return the row without infinities and NaN, which JSON cannot hold."""
    return {name: value for name, value in row.items() if value is not None and math.isfinite(value)}


def _line(row: Row) -> bytes:
    whole = {name: int(value) if float(value).is_integer() else value for name, value in row.items()}
    return (json.dumps(whole) + "\n").encode()


class StepLog:
    """Writes the rows of a run, oldest first."""

    def __init__(self, run: OpenRun) -> None:
        """Create the log without rows; `restore` adds those of a resumed run from the store."""
        self._run = run
        config = run.config
        size = JobSize.of(config)
        self._rivals = config.players.rivals
        sole = config.players.default if len(config.policies) > 1 else ""
        self._histories = {policy: RunHistory(size) for policy in self._rivals or (sole,)}
        self._job_history = RunHistory(size)  # a row a step, whichever policy was trained in it
        self._found: dict[str, list[HealthWarning]] = {}  # by policy, of the newest step in which it was trained

    async def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write the file from the store's rows, as after a restart."""
        rows = [_finite(row) for row in rows]  # a store of before has null where a number was infinite
        self._run.folder.write_metrics(rows)
        steps = [int(row["step"]) for row in rows if any(of_policies(row, "train/episodes").values())]
        facts = await self._opponents({*steps[:START], *steps[-KEPT:]})  # no rule looks at others
        for row in rows:
            self._add({**row, **facts.get(int(row["step"]), {})})

    async def _opponents(self, steps: Collection[int]) -> dict[int, dict[str, float]]:
        """Return the numbers that the doctor's rules about opponents need, by step."""
        return await self._run.store.db.read(lambda connection: opponent_facts(connection, steps))

    def _add(self, row: Row) -> list[str]:
        """Add a row to the histories of the policies and the job; return the names of the policies that it trained."""
        own = {policy: row_of_policy(row, policy, self._rivals) for policy in self._histories}
        trained = [policy for policy, mine in own.items() if mine.get("train/episodes")]
        for policy, mine in own.items():
            self._histories[policy].add(mine)
        if trained:
            self._job_history.add(own[trained[0]])
        return trained

    async def write(self, step: int, row: dict[str, float], last: bool) -> None:
        """Record a step's metrics in store, file, status and events; after a validation, draw the curve.

        Step 0 is the evaluation before the first. The number of warnings is added to `row`; numbers that are not finite
        are left out. `last`: training ends with this step.
        """
        row = _finite(row)
        await self._warn(row)
        await self._run.store.log.put_metrics(step, row)
        self._run.folder.append_metrics(row)
        self._run.progress.last_metrics = row
        await self._run.event("step", row)
        if of_policies(row, VALIDATION) or last:
            rows = await self._run.store.log.metrics()
            await asyncio.to_thread(self._run.folder.draw_curve, rows, self._run.config.name)

    async def _warn(self, row: dict[str, float]) -> None:
        """Report each sign of a run that learns nothing, once, when it appears."""
        step = int(row["step"])
        trained = self._add({**row, **(await self._opponents([step]))[step]})
        if not trained:
            return
        before = {(warning.policy, warning.code) for warning in self._run.progress.warnings}
        if self._rivals:
            # One that is not updated in this step keeps the signs of the step in which it was.
            self._found |= {policy: health_of(self._histories[policy], policy, OF_A_POLICY) for policy in trained}
            self._found[""] = health_of(self._job_history, "", OF_A_JOB)
        else:
            self._found = {policy: health_of(self._histories[policy], policy) for policy in trained}
        found = [warning for warnings in self._found.values() for warning in warnings]
        row["train/warnings"] = float(len(found))
        self._run.progress.warnings = found
        for warning in found:
            if (warning.policy, warning.code) not in before:
                await self._run.event("warning", warning.model_dump())
