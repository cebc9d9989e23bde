"""A model call outside any episode: the same session, of which nothing is left when the call is over."""

from __future__ import annotations

from uuid import uuid4

from palestra.schemas.records import Episode, Task
from palestra.schemas.states import EpisodeState
from palestra.session.context import SessionContext
from palestra.session.recorder import NoRecorder
from palestra.session.session import EpisodeSession

NO_TASK = Task(task_id="", data={})


def plain_session(context: SessionContext) -> EpisodeSession:
    """A session for one request. It samples like an ad-hoc episode: as its caller says.

    Its name is random, and so are the seeds that follow from it: equal calls are different samples, unless they have
    a seed of their own.
    """
    episode = Episode(
        episode_id=uuid4().hex,
        kind="adhoc",
        group_index=0,
        sample_index=0,
        task=NO_TASK,
        state=EpisodeState.CLAIMED,
        fence=0,
        attempts=0,
        rewards=None,
        step_rewards=None,
        step_times=None,
        metadata={},
        worker_id=None,
        lease_seconds=0.0,
    )
    return EpisodeSession(context, episode, (), NoRecorder())
