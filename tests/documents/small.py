"""Run a script as it stands, with less behind it: `python -m documents.small SCRIPT`.

The text of a snippet is not changed. `palestra.train`, `palestra.evaluate` and `ControlClient.submit` get the
configuration that the snippet made, which was validated, and a job of one step with a model of random weights is run in
its place. A folder, such as a checkpoint that the snippet has trained, stays, and so does a model that sees.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import palestra
from palestra import ControlClient, JobConfig

LESS: Mapping[str, Mapping[str, Any]] = {
    "rollout": {"group_size": 2, "groups_per_step": 1},
    "engine": {"threads": 1},
    "trainer": {"threads": 1},
}
MOST_GIB = 4.0  # of a job of a service: a model of random weights has room in it


def small(config: JobConfig) -> JobConfig:
    """Return the job with one step of two episodes, models of random weights, and the engine that is always there."""
    data = config.model_dump() | {"steps": 1, "model": None}
    if config.engine.kind != "embedded":  # this machine may have no other
        data["engine"] = {"kind": "embedded"}
    for key, settings in LESS.items():
        data[key] |= settings
    for policy in data["policies"].values():
        if policy["model"] != "tiny-random-vision" and not Path(policy["model"]).exists():
            policy["model"] = "tiny-random"
        policy["max_context"] = 512
        policy["sampling"]["max_tokens"] = min(8, policy["sampling"]["max_tokens"])
    return JobConfig.model_validate(data)


def in_small(function: Any) -> Any:
    """Return `train` or `evaluate` with a small job behind it."""

    @wraps(function)
    def called(rollout: Any = None, tasks: Any = (), config: JobConfig | None = None, **more: Any) -> Any:
        if "model" in more and not Path(more["model"]).exists():
            more["model"] = "tiny-random"
        return function(rollout, tasks, small(config or JobConfig()), **more)

    return called


def submit_small(submit: Any) -> Any:
    """Return `ControlClient.submit` with a small job behind it."""

    @wraps(submit)
    def called(self: ControlClient, config: Mapping[str, Any] | None = None, **more: Any) -> Any:
        if config is not None:
            config = small(JobConfig.model_validate(config)).model_dump(mode="json", exclude_none=True)
            if "memory_gib" in more:
                more["memory_gib"] = min(more["memory_gib"], MOST_GIB)
        return submit(self, config, **more)

    return called


if __name__ == "__main__":
    palestra.train = in_small(palestra.train)
    palestra.evaluate = in_small(palestra.evaluate)
    ControlClient.submit = submit_small(ControlClient.submit)  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
