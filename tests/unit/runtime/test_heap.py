"""All threads of a job share one heap: each more would keep what the largest temporaries need."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import pytest

JOB = """
model = "tiny-random"
policies = {policy = {sampling = {max_tokens = 4}}}
steps = 1
run_dir = "run"
rollout = {groups_per_step = 1, group_size = 2}
server = {port = 0}
"""
HEAPS = """
import ctypes

def report():
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.fopen(b"heaps.xml", b"w"))
    assert libc.malloc_info(0, file) == 0
    libc.fclose(file)
"""
TRAIN = """
import palestra
async def rollout(task, endpoint):
    return 1.0
palestra.train(rollout, [{"text": "a"}], palestra.load_config("job.toml"), quiet=True)
report()
"""
RUN = """
from palestra.cli.main import main
settings = ["environment.name=arithmetic", "environment.train_tasks=1", "environment.validation_tasks=1"]
assert main(["run", "job.toml", *(f"--set={setting}" for setting in settings)]) == 0
report()
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps of glibc")
@pytest.mark.parametrize("script", [TRAIN, RUN], ids=["train", "run"])
def test_all_threads_of_a_job_share_one_heap(tmp_path, script):
    (tmp_path / "job.toml").write_text(JOB)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", HEAPS + script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("<heap nr=", (tmp_path / "heaps.xml").read_text())) == 1
