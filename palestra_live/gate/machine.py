"""The gate as a state machine: decisions are a function of the observations, so that any prefix can be replayed."""

from __future__ import annotations

from dataclasses import dataclass, field

from palestra.doctor.evidence import Evidence
from palestra.errors import ConfigError
from palestra_live.gate.config import GateBounds, why_unreachable
from palestra_live.gate.records import (
    TRANSITIONS,
    Audited,
    Compared,
    GateDecision,
    HeldOut,
    Observation,
    Offered,
    Ordered,
    SessionEnded,
    Started,
    VersionStage,
)
from palestra_live.gate.statistics import FEWEST, WATCH_ALARM, Differences, watched

RATIOS = ("latency", "length", "cost")
SHARES = ("refusals", "errors")
NO_PAIRS = Differences()
NO_EVIDENCE = Evidence(0.0, 0)


@dataclass
class Pairing:
    """Pairs sessions of a new version with sessions of the live one, each session and each user at most once.

    A user's sessions are alike, and users are what is randomised: a second session of theirs would be counted as more
    evidence than it is.
    """

    differences: Differences = NO_PAIRS
    users: set[str] = field(default_factory=set)
    waiting: dict[bool, float] = field(default_factory=dict)  # of the new version (True), of the live one

    def add(self, user: str, new: bool, value: float, ratio: bool) -> None:
        """Add one session. `ratio`: pairs are compared by (new - live) / (new + live) in place of new - live."""
        if user in self.users:
            return
        self.users.add(user)
        other = self.waiting.pop(not new, None)
        if other is None:
            self.waiting[new] = value
            return
        ours, theirs = (value, other) if new else (other, value)
        whole = (ours + theirs) if ratio else 1.0
        self.differences = self.differences.add((ours - theirs) / whole if whole else 0.0)


@dataclass
class VersionTrial:
    """A version that is tested against the live one."""

    version: int
    held_out: Differences | None = None
    audited: bool = False
    shadow: Differences = NO_PAIRS
    canary: dict[str, Pairing] = field(
        default_factory=lambda: {name: Pairing() for name in ("score", *RATIOS, *SHARES)}
    )


@dataclass
class Watch:
    """The e-CUSUM over the sessions of a promoted version."""

    floor: float
    sessions: int = 0
    evidence: Evidence = NO_EVIDENCE


