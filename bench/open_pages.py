"""How much longer a job's step takes while ten pages are open: a job with the fake engine, and one with a real model.

    python bench/open_pages.py [--model tiny-random] [--steps 40]

A job plays and trains by itself. In every second stretch of `STRETCH` steps ten clients do what ten open pages do. Each
holds a stream of events, and asks for the run's line every three seconds and after each step; two have the findings
open, and ask for them after each step. Stretches with and without pages alternate, so that what else the machine does
falls on both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2

PAGES, STRETCH = 10, 4
EVERY_SECONDS = 3.0


class Page:
    """What one open page asks of the server."""

    def __init__(self, url: str, key: str, name: str, view: str) -> None:
        self._base, self._name, self._view = f"{url}/dashboard/api", name, view
        self._headers = {"authorization": f"Bearer {key}"}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._follow, self._ask)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the stream and the questions."""
        self._over.set()
        self._threads[1].join()

    def _follow(self) -> None:
        try:
            with (
                httpx2.Client(headers=self._headers, timeout=None) as http,
                http.stream("GET", f"{self._base}/events") as answer,
            ):
                for line in answer.iter_lines():
                    if self._over.is_set():
                        return
                    if line == "event: step":
                        http.get(f"{self._base}/runs/{self._name}{self._view}")
        except httpx2.HTTPError:
            return  # the job is over

    def _ask(self) -> None:
        with httpx2.Client(headers=self._headers, timeout=30) as http:
            while not self._over.wait(EVERY_SECONDS):
                try:
                    http.get(f"{self._base}/runs/{self._name}")
                except httpx2.HTTPError:
                    return


def job(folder: Path, model: str, steps: int) -> Path:
    """Write the configuration of the job, and return its file."""
    engine = {"kind": "fake", "reply_tokens": 8, "delay_seconds": 0.02} if model == "fake" else {"threads": 1}
    policy = {} if model == "fake" else {"model": model, "sampling": {"max_tokens": 24}, "max_context": 512}
    config = {
        "name": "pages",
        "run_dir": str(folder / "run"),
        "steps": steps,
        "engine": engine,
        "policies": {"policy": policy},
        "environment": {"name": "arithmetic", "train_tasks": 64, "validation_tasks": 0},
        "rollout": {"group_size": 8, "groups_per_step": 8},
        "evaluation": {"every_steps": 0},
        "server": {"port": 0},
    }
    from palestra.config import dump_config, parse_config

    path = folder / "job.toml"
    path.write_text(dump_config(parse_config(config)))
    return path


def measure(model: str, steps: int) -> None:
    """Run the job, and print the medians of the steps with and without pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "palestra.cli.main", "run", str(job(folder, model, steps))]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        rows, key = folder / "run" / "metrics.jsonl", folder / "run" / "api_key"
        url = ""
        while not url or not key.exists():
            time.sleep(0.1)
            assert process.poll() is None, (folder / "log").read_text()
            url = next((word for word in (folder / "log").read_text().split() if word.startswith("http://")), "")
        url = url.rstrip(".,;").removesuffix("/dashboard").removesuffix("/v1")
        pages: list[Page] = []
        with_pages = set[int]()
        while process.poll() is None:
            done = len(rows.read_text().splitlines()) if rows.exists() else 0
            wanted = (done // STRETCH) % 2 == 1
            if wanted and not pages:
                pages = [
                    Page(url, key.read_text().strip(), "pages", "/findings" if n < 2 else "") for n in range(PAGES)
                ]
            elif not wanted and pages:
                for page in pages:
                    page.close()
                pages = []
            if pages:
                with_pages.add(done + 1)
            time.sleep(0.02)
        assert process.returncode == 0, (folder / "log").read_text()
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    taken = {int(row["step"]): row["time/step_seconds"] for row in found if row["step"] > STRETCH}
    edges = {step for step in taken if (step in with_pages) != (step - 1 in with_pages)}  # pages opened in its middle
    on = [seconds for step, seconds in taken.items() if step in with_pages and step not in edges]
    off = [seconds for step, seconds in taken.items() if step not in with_pages and step not in edges]
    before, during = statistics.median(off), statistics.median(on)
    print(
        f"{model}: a step takes {before * 1000:.1f} ms without pages ({len(off)} steps), {during * 1000:.1f} ms with "
        f"{PAGES} ({len(on)} steps): {during / before - 1:+.1%}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-random", help="a model, or `fake` for the fake engine")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    measure(arguments.model, arguments.steps)
