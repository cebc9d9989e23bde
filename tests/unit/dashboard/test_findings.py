"""The page's findings are those of `palestra doctor`."""

from __future__ import annotations

import asyncio

import pytest

from palestra.dashboard.reader import Reader, read_findings
from palestra.dashboard.runs import Run
from palestra.doctor.examination import RULES, examine
from palestra.errors import StoreError
from unit.building import FakeClock, open_store
from unit.doctor.curves import run_of
from unit.doctor.test_examination import STEPS, record


def truncated(step: int) -> dict[str, float]:
    return {"rollout__truncated_share": 1.0} if step > 3 else {}


async def test_they_are_those_of_the_doctor_with_their_episodes(tmp_path):
    await record(tmp_path, truncated)
    (wanted,) = examine(tmp_path).findings
    found = read_findings(Run(name="r", folder=tmp_path))
    (one,) = found.findings
    assert one == wanted
    assert (one.code, one.since, one.holds, one.episodes[0]) == ("truncated", 6, True, "train-000008-02")
    assert (found.step, found.steps, found.rules) == (STEPS, 30, len(RULES))


async def test_a_healthy_run_has_none(tmp_path):
    await record(tmp_path)
    assert read_findings(Run(name="r", folder=tmp_path)).findings == ()


async def test_many_pages_ask_for_them_once(tmp_path, monkeypatch):
    await record(tmp_path, truncated)
    run, read = Run(name="r", folder=tmp_path), []
    monkeypatch.setattr(
        "palestra.dashboard.reader.read_findings", lambda run: read.append(run.name) or read_findings(run)
    )
    reader = Reader([run], asyncio.Event())
    answers = await asyncio.gather(*(reader.findings(run) for _ in range(10)))
    assert len({id(answer) for answer in answers}) == 1
    assert await reader.findings(run) is answers[0]
    assert read == ["r"]


async def test_an_answer_of_an_earlier_step_than_the_wanted_one_is_not_used(tmp_path):
    await record(tmp_path)
    run = Run(name="r", folder=tmp_path)
    reader = Reader([run], asyncio.Event())
    assert (await reader.findings(run)).step == STEPS
    (*_, row) = run_of(STEPS + 1, lambda step: {})
    with open_store(tmp_path, FakeClock()) as store:
        await store.log.put_metrics(STEPS + 1, row)
    assert (await reader.findings(run, STEPS)).step == STEPS, "this answer is good enough"
    found = await asyncio.gather(*(reader.findings(run, STEPS + 1) for _ in range(5)))
    assert {one.step for one in found} == {STEPS + 1}
    assert len({id(one) for one in found}) == 1


async def test_a_damaged_run_says_so_to_each_and_again(tmp_path):
    await record(tmp_path)
    (tmp_path / "run.db").write_bytes(b"rubbish " * 999)
    run = Run(name="r", folder=tmp_path)
    reader = Reader([run], asyncio.Event())
    for _ in range(2):
        found = await asyncio.gather(reader.findings(run), reader.findings(run), return_exceptions=True)
        assert [type(one) for one in found] == [StoreError, StoreError]
    with pytest.raises(StoreError):
        await reader.findings(run)
