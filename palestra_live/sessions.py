"""The sessions of a live run: opened, recorded as episodes, ended by silence, settled by feedback, and trained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from palestra.database import WAKE_SECONDS, Notifier
from palestra.database.sqlite import pieces
from palestra.errors import Conflict, Expired, Forbidden, NotFound, PalestraError
from palestra.learner import OpenRun
from palestra.learner.gathering import Restart
from palestra.server import DataPlane
from palestra.threads import in_thread
from palestra.types.calls import Chat, PolicyVersion, VersionSpan
from palestra.types.records import SOLE_AGENT, EpisodeEnd, RecordedEpisode, Task
from palestra.waiting import LoggedOnce, cancelled, together
from palestra_live.config import LiveConfig
from palestra_live.conversations import Conversations
from palestra_live.forgetting import Forgotten, forget, sessions_before, sessions_of
from palestra_live.judged import SessionJudge
from palestra_live.learning import WINDOW, SessionScores
from palestra_live.lessons import lesson_episodes, session_episode
from palestra_live.privacy import Redaction
from palestra_live.store import LiveStore, NewSession, SessionState

log = logging.getLogger("palestra.live")
TICK_SECONDS = 0.5
AT_ONCE = 64  # sessions that are ended or settled at the same time
EXPIRE_SECONDS = 3600.0  # between two looks for content that is too old
LEASE_SECONDS = 3600.0  # renewed while a session is open or feedback may come; a restart begins it anew
WORKER = "live"
UNTIL = "sessions_used_until"  # fact of the run: see `LiveSessions._note`
PRIVATE: ContextVar[list[str]] = ContextVar("private replies of a request, which are not recorded")


@dataclass(slots=True, eq=False)
class LiveSession:
    """An open session.

    Attributes:
        policy: what serves it until its end.
        episode: id and fence of its episode; None: nothing of it is recorded yet.
        calls: that are being answered.
        stored: whether it is more than one call.
    """

    session_id: str
    subject: str | None
    train: bool
    policy: str
    created_at: float
    last_at: float
    episode: tuple[str, int] | None = None
    calls: int = 0
    stored: bool = True
    over: bool = False
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check(self) -> None:
        """Raise Expired: the session is over."""
        if self.over:
            raise Expired(f"session {self.session_id!r} is over; open another one")

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Keep the session open inside of the block. Raises Expired: it is over."""
        self.check()
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.last_at = time.time()


class Versions:
    """Decides which version serves a session, and which weights are trained: here always the newest.

    Attributes:
        on_trial: what the version that is tested now waits for; empty: there is none.
    """

    def __init__(self, run: OpenRun) -> None:
        self._run, self.on_trial = run, ""
        (self._policy,) = run.policies.trained

    async def choose(self, new: NewSession) -> str:
        """Return the name of the version that serves a new session until its end."""
        return self._policy

    async def ready(self, restart: Restart) -> str:
        """Put the right weights into the trainer, and return why no step can begin now; empty: one can."""
        return ""

    def age(self, version: int, newest: int) -> int | None:
        """Return how many versions older a token's is than `newest`, that of the trainer; None: it was not trained
        from it.
        """
        return newest - version


