"""The first token of a reply does not wait for the next tokens of all others."""

from __future__ import annotations

import torch

from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.core import EngineCore
from palestra.engine.embedded.model_runner import PolicyModel
from palestra.engine.embedded.request import RunningRequest
from palestra.types.calls import PolicyVersion
from unit.building import engine_request
from unit.engine.calling import GREEDY, prompt


def test_it_is_delivered_before_the_decoding_pass_of_its_turn(tiny, monkeypatch):
    config = EmbeddedEngineConfig.model_validate({"threads": 1, "dtype": "float32"})
    policies = {"policy": PolicyModel(model=tiny, stop_ids=frozenset({258}))}
    core = EngineCore(policies, PolicyVersion(0, 0), config, False, 2**20)
    delivered, before = list[object](), list[int]()
    runner = core.policies["policy"].runner
    decode = runner.decode
    monkeypatch.setattr(runner, "decode", lambda requests: (before.append(len(delivered)), decode(requests))[1])
    core.begin(RunningRequest(engine_request(prompt(5), GREEDY), delivered.append))
    with torch.inference_mode():
        core.step()
        core.step()
    assert before[0] == 1
    assert len(delivered) == 1 + len(before)
