"""What a run has cost, by phase, policy and episode, from what its store has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from sqlalchemy import Connection, func, select

from palestra.config import JobConfig
from palestra.config.budget import TokenPrice, device_price, exact_money, shown_money, storage_money, token_prices
from palestra.dashboard.answers import CostLine, CostsAnswer
from palestra.store.browsing import browse
from palestra.store.run_log import readable_metrics
from palestra.store.spending import Used, spent_ms, sums, sums_by_episode, usage_of_calls
from palestra.store.tables import events

if TYPE_CHECKING:
    from palestra.dashboard.runs import Run

PHASES = {  # of the kinds of calls
    "train": "rollouts",
    "teacher": "training",
    "validation": "evaluation",
    "judge": "judges",
    "audit": "judges",
    "adhoc": "serving",
}
TIMES = {  # metrics whose seconds no other phase has
    "rollouts": ("time/rollout_seconds",),
    "training": ("time/train_seconds", "time/publish_seconds"),
    "evaluation": ("time/validation_seconds",),
    "judges": ("time/audit_seconds",),
}
WAITING, DEVICES, OUTSIDE, STORAGE = "waiting", "(devices)", "(outside episodes)", "(storage)"


@dataclass(frozen=True, slots=True)
class Cost:
    """What something has cost.

    Attributes:
        ms: milliseconds of the run, on all devices of the job.
        money: units of money (`palestra.config.budget.UNITS`).
    """

    calls: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    ms: int = 0
    money: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.reply_tokens + other.reply_tokens,
            self.ms + other.ms,
            self.money + other.money,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(-other.calls, -other.prompt_tokens, -other.reply_tokens, -other.ms, -other.money)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostReport:
    """What a run has cost. The sums over each table are equal to `total`.

    Attributes:
        counted: whether calls are in it; False: the job does not count them, and they were not read.
        priced: whether the run has prices; without them, `money` is 0.
        phases: `rollouts`, `training`, `evaluation`, `judges`, `serving` and `waiting`: starts, idle workers, and work
            that was lost by kills; with a price, `storage`.
        payees: by policy, or server that was asked; `(devices)` has the time, `(storage)` the folder.
        episodes: by id, empty unless asked for; calls outside of episodes and devices have their own rows.
    """

    counted: bool
    priced: bool
    total: Cost
    phases: Mapping[str, Cost]
    payees: Mapping[str, Cost]
    episodes: Mapping[str, Cost]


class PhaseTimes:
    """The time of a run by phase, of the steps that were read so far."""

    def __init__(self) -> None:
        self._lock, self._step, self._wall, self._ms = Lock(), -1, 0, dict.fromkeys(TIMES, 0)

    def read(self, connection: Connection) -> dict[str, int]:
        """Return the milliseconds of each phase, with steps that are new. What no step had was waiting."""
        with self._lock:
            for row in readable_metrics(connection, after=self._step).rows:
                for phase, names in TIMES.items():
                    self._ms[phase] += sum(round(1000 * row.get(name, 0.0)) for name in names)
                self._step, self._wall = int(row["step"]), round(1000 * row.get("wall_seconds", 0.0))
            whole = spent_ms(connection) or self._wall
            return self._ms | {WAITING: max(whole - sum(self._ms.values()), 0)}


def read_costs(folder: Path, config: JobConfig, by_episode: bool = False) -> CostReport:
    """Return what a run has cost so far.

    Args:
        folder: of the run, finished or running.
        config: the run's, perhaps with other prices.
        by_episode: whether the costs of each episode are read, too.

    Raises:
        NotFound, StoreError: there is no run, or it can't be read.
    """
    with browse(folder / "run.db") as connection:
        used, episodes = sums(connection), sums_by_episode(connection) if by_episode else []
        if not used:
            episodes = used = _summed_up(usage_of_calls(connection, config))
        storage = storage_cost(folder, connection, config)
        return costs_of(connection, config, PhaseTimes(), used, storage, episodes if by_episode else None)


def _summed_up(calls: Iterable[Used]) -> list[Used]:
    """Return the sums of calls by episode, kind and payee."""
    found: dict[tuple[str, str, str], Used] = {}
    for one in calls:
        before = found.get(key := one[:3])
        found[key] = one if before is None else Used(*key, *(a + b for a, b in zip(before[3:], one[3:], strict=True)))
    return list(found.values())


def run_costs(run: Run) -> CostsAnswer:
    """Return what a run of a page has cost; calls are in it if the job counts them."""
    with run.open() as connection:
        return costs_answer(run.name, _costs_of_page(run, connection))


def _costs_of_page(run: Run, connection: Connection) -> CostReport:
    storage = storage_cost(run.folder, connection, run.config)
    return costs_of(connection, run.config, run.memory.times, sums(connection), storage)


def storage_cost(folder: Path, connection: Connection, config: JobConfig) -> Cost | None:
    """Return what keeping a run costs, by its present size, from its first event until now; None: it has no price."""
    if config.prices is None or not config.prices.storage:
        return None
    began = connection.execute(select(func.min(events.c.at))).scalar()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Cost(money=storage_money(config, size, 0.0 if began is None else max(time.time() - began, 0.0)))


def costs_of(
    connection: Connection,
    config: JobConfig,
    times: PhaseTimes,
    used: Sequence[Used],
    storage: Cost | None = None,
    episodes: Sequence[Used] | None = None,
) -> CostReport:
    """Return what a run has cost.

    Args:
        times: of the steps that were read before.
        used: by all calls.
        storage: of the run's folder; None: it has no price.
        episodes: the same by episode; None: the costs of episodes are not wanted.
    """
    prices = token_prices(config)
    device = device_price(config)
    devices = {phase: Cost(ms=ms, money=ms * device) for phase, ms in times.read(connection).items()}
    clock = sum(devices.values(), Cost())
    kept = {} if storage is None else {STORAGE: storage}
    tokens = [(one, _cost(one, prices)) for one in used]
    phases = {phase: devices.get(phase, Cost()) for phase in (*dict.fromkeys(PHASES.values()), WAITING)}
    payees: dict[str, Cost] = {}
    for one, cost in tokens:
        phases[PHASES[one.kind]] += cost
        payees[one.payee] = payees.get(one.payee, Cost()) + cost
    called = sum((cost for _, cost in tokens), Cost())
    own: dict[str, Cost] = {}
    if episodes is not None:
        own = _by_episode(episodes, prices)
        own |= {OUTSIDE: called - sum(own.values(), Cost()), DEVICES: clock, **kept}
    return CostReport(
        counted=bool(used),
        priced=config.prices is not None,
        total=called + clock + sum(kept.values(), Cost()),
        phases=phases if storage is None else phases | {"storage": storage},
        payees=payees | {DEVICES: clock, **kept},
        episodes=own,
    )


def _by_episode(used: Iterable[Used], prices: Mapping[str, TokenPrice]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    for one in used:
        if one.episode_id:
            found[one.episode_id] = found.get(one.episode_id, Cost()) + _cost(one, prices)
    return found


def _cost(used: Used, prices: Mapping[str, TokenPrice]) -> Cost:
    return Cost(used.calls, used.prompt_tokens, used.reply_tokens, 0, used.money(prices))


def costs_answer(run: str, found: CostReport, episodes: int = 0) -> CostsAnswer:
    """Return a report as the page shows it. `episodes`: how many of those that have cost most."""
    others = {name: cost for name, cost in found.episodes.items() if name in (OUTSIDE, DEVICES, STORAGE)}
    own = [item for item in found.episodes.items() if item[0] not in others]
    ranked = sorted(own, key=lambda item: (item[1].money, item[1].reply_tokens), reverse=True)
    shown = ranked[:episodes]
    if episodes:
        if rest := ranked[episodes:]:
            shown.append((f"({len(rest):,} others)", sum((cost for _, cost in rest), Cost())))
        shown += others.items()
    return CostsAnswer(
        run=run,
        counted=found.counted,
        priced=found.priced,
        total=_line("total", found.total),
        phases=[_line(*item) for item in found.phases.items()],
        payees=[_line(*item) for item in found.payees.items()],
        episodes=[_line(*item) for item in shown],
    )


def _line(name: str, cost: Cost) -> CostLine:
    exact = exact_money(cost.money)
    return CostLine(name=name, **asdict(cost) | {"money": exact, "shown": shown_money(cost.money)})


def summed(name: str, found: Mapping[str, CostsAnswer]) -> CostsAnswer:
    """Return the costs of several runs together: their phases, and in `payees` a line for each run."""
    phases: dict[str, Cost] = {}
    for answer in found.values():
        for line in answer.phases:
            phases[line.name] = phases.get(line.name, Cost()) + _cost_of(line)
    report = CostReport(
        counted=any(answer.counted for answer in found.values()),
        priced=any(answer.priced for answer in found.values()),
        total=sum(phases.values(), Cost()),
        phases=phases,
        payees={run: _cost_of(answer.total) for run, answer in found.items()},
        episodes={},
    )
    return costs_answer(name, report)


def _cost_of(line: CostLine) -> Cost:
    return Cost(line.calls, line.prompt_tokens, line.reply_tokens, line.ms, int(line.money.replace(".", "")))
