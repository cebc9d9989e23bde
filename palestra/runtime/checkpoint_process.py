"""`python -m palestra.runtime.checkpoint_process SOCKET RUN CHECKPOINT FOLDER`: serves a checkpoint for the dashboard.

It sends these events: `{"phase": …}` while the model is loaded, `{"url": …, "key": …, "policies": …}` when it answers,
or `{"failed": …}`. It ends with the dashboard, even if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from palestra.config import SAVED_CONFIG, JobConfig, load_config
from palestra.dashboard.progress import model_key, serving_settings
from palestra.errors import NotFound, PalestraError
from palestra.extras import missing_extra
from palestra.process.channel import BlockingChannel, Event, raw
from palestra.process.child import with_owner
from palestra.runtime.starting_points import all_checkpoints
from palestra.trainer.checkpoint import good

END_SECONDS = 10.0  # what the serving may take to end


def _main(run: Path, name: str, folder: Path) -> int:
    """Serve a checkpoint until the dashboard ends, and return the exit code.

    Args:
        name: of the checkpoint, such as `policy@step-20`.
        folder: an empty folder for the server's keys; calls are not recorded.
    """
    channel = BlockingChannel(with_owner(_end))

    def tell(**what: Any) -> None:
        channel.send(Event("told", raw(what)))

    with contextlib.suppress(OSError):
        os.nice(10)  # a job that trains on this machine comes first,
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")  # also where memory is short
    try:
        config = config_for(run, name, folder)
        tell(phase="loading the libraries")
        from palestra.models.device import tune_malloc
        from palestra.runtime.event_loop import run_on_uvloop
        from palestra.runtime.local import serve
        from palestra.runtime.starting_points import with_checkpoints

        if config.engine.has_model:
            tune_malloc()
            import torch  # noqa: F401 - takes seconds, in which the phase is not that of the model
        tell(phase=f"loading {name}")
        run_on_uvloop(
            serve(
                with_checkpoints(config),
                lambda kind, data: None,
                lambda job: tell(
                    url=job.url,
                    key=job.plane.keys.playground_key,
                    policies=list(job.plane.sessions.context.policies.names),
                ),
            )
        )
    except PalestraError as error:
        tell(failed=str(error))
        return 1
    except ModuleNotFoundError as error:
        tell(failed=missing_extra(error) or str(error))
        return 1
    return 0


def config_for(run: Path, name: str, folder: Path) -> JobConfig:
    """Return the configuration of a job that serves a checkpoint, with the newest ones of the run's other policies."""
    saved = load_config(run / SAVED_CONFIG)
    if (place := all_checkpoints(saved, run).get(name)) is None:
        raise NotFound(f"{run} has no checkpoint {name!r}, or not any more")
    if good(place.folder.parent, place.step) is None:
        raise NotFound(f"the checkpoint {name!r} was removed a moment ago")
    settings = serving_settings(run, saved) | {
        "run_dir": str(folder),
        "server.host": "127.0.0.1",
        model_key(place.policy): str(place.folder),
    }
    return load_config(run / SAVED_CONFIG, settings)


def _end(_: bytes) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
