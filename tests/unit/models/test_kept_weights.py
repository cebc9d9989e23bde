"""Weights that are kept for workers: right for as long as they are held, in memory that is used again afterwards."""

from __future__ import annotations

import os

import pytest
import torch

from palestra.models.kept_weights import HeldFile, KeptSource, WeightKeeper, open_files
from palestra.models.weights import LocalWeights, SavedWeights


def drawn(seed: int, **shapes: tuple[int, ...]) -> LocalWeights:
    draw = torch.Generator().manual_seed(seed)
    return LocalWeights([(name, torch.randn(shape, generator=draw)) for name, shape in shapes.items()])


def check(held: HeldFile, source: LocalWeights) -> None:
    """Matrices are rounded once, and all else is as it was."""
    read = dict(held.source.tensors())
    assert read.keys() == dict(source.named).keys()
    for name, tensor in source.named:
        assert torch.equal(read[name], tensor.bfloat16() if tensor.ndim > 1 else tensor)


def test_a_file_is_written_again_when_nothing_holds_it_and_never_before():
    keeper = WeightKeeper("bfloat16")
    sources = [drawn(seed, a=(5, 3), norm=(3,), b=(2, 7)) for seed in range(3)]
    first = keeper.keep(sources[0])
    second = keeper.keep(sources[1])
    assert first.source != second.source
    check(first, sources[0])
    check(second, sources[1])
    place = first.source
    del first
    third = keeper.keep(sources[2])
    assert third.source == place
    check(third, sources[2])
    check(second, sources[1])


@pytest.mark.parametrize("other", [{"a": (5, 3)}, {"a": (3, 5), "norm": (3,)}, {"a": (5, 3), "scale": (3,)}])
def test_other_weights_get_a_file_of_their_own(other):
    keeper = WeightKeeper("bfloat16")
    keeper.keep(drawn(0, a=(5, 3), norm=(3,)))
    source = drawn(1, **other)
    check(keeper.keep(source), source)


def test_the_files_are_freed_with_their_keeper():
    if not open_files().exists():
        pytest.skip("files have names here")
    before = set(os.listdir(open_files()))
    keeper = WeightKeeper("bfloat16")
    held = [keeper.keep(drawn(seed, a=(5, 3))) for seed in range(3)]
    assert set(os.listdir(open_files())) - before
    del held, keeper
    assert set(os.listdir(open_files())) <= before


def test_weights_of_a_folder_stay_there(tmp_path):
    assert isinstance(WeightKeeper("bfloat16").keep(SavedWeights(tmp_path)), KeptSource)


class SeenFull(list):
    """What a thread has looked at before another one took what was in it."""

    def __bool__(self) -> bool:
        return True


def test_a_file_that_another_thread_has_taken_meanwhile_is_not_waited_for():
    keeper, source = WeightKeeper("bfloat16"), drawn(0, a=(5, 3))
    keeper._spare = SeenFull()
    check(keeper.keep(source), source)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_was_forked_after_the_import_reads_its_own_files():
    """The file of the same number in the process that it was forked from is another one, or none."""
    child = os.fork()
    if not child:  # no assertion and no clean-up of pytest here
        try:
            held = WeightKeeper("float32").keep(LocalWeights([("w", torch.full((2, 2), 3.0))]))
            os._exit(0 if dict(held.source.tensors())["w"].sum() == 12.0 else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
