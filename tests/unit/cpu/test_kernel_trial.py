"""Compiled functions are tried before they are used: right ones pass, and a wrong one is found and named."""

from __future__ import annotations

import sys

import pytest
import torch

from palestra_cpu import cpu_kernels as module
from palestra_cpu.attention_kernels import AttentionKernels
from palestra_cpu.cpu_kernels import CpuKernels, cpu_kernels
from palestra_cpu.kernel_library import wrong_functions

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux alone")]
OF_ALL = ["norm", "norm_gradient", "gate", "gate_gradient", "rotate", "attend"]
OF_BFLOAT16 = ["product", "layer", "trees", "trees_gradient", "prompts"]


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = cpu_kernels()
    assert found is not None, "this machine has no C compiler"
    return found


def off(result, number):
    """Results of which one is 5 % off."""
    if isinstance(result, torch.Tensor):
        return result * 1.05
    return tuple(part * 1.05 if place == number else part for place, part in enumerate(result))


def test_right_functions_pass_whatever_torch_is_told_meanwhile(kernels):
    assert wrong_functions(kernels) == []
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert wrong_functions(kernels) == []
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert wrong_functions(kernels) == []
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", OF_ALL + OF_BFLOAT16)
def test_a_wrong_function_is_named(kernels, monkeypatch, name):
    if kernels.attention is None and name in OF_BFLOAT16:
        pytest.skip("no compiled products of bfloat16 here")
    owner = CpuKernels if hasattr(CpuKernels, name) else AttentionKernels
    right = getattr(owner, name)
    if name == "layer":  # which writes into the stream
        monkeypatch.setattr(owner, name, lambda kernels, stream, *given: right(kernels, stream.mul_(1.05), *given))
        assert wrong_functions(kernels) == [name]
        return
    for number in range(
        3 if name in ("rotate", "trees_gradient") else 2 if "norm" in name or "gradient" in name else 1
    ):
        monkeypatch.setattr(owner, name, lambda *given, number=number: off(right(*given), number))
        assert name in wrong_functions(kernels)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_numbers_that_are_none_are_wrong(kernels, monkeypatch, value):
    right = CpuKernels.gate
    monkeypatch.setattr(CpuKernels, "gate", lambda *given: right(*given).fill_(value))
    assert wrong_functions(kernels) == ["gate"]


def test_wrong_functions_are_not_used_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(module, "wrong_functions", lambda kernels: ["gate", "trees"])
    module.compiled_kernels.cache_clear()
    try:
        assert cpu_kernels() is None
        assert "wrong results of gate, trees" in caplog.text
    finally:
        module.compiled_kernels.cache_clear()
