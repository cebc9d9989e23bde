from __future__ import annotations

import asyncio
import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import JobConfig, parse_config
from palestra.runtime import console
from palestra.runtime.console import Console, beginning, console_of
from palestra.runtime.local import local_job
from palestra.runtime.watchdog import STALLED_SECONDS, PlainLines, Situation, clock, describe_situation
from palestra.types.progress import PhaseProgress, duration
from palestra.types.wire import EpisodeHolder


def looked(**changes) -> Situation:
    known = {"phase": "gathering step 3", "step": 2, "steps": 30, "collected": PhaseProgress(12, 64), "claimed": 4}
    return Situation(**(known | {"busy_workers": 2, "known_workers": 2} | changes))


def held(number: int, worker: str = "box-17", claimed: float = 300.0, heard: float = 200.0) -> list[EpisodeHolder]:
    return [
        EpisodeHolder(episode_id=f"e{n}", worker_id=worker, claimed_seconds=claimed, heard_seconds=heard)
        for n in range(number)
    ]


@pytest.mark.parametrize(
    ("situation", "still", "holders", "line"),
    [
        (looked(), 0.0, (), "gathering step 3: 12 of 64 episodes"),
        (looked(seconds_left=3725.0), 0.0, (), "gathering step 3: 12 of 64 episodes, about 1:02:05 left"),
        (looked(seconds_left=0.0), 0.0, (), "gathering step 3: 12 of 64 episodes"),
        (looked(phase="training step 3", collected=None), 900.0, held(1), "training step 3"),
        (looked(phase="evaluating before training", collected=PhaseProgress(0, 16)), 0.0, (),
         "evaluating before training: 0 of 16 episodes"),
        (looked(claimed=0, busy_workers=0, known_workers=0), 0.0, (),
         "gathering step 3: 12 of 64 episodes, waiting for workers: none has asked for an episode yet"),
        (looked(claimed=0, busy_workers=0), 500.0, (),
         "gathering step 3: 12 of 64 episodes, waiting for workers: none is connected now"),
        (looked(claimed=0, busy_workers=0, plays_itself=True), 0.0, (), "gathering step 3: 12 of 64 episodes"),
        (looked(collected=PhaseProgress(64, 64), claimed=0, busy_workers=0), 0.0, (),
         "gathering step 3: 64 of 64 episodes"),
        (looked(), STALLED_SECONDS, held(4),
         "gathering step 3: 12 of 64 episodes, no progress for 60 s; held: 4 episodes by worker box-17 for 5 min, "
         "last heard 3 min ago"),
        (looked(), 80.0, held(1, heard=0.0),
         "gathering step 3: 12 of 64 episodes, no progress for 80 s; held: 1 episode by worker box-17 for 5 min, "
         "a call is in flight"),
        (looked(), 80.0, (), "gathering step 3: 12 of 64 episodes, no progress for 80 s"),
    ],
)  # fmt: skip
def test_the_line_says_what_is_going_on_and_for_whom_it_waits(situation, still, holders, line):
    assert describe_situation(situation, still, holders) == line


def test_of_many_workers_those_that_hold_most_are_named():
    holders = [holder for number in range(1, 7) for holder in held(number, f"w{number}")]
    line = describe_situation(looked(), 100.0, holders)
    assert [f"by worker w{n} " in line for n in range(1, 7)] == [False, False, False, True, True, True]
    assert line.endswith("and 3 other workers")


@pytest.mark.parametrize(
    ("seconds", "words", "shown"),
    [(-1, "0 s", "0:00"), (99.4, "99 s", "1:39"), (120, "2 min", "2:00"), (9000, "2.5 h", "2:30:00")],
)
def test_time_spans_are_short(seconds, words, shown):
    assert (duration(seconds), clock(max(seconds, 0))) == (words, shown)


