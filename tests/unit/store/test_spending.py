from __future__ import annotations

import asyncio
from functools import partial

import pytest

from palestra.config import JobConfig, parse_config
from palestra.errors import BudgetSpent, EpisodeLeaseExpired
from palestra.runtime.spending import judging_policies
from palestra.store.ledger import Ledger, Limits
from palestra.store.spending import Metering, Used, sums, sums_by_episode, usage_of_calls
from palestra.types.records import Verdict, VerdictKey
from unit.building import TASK, make_chat, open_store

EPISODE = "train-000000-00"
CONFIG = JobConfig.model_validate({"engine": {"kind": "fake"}})


async def claimed(store, kind: str = "train") -> str:
    await store.groups.register(kind, 0, 1, TASK, 1)
    return (await store.episodes.claim("w", f"r-{kind}", None)).episode_id


JUDGES = {"judge": "judge", "auditor": "audit"}


def metering(store, tokens: int | None = None) -> Metering:
    return Metering(Ledger(limits=Limits(tokens), monotonic=store.clock.monotonic), store.spending, JUDGES)


def without_calls(found: list[Used]) -> set[tuple]:
    return {(one.kind, one.payee, one.prompt_tokens, one.reply_tokens) for one in found}


async def test_a_call_and_its_use_are_recorded_together_or_not_at_all(store):
    episode = await claimed(store)
    record = partial(metering(store).record, kind="train")
    first = make_chat()
    await record(first)
    await record(make_chat(index=1, parent=first, policy="policy@3"))
    with pytest.raises(EpisodeLeaseExpired):
        await record(make_chat(index=2, fence=2))
    wanted = [Used("", "train", "policy", 2, 3 + 8, 4)]
    assert await store.db.read(sums) == wanted
    assert await store.db.read(sums_by_episode) == [wanted[0]._replace(episode_id=episode)]


async def test_the_sum_over_episodes_and_calls_outside_of_them_is_the_sum_of_all(store):
    all_of = metering(store)
    train, validation = await claimed(store), await claimed(store, "validation")
    await all_of.record(make_chat(episode_id=train), "train")
    await all_of.record(make_chat(episode_id=validation, policy="Ω"), "validation")
    await all_of.record(make_chat(episode_id="random", fence=0, policy="judge"), "adhoc")
    await all_of.record(make_chat(episode_id="random", fence=0, policy="auditor"), "adhoc")
    await all_of.record(make_chat(episode_id="random", fence=0), "adhoc")
    all_of.lost(make_chat(episode_id=train, prompt=(1,), completion=()), "train")
    meter = all_of.server("judge", "the judge")
    await meter.pay(await meter.reserve(100, 100), 10**14, 1)
    found = await store.db.read(sums)
    assert without_calls(found) == {
        ("train", "policy", 4, 2),
        ("validation", "Ω", 3, 2),
        ("judge", "judge", 3, 2),
        ("audit", "auditor", 3, 2),
        ("adhoc", "policy", 3, 2),
        ("judge", "the judge", 10**14, 1),
    }
    episodes = await store.db.read(sums_by_episode)
    assert {one.episode_id for one in episodes} == {train, validation}
    assert without_calls(episodes) <= without_calls(found)


@pytest.mark.parametrize(
    ("kind", "policy", "refused"),
    [("adhoc", "policy", True), ("adhoc", "judge", False), ("adhoc", "auditor", False), ("train", "policy", False)],
)
async def test_only_a_call_that_is_no_part_of_the_job_leaves_it_running_when_it_does_not_fit(
    store, kind, policy, refused
):
    all_of = metering(store, tokens=4)
    held = asyncio.create_task(all_of.hold(make_chat(policy=policy), kind))
    await asyncio.sleep(0.01)
    assert all_of.ledger.over is not refused
    assert held.done() is refused
    all_of.ledger.close()
    with pytest.raises(BudgetSpent):
        await held


def test_policies_that_judge_and_audit_are_known_by_their_names():
    judge = {"kind": "rubric", "criteria": [{"name": "good", "text": "Good?"}]}
    policies = {
        "policy": {"model": "none"},
        "a": {"model": "none", "frozen": True},
        "b": {"model": "none", "frozen": True},
    }
    config = parse_config(
        {
            "engine": {"kind": "fake"},
            "policies": policies,
            "judge": judge | {"policy": "a"},
            "audit": {"judge": judge | {"policy": "b"}},
        }
    )
    assert judging_policies(config) == {"a": "judge", "b": "audit"}


async def test_a_run_without_sums_gets_the_same_from_its_calls_once(tmp_path):
    with open_store(tmp_path) as store:
        await claimed(store)
        parent = make_chat()
        await store.calls.append(parent)
        await store.calls.append(make_chat(index=1, parent=parent))
        key = VerdictKey(kind="train", group_index=0, members=((EPISODE, 1),), rubric="r", judge="j", ordering=0)
        verdict = Verdict(scores={}, reasons={}, calls=2, tokens=70, seconds=1.0)
        await store.verdicts.record(key, verdict)
        await store.audits.record(key, verdict)
        scanned = await store.db.read(lambda connection: list(usage_of_calls(connection, CONFIG)))
        used, ms = await store.spending.begin(CONFIG)
        assert ms == 0
        wanted = {("train", "policy", 3 + 8, 4), ("judge", "the judge", 70, 0), ("audit", "the audit's judge", 70, 0)}
        assert without_calls(used) == wanted
        assert sum(one.prompt_tokens + one.reply_tokens for one in scanned) == 11 + 4 + 140
        await store.spending.set_ms(12_345)
        assert await store.spending.begin(CONFIG) == (used, 12_345)


async def test_recorded_episodes_cost_no_tokens(store):
    await claimed(store)
    await store.calls.append(make_chat())
    learns = JobConfig.model_validate({"engine": {"kind": "fake"}, "algorithm": {"name": "sft"}})
    assert await store.db.read(lambda connection: list(usage_of_calls(connection, learns))) == []
