"""Servers from a script, of which each test gets one that nobody has asked yet."""

from __future__ import annotations

import pytest

from unit.engine.engine_servers import ScriptedSglang, ScriptedVllm


@pytest.fixture
def vllm():
    return ScriptedVllm()


@pytest.fixture(params=[ScriptedVllm, ScriptedSglang])
def server(request):
    return request.param()
