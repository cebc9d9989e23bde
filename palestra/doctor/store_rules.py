"""Signs that the metrics do not have: of workers, of opponents, and of the disk. `store_facts` adds their numbers."""

from __future__ import annotations

from palestra.doctor import episodes
from palestra.doctor.rule import RECENT, History, Row, Rule, in_each, mean

# Names of the numbers that `store_facts` adds to a row.
CLAIMS, FAILURES = "store/claims", "store/failures"
REASON = "store/reason/"  # and the reason: how many attempts of the step ended with it
AGENT_REWARD = "store/reward/"  # and the agent: its mean reward
CONSTANT_SUM, TWO_AGENTS = "store/constant_sum_share", "store/episodes_of_two"
REWARD_SPREAD = "store/reward_spread"
HIGHEST, LOWEST = "store/reward_highest", "store/reward_lowest"
TOGETHER = "store/reward_correlation"  # of the two agents of an episode; absent where one always earns the same
FREE, NEEDED = "disk/free_bytes", "disk/needed_bytes"

FAILED_SHARE, LEAST_FAILED = 0.2, 3
CONSTANT_SHARE = 0.95
RISE = 0.1  # of the spread of rewards
OPPONENT_STEPS = 6
RESERVE = 256 * 2**20  # bytes: the databases and the system need room beside the run


def _workers_fail(history: History) -> str | None:
    recent = [row for row in history.recent if CLAIMS in row]
    claims, failures = (sum(row[name] for row in recent) for name in (CLAIMS, FAILURES))
    if failures < LEAST_FAILED or failures < FAILED_SHARE * claims:
        return None
    counts: dict[str, float] = {}
    for row in recent:
        for name in row:
            if name.startswith(REASON):
                counts[name.removeprefix(REASON)] = counts.get(name.removeprefix(REASON), 0.0) + row[name]
    most = max(counts, key=lambda name: counts[name], default="")
    why = f", most often with: {most}" if most else ""
    return f"in the last {len(recent)} steps {failures:.0f} of {claims:.0f} attempts to play an episode failed{why}"


def _opponents_rise(history: History) -> str | None:
    rows = [row for row in history.rows if TWO_AGENTS in row]
    if len(rows) < OPPONENT_STEPS:
        return None
    first, last = [row for row in history.start if TWO_AGENTS in row][:RECENT], rows[-RECENT:]
    agents = [name for name in first[0] if name.startswith(AGENT_REWARD)] if first else []
    if len(agents) != 2 or not in_each(first, lambda row: row[CONSTANT_SUM] >= CONSTANT_SHARE):
        return None
    least = RISE * max(row[REWARD_SPREAD] for row in (*first, *last))
    moves = [(name, mean(first, name), mean(last, name)) for name in agents]
    if least <= 0 or any(a is None or b is None or b - a <= least for _, a, b in moves):
        return None
    said = " and ".join(f"{name.removeprefix(AGENT_REWARD)} from {a:.3g} to {b:.3g}" for name, a, b in moves)
    return f"the rewards of both opponents rose: {said}; at the start what one won the other lost"


def _disk_fills(history: History) -> str | None:
    row: Row = history.newest
    if FREE not in row or row[FREE] >= row[NEEDED] + RESERVE:
        return None
    left = history.job.steps - row["step"]
    return (
        f"{row[FREE] / 2**30:.2f} GiB are free, and the {left:.0f} steps that are left need about "
        f"{row[NEEDED] / 2**30:.2f} GiB at the pace so far"
    )


STORE_RULES = (
    Rule(
        code="workers_fail",
        formula=f"in {RECENT} steps together: attempts that failed ≥ {FAILED_SHARE:g} × attempts, and ≥ {LEAST_FAILED}",
        seen=_workers_fail,
        means="workers crash, lose their lease, or their environment raises; what they played is thrown away",
        remedy="read the reasons in `palestra episodes`; raise rollout.lease_seconds if leases expire",
        shows=episodes.failed,
        of_job=True,
    ),
    Rule(
        code="opponents_rise",
        formula=f"two agents whose rewards had a constant sum in ≥ {CONSTANT_SHARE:g} of the episodes of each of the "
        f"first {RECENT} steps: the mean of each rose by > {RISE:g} × (highest - lowest reward) to the last {RECENT}",
        seen=_opponents_rise,
        means="the game is not zero-sum any more: the players found a way to be paid together, or the reward has a bug",
        remedy="read the episodes in which both won, and make the reward of one the loss of the other",
        shows=episodes.best,
        of_job=True,
    ),
    Rule(
        code="disk_fills",
        formula="free bytes of the run's disk < bytes of `run.db` / steps × steps left + newest checkpoint + "
        f"{RESERVE // 2**20} MiB",
        seen=_disk_fills,
        means="the run will end with an error of the disk; what is acknowledged until then is kept",
        remedy="free room, lower checkpoint.keep, or move the folder and go on with --resume",
        shows=episodes.none_of,
        of_job=True,
    ),
)
