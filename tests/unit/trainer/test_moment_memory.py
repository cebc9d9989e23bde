"""Moments outside of the heap: the numbers of torch's own optimizer, kept on disk and freed as all others are."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from palestra.errors import CheckpointError
from palestra.trainer import optimizer as module
from palestra.trainer.base import OptimParams
from palestra.trainer.optimizer import Optimizer, zeros_apart

PARAMS = OptimParams(learning_rate=0.01, max_grad_norm=1e9, weight_decay=0.1)


def weights_of(seed: int = 0) -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (7, 5), "norm": (5,), "empty": (0, 3), "another": (3, 33)}
    return [(name, nn.Parameter(torch.randn(shape, generator=draw))) for name, shape in shapes.items()]


def step(optimizer: Optimizer, seed: int, without: str = "") -> None:
    draw = torch.Generator().manual_seed(seed)
    for name, p in optimizer.parameters:
        gradient = torch.randn(p.shape, generator=draw)
        p.grad = None if name == without else gradient
    assert optimizer.step(PARAMS).applied


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.setattr(module, "_APART_BYTES", 0)


def in_one_memory(optimizer: Optimizer) -> bool:
    states = optimizer.adamw.state.values()
    return len({moment.untyped_storage().data_ptr() for s in states for moment in (s["exp_avg"], s["exp_avg_sq"])}) == 1


def test_zeros_have_shapes_and_types_and_do_not_overlap():
    wanted = [torch.empty(3, 5), torch.empty(0, 2), torch.empty(7, dtype=torch.float64), torch.empty(())]
    found = zeros_apart(wanted)
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in wanted]
    assert all(not one.any() and one.data_ptr() % 64 == 0 for one in found)
    for number, one in enumerate(found):
        one.fill_(number + 1)
    assert [set(one.flatten().tolist()) for one in found] == [{1}, set(), {3}, {4}]
    assert zeros_apart([]) == []


def test_updates_are_those_of_torch_also_where_a_weight_begins_later(apart):
    own, other = Optimizer(weights_of()), weights_of()
    groups = [
        {"params": [p for _, p in other if p.ndim >= 2], "weight_decay": PARAMS.weight_decay},
        {"params": [p for _, p in other if p.ndim < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=PARAMS.learning_rate, betas=PARAMS.betas, eps=PARAMS.epsilon, fused=True)
    for seed in range(4):
        step(own, seed, without="another" if seed < 2 else "")
        draw = torch.Generator().manual_seed(seed)
        for name, p in other:
            gradient = torch.randn(p.shape, generator=draw)
            p.grad = None if seed < 2 and name == "another" else gradient
        theirs.step()
    assert in_one_memory(own)
    for (name, mine), (_, wanted) in zip(own.parameters, other, strict=True):
        assert torch.equal(mine, wanted), name


def test_what_is_read_lies_apart_as_well_and_training_continues_bit_by_bit(apart, tmp_path):
    first = Optimizer(weights_of())
    for seed in range(2):
        step(first, seed)
    first.write(tmp_path, "moments")
    second = Optimizer([(name, nn.Parameter(p.detach().clone())) for name, p in first.parameters])
    second.read(tmp_path, "moments")
    assert in_one_memory(second)
    for optimizer in (first, second):
        step(optimizer, 2)
    for (name, mine), (_, wanted) in zip(second.parameters, first.parameters, strict=True):
        assert torch.equal(mine, wanted), name


def test_a_weight_without_moments_in_a_checkpoint_begins_with_none(apart, tmp_path):
    """Although the optimizer that reads it has taken steps with that weight."""
    early, later = Optimizer(weights_of()), Optimizer(weights_of())
    for optimizer in (early, later):
        step(optimizer, 0, without="another")
    early.write(tmp_path, "moments")
    for seed in range(1, 4):
        step(later, seed)
    later.read(tmp_path, "moments")
    for (_, mine), (_, wanted) in zip(later.parameters, early.parameters, strict=True):
        mine.data.copy_(wanted)
    for optimizer in (early, later):
        step(optimizer, 9)
    for (name, mine), (_, wanted) in zip(later.parameters, early.parameters, strict=True):
        assert torch.equal(mine, wanted), name


@pytest.mark.parametrize("change", [lambda own: own.pop("exp_avg"), lambda own: own.update(exp_avg=torch.zeros(1, 5))])
def test_moments_that_do_not_fit_are_refused(apart, tmp_path, change):
    first = Optimizer(weights_of())
    step(first, 0)
    change(first.adamw.state[first.parameters[0][1]])
    first.write(tmp_path, "moments")
    with pytest.raises(CheckpointError, match=r"moments.*matrix"):
        Optimizer(weights_of()).read(tmp_path, "moments")


def test_a_kernel_without_huge_pages_has_moments_and_one_without_room_says_so(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    assert not zeros_apart([torch.empty(3)])[0].any()

    def full(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(MemoryError, match=r"0\.0.*moments"):
        zeros_apart([torch.empty(3)])


def resident() -> int:
    """MiB of this process that are no files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) // 1024


def test_memory_of_moments_goes_back_to_the_system():
    large = Optimizer([("large", nn.Parameter(torch.zeros(2**12, 2**12)))])  # 64 MiB
    step(large, 0)
    before = resident()
    large.forget_moments()
    assert before - resident() > 120


def test_few_weights_keep_their_moments_in_the_heap():
    small = Optimizer(weights_of())
    step(small, 0)
    assert not in_one_memory(small)
