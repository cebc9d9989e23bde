"""Each tracker with its real library, writing to disk, read back; through kills of the job and a resume."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.building import FakeClock, open_store
from unit.tracking.test_follow import drop, put

from libraries.child import FOLDER, ROOT, missing, run
from palestra.config import dump_config, parse_config
from palestra.process.child import popen

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(missing(), reason="no .venv-peers/libraries; `make libraries` makes it"),
]
BEHIND = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/libraries/behind'}", "PALESTRA_TEST_LIBRARIES": str(FOLDER)}
# Each prints what its tracker has of the run as JSON: {"runs": how many, "rows": {metric: [[step, value], …]}}.
READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator("tracking/tensorboard", size_guidance={"scalars": 0}); read.Reload()
rows = {tag: [[e.step, e.value] for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
runs = 1
""",
    "wandb": """
import glob
from wandb.proto import wandb_internal_pb2 as pb
def records(data):
    # A log of LevelDB: blocks of 32 KiB, of pieces with a checksum, a length and a kind.
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4:place + 6], "little"), data[place + 6]
        whole += data[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
files = glob.glob("tracking/wandb/wandb/offline-run-*/*.wandb"); runs, rows = len(files), {}
for data in records(open(files[0], "rb").read()):
    record = pb.Record(); record.ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                rows.setdefault(name, []).append([items.get("_step", record.history.step.num), value])
""",
    "mlflow": """
import os, pathlib
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=pathlib.Path("tracking/mlflow").resolve().as_uri())
found = client.search_runs([client.get_experiment_by_name("palestra").experiment_id])
runs = len(found)
rows = {name: [[m.step, m.value] for m in client.get_metric_history(found[0].info.run_id, name)]
        for name in found[0].data.metrics}
""",
    "trackio": """
import os, pathlib
os.environ["TRACKIO_DIR"] = str(pathlib.Path("tracking/trackio").resolve())
from trackio.sqlite_storage import SQLiteStorage
runs = len(SQLiteStorage.get_runs("palestra"))
rows = {}
for row in SQLiteStorage.get_logs("palestra", "tracked"):
    for name, value in row.items():
        if name not in ("timestamp", "step", "log_id"):
            rows.setdefault(name, []).append([row["step"], value])
""",
}


def read_back(name: str, folder: Path) -> dict[str, object]:
    code = f"import json\n{READERS[name]}\nprint('found ' + json.dumps({{'runs': runs, 'rows': rows}}))"
    (line,) = [line for line in run(code, folder).splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def rewards(found) -> list[tuple[int, float]]:
    """Sorted by step, because the clock of `put` begins again each time, and some trackers sort by time."""
    return sorted((int(step), round(value, 6)) for step, value in found["rows"]["train/reward_mean"])


def start(name: str, folder: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process of a tracker, as a job does, and return the job's end of its socket, too."""
    ours, theirs = socket.socketpair()
    words = (str(folder), name)
    with theirs:
        variables = {**os.environ, **BEHIND}
        return popen(("-m", "palestra.tracking.process"), theirs, variables, words, folder / f"{name}.log"), ours


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def configured(folder: Path) -> None:
    settings = {"name": "tracked", "engine": {"kind": "fake"}, "steps": 9}
    (folder / "config.toml").write_text(dump_config(parse_config(settings)))


@pytest.mark.parametrize("name", READERS)
async def test_a_tracker_has_each_row_once_also_after_a_kill_and_a_resume(tmp_path, name):
    configured(tmp_path)
    await put(tmp_path, [(0, 0.0), (1, 0.1), (2, 0.2)])
    first, job = start(name, tmp_path)
    wait_for(lambda: any((tmp_path / "tracking" / name).rglob("*")) or first.poll() is not None)
    await put(tmp_path, [(3, 0.3)])
    time.sleep(2.5)
    first.send_signal(signal.SIGKILL)  # with its job, without a word
    first.wait()
    job.close()
    await drop(tmp_path, 1)
    await put(tmp_path, [(2, 0.25), (3, 0.35), (4, 0.45)])
    second, job = start(name, tmp_path)
    time.sleep(3.0)
    await put(tmp_path, [(5, 0.55)])
    with open_store(tmp_path, FakeClock()) as store:
        await store.log.add_event("completed", {"step": 5})
    job.close()
    assert second.wait(30) == 0, (tmp_path / f"{name}.log").read_text()
    found = read_back(name, tmp_path)
    assert found["runs"] == 1
    assert rewards(found) == [(0, 0.0), (1, 0.1), (2, 0.25), (3, 0.35), (4, 0.45), (5, 0.55)]


@pytest.mark.parametrize("name", READERS)
async def test_the_command_hands_over_a_run_that_is_over_and_a_second_time_changes_nothing(tmp_path, name):
    configured(tmp_path)
    await put(tmp_path, [(1, 0.1), (2, 0.2)])
    for _ in range(2):
        code = "import sys; from palestra.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "track", str(tmp_path), name]
        environment = {**os.environ, **BEHIND}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"2 rows of {tmp_path} for {name}" in done.stdout
    found = read_back(name, tmp_path)
    assert found["runs"] == 1
    assert rewards(found) == [(1, 0.1), (2, 0.2)]


def test_a_job_with_all_trackers_has_its_rows_in_each(tmp_path):
    """A whole job in a process of its own, with the fake engine; its rows are those of metrics.jsonl."""
    names = list(READERS)
    config = {
        "name": "tracked",
        "steps": 3,
        "run_dir": str(tmp_path),
        "tracking": names,
        "engine": {"kind": "fake"},
        "server": {"port": 0},
        "environment": {"name": "arithmetic", "train_tasks": 8, "validation_tasks": 0},
        "rollout": {"group_size": 2, "groups_per_step": 2},
        "evaluation": {"every_steps": 0},
    }
    (tmp_path / "job.toml").write_text(dump_config(parse_config(config)))
    code = "import sys; from palestra.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", str(tmp_path / "job.toml")]
    environment = {**os.environ, **BEHIND}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tracker" not in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    wanted = [(row["step"], round(row["train/reward_mean"], 6)) for row in rows]
    assert len(wanted) == 3
    for name in names:
        assert rewards(read_back(name, tmp_path)) == wanted
