"""The findings of a run: each rule over each of its steps, from its store alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import orjson
from sqlalchemy import Connection, func, select

from palestra.config import JobConfig, load_saved_config
from palestra.doctor.rule import JobSize, Row, Rule, RunHistory
from palestra.doctor.store_facts import PIECE, disk_facts, store_facts
from palestra.errors import NotFound
from palestra.extensions import extensions, load_extension
from palestra.store.browsing import browse, last_state
from palestra.store.run_log import NUMERICS, read_fact, readable_metrics
from palestra.store.search import readable_summaries
from palestra.store.tables import episodes, groups, metric_rows
from palestra.store.verdicts import audit_scores
from palestra.types.metrics import row_of_policy
from palestra.types.records import ON_PURPOSE
from palestra.types.summaries import EpisodeSummary, Examination, Finding, HealthWarning

# Those of installed packages, in their order.
RULES: tuple[Rule, ...] = tuple(
    rule for point in extensions("palestra.rules").values() for rule in load_extension(point)
)

OF_A_POLICY = tuple(rule for rule in RULES if not rule.of_job)
OF_A_JOB = tuple(rule for rule in RULES if rule.of_job)


def health_of(history: RunHistory, policy: str = "", rules: Sequence[Rule] = RULES) -> list[HealthWarning]:
    """Return the signs in the newest step; empty for a run that learns. `policy`: of the rows, for people; empty if the
    job has only one.
    """
    if not history.rows:
        return []
    step, whose = int(history.newest["step"]), policy and f"policy {policy}: "
    return [
        HealthWarning(code=rule.code, step=step, text=f"{whose}{seen}; {rule.remedy}", policy=policy)
        for rule in rules
        if (seen := rule.seen(history)) is not None
    ]


MOST_EPISODES = 5  # of a finding
EXAMINE_SECONDS = 60.0  # that the queries of an examination may take: a table may be a view without an end
MOST_LOOKED_AT = 2000  # episodes of a step, of which a finding's are chosen


def examine(folder: Path | str) -> Examination:
    """Examine a run, finished or running, without changing its folder."""
    folder = Path(folder)
    if not (folder / "run.db").is_file():
        raise NotFound(f"{folder} is not the folder of a run (it has no run.db)")
    config = load_saved_config(folder)
    with browse(folder / "run.db", EXAMINE_SECONDS) as connection:
        return examine_store(connection, config, folder)


def findings_of(rows: Iterable[Row], job: JobSize, rivals: Sequence[str] = ()) -> list[Finding]:
    """Return the findings of the rules in rows, without episodes; see `Signs`."""
    signs = Signs(job, rivals)
    for row in rows:
        signs.add(row)
    return signs.findings()


class Signs:
    """The signs in the rows of a run, which are added step by step."""

    def __init__(self, job: JobSize, rivals: Sequence[str] = ()) -> None:
        """Begin without rows. `rivals`: the trained policies, if there are several; each one's rows are examined."""
        self._rivals = rivals
        self._of_policies = {name: _Watch(job, OF_A_POLICY, name) for name in rivals}
        self._of_job = _Watch(job, OF_A_JOB if rivals else RULES, "")

    def add(self, row: Row) -> None:
        """Add the row of the next step, with the numbers of `store_facts` where known."""
        if self._rivals:
            own = {policy: row_of_policy(row, policy, self._rivals) for policy in self._rivals}
            for policy, of_policy in own.items():
                self._of_policies[policy].add(of_policy)
            # The rules of the job need one row a step, of whichever policy was trained in it.
            row = next((one for one in own.values() if one.get("train/episodes")), own[self._rivals[0]])
        self._of_job.add(row)

    def findings(self) -> list[Finding]:
        """Return the findings so far, without episodes; present ones first."""
        watches = (*self._of_policies.values(), self._of_job)
        found = [finding for watch in watches for finding in watch.findings()]
        return sorted(found, key=lambda finding: not finding.holds)

    def copy(self) -> Self:
        """Return a copy, to which rows can be added apart."""
        made = copy.copy(self)
        made._of_policies = {name: watch.copy() for name, watch in self._of_policies.items()}
        made._of_job = self._of_job.copy()
        return made


class _Watch:
    """The signs in the rows of a policy, or of the job."""

    def __init__(self, job: JobSize, rules: Sequence[Rule], policy: str) -> None:
        self._history, self._newest = RunHistory(job), 0
        self._rules, self._policy = rules, policy
        self._spells: dict[str, _Spell] = {}

    def add(self, row: Row) -> None:
        self._history.add(row)
        if not row.get("train/episodes"):
            return
        before, self._newest = self._newest, int(row["step"])
        for rule in self._rules:
            if (seen := rule.seen(self._history)) is not None:
                self._spells.setdefault(rule.code, _Spell(rule)).extend(before, self._newest, seen)

    def findings(self) -> list[Finding]:
        known = (self._spells[rule.code] for rule in self._rules if rule.code in self._spells)
        return [spell.finding(self._newest, self._policy) for spell in known]

    def copy(self) -> _Watch:
        made = copy.copy(self)
        made._history = self._history.copy()
        made._spells = {code: copy.copy(spell) for code, spell in self._spells.items()}
        return made


