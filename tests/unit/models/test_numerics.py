"""What computes is the same in two starts on one machine, and a difference is named."""

from __future__ import annotations

import pytest
import torch

from palestra.errors import ConfigError
from palestra.models import kernels
from palestra.models.numerics import KERNELS, PROBLEM, VARIABLES, check_numerics, differences, numerics
from palestra_cpu import extension
from palestra_cpu.cpu_kernels import CompiledKernels


def test_two_looks_at_one_machine_are_equal():
    found = numerics(kernels=True)
    assert found == numerics(kernels=True)
    assert found["torch"] == torch.__version__
    assert differences(found, found) == ""
    check_numerics(found, found, "the steps were computed")


def test_compiled_functions_that_are_gone_are_named_with_the_reason(monkeypatch):
    monkeypatch.setattr(kernels, "kernels", extension.CpuExtension)  # also where they are for another torch
    monkeypatch.setattr(extension, "compiled_kernels", lambda: CompiledKernels(object(), "cc 12.2.0"))
    before = numerics(kernels=True)
    assert before[KERNELS] == "compiled by cc 12.2.0"
    monkeypatch.setattr(extension, "compiled_kernels", lambda: CompiledKernels(None, problem="there is no C compiler"))
    now = numerics(kernels=True)
    with pytest.raises(ConfigError, match=r"12\.2\.0.*torch.s"):
        check_numerics(before, now, "the steps so far were computed")
    monkeypatch.setattr(extension, "compiled_kernels", lambda: CompiledKernels(object(), "cc 13.1.0"))
    with pytest.raises(ConfigError, match=r"12\.2\.0.*13"):
        check_numerics(before, numerics(kernels=True), "the steps so far were computed")


def test_reasons_alone_are_no_difference():
    assert differences({KERNELS: "torch", PROBLEM: "a full disk"}, {KERNELS: "torch", PROBLEM: "no compiler"}) == ""


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_the_libraries_count(monkeypatch, name):
    before = numerics(kernels=False)
    monkeypatch.setenv(name, "other")
    assert "variables" in differences(before, numerics(kernels=False))


def test_without_bfloat16_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(extension, "compiled_kernels", lambda: pytest.fail("compiled"))
    assert KERNELS not in numerics(kernels=False)