class LiveSessions:
    """All sessions of a run, and its source of training episodes."""

    def __init__(
        self,
        run: OpenRun,
        plane: DataPlane,
        store: LiveStore,
        config: LiveConfig,
        versions: Versions,
        redaction: Redaction,
        judge: SessionJudge | None = None,
    ) -> None:
        self._run, self._plane, self.store, self._config, self._versions = run, plane, store, config, versions
        self.redaction, self.conversations = redaction, Conversations(plane.sessions.context.sameness)
        self._judge, self._judging = judge, dict[str, asyncio.Task[None]]()
        self._open: dict[str, LiveSession] = {}
        self._ended: dict[str, Mapping[str, Any]] = {}
        self._scored = SessionScores()
        self._used: dict[str, tuple[float, int]] = {}  # the newest that steps have: when they ended, and the step
        self._recalled = set[str | None]()  # clusters whose older scores were read
        self._until = self._expire_at = 0.0
        self._news = Notifier()  # of sessions with a score

    async def load(self) -> None:
        """Go on with the sessions of an earlier process."""
        for row in await self.store.in_state(SessionState.OPEN):
            session = self._open[row["session_id"]] = _session(row)
            if session.episode is not None:
                for chat in (await self._run.store.calls.of_lease(*session.episode))[1]:
                    self.conversations.add(session.session_id, session.subject, chat)
        for state in (SessionState.ENDED, SessionState.SETTLED):
            self._ended |= {row["session_id"]: row for row in await self.store.in_state(state)}
        self._until, step = json.loads(await self._run.store.log.fact(UNTIL) or "[0.0, 0]")
        self._scored.recall(await self.store.newest_scored(WINDOW + 1, self._until))
        used = {group.task_id: group.step for group in await self._run.store.groups.after("train", step)}
        for row in await self.store.to_learn_since(self._until):
            if (name := row["session_id"]) in used:
                self._used[name] = row["ended_at"], used[name]
            self._scored.add(row, used=name in used)

    async def _baseline(self, name: str, cluster: str | None) -> float | None:
        """Return the baseline of a session. The first of a cluster since the start has its older scores read."""
        if cluster not in self._recalled:
            self._recalled.add(cluster)
            self._scored.recall(await self.store.newest_scored(WINDOW + 1, self._until, cluster), cluster)
        return self._scored.baseline(name, cluster)

    async def _note(self, step: int) -> None:
        """Store which sessions need not be looked at after a restart: those that ended before all that wait."""
        ending = [one.last_at for one in self._open.values() if one.over]
        rows = (*self._scored.waiting.values(), *self._ended.values())
        until = min([time.time(), *ending, *(row["ended_at"] for row in rows)])
        self._used = {name: one for name, one in self._used.items() if one[0] >= until}
        first = min([step, *(at for _, at in self._used.values())])
        await self._run.store.log.set_fact(UNTIL, json.dumps([until, first - 1]))

    async def open(self, new: NewSession) -> LiveSession:
        """Open a session, or return the open one of this id. Raises Conflict, Forbidden or Expired if it is another's,
        has another consent, or is over.
        """
        session = await self.find(new.session_id, missing_ok=True)
        if session is None:
            row = await self.store.begin(new, await self._versions.choose(new))
            session = self._open.setdefault(new.session_id, _session(row))
        if session.subject != new.subject:
            raise Forbidden(f"session {new.session_id!r} is another subject's; use another id")
        if session.train != new.train:
            raise Conflict(f"session {new.session_id!r} was opened with train = {str(session.train).lower()}")
        return session

    async def find(self, session_id: str, missing_ok: bool = False) -> LiveSession | None:
        """Return an open session; None if `missing_ok` and there was never one of this id. Raises NotFound or
        Expired.
        """
        if (session := self._open.get(session_id)) is not None:
            return session
        row = await self.store.find(session_id)
        if row is None:
            if missing_ok:
                return None
            raise NotFound(f"there is no session {session_id!r}; open one with POST /live/sessions")
        raise Expired(f"session {session_id!r} is over; open another one")

    async def recorded_by(self, session: LiveSession) -> str:
        """Return the key under which the calls of a session are recorded. Raises Expired: it is over."""
        async with session.claiming:
            session.check()
            episodes, name = self._run.store.episodes, session.session_id
            if session.episode is None or not self._run.store.leases.renew(*session.episode):
                task = Task(task_id=name, data={"session": name})
                request_id = f"live {name} {session.created_at}"  # a forgotten session's name may be used again
                episode_id = await episodes.register_adhoc(task, request_id)
                claimed = await episodes.claim(WORKER, request_id, LEASE_SECONDS, episode_id)
                assert claimed is not None, "an episode that is named is claimed or refused"
                session.episode = claimed.episode_id, claimed.fence
                await self.store.change(name, episode_id=claimed.episode_id, fence=claimed.fence)
            (await self._plane.sessions.open(*session.episode)).keeps = partial(self._keeps, session)
            return self._plane.keys.episode_key(*session.episode)

    async def _keeps(self, session: LiveSession, chat: Chat) -> bool:
        """Return whether a reply may be recorded, as nothing in it is private."""
        if await self.redaction.finds_in_thread(msgspec.to_builtins(chat.reply)):
            PRIVATE.get([]).append(chat.request_digest)
            return False
        self.conversations.add(session.session_id, session.subject, chat)
        return True

    async def run(self) -> None:
        """End sessions after silence, and settle them when no more feedback may come, until cancelled."""
        trouble = LoggedOnce(log, "sessions can't be looked after now")
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                with trouble.attempt():
                    await self._tick(time.time())
        finally:
            await cancelled(*self._judging.values())

    async def _tick(self, now: float) -> None:
        for piece in pieces(list(self._open.values()), AT_ONCE):  # their writes share commits
            silent = [one for one in piece if not one.calls and now - one.last_at >= self._config.idle_seconds]
            await together(*map(self.end, silent))
        due = list[str]()
        for name, row in self._ended.items():
            if name in self._judging:
                continue
            if row["state"] != SessionState.ENDED or now >= row["ended_at"] + self._config.wait_seconds:
                due.append(name)
            elif row["episode_id"] is not None:
                self._run.store.leases.renew(row["episode_id"], row["fence"])
        for names in pieces(due, AT_ONCE):
            await together(*map(self._settle, names))
        await self._expire(now)

    async def end(self, session: LiveSession) -> None:
        """End a session; feedback may still come."""
        session.over = True
        await self.store.change(session.session_id, state=SessionState.ENDED.value, ended_at=time.time())
        row = await self.store.find(session.session_id)
        assert row is not None, "a session that is open is in the store"
        self._ended[session.session_id] = row
        self._open.pop(session.session_id, None)
        self.conversations.remove(session.session_id)

    async def _settle(self, name: str) -> None:
        """Take no more feedback for a session, and have it judged if it has none and is drawn; then finish it."""
        if (row := self._ended.get(name)) is None:  # it was forgotten
            return
        score, judge = await self.store.settle(name), self._judge
        silent = score is None and row["episode_id"] is not None
        if silent and judge is not None and judge.draws(name) and await self.store.is_silent(name):
            self._judging[name] = asyncio.create_task(self._judged(judge, name, row))
        else:
            await self._finish(name, row, score)

    async def _judged(self, judge: SessionJudge, name: str, row: Mapping[str, Any]) -> None:
        """Have a session scored, and finish it."""
        try:
            if (score := await judge.score(row)) is not None:
                await self.store.add_verdict(name, score)
            if name in self._ended:
                await self._finish(name, row, score)
        except PalestraError as error:  # the next look tries again
            log.error("session %s is not finished: %s", name, error)
        finally:
            self._judging.pop(name, None)

    async def _finish(self, name: str, row: Mapping[str, Any], score: float | None) -> None:
        """End the episode of a settled session with its score as reward; without one, discard it."""
        if row["episode_id"] is not None:
            episodes, lease = self._run.store.episodes, (row["episode_id"], row["fence"])
            try:
                if score is None:
                    await episodes.abort(*lease, "no score", discard=True)
                else:
                    await episodes.end(*lease, EpisodeEnd(rewards={SOLE_AGENT: score}, metadata={"session": name}))
            except Conflict as error:
                if score is not None:
                    log.error("session %s is not trained: %s", name, error)
        await self.store.change(name, state=SessionState.DONE.value)
        self._ended.pop(name, None)
        if score is not None or any(await self.store.lessons(name)):
            self._scored.add({**row, "score": score})
            self._news.notify()

    async def unstored(self, subject: str | None) -> LiveSession:
        """Return a session of one call, of which nothing is stored."""
        new = NewSession(session_id=secrets.token_hex(8), subject=subject, cluster=None, train=False)
        policy, now = await self._versions.choose(new), time.time()
        return LiveSession(
            session_id=new.session_id,
            subject=subject,
            train=False,
            policy=policy,
            created_at=now,
            last_at=now,
            stored=False,
        )

    async def forget(self, subject: str) -> Forgotten:
        """End the sessions of a subject and delete what they have said; see `forgetting.forget`."""
        folder = self._run.folder.path
        names = await in_thread(lambda: sessions_of(folder, subject))
        for name in names:
            self.conversations.remove(name)
            if (judging := self._judging.pop(name, None)) is not None:
                await cancelled(judging)
            if (session := self._open.pop(name, None)) is not None:
                session.over = True
                async with session.claiming:  # a call may be about to be recorded
                    pass
            row = await self.store.find(name)
            self._ended.pop(name, None)
            if row is not None and row["episode_id"] is not None and row["state"] != SessionState.DONE:
                with contextlib.suppress(Conflict):  # it is over
                    await self._run.store.episodes.abort(row["episode_id"], row["fence"], "forgotten", discard=True)
        self._scored.remove(set(names))
        return await in_thread(lambda: forget(folder, names, subject))

    async def _expire(self, now: float) -> None:
        """Delete the content of sessions that is older than `keep_days`."""
        if self._config.keep_days is None or now < self._expire_at:
            return
        self._expire_at = now + EXPIRE_SECONDS
        folder, before = self._run.folder.path, now - self._config.keep_days * 86400.0
        if names := await in_thread(lambda: sessions_before(folder, before)):
            for name in names:
                self._scored.waiting.pop(name, None)
            await in_thread(lambda: forget(folder, names))

    async def gather(self, step: int, groups: int, versions: Mapping[str, PolicyVersion], restart: Restart) -> None:
        """Put sessions with feedback into a step, each as a group of its own; see `EpisodeSource`."""
        ((policy, version),) = versions.items()
        while True:
            seen = self._news.count
            waits = await self._versions.ready(restart)
            missing = groups - len(await self._run.store.groups.of_step("train", step))
            self._say(step, groups, missing, waits)
            for row in list(self._scored.waiting.values()):
                if missing > 0 and not waits:
                    missing -= await self._put(row, step, policy, version)
            if missing <= 0:
                await self._note(step)
                return
            await self._news.wait(WAKE_SECONDS, seen)

    def _say(self, step: int, groups: int, missing: int, waits: str) -> None:
        """Say what a step waits for."""
        done, due = (self._scored.total, WINDOW + 1) if self._scored.total <= WINDOW else (groups - missing, groups)
        text = f"gathering step {step}: {waits or f'{done} of {due} sessions with feedback'}"
        self._run.progress.enter("; ".join(filter(None, (text, self._versions.on_trial))))

    async def _put(self, row: Mapping[str, Any], step: int, policy: str, version: PolicyVersion) -> bool:
        """Put a session into a step as one group, and return whether it can be trained now."""
        name, score = row["session_id"], row["score"]
        baseline = None if score is None else await self._baseline(name, row["cluster"])
        if row["episode_id"] is not None and score is not None and baseline is None:
            return False
        self._scored.waiting.pop(name, None)
        if row["episode_id"] is None:
            return False
        (trajectory,) = await self._run.store.calls.trajectories([row["episode_id"]])
        if not (chats := trajectory.chats):
            return False
        served = {span.version.n for chat in chats for span in chat.versions}
        ages = {one: age for one in served if (age := self._versions.age(one, version.n)) is not None}
        found: list[RecordedEpisode] = []
        stale = len(ages) < len(served) or max(ages.values(), default=0) > self._run.config.rollout.max_staleness
        if stale and baseline is not None:
            await self._run.event("session_stale", {"session": name, "step": step})
        elif baseline is not None:
            counted = {n: max(version.n - age, 0) for n, age in ages.items()}
            found.append(session_episode(row, score, baseline, _recorded(chats, policy, counted)))
        lessons = await self.store.lessons(name)
        found += await lesson_episodes(self._run, policy, version, row, chats, lessons)
        if found:
            self._used[name] = row["ended_at"], step
            groups = self._run.store.groups
            await groups.register_recorded(await groups.next_index("train"), step, found)
        return bool(found)


def _recorded(chats: Sequence[Chat], policy: str, counted: Mapping[int, int]) -> list[Chat]:
    """Return a session's calls as of the policy that is trained, whatever version has served it.

    `counted`: by the number of a version that served, the number from which the trainer counts the age of its tokens.
    Both are equal unless training has returned to an earlier version.
    """

    def aged(span: VersionSpan) -> VersionSpan:
        return span._replace(version=PolicyVersion(span.version.incarnation, counted[span.version.n]))

    return [replace(chat, fence=0, policy=policy, versions=tuple(map(aged, chat.versions))) for chat in chats]


def _session(row: Mapping[str, Any]) -> LiveSession:
    episode = None if row["episode_id"] is None else (row["episode_id"], row["fence"])
    same = {key: row[key] for key in ("session_id", "subject", "policy", "created_at", "last_at")}
    return LiveSession(**same, train=bool(row["train"]), episode=episode)
