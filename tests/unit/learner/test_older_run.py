"""A run that an earlier version began is finished by this one.

`run_of_3c2c73b` was made at that commit by `ScriptedJob(folder, config(), crash_at=104)`: its process died while step 3
was played, after the checkpoint of step 2. `WEIGHTS` is what the same version ended with where nothing died.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from palestra.config import load_config
from palestra.store.browsing import browse, list_episodes, read_episode
from palestra.store.run_log import read_events
from unit.learner.scripted_job import ScriptedJob, config

OLDER = Path(__file__).parent / "run_of_3c2c73b"
WEIGHTS = "5aebf12d95f876d63f03f1661a523933cc7c64382bb773e7b83e3bfa67a9ad4b"


async def test_a_run_of_an_earlier_version_ends_as_it_would_have_there(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(OLDER, run)
    with browse(run / "run.db") as connection:
        before = {episode.episode_id: episode for episode in list_episodes(connection, None, None, 1000)}
        ended = {
            name: read_episode(connection, name).trajectory for name, one in before.items() if one.state == "completed"
        }
        events = read_events(connection, 0, 1000)
    assert len(ended) == 13
    assert load_config(run / "config.toml").digest() == config().digest()  # its names are translated
    assert await ScriptedJob(run, config()).run() == WEIGHTS
    with browse(run / "run.db") as connection:
        after = list_episodes(connection, None, None, 1000)
        for name, trajectory in ended.items():
            now = read_episode(connection, name).trajectory
            assert now.episode == trajectory.episode
            assert [chat.ids.tolist() for chat in now.chats] == [chat.ids.tolist() for chat in trajectory.chats]
        assert read_events(connection, 0, 1000)[: len(events)] == events
    assert {episode.state for episode in after} == {"completed"}
    assert [one for one in after if one.episode_id in ended] == [before[name] for name in sorted(ended)]
