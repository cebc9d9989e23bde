"""A service: `palestra serve` queues and runs many users' jobs; this one submits a job, watches it, and gets its curve.

    pip install '.[cluster]'
    python recipes/service.py [--steps 3] [--model SmolLM2-135M-Instruct]

The service is started here with a local Ray cluster, and ended in the end. Where it runs for a team, the lines below
`main` are all that a user needs: the variables PALESTRA_URL and PALESTRA_KEY, `ControlClient()`, and `submit`. The same
on the command line: `palestra submit job.toml --cpus 1`, `palestra logs -f ID`. What it prints is in README.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra import ControlClient


@contextmanager
def service(folder: Path) -> Iterator[ControlClient]:
    """Start `palestra serve` on a free port of this machine; yield a client with the first admin's key."""
    command = [Path(sys.executable).with_name("palestra"), "serve", "--state-dir", folder, "--port", "0", "--cpus", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said, url, key = "", None, None
        while not (url and key):  # it says both when it is ready
            said += (line := server.stdout.readline())
            assert line, "the service could not be started"
            url, key = re.search(r"http://[\d.:]+", said), re.search(r"pk_\w{12}_[\w-]{43}", said)
        with ControlClient(url[0], key[0]) as control:
            try:
                yield control
            finally:
                server.terminate()  # where no job runs any more, the Ray cluster that it started ends with it


def main(steps: int, model: str) -> None:
    """Submit a job, follow its steps, and download what it made."""
    config = {
        "name": "service",
        "steps": steps,
        "environment": {"name": "arithmetic", "train_tasks": 40, "validation_tasks": 16},  # YOURS 1: what is played
        "policies": {"player": {"model": model, "max_context": 512, "sampling": {"max_tokens": 12}}},  # YOURS 2
        "rollout": {"groups_per_step": 4, "group_size": 6},
    }
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as control:
        job = control.submit(config, cpus=1)  # YOURS 3: what it holds while it runs: cores, GPUs, memory
        for event in job.events():
            if event.kind == "state":
                print(f"{job.job_id} is {event.data['state']}")
            if event.kind == "step" and "train/reward_mean" in event.data:
                print(f"step {event.data['step']:g}: reward {event.data['train/reward_mean']:.2f}")
        job.download("curve.png", Path("curve.png"))
        print(f"{job.view().state}; its curve is in curve.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A job of the service.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.model)
