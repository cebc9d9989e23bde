"""Costs by phase, policy and episode: each table adds up to what was spent, to the last unit."""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from pathlib import Path

import pytest

from palestra.cli.main import main
from palestra.config import JobConfig, dump_saved_config, parse_config
from palestra.config.budget import UNITS
from palestra.dashboard.answers import Cost, CostsAnswer
from palestra.dashboard.costs import cost_sum, read_costs, run_costs, summed
from palestra.dashboard.runs import Run
from palestra.store.ledger import Ledger, Limits
from palestra.store.spending import Metering, Used
from unit.building import TASK, make_chat, open_store

PRICED = {"device_hour": 0.1, "tokens": {"policy": [0.3, 0.7], "http://h:1": [1e-7, 3.0]}}
JUDGED = {"kind": "rubric", "url": "http://h:1", "criteria": [{"name": "good", "text": "Good?"}]}
HUGE = 10**15  # tokens; SQLite's integers end at 9.2 * 10^18


def config(**changes) -> JobConfig:
    return parse_config({"engine": {"kind": "fake"}, "prices": PRICED, "judge": JUDGED} | changes)


async def spend(folder: Path, metered: bool = True) -> None:
    """Two training episodes, a validation, calls outside, a judge, two steps, and 100 s in all."""
    with open_store(folder) as store:
        metering = Metering(Ledger(limits=Limits(), monotonic=store.clock.monotonic), store.spending)
        for kind, size in (("train", 2), ("validation", 1)):
            await store.groups.register(kind, 0, 1, TASK, size)
        for number, kind in enumerate(("validation", "train", "train")):
            episode = await store.episodes.claim("w", f"r{number}", None)
            record = partial(metering.record, kind=episode.kind) if metered else store.calls.append
            await record(make_chat(episode_id=episode.episode_id, prompt=range(7 + number)))
            assert episode.kind == kind
        if metered:
            await metering.record(make_chat(fence=0), "adhoc")
            await store.spending.add(Used("", "judge", "the judge", 3, HUGE, 11))
            await store.spending.add(Used("", "adhoc", "Ω \u202e", 1, 5, HUGE))
            await store.spending.set_ms(100_000)
        times = {"time/rollout_seconds": 7.0001, "time/train_seconds": 5.0, "time/publish_seconds": 0.3333}
        for step in (1, 2):
            row = {"step": float(step), "wall_seconds": 40.0 * step, "time/validation_seconds": 2.5, **times}
            await store.log.put_metrics(step, row)
    (folder / "config.toml").write_text(dump_saved_config(config()))


def add_up(found: CostsAnswer) -> None:
    for table in (found.phases, found.payees, found.episodes):
        assert cost_sum("total", table) == found.total


def of(table: list[Cost], name: str) -> Cost:
    (found,) = (line for line in table if line.name == name)
    return found


async def test_the_sums_over_phases_policies_and_episodes_are_the_total(tmp_path):
    await spend(tmp_path)
    found = read_costs(tmp_path, config(), episodes=100)
    add_up(found)
    assert of(found.phases, "rollouts").prompt_tokens == 8 + 9
    assert of(found.phases, "evaluation").reply_tokens == 2
    assert of(found.phases, "serving").reply_tokens == HUGE + 2
    assert of(found.phases, "waiting").ms == 100_000 - 2 * (7000 + 5333 + 2500) == 70_334
    token = UNITS // 10**7  # 0.1 a million
    judge = HUGE * -(-UNITS // 10**13) + 11 * 30 * token
    assert of(found.phases, "judges").money == judge
    policy = 3 * token * (7 + 8 + 9 + 3) + 7 * token * 8
    devices = 100_000 * -(-UNITS // (10 * 3_600_000))
    assert found.total.money == judge + policy + devices
    assert len(found.episodes) == 3 + 2


async def test_storage_costs_by_size_and_age_and_the_sums_still_add_up(tmp_path):
    await spend(tmp_path)
    big = tmp_path / "weights.bin"
    with big.open("wb") as file:
        file.truncate(2**30)  # sparse
    with sqlite3.connect(tmp_path / "run.db") as db:
        db.execute("INSERT INTO events (at, kind, data) VALUES (?, 'running', '{}')", (time.time() - 15 * 24 * 3600,))
    with_storage = config(prices=PRICED | {"storage": 0.5})
    found = read_costs(tmp_path, with_storage, episodes=100)
    storage = of(found.payees, "(storage)")
    assert storage.money / UNITS == pytest.approx(0.25, rel=0.01)  # half a month of a GiB at 0.5
    assert of(found.episodes, "(storage)") == storage
    assert of(found.phases, "storage").money == storage.money
    add_up(found)
    assert "storage" not in [line.name for line in read_costs(tmp_path, config()).phases]


async def test_a_run_that_does_not_count_has_its_calls_read(tmp_path):
    await spend(tmp_path, metered=False)
    found = read_costs(tmp_path, config(prices=None), episodes=100)
    add_up(found)
    assert not found.priced
    assert (found.total.prompt_tokens, found.total.reply_tokens, found.total.ms) == (24, 6, 80_000)
    page = run_costs(Run(name="r", folder=tmp_path))
    assert not page.counted
    assert page.total.calls == 0


async def test_a_page_that_is_asked_again_reads_new_steps_alone(tmp_path):
    await spend(tmp_path)
    run = Run(name="r", folder=tmp_path)
    before = run_costs(run)
    assert before == run_costs(run) == read_costs(tmp_path, config()).model_copy(update={"run": "r"})
    with open_store(tmp_path) as store:
        await store.log.put_metrics(3, {"step": 3.0, "time/train_seconds": 1.0})
    after = {line.name: line.ms for line in run_costs(run).phases}
    assert after["training"] == {line.name: line.ms for line in before.phases}["training"] + 1000
    assert sum(after.values()) == before.total.ms == 100_000
    both = summed("jobs", {"a": before, "b": before})
    assert both.total.money == 2 * before.total.money
    assert CostsAnswer.model_validate_json(both.model_dump_json()) == both


async def test_the_command_prints_tables_or_exact_json(tmp_path, capsys):
    await spend(tmp_path)
    assert main(["cost", str(tmp_path), "--episodes", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("rollouts", "waiting", "the judge", "(2 others)", "(devices)", "total"))
    assert "\u202e" not in printed
    assert main(["cost", str(tmp_path), "--json", "--set", "prices.device_hour=0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(int(line["money"].replace(".", "")) for line in found["phases"]) == int(
        found["total"]["money"].replace(".", "")
    )
    assert all(line["money"] == "0.000000000000000" for line in found["payees"] if line["name"] == "(devices)")


async def test_the_dearest_episodes_are_episodes_whatever_the_rest_costs(tmp_path):
    await spend(tmp_path)
    found = read_costs(tmp_path, config(), episodes=2)
    assert [line.name for line in found.episodes] == [
        "train-000000-01",
        "train-000000-00",
        "(1 others)",
        "(outside episodes)",
        "(devices)",
    ]
    assert sum(line.prompt_tokens for line in found.episodes) == found.total.prompt_tokens


@pytest.mark.parametrize("words", [["--user", "u"], [], ["x", "--since", "1h"]])
def test_the_command_says_what_it_needs(words, capsys):
    assert main(["cost", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
