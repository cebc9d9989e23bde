"""`palestra compare` as a person runs it: a grid without a model, killed, stopped, gone on with; the page it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from servers import PALESTRA, until

JOB = """
[environment]
name = "arithmetic"
train_tasks = 32
validation_tasks = 4
[policies.policy.sampling]
max_tokens = 8
[rollout]
group_size = 4
groups_per_step = 2
[checkpoint]
every_steps = 1
[engine]
kind = "fake"
reply_tokens = 4
delay_seconds = DELAY
"""
GRID = """
name = "grid"
seeds = [0, 1]
evaluations = 2
[scenarios.sums]
job = "job.toml"
token_budget = 150
threshold = 0.5
[algorithms.grpo]
[algorithms.dr_grpo]
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path, delay=0.0)
    return tmp_path


def write(folder: Path, delay: float, budget: int = 150) -> None:
    (folder / "job.toml").write_text(JOB.replace("DELAY", str(delay)))
    (folder / "compare.toml").write_text(GRID.replace("150", str(budget)))


def compare(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PALESTRA), "compare", "compare.toml", *more], cwd=folder, capture_output=True, text=True, timeout=150
    )


def begin(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [str(PALESTRA), "compare", "compare.toml"], cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run: Path) -> list[dict[str, float]]:
    """What of a run's rows does not depend on time."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in metrics(run)]


def steps_of(run: Path) -> int:
    return len(metrics(run)) if (run / "metrics.jsonl").exists() else 0


def children_of(folder: Path) -> list[int]:
    """The processes that play a run of this comparison."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                here = os.readlink(entry / "cwd") == str(folder)
            except OSError:
                continue
            if here and b"--child" in words:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_grid_is_run_at_equal_tokens_and_its_page_is_written(folder):
    done = compare(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[4/4] sums  dr_grpo  seed 1" in done.stdout
    runs = [folder / "runs/grid/sums" / name / seed for name in ("grpo", "dr_grpo") for seed in ("seed-0", "seed-1")]
    for run in runs:
        rows = metrics(run)
        tokens = [row["rollout/sampled_tokens"] for row in rows[1:]]
        assert tokens[-2] < 150 <= tokens[-1]  # it ended with the step that reached the budget
        assert sum("validation/reward_mean" in row for row in rows) >= 3
        assert json.loads(run.with_suffix(".json").read_text())["state"] == "finished"
        assert len(list((run / "checkpoints").iterdir())) == 1
    page = (folder / "runs/grid/comparison.md").read_text()
    assert "4 of 4 runs are finished" in page
    assert "| grpo − dr_grpo | 2 |" in page or "| dr_grpo − grpo | 2 |" in page
    assert (folder / "runs/grid/comparison-sums.png").read_bytes().startswith(b"\x89PNG")

    before = [(run / "run.db").stat().st_mtime_ns for run in runs]
    again = compare(folder, "--page", "elsewhere/page.md")
    assert again.returncode == 0
    assert "sums  grpo" not in again.stdout  # nothing was run a second time
    assert [(run / "run.db").stat().st_mtime_ns for run in runs] == before
    assert (folder / "elsewhere/page-sums.png").is_file()

    listed = compare(folder, "--list", "--only", "sums/dr_grpo").stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [["finished", "sums"]] * 2


@pytest.mark.long
def test_results_are_continued_without_the_folders_of_the_runs(folder, tmp_path_factory):
    assert compare(folder, "--only", "sums/grpo", "--results", "results.json").returncode == 0
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, delay=0.0)
    (elsewhere / "results.json").write_bytes((folder / "results.json").read_bytes())
    listed = compare(elsewhere, "--list", "--results", "results.json").stdout.splitlines()
    assert [line.startswith("finished") for line in listed] == ["/grpo/" in line for line in listed]
    done = compare(elsewhere, "--results", "results.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[2/2] sums  dr_grpo  seed 1" in done.stdout
    assert not (elsewhere / "runs/grid/sums/grpo").exists()
    assert "4 of 4 runs are finished" in (elsewhere / "runs/grid/comparison.md").read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_grid_that_is_killed_goes_on_where_it_was_and_ends_alike(folder, tmp_path_factory):
    """SIGKILL reaches the command, then a run, then both; each run of the grid is still trained once and to its end."""
    whole = tmp_path_factory.mktemp("whole")
    for place in (folder, whole):
        write(place, delay=0.02, budget=400)
        (place / "job.toml").write_text("deterministic = true\n" + (place / "job.toml").read_text())
    assert compare(whole).returncode == 0

    first = folder / "runs/grid/sums/grpo/seed-0"
    command = begin(folder)
    until(lambda: steps_of(first) >= 3, "steps of the first run")
    command.kill()
    command.wait()
    until(lambda: not children_of(folder), "the run notices, saves and ends")
    assert steps_of(first) >= 3
    assert json.loads(first.with_suffix(".json").read_text())["state"] == "started"

    second = folder / "runs/grid/sums/dr_grpo/seed-0"
    command = begin(folder)
    until(lambda: steps_of(second) >= 3, "steps of the second run")
    finished = (first / "metrics.jsonl").stat().st_mtime_ns
    for number in (*children_of(folder), command.pid):
        os.kill(number, signal.SIGKILL)
    command.wait()
    third = folder / "runs/grid/sums/grpo/seed-1"
    command = begin(folder)
    until(lambda: steps_of(third) >= 2, "steps of the third run")
    for number in children_of(folder):
        os.kill(number, signal.SIGKILL)
    assert command.wait(150) == 1  # the command has marked that run and gone on with the others
    assert "failed: its process was killed by SIGKILL" in (folder / "output").read_text()

    done = compare(folder)
    assert (done.returncode, done.stdout.count("(goes on)")) == (0, 1)
    assert (first / "metrics.jsonl").stat().st_mtime_ns == finished
    for run in (folder / "runs/grid/sums").glob("*/seed-?"):
        assert numbers(run) == numbers(whole / run.relative_to(folder)), run


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_present_run(folder, number):
    write(folder, delay=0.05, budget=1000)
    first = folder / "runs/grid/sums/grpo/seed-0"
    command = begin(folder)
    until(lambda: steps_of(first) >= 2, "steps of the first run")
    command.send_signal(number)
    assert command.wait(60) == 130
    output = (folder / "output").read_text()
    assert "stopped; go on with the same command (runs are in runs/grid" in output
    assert not children_of(folder)
    assert list((first / "checkpoints").iterdir())
    assert "0 of 4 runs are finished" in (folder / "runs/grid/comparison.md").read_text()


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_run(folder):
    (folder / "recipe.py").write_text(
        "def scenario():\n"
        "    def rollout(task, endpoint):\n"
        "        raise KeyError('no such thing')\n"
        "    config = {'engine': {'kind': 'fake'}, 'rollout': {'max_attempts': 1}}\n"
        "    return {'rollout': rollout, 'tasks': [{}], 'validation_tasks': [{}], 'config': config}\n"
    )
    with (folder / "compare.toml").open("a") as grid:
        grid.write('[scenarios.broken]\nplay = "recipe.py:scenario"\ntoken_budget = 10\nthreshold = 1\n'
                   'algorithms = ["grpo"]\nseeds = [0]\n')  # fmt: skip
    done = compare(folder)
    assert done.returncode == 1
    assert "failed: " in done.stdout
    assert "1 of 5 runs failed, and are tried again next time" in done.stdout
    page = (folder / "runs/grid/comparison.md").read_text()
    assert "4 of 5 runs are finished, 1 failed" in page
    assert "- broken  grpo  seed 0: " in page


@pytest.mark.slow
def test_two_commands_do_not_run_one_comparison_at_the_same_time(folder):
    write(folder, delay=0.05, budget=1000)
    command = begin(folder)
    try:
        until(lambda: (folder / "runs/grid/sums/grpo/seed-0.json").exists(), "a first run")
        done = compare(folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert "another process runs the comparison in runs/grid" in done.stderr
    finally:
        command.send_signal(signal.SIGINT)
        command.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "palestra compare: the following arguments are required: COMPARE.TOML"),
        (("none.toml",), "none.toml: no such file"),
        (("compare.toml", "--only", "sum"), "--only sum: the comparison has no such runs; did you mean sums?"),
    ],
)
def test_bad_arguments_are_one_line(folder, arguments, said):
    done = subprocess.run([str(PALESTRA), "compare", *arguments], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "arguments", "said"),
    [
        ("job.toml", (), "the output {}/job.toml can't be used as a folder: file exists"),
        ("job.toml/x", (), "the output {}/job.toml/x can't be used as a folder: not a directory"),
        (
            "out",
            ("--page", "/dev/full/p.md"),
            "the page /dev/full/p.md could not be written: not a directory; mend that",
        ),
        ("out", ("--page", "compare.toml"), "--page compare.toml is the comparison itself; name another file"),
        ("out", ("--page", "."), "--page . is a folder; name another file"),
    ],
)
def test_what_can_not_be_written_is_one_line(folder, output, arguments, said):
    grid = f'output = "{output}"\n' + (folder / "compare.toml").read_text()
    (folder / "compare.toml").write_text(grid)
    done = compare(folder, "--no-run", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said.format(folder) in done.stderr
    assert done.stderr.count("\n") == 1
    assert "--resume" not in done.stderr
    assert (folder / "compare.toml").read_text() == grid
