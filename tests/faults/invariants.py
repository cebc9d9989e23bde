"""What has to hold after every fault."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

from outcome import assert_same_metrics
from servers import Job as Folder
from service import GAMES, until

from faults.world import GPUS, World
from palestra_control.job import Job

RESTARTS = 3  # that a job has, unless it says otherwise


def assert_as_if_nothing_had_happened(world: World, job: Job, losses: range, undisturbed: Folder) -> None:
    """The job is done, with the metrics and weights of a job that nothing disturbed; its server was lost so often."""
    view = job.view()
    assert (view.state, RESTARTS - view.restarts_left in losses) == ("completed", True), (view, job.changes())
    left = world.folder(job)
    assert_nothing_is_lost_or_counted_twice(left)
    trained = {episode for episodes in left.manifests().values() for episode in episodes}
    completed = left.query("SELECT episode_id FROM episodes WHERE state = 'completed' AND kind = 'train'")
    assert trained == {row["episode_id"] for row in completed}
    assert not left.query("SELECT 1 FROM episodes WHERE state IN ('claimed', 'registered')")
    assert_same_metrics(left, undisturbed)
    assert left.weights() == undisturbed.weights()
    assert_nothing_is_held(world, job)


def assert_cancelled(world: World, job: Job) -> None:
    """The job is over, and what it had trained is there."""
    view = job.view()
    assert view.state == "cancelled", (view, job.changes())
    assert any(world.checkpoints(job).glob("step-*"))
    assert_nothing_is_lost_or_counted_twice(world.folder(job))
    assert_nothing_is_held(world, job)


def assert_nothing_is_lost_or_counted_twice(left: Folder) -> None:
    """Of episodes: what was accepted is there, nothing is trained on twice, and none was held by two."""
    stored = {
        row["episode_id"]: json.loads(row["rewards"])["agent"]
        for row in left.query("SELECT episode_id, rewards FROM episodes WHERE state = 'completed'")
    }
    accepted = [(entry["episode"], entry["reward"]) for entry in left.worker_log("ended")]
    assert len(dict(accepted)) == len(accepted), "an episode was accepted from two workers"
    assert dict(accepted).items() <= stored.items()
    trained = Counter(episode for episodes in left.manifests().values() for episode in episodes)
    assert set(trained.values()) <= {1}
    assert trained.keys() <= stored.keys()
    assert_no_lease_was_held_by_two(left)


def assert_no_lease_was_held_by_two(left: Folder) -> None:
    """Nothing was sampled for a former holder after the next one had claimed the episode."""
    begun: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))  # calls, by episode and fence
    for row in left.query("SELECT episode_id, fence, started_at FROM chats"):
        begun[row["episode_id"]][row["fence"]].append(row["started_at"])
    for row in left.query("SELECT episode_id, fence, claimed_at FROM episodes WHERE fence > 0"):
        calls, last = begun[row["episode_id"]], row["fence"]
        assert all(fence <= last for fence in calls), row["episode_id"]
        spans = [(min(calls[fence]), max(calls[fence])) for fence in sorted(calls)]
        assert all(before[1] <= after[0] for before, after in pairwise(spans)), row["episode_id"]
        assert all(at <= row["claimed_at"] for fence, starts in calls.items() if fence < last for at in starts)
        assert all(at >= row["claimed_at"] for at in calls.get(last, ())), row["episode_id"]


def assert_nothing_is_held(world: World, job: Job) -> None:
    """No process of the job is left, and no machine is taken for more or less than it has."""
    until(lambda: not world.service.processes_of(job.job_id), "its processes are gone")
    for machine in world.machines():
        held = (machine["cpus"] - machine["free_cpus"], machine["gpus"] - machine["free_gpus"], machine["jobs"])
        assert held == (0, 0, 0) or machine["cpus"] in world.busy or not machine["alive"], machine


def assert_everything_can_be_had(world: World) -> None:
    """Nothing is held in Ray's own books either: a job that needs all of a machine starts."""
    (first,) = (machine for machine in world.machines() if machine["gpus"] == GPUS)
    world.job_over(GAMES | {"steps": 1}, cpus=first["cpus"], gpus=GPUS)
