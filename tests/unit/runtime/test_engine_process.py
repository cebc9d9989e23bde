"""The processes of inference workers are started on cards of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from palestra.config import parse_config
from palestra.engine.cards import Card, CardTurns, deal_cards
from palestra.engine.driver import EngineJob
from palestra.errors import EngineFailure, ServerFailed
from palestra.process.child import start_process
from palestra.runtime.engine_process import EngineProcesses

pytestmark = pytest.mark.ci

FAKE = EngineJob(config=parse_config({"engine": {"kind": "fake"}}))


def turns(cards: int) -> CardTurns:
    return CardTurns(deal_cards([Card(name=str(number)) for number in range(cards)], cards, 1, 0))


def card_of(process: int) -> str | None:
    """What a process was started with."""
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(one.partition("=")[::2] for one in variables).get("CUDA_VISIBLE_DEVICES")


async def test_each_worker_is_started_on_a_card_of_its_own_also_one_in_the_place_of_another(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    processes = EngineProcesses(FAKE, cards=turns(2))
    started = [await processes.start(number) for number in range(2)]
    assert [card_of(one.process) for one in started] == ["0", "1"]
    started[1].kill()
    started.append(await processes.start(2))
    assert card_of(started[2].process) == "1"
    for one in started:
        one.kill()
        await one.engine.close()


async def test_a_worker_that_does_not_start_gives_its_card_back():
    asked = []

    async def start(program, variables):
        asked.append(variables)
        raise ServerFailed("no room")

    processes = EngineProcesses(FAKE, start=start, cards=turns(2))
    for _ in range(3):
        with pytest.raises(EngineFailure, match="no room"):
            await processes.start(0)
    assert asked == [{"CUDA_VISIBLE_DEVICES": "0"}] * 3


async def test_without_cards_a_worker_has_those_of_the_job(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    started = await EngineProcesses(FAKE, start=start_process).start(0)
    assert card_of(started.process) == "3"
    started.kill()
    await started.engine.close()
