"""What a run has cost, by phase, policy and episode, from what its store has."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from sqlalchemy import Connection, func, select

from palestra.config import JobConfig
from palestra.config.budget import device_price, storage_money, token_prices
from palestra.dashboard.answers import Cost, CostsAnswer
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
AMOUNTS = ("calls", "prompt_tokens", "reply_tokens", "ms", "money")
WAITING, DEVICES, OUTSIDE, STORAGE = "waiting", "(devices)", "(outside episodes)", "(storage)"


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


def read_costs(folder: Path, config: JobConfig, episodes: int = 0) -> CostsAnswer:
    """Return what a run has cost so far.

    Args:
        folder: of the run, finished or running.
        config: the run's, perhaps with other prices.
        episodes: how many of those that have cost most are listed, too.

    Raises:
        NotFound, StoreError: there is no run, or it can't be read.
    """
    with browse(folder / "run.db") as connection:
        used, of_episodes = sums(connection), sums_by_episode(connection) if episodes else []
        if not used:
            of_episodes = used = _summed_up(usage_of_calls(connection, config))
        found = _costs(folder, connection, config, PhaseTimes(), used)
        return found.model_copy(update={"run": folder.name, "episodes": _dearest(found, of_episodes, config, episodes)})


def run_costs(run: Run) -> CostsAnswer:
    """Return what a run of a page has cost; calls are in it if the job counts them."""
    with run.open() as connection:
        found = _costs(run.folder, connection, run.config, run.memory.times, sums(connection))
        return found.model_copy(update={"run": run.name})


def _summed_up(calls: Iterable[Used]) -> list[Used]:
    """Return the sums of calls by episode, kind and payee."""
    found: dict[tuple[str, str, str], Used] = {}
    for one in calls:
        before = found.get(key := one[:3])
        found[key] = one if before is None else Used(*key, *(a + b for a, b in zip(before[3:], one[3:], strict=True)))
    return list(found.values())


def storage_cost(folder: Path, connection: Connection, config: JobConfig) -> list[Cost]:
    """Return what keeping a run costs, by its present size, from its first event until now; empty: it has no price."""
    if config.prices is None or not config.prices.storage:
        return []
    began = connection.execute(select(func.min(events.c.at))).scalar()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    seconds = 0.0 if began is None else max(time.time() - began, 0.0)
    return [Cost(name=STORAGE, money=storage_money(config, size, seconds))]


def _costs(
    folder: Path, connection: Connection, config: JobConfig, times: PhaseTimes, used: Sequence[Used]
) -> CostsAnswer:
    """Return what a run has cost. `times`: of the steps that were read before. `used`: by all calls."""
    device = device_price(config)
    devices = [Cost(name=phase, ms=ms, money=ms * device) for phase, ms in times.read(connection).items()]
    kept = storage_cost(folder, connection, config)
    payees = _by_name([*_called(used, config, "payee"), cost_sum(DEVICES, devices), *kept])
    empty = [Cost(name=phase) for phase in (*PHASES.values(), WAITING)]
    called = [cost_sum(PHASES[one.name], [one]) for one in _called(used, config, "kind")]
    return CostsAnswer(
        run="",
        counted=bool(used),
        priced=config.prices is not None,
        total=cost_sum("total", payees),
        phases=_by_name([*empty, *devices, *called, *(cost_sum("storage", [one]) for one in kept)]),
        payees=payees,
    )


def _dearest(found: CostsAnswer, used: Sequence[Used], config: JobConfig, most: int) -> list[Cost]:
    """Return the episodes that have cost most, and lines for everything else, so that all add up to the total."""
    if not most:
        return []
    own = _by_name(_called([one for one in used if one.episode_id], config, "episode_id"))
    own.sort(key=lambda cost: (cost.money, cost.reply_tokens), reverse=True)
    rest = [cost_sum(f"({len(own) - most:,} others)", own[most:])] if own[most:] else []
    others = [line for line in found.payees if line.name in (DEVICES, STORAGE)]
    return [*own[:most], *rest, cost_sum(OUTSIDE, [found.total], less=[*own, *others]), *others]


def _called(used: Iterable[Used], config: JobConfig, name: str) -> list[Cost]:
    """Return what calls have cost, named by one of their fields."""
    prices = token_prices(config)
    return [
        Cost(
            name=getattr(one, name),
            calls=one.calls,
            prompt_tokens=one.prompt_tokens,
            reply_tokens=one.reply_tokens,
            money=one.money(prices),
        )
        for one in used
    ]


def _by_name(costs: Iterable[Cost]) -> list[Cost]:
    """Return the sums of costs with the same name."""
    found: dict[str, list[Cost]] = {}
    for cost in costs:
        found.setdefault(cost.name, []).append(cost)
    return [cost_sum(name, same) for name, same in found.items()]


def cost_sum(name: str, costs: Sequence[Cost], less: Sequence[Cost] = ()) -> Cost:
    """Return the sum of some costs, without others, under a name."""
    return Cost(
        name=name, **{field: sum(map(of := attrgetter(field), costs)) - sum(map(of, less)) for field in AMOUNTS}
    )


def summed(name: str, found: Mapping[str, CostsAnswer]) -> CostsAnswer:
    """Return the costs of several runs together: their phases, and in `payees` a line for each run."""
    runs = [cost_sum(run, [answer.total]) for run, answer in found.items()]
    return CostsAnswer(
        run=name,
        counted=any(answer.counted for answer in found.values()),
        priced=any(answer.priced for answer in found.values()),
        total=cost_sum("total", runs),
        phases=_by_name(line for answer in found.values() for line in answer.phases),
        payees=runs,
    )
