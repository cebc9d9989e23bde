"""The groups of a step: registered, waited for, and replaced if too many of their episodes are lost.

All state is in the store instead of memory, so that a restart finds every submitted episode.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from palestra.config import RolloutConfig
from palestra.database import WAKE_SECONDS
from palestra.database.sqlite import pieces
from palestra.errors import EngineFailure, EpisodesLost, PalestraError
from palestra.rollout.result import Termination
from palestra.store import RunStore
from palestra.store.groups import GroupNow
from palestra.threads import in_thread, short_turns
from palestra.types.records import Task, Trajectory
from palestra.types.states import REPLACED, GroupState

TasksOf = Callable[[int, Sequence[int]], Awaitable[Mapping[int, Sequence[Task]]]]
GROUPS_AT_ONCE = 64  # whose tasks are read before the first of them are registered
GATHER_SECONDS = 0.05  # in which groups that end are settled together


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """The complete groups of a step."""

    episode_ids: tuple[str, ...]
    trajectories: list[Trajectory] = field(compare=False, repr=False)
    dropped: int = 0
    skipped: int = 0
    discarded: int = 0
    stale: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Which groups of a step are replaced because they have no learning signal.

    It depends on earlier groups in canonical order, not on the order of playing, so that the same episodes give the
    same manifest.

    Attributes:
        teaches: returns whether completed episodes have a learning signal.
        most: limit of groups of a step replaced for that reason.
    """

    teaches: Callable[[Sequence[Trajectory]], Awaitable[bool]]
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Used:
    """Of a group that is complete: its episodes that are fresh enough, and how many others it has."""

    fresh: list[Trajectory]
    stale: list[str]
    discarded: int


async def gather_groups(
    store: RunStore,
    config: RolloutConfig,
    tasks_of: TasksOf,
    step: int,
    last_step: int,
    versions: Mapping[str, int],
    dynamic: DynamicSampling | None = None,
) -> Gathered:
    """Wait until `groups_per_step` groups of a step are complete, and return their episodes.

    Groups of the steps up to `last_step` are registered as well, as far as `max_open_buckets` allows, and played
    meanwhile. Groups that were registered before a restart are used, so that no completed episode is lost.

    Args:
        tasks_of: returns the tasks that the episodes of a group play in turn, by the group's index, for a step and the
            indices of its next groups.
        last_step: the last step whose episodes may be played now.
        versions: n of each policy that will be trained, by name. An episode with a token of one of them that is older
            than `max_staleness` allows is not used, and registered again. What other policies said is never stale.
        dynamic: replaces groups that have nothing to teach; None: such groups are part of the step.

    Raises:
        EpisodesLost, EngineFailure: group after group was lost; training on the rest would hide the failure.
    """
    oldest = {policy: n - config.max_staleness for policy, n in versions.items()}
    used: dict[int, _Used] = {}  # by group index
    groups = store.groups
    while True:
        seen = groups.open.settled.count
        waiting = await _register(store, config, tasks_of, range(step, last_step + 1))
        is_open = groups.open.number("train", step)
        states, changed = await _settle(store, config, step, oldest, dynamic, used)
        count = Counter(states.values())
        if count[GroupState.DROPPED] > 2 * config.groups_per_step:
            played = sum(len(of.completed) + of.discarded for of in (await groups.played("train", [*states])).values())
            raise _lost(step, played, await groups.discard_reasons("train", step))
        if count[GroupState.READY] == config.groups_per_step:
            ready = [used[index] for index, state in states.items() if state is GroupState.READY]
            trajectories = [trajectory for of in ready for trajectory in of.fresh]
            return Gathered(
                episode_ids=tuple(trajectory.episode.episode_id for trajectory in trajectories),
                trajectories=trajectories,
                dropped=count[GroupState.DROPPED],
                skipped=count[GroupState.SKIPPED],
                discarded=sum(of.discarded for of in ready),
                stale=sum(len(of.stale) for of in ready),
            )
        if changed:
            continue
        if waiting:  # a group that is done makes room for another
            await groups.open.settled.wait(WAKE_SECONDS, seen)
        elif count[GroupState.OPEN]:
            await groups.open.wait("train", step, is_open, WAKE_SECONDS)
            await groups.open.wait("train", step, 1, GATHER_SECONDS)