class _Spell:
    """Consecutive steps that show a sign."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self._since, self._until, self._seen, self._count = rule, 0, -1, "", 0

    def extend(self, before: int, step: int, seen: str) -> None:
        """Add a step; one that does not follow directly begins a new stretch."""
        if self._until != before:
            self._since = step
        self._until, self._seen, self._count = step, seen, self._count + 1

    def finding(self, newest: int, policy: str) -> Finding:
        """Return the finding, as it is after the newest step."""
        return Finding(
            code=self._rule.code,
            seen=self._seen,
            since=self._since,
            until=self._until,
            holds=self._until == newest,
            steps=self._count,
            means=self._rule.means,
            remedy=self._rule.remedy,
            policy=policy,
        )


class Examined:
    """The finished part of a run as far as it was examined. The next examination continues there."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.facts: dict[int, dict[str, float]] = {}  # of the episodes of steps after `until`
        self.signs: Signs | None = None
        self.until = self.read = -1  # newest step in `signs`, and newest step in `facts`
        self.damaged: list[int] = []  # steps before `until`


def examine_store(connection: Connection, config: JobConfig, folder: Path, kept: Examined | None = None) -> Examination:
    """Examine a run whose store is open. `kept`: what earlier examinations have read, updated here; None: the whole run
    is read.
    """
    kept = Examined() if kept is None else kept
    while add_facts(connection, kept):
        pass
    rows, damaged = readable_metrics(connection, after=kept.until)
    known: list[Row] = [{**row, **kept.facts.get(int(row["step"]), {})} for row in rows]
    kept.signs = kept.signs or Signs(JobSize.of(config), config.players.rivals)
    for row in known[:-1]:  # the newest may still change
        kept.signs.add(row)
        kept.until = int(row["step"])
        kept.facts.pop(kept.until, None)
    damaged = [*kept.damaged, *damaged]
    kept.damaged = [step for step in damaged if step < kept.until]
    signs = kept.signs.copy()
    if known:
        signs.add({**known[-1], **disk_facts(folder, int(known[-1]["step"]), config.steps)})
    found = signs.findings()
    shown = [_with_episodes(connection, finding) for finding in found]
    newest = int(known[-1]["step"]) if known else 0
    failed, reason = (0, "") if newest else _failed(connection)
    return Examination(
        step=newest,
        steps=config.steps,
        findings=tuple(shown),
        damaged=tuple(damaged),
        failed=failed,
        reason=reason,
        numerics=_numerics(connection),
    )


def _numerics(connection: Connection) -> dict[str, str]:
    """Return what computes a run; {}: unknown or damaged."""
    try:
        found = orjson.loads(read_fact(connection, NUMERICS) or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _failed(connection: Connection) -> tuple[int, str]:
    """Return how many episodes of training have failed, 0 if one was completed, and why they or their job did."""
    columns = (episodes.c.episode_id, episodes.c.state, episodes.c.reason)
    begun = episodes.c.state.in_(("completed", "discarded")) | episodes.c.reason.is_not(None)
    order = (func.coalesce(episodes.c.claimed_at, 0), episodes.c.group_index, episodes.c.sample_index)
    rows = connection.execute(select(*columns).where(episodes.c.kind == "train", begun).order_by(*order)).all()
    failed = [row for row in rows if not str(row.reason).startswith(ON_PURPOSE)]
    if any(row.state == "completed" for row in rows):
        failed = []
    reason = f"{failed[-1].episode_id}: {failed[-1].reason}" if failed else ""
    last = last_state(connection)
    if last is not None and last.kind == "failed":
        with suppress(ValueError, TypeError, KeyError):  # its event is damaged
            reason = str(orjson.loads(last.data)["reason"])
    return len(failed), reason


def add_facts(connection: Connection, kept: Examined) -> bool:
    """Read the episodes of some finished steps, each of which is read once, and return whether there are more."""
    newest = connection.execute(select(func.max(metric_rows.c.step))).scalar() or 0
    if kept.read > newest:
        kept.clear()  # the job was resumed from an earlier checkpoint, and trains these steps again
    found = store_facts(connection, kept.read, newest)
    kept.facts |= found
    kept.read = max(found, default=kept.read)
    return len(found) == PIECE


def _with_episodes(connection: Connection, finding: Finding) -> Finding:
    """Return a finding with the episodes of its last step that show it."""
    rule = next(rule for rule in RULES if rule.code == finding.code)
    chosen = rule.shows(_episodes_of(connection, finding.until))
    if rule.audited:
        scores = audit_scores(connection, finding.until)
        if known := [one for one in chosen if one.episode_id in scores]:
            best_paid = known[: max(len(known) // 2, 1)]
            chosen = sorted(best_paid, key=lambda one: scores[one.episode_id])
    chosen = chosen[:MOST_EPISODES]
    return finding.model_copy(update={"episodes": tuple(one.episode_id for one in chosen)})


def _episodes_of(connection: Connection, step: int) -> Sequence[EpisodeSummary]:
    """Return the training episodes of a step in canonical order; damaged ones are left out."""
    of_step = select(groups.c.group_index).where(groups.c.kind == "train", groups.c.step == step)
    wanted = select(episodes).where(episodes.c.kind == "train", episodes.c.group_index.in_(of_step))
    order = wanted.order_by(episodes.c.group_index, episodes.c.sample_index).limit(MOST_LOOKED_AT)
    found = readable_summaries(connection, connection.execute(order).all())
    return [one for one in found if one.damaged is None]
