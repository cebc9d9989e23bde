"""Servers from a script, of which each test gets one that nobody has asked yet."""

from __future__ import annotations

from importlib import import_module

import pytest


def scripted(name: str):
    """Imported only here, for tests of the core alone, which have neither vLLM's nor SGLang's driver."""
    return getattr(import_module("unit.engine.engine_servers"), name)()


@pytest.fixture
def vllm():
    return scripted("ScriptedVllm")


@pytest.fixture(params=["ScriptedVllm", "ScriptedSglang"])
def server(request):
    return scripted(request.param)