async def _register(store: RunStore, config: RolloutConfig, tasks_of: TasksOf, steps: range) -> bool:
    """Register the missing groups of these steps; return whether one of them has to wait for another to end."""
    alive = await store.groups.alive("train", steps)
    missing = {due: config.groups_per_step - alive.get(due, 0) for due in steps}
    if not (room := sum(missing.values())):
        return False
    if config.max_open_buckets is not None:
        room = config.max_open_buckets - await store.groups.number_open("train")
    index = await store.groups.next_index("train")
    for due, number in missing.items():
        for piece in pieces(range(index, index + min(number, max(room, 0))), GROUPS_AT_ONCE):
            await store.groups.register_many("train", due, await tasks_of(due, piece), config.group_size)
            index, room, number = index + len(piece), room - len(piece), number - len(piece)
        if number:
            return True
    return False


async def _settle(
    store: RunStore,
    config: RolloutConfig,
    step: int,
    oldest: Mapping[str, int],
    dynamic: DynamicSampling | None,
    used: dict[int, _Used],
) -> tuple[dict[int, GroupState], bool]:
    """Settle complete groups of a step, in order; return the states of all by index, and if there is more to play."""
    now = await store.groups.now("train", step)
    states = {group.group_index: group.state for group in now}
    left = [group for group in now if group.state is GroupState.OPEN]
    in_turn = dynamic is not None
    complete = [group.group_index for group in (takewhile(_complete, left) if in_turn else filter(_complete, left))]
    before = [index for index, state in states.items() if state is GroupState.READY and index not in used]
    with short_turns():
        used.update(await _played(store, before + complete, oldest))
    skipped = sum(state is GroupState.SKIPPED for state in states.values())
    following, again = dict[int, GroupState](), dict[int, list[str]]()
    for index in complete:
        of = used[index]
        if of.stale and (short := config.group_size - len(of.fresh) - of.discarded) > 0:
            again[index] = sorted(of.stale)[-short:]
            if in_turn:
                break
            continue
        state = GroupState.READY if len(of.fresh) >= config.least_completed else GroupState.DROPPED
        if state is GroupState.READY and dynamic is not None and skipped < dynamic.most:
            state = GroupState.READY if await dynamic.teaches(of.fresh) else GroupState.SKIPPED
        skipped += state is GroupState.SKIPPED
        following[index] = state
    if following:
        await store.groups.settle("train", following)
    if again:
        await store.groups.register_again("train", step, again)
    return states | following, bool(again) or any(state in REPLACED for state in following.values())


def _complete(group: GroupNow) -> bool:
    return not group.is_open


async def _played(store: RunStore, indices: Sequence[int], oldest: Mapping[str, int]) -> dict[int, _Used]:
    """Return what can be used of groups that are complete, by group index."""
    if not indices:
        return {}
    played = await store.groups.played("train", indices)
    names = [name for of in played.values() for name in of.completed]
    of_groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in await store.calls.trajectories(names):
        of_groups[trajectory.episode.group_index].append(trajectory)
    stale = await in_thread(
        lambda: {t.episode.episode_id for of in of_groups.values() for t in of if _stale(t, oldest)}
    )
    return {
        index: _Used(
            fresh=[one for one in of_groups[index] if one.episode.episode_id not in stale],
            stale=[name for name in of.completed if name in stale],
            discarded=of.discarded,
        )
        for index, of in played.items()
    }


def _stale(trajectory: Trajectory, oldest: Mapping[str, int]) -> bool:
    """Return whether a token was sampled by a version of a policy of `oldest` before that one."""
    return any(
        span.version.n < oldest[chat.policy]
        for chat in trajectory.chats
        if chat.policy in oldest
        for span in chat.versions
    )


def _lost(step: int, played: int, reasons: Sequence[str]) -> PalestraError:
    """Return the error that says why most of the lost episodes of a step were discarded."""
    kinds = Counter(reason.partition(":")[0] for reason in reasons)
    kind, number = kinds.most_common(1)[0]
    example = " ".join(next(reason for reason in reasons if reason.partition(":")[0] == kind).split())
    # A kind of ours says less than what follows it; the name of an exception belongs to its text.
    said = example.partition(": ")[2] if kind in [*Termination] and ": " in example else example
    which = f"all {number}" if number == played else f"{number} of {played}"
    how = "have no reward" if kind == Termination.NOT_SCORED else "failed"
    text = (
        f"{which} episodes of step {step} {how}: {said:.300}; "
        "`palestra episodes RUN --state discarded` has the reason of each"
    )
    return EngineFailure(text) if kind == Termination.ENGINE_FAILED else EpisodesLost(text)
