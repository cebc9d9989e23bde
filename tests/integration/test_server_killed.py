"""SIGKILL to the server at every named point: after a restart the run ends as if nothing had happened."""

from __future__ import annotations

import json

import pytest
from outcome import assert_complete, assert_same_metrics
from servers import SCRIPTED, Job, run_through

from palestra.faults import SERVER_POINTS

pytestmark = pytest.mark.ci

# The pass at which the server dies: early in one case, late in the other. There are 20 claims and ends, 40 chats,
# 3 manifests and steps, 4 publications, and a checkpoint every step in one case and every other step in the other.
EARLY = {"claim": 1, "chat": 8, "generation": 7, "end": 4, "manifest": 1, "step": 1, "checkpoint": 1, "publish": 1}
LATE = {"claim": 13, "chat": 27, "generation": 28, "end": 18, "manifest": 3, "step": 2, "checkpoint": 2, "publish": 4}
# Of the first tier: late, so that steps have to be repeated.
FIRST_TIER = {"before_publish:4"}
FAULTS = [
    (every, f"{point}:{passes[point.split('_')[1]]}")
    for every, passes in ((1, EARLY), (2, LATE))
    for point in SERVER_POINTS
]
assert {fault for _, fault in FAULTS} > FIRST_TIER
CELLS = [
    pytest.param(every, fault, id=fault.replace(":", "-"), marks=() if fault in FIRST_TIER else pytest.mark.slow)
    for every, fault in FAULTS
]


@pytest.mark.parametrize(("every", "fault"), CELLS)
def test_a_killed_server_goes_on_as_if_nothing_had_happened(tmp_path, undisturbed, every, fault):
    with Job(tmp_path, SCRIPTED | {"checkpoint": {"every_steps": every}}) as job:
        run_through(job, [fault])
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_a_server_that_is_killed_again_while_it_repeats_steps_goes_on_too(tmp_path, undisturbed):
    with Job(tmp_path, SCRIPTED | {"checkpoint": {"every_steps": 2}}) as job:
        run_through(job, ["after_chat_commit:20", "before_step:1", "before_checkpoint_rename:1", "after_end_commit:3"])
        assert_complete(job)
        assert_same_metrics(job, undisturbed)
        assert job.weights() == undisturbed.weights()


@pytest.mark.slow
def test_where_history_cant_be_repeated_bit_by_bit_versions_say_so(tmp_path, undisturbed):
    with Job(tmp_path, SCRIPTED | {"deterministic": False, "checkpoint": {"every_steps": 1}}) as job:
        run_through(job, ["before_manifest_commit:2"])
        assert_complete(job)
        assert job.weights() == undisturbed.weights()
        incarnations = {
            row["episode_id"]: {incarnation for incarnation, _, _ in json.loads(row["versions"])}
            for row in job.query("SELECT episode_id, versions FROM chats")
        }
        before, after = job.manifests()[1] + job.manifests()[2], job.manifests()[3]
        assert {0} == set.union(*(incarnations[episode] for episode in before))
        assert {1} == set.union(*(incarnations[episode] for episode in after))