@given(st.lists(st.tuples(st.floats(0.1, 40.0), st.sampled_from("abc")), max_size=60))
def test_plain_lines_are_rare_and_news_are_not_kept_back(looks):
    lines, now = PlainLines(0.0), 0.0
    last, shown = 0.0, None
    for pause, news in looks:
        now += pause
        due, since = lines.due(news, now), now - last
        if news != shown:
            assert due == (since >= PlainLines.PLAIN_SECONDS)
        elif due:
            assert since >= PlainLines.REPEAT_SECONDS
        else:
            assert since < PlainLines.MOST_SECONDS
        if due:
            last, shown = now, news


def test_without_news_the_pauses_grow():
    lines, at = PlainLines(0.0), []
    for second in range(4000):
        if lines.due("the same", float(second)):
            at.append(second)
    assert at[:5] == [10, 40, 100, 220, 460]
    assert at[-1] - at[-2] == 600


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_a_pipe_gets_one_line_while_the_model_is_being_loaded(kind, monkeypatch):
    for name, seconds in (("PLAIN_SECONDS", 0.01), ("REPEAT_SECONDS", 0.01)):
        monkeypatch.setattr(PlainLines, name, seconds)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.001)
    out = io.StringIO()
    with console_of(JobConfig.model_validate({"kind": kind, "engine": {"kind": "fake"}}), out):
        while console.LOADING not in out.getvalue():
            time.sleep(0.001)
        time.sleep(0.1)  # ten times the pause after which other lines are repeated
    assert out.getvalue().count(console.LOADING) == 1


@pytest.mark.slow
async def test_a_pipe_gets_plain_lines_that_say_that_workers_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(PlainLines, "PLAIN_SECONDS", 0.1)
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    config = JobConfig.model_validate(
        {
            "run_dir": tmp_path / "run",
            "server": {"port": 0},
            "engine": {"kind": "fake"},
            "tasks": {"train": tmp_path / "tasks.jsonl", "validation": tmp_path / "tasks.jsonl"},
        }
    )
    out = io.StringIO()
    with Console(config, file=out) as shown:
        async with local_job(config, shown.report) as job, asyncio.timeout(60):
            shown.ready(job)
            running = asyncio.create_task(job.run())
            while "none has asked for an episode yet" not in out.getvalue():
                await asyncio.sleep(0.02)
            job.stop()
            await running
    assert "evaluating before training: 0 of 2 episodes, waiting for workers: none has asked" in out.getvalue()
    assert all(character.isprintable() or character == "\n" for character in out.getvalue())
    assert out.getvalue().count("waiting for workers") == 1


def test_a_worker_that_comes_after_a_long_wait_has_its_own_time():
    alone = looked(claimed=0, busy_workers=0, known_workers=0)
    assert alone.waits_for_workers
    assert looked().moved != alone.moved
    assert looked(claimed=3).moved == looked(claimed=4).moved


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_a_worker_that_is_lost_is_a_line_on_the_console(kind):
    out = io.StringIO()
    with console_of(JobConfig.model_validate({"kind": kind, "engine": {"kind": "fake"}}), out) as shown:
        shown.report("engine_worker_lost", {"step": 3, "text": "inference worker 1 [vllm] was killed by SIGKILL"})
    assert "inference worker 1 [vllm] was killed by SIGKILL" in out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "fake"}, "loading the model"),
        ({"kind": "vllm", "url": "http://a:1"}, "loading the model"),
        ({"kind": "vllm", "python": "/p"}, "starting 1 vLLM server (runs/j/engine-*.log), which takes half a minute"),
        (
            {"workers": [{"kind": "embedded"}, {"kind": "vllm", "python": "/p", "replicas": 2}]},
            "starting 2 vLLM servers (runs/j/engine-*.log), which takes half a minute",
        ),
    ],
)
def test_what_a_job_does_before_it_listens_is_said(engine, said):
    config = parse_config({"name": "j", "run_dir": "runs/j", "engine": engine, "policies": {"p": {"model": "m"}}})
    assert beginning(config).startswith(said)