class Gate:
    """The state after some observations. The same observations always give the same decisions."""

    def __init__(self) -> None:
        self.bounds = GateBounds()
        self.key = b""
        self.stages: dict[int, VersionStage] = {}
        self.live: int | None = None
        self.before: list[int] = []  # versions that were live, oldest first, to go back to
        self.trial: VersionTrial | None = None
        self.watch: Watch | None = None
        self.held: str | None = None  # the reason why a person stopped promotions
        self.level = Differences()  # scores of the live version since the last canary began
        self._decided: list[GateDecision] = []

    def see(self, observation: Observation) -> list[GateDecision]:
        """Take one observation, and return what it decides.

        Raises:
            ConfigError: it is an order that cannot be followed; nothing has changed.
        """
        self._decided = []
        match observation:
            case Started():
                self._start(observation)
            case Offered(version=version) if self.trial is None and self.live is not None:
                if version not in self.stages:
                    self.trial = VersionTrial(version)
                    self._move(
                        version, VersionStage.CANDIDATE, f"a new version, to be compared with version {self.live}"
                    )
            case HeldOut(version=version, differences=differences) if self._on_trial(version, VersionStage.CANDIDATE):
                self._hold_out(differences)
            case Audited(version=version):
                self._audit(version, observation)
            case Compared(version=version, against=against) if self._on_trial(version, VersionStage.SHADOW):
                if against == self.live:
                    self._compare(observation.difference)
            case SessionEnded():
                self._end(observation)
            case Ordered():
                self._order(observation)
            case _:
                pass  # of a trial that is over
        return self._decided

    # what is observed

    def _start(self, seen: Started) -> None:
        known = {key: value for key, value in seen.bounds.items() if key in GateBounds.model_fields}
        self.bounds = GateBounds.model_validate(known)  # another version of Palestra may have had more keys
        if self.live is None:
            self.live, self.key = seen.version, bytes.fromhex(seen.key)
            self._move(seen.version, VersionStage.LIVE, "the version that the run begins with")

    def _hold_out(self, differences: tuple[float, ...]) -> None:
        trial = self._trial
        trial.held_out = Differences()
        for one in differences:
            trial.held_out = trial.held_out.add(one)
        if trial.held_out.interval.high < 0.0:
            self._reject("worse than the live version on held-out tasks", _numbers(trial.held_out))
        else:
            self._tested()

    def _audit(self, version: int, seen: Audited) -> None:
        if not seen.passed and version == self.live:
            self._back(f"the audit holds it back: {seen.reason}", {})
        elif self.trial is not None and self.trial.version == version:
            self.trial.audited = seen.passed
            if not seen.passed:
                self._move(version, VersionStage.QUARANTINED, f"the audit holds it back: {seen.reason}")
                self.trial = None
            elif self.stages[version] is VersionStage.CANDIDATE:
                self._tested()

    def _tested(self) -> None:
        """Let a candidate go on when held-out tasks and audit are both passed."""
        trial = self._trial
        if trial.held_out is None or not trial.audited:
            return
        why = "passed held-out tasks and audit" if trial.held_out.size else "passed the audit; no held-out tasks"
        if self.bounds.shadow:
            self._move(trial.version, VersionStage.SHADOW, why, _numbers(trial.held_out))
        else:
            self._start_canary(why, trial.held_out)

    def _compare(self, difference: float) -> None:
        trial = self._trial
        trial.shadow = trial.shadow.add(difference)
        low, high = trial.shadow.interval
        numbers = _numbers(trial.shadow) | {"margin": self.bounds.margin}
        if low > self.bounds.margin:
            self._start_canary("its replies to logged prompts are better by more than the margin", trial.shadow)
        elif high < self.bounds.margin:
            self._reject("its replies to logged prompts are not better by the margin", numbers)
        elif trial.shadow.size >= self.bounds.pairs:
            self._reject(f"undecided after {trial.shadow.size} judged pairs", numbers)

    def _start_canary(self, why: str, found: Differences) -> None:
        level = self.level
        if not self.bounds.shadow and level.size >= FEWEST:
            unreachable = why_unreachable(self.bounds, level.mean)
            if unreachable is not None:
                self._reject(unreachable, {"level": level.mean})
                return
        self.level = Differences()
        self._move(self._trial.version, VersionStage.CANARY, why, _numbers(found))

    def _end(self, seen: SessionEnded) -> None:
        if seen.version == self.live and seen.score is not None:
            self.level = self.level.add(seen.score)
            if self._lost(seen.score):
                return
        trial = self.trial
        if trial is None or self.stages[trial.version] is not VersionStage.CANARY:
            return
        if seen.version not in (trial.version, self.live):
            return
        values = {
            "score": seen.score,
            "latency": seen.seconds,
            "length": seen.tokens,
            "cost": seen.cost,
            "refusals": seen.refused,
            "errors": seen.failed,
        }
        for name, value in values.items():
            if value is not None:
                trial.canary[name].add(seen.user, seen.version == trial.version, float(value), name in RATIOS)
        self._judge_canary()

    def _judge_canary(self) -> None:
        trial = self._trial
        found = {name: pairing.differences for name, pairing in trial.canary.items()}
        score, bounds = found["score"], self.bounds
        numbers = _numbers(score) | {name: found[name].mean for name in (*RATIOS, *SHARES) if found[name].size}
        for name in (*RATIOS, *SHARES):
            if found[name].interval.low > self.allowed(name):
                self._reject(f"the guardrail {name} is broken", numbers | {"allowed": self.allowed(name)})
                return
        margin = numbers["margin"] = self.canary_margin
        low, high = score.interval
        if low > margin and self.held is None and not self.blocked_by():
            self._promote(trial.version, "its sessions score higher than the margin asks, and guardrails hold", numbers)
        elif high < margin:
            self._reject("its sessions score too low", numbers)
        elif score.size >= bounds.pairs and self.held is None:
            self._reject(f"undecided after {score.size} pairs of sessions", numbers)

    @property
    def canary_margin(self) -> float:
        """Return the difference of scores that a canary has to exceed."""
        return -self.bounds.worse if self.bounds.shadow else self.bounds.margin

    def blocked_by(self) -> list[str]:
        """Return the guardrails that do not hold now for the version on trial."""
        found = self._trial.canary
        return [name for name in (*RATIOS, *SHARES) if found[name].differences.mean > self.allowed(name)]

    def allowed(self, name: str) -> float:
        """Return the largest mean difference of a guardrail, in the unit of its pairs."""
        bound: float = getattr(self.bounds.guardrails, name)
        return (bound - 1.0) / (bound + 1.0) if name in RATIOS else bound

    def _lost(self, score: float) -> bool:
        """Return whether the watch sends the live version back."""
        if (watch := self.watch) is None:
            return False
        watch.evidence = watched(watch.evidence, watch.sessions, score, watch.floor)
        watch.sessions += 1
        if watch.evidence.nats < WATCH_ALARM:
            return False
        numbers = {"sessions": float(watch.sessions), "floor": watch.floor, "nats": watch.evidence.nats}
        numbers["since"] = float(watch.evidence.start)
        self._back("its sessions score lower than those of the version before", numbers)
        return True

    # what a person wants

    def _order(self, seen: Ordered) -> None:
        said = f"{seen.by}: {seen.reason}"
        if self.live is None:
            raise ConfigError("no version is live yet: the gate begins with the run's server")
        if seen.order == "hold":
            self.held = said
            self._say(self.live, f"promotions stopped by {said}")
        elif seen.order == "resume":
            self.held = None
            self._say(self.live, f"promotions go on, by {said}")
            if self.trial is not None and self.stages[self.trial.version] is VersionStage.CANARY:
                self._judge_canary()
        elif seen.order == "back":
            if not self.before:
                raise ConfigError(f"version {self.live} is the first that was live: there is none to go back to")
            self._back(f"sent back by {said}", {})
        else:
            self._promote_by_order(seen.version, said)

    def _promote_by_order(self, version: int | None, said: str) -> None:
        """Promote a version that has passed: one that was live, or a canary that only a hold kept back."""
        stage = None if version is None else self.stages.get(version)
        if version is None or stage is None:
            raise ConfigError(f"there is no version {version}: `palestra live status` lists them")
        if stage is VersionStage.CANARY:
            held, self.held = self.held, None
            self._judge_canary()
            self.held = held
            if self.stages[version] is not VersionStage.CANARY:
                return
        if stage is not VersionStage.RETIRED:
            raise ConfigError(
                f"version {version} is {stage.replace('_', ' ')} and has not passed: only a version that won its "
                "canary can be live"
            )
        self._promote(version, f"promoted by {said}", {})

    # what changes

    def _promote(self, version: int, why: str, numbers: dict[str, float]) -> None:
        before, level = self.live, self.level
        if before is not None:
            self.before = [one for one in self.before if one != version] + [before]
            self._move(before, VersionStage.RETIRED, f"version {version} took its place")
        self.live, self.trial, self.level = version, None, Differences()
        self.watch = None if level.size < FEWEST else Watch(max(level.mean - self.bounds.drop, 0.0))
        self._move(version, VersionStage.LIVE, why, numbers)

    def _back(self, why: str, numbers: dict[str, float]) -> None:
        """Let the version that was live before serve again; without one, say so."""
        lost = self.live
        assert lost is not None
        if not self.before:
            self._say(lost, f"{why}; it is the first that was live, and there is none to go back to")
            self.watch = None
            return
        target = self.before.pop()
        if self.trial is not None:
            self._reject(f"version {lost}, with which it was compared, has gone back", {})
        self._move(lost, VersionStage.GONE_BACK, why, numbers)
        self.live, self.watch, self.level = target, None, Differences()
        self._move(target, VersionStage.LIVE, f"serves again in place of version {lost}")

    def _reject(self, why: str, numbers: dict[str, float]) -> None:
        self._move(self._trial.version, VersionStage.REJECTED, why, numbers)
        self.trial = None

    def _move(self, version: int, stage: VersionStage, why: str, numbers: dict[str, float] | None = None) -> None:
        before = self.stages.get(version)
        assert stage in TRANSITIONS[before], f"version {version}: {before} -> {stage}"
        self.stages[version] = stage
        self._decided.append(GateDecision(version=version, before=before, after=stage, why=why, data=numbers or {}))

    def _say(self, version: int, why: str) -> None:
        self._decided.append(GateDecision(version=version, before=None, after=None, why=why, data={}))

    @property
    def _trial(self) -> VersionTrial:
        assert self.trial is not None
        return self.trial

    def _on_trial(self, version: int, stage: VersionStage) -> bool:
        return self.trial is not None and self.trial.version == version and self.stages[version] is stage


def _numbers(found: Differences) -> dict[str, float]:
    low, high = found.interval
    return {"pairs": float(found.size), "difference": found.mean, "low": low, "high": high}
