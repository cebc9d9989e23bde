"""Products of few rows and whole decoding layers by one call: against exact arithmetic and the way by several calls."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from textwrap import dedent
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from palestra.engine.embedded.config import EmbeddedEngineConfig
from palestra.engine.embedded.engine import EmbeddedEngine
from palestra.engine.embedded.kv_cache import DecodeAttention, KVCache
from palestra.engine.embedded.model_runner import MIN_ROWS, PolicyModel
from palestra.models.causal_lm import CausalLM, load_causal_lm
from palestra_cpu import extension, kernel_arguments, llama_layers
from palestra_cpu import packed as packed_matrix
from palestra_cpu.cpu_kernels import CpuKernels, cpu_kernels
from palestra_cpu.kernel_arguments import CachedRows, MatrixAddress
from palestra_cpu.packed import PackedMatrix, pack_model
from unit.cpu.test_llama_layers import KINDS, drawn, errors_of
from unit.models.test_causal_lm import rounded_like_the_engine, two_of

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux alone")]
HALF_A_STEP = 2**-8  # of bfloat16, relative


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = cpu_kernels()
    assert found is not None, "this machine has no C compiler"
    if not found.most_rows:
        pytest.skip("this processor leaves all products to oneDNN")
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def needed(address: MatrixAddress | None) -> MatrixAddress:
    """An address, without which the test says nothing; with AMX oneDNN may choose layouts that C does not read."""
    kernels = cpu_kernels()
    if address is None and kernels is not None and kernels.most_rows < 128:
        pytest.skip("oneDNN packs this matrix otherwise on this processor")
    assert address is not None
    return address


class Packed:
    """A matrix as the functions get it; what they read is kept."""

    def __init__(self, outs: int, width: int, biased: bool = False, rows: int = 64) -> None:
        self.plain = numbers(outs, width, seed=1)
        self.bias = numbers(outs, seed=2) if biased else None
        packed = torch.ops.mkldnn._reorder_linear_weight(self.plain, rows)
        self.found = MatrixAddress.of(packed, self.plain, self.bias, trusted=False)

    @property
    def address(self) -> MatrixAddress:
        return needed(self.found)

    def exact(self, rows: Tensor) -> Tensor:
        found = rows.double() @ self.plain.double().t()
        return found if self.bias is None else found + self.bias.double()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [2, 30, 64, 66, 576])
@pytest.mark.parametrize("outs", [1, 31, 33, 64, 100, 192, 577])
def test_products_are_exact_but_for_the_rounding_of_their_results(kernels, outs, width, biased):
    matrix = Packed(outs, width, biased)
    for count in (0, 1, 2, 3, 4, 7, 64):
        rows = numbers(count, width)
        found, exact = kernels.product(rows, matrix.address), matrix.exact(rows)
        sums = 1e-6 * (rows.double().abs() @ matrix.plain.double().abs().t() + 3)  # which float32 adds
        assert ((found.double() - exact).abs() <= HALF_A_STEP * exact.abs() + sums).all()


def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(kernels, threads):
    matrix, rows = Packed(700, 576), numbers(128, 576)
    whole = kernels.product(rows, matrix.address)
    for count in (1, 2, 5, 127):
        assert torch.equal(kernels.product(rows[:count], matrix.address), whole[:count])
        assert torch.equal(kernels.product(rows[-count:], matrix.address), whole[-count:])
    for many in (1, 3, 50):  # more than there are halves of blocks
        torch.set_num_threads(many)
        assert torch.equal(kernels.product(rows, matrix.address), whole)


def test_what_is_no_number_stays_in_its_row(kernels):
    matrix, rows = Packed(100, 64), numbers(5, 64)
    whole = kernels.product(rows, matrix.address)
    rows[2, 7] = float("nan")
    rows[4, 9] = float("inf")
    found = kernels.product(rows, matrix.address)
    assert found[2].isnan().all()
    assert not found[4].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], whole[[0, 1, 3]])


def test_rows_need_not_lie_one_after_another(kernels):
    matrix, beside = Packed(64, 64), numbers(6, 128)
    assert torch.equal(
        kernels.product(beside[:, 64:], matrix.address), kernels.product(beside[:, 64:].contiguous(), matrix.address)
    )


def test_blocks_may_have_32_outputs(kernels, threads):
    """As oneDNN chooses for fewer rows and more threads, and, by its source, for the tiles of AMX."""
    torch.set_num_threads(8)
    small, rows = Packed(192, 576, biased=True, rows=32), numbers(7, 576)
    if small.found is None or small.address.block != 32:
        pytest.skip("this oneDNN chooses another layout")
    for many in (1, 2, 5):
        torch.set_num_threads(many)
        assert torch.equal(
            kernels.product(rows, small.address), kernels.product(rows, Packed(192, 576, biased=True).address)
        )


def test_weights_may_come_to_lie_otherwise(kernels, threads, monkeypatch):
    """oneDNN's choice depends on the number of threads; every matrix is looked at where it lies."""
    monkeypatch.setattr(packed_matrix, "_ROWS", 32)
    torch.set_num_threads(1)
    layer, rows = nn.Linear(64, 192).bfloat16(), numbers(3, 64)
    matrix = PackedMatrix(["layer"], [layer])
    with torch.inference_mode():
        before = matrix.whole_product(rows)
        torch.set_num_threads(8)
        matrix.pack([layer.weight])
        assert torch.equal(matrix.whole_product(rows), before)
        assert torch.equal(copy.deepcopy(matrix).whole_product(rows), before)


def test_a_matrix_that_lies_otherwise_is_left_to_onednn(kernels):
    assert Packed(64, 33).found is None, "inputs do not come in pairs"
    plain = numbers(130, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, 64)
    needed(MatrixAddress.of(packed, plain, None, trusted=False))
    for row in (0, 70, 129):  # as if a number lay elsewhere
        other = plain.clone()
        other[row, 63] += 1
        assert MatrixAddress.of(packed, other, None, trusted=False) is None
        assert MatrixAddress.of(packed, other, None, trusted=True) is None
    with patch.object(kernel_arguments, "_lies_in_blocks", lambda *_: False), torch.inference_mode():
        matrix = PackedMatrix(["layer"], [nn.Linear(64, 64).bfloat16()])
        assert matrix.address is None
        assert matrix.whole_product(numbers(2, 64)).shape == (2, 64)


def test_weights_that_fail_to_be_packed_leave_those_before_and_an_address_keeps_what_lies_there(kernels):
    layer, rows = nn.Linear(64, 192).bfloat16(), numbers(3, 64)
    matrix = PackedMatrix(["layer"], [layer])
    with torch.inference_mode():
        before, address = matrix.whole_product(rows), needed(matrix.address)
        with patch.object(torch, "cat", side_effect=MemoryError), pytest.raises(MemoryError):
            matrix.pack([torch.zeros(192, 64)])
        assert torch.equal(matrix.whole_product(rows), before)
        matrix.pack([torch.zeros(192, 64)])
        assert torch.equal(kernels.product(rows, address), before), "though it is not the matrix's any more"


def test_packing_takes_no_more_memory_than_the_matrix(kernels):
    """The head is packed while all plain matrices are there."""
    needed(PackedMatrix(["large"], [nn.Linear(512, 40_000, bias=False, dtype=torch.bfloat16)]).address)
    code = """
        import resource, torch
        from torch import nn
        from palestra_cpu.cpu_kernels import cpu_kernels
        from palestra_cpu.packed import PackedMatrix
        cpu_kernels()
        PackedMatrix(["small"], [nn.Linear(64, 64, bias=False).bfloat16()])
        layer = nn.Linear(512, 40_000, bias=False, dtype=torch.bfloat16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        matrix = PackedMatrix(["large"], [layer])
        assert matrix.address is not None
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / layer.weight.nbytes)
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.3


def test_an_exact_matrix_has_onednns_products_and_a_copy_its_own_weights(kernels):
    layer = nn.Linear(64, 128).bfloat16()
    assert PackedMatrix(["layer"], [layer], exact=True).address is None
    one = PackedMatrix(["layer"], [layer])
    needed(one.address)
    other = copy.deepcopy(one)
    with torch.inference_mode():
        before = one.whole_product(numbers(3, 64))
        one.pack([torch.zeros(128, 64)])
        assert torch.equal(other.whole_product(numbers(3, 64)), before)
        bias = layer.bias.detach().expand(3, -1)
        assert torch.equal(one.whole_product(numbers(3, 64)), bias)


def test_many_rows_are_multiplied_by_onednn(kernels):
    layer = nn.Linear(64, 128).bfloat16()
    one, rows = PackedMatrix(["layer"], [layer]), numbers(kernels.most_rows + 1, 64)
    needed(one.address)
    with torch.inference_mode(), patch.object(CpuKernels, "product", side_effect=AssertionError("not of so many")):
        found = one.whole_product(rows)
        with pytest.raises(AssertionError, match="so many"):
            one.whole_product(rows[:-1])
        exact = rows.double() @ layer.weight.double().t() + layer.bias.double()
    assert errors_of(found.double(), exact) < HALF_A_STEP


# Layers.


def sampled_from(kind: str, changes: dict, exact: bool = False) -> CausalLM:
    model = rounded_like_the_engine(drawn(kind, changes).model)
    pack_model(model, exact)
    assert model.packed is not None
    if not exact:
        for matrix in model.packed:
            needed(matrix.address)
    return model


def in_float32(kind: str, changes: dict) -> CausalLM:
    """The same model with the same rounded matrices, which computes in float32."""
    model = rounded_like_the_engine(drawn(kind, changes).model).model
    return CausalLM(model.float())


def cache_of(model: CausalLM, lengths: list[int]) -> KVCache:
    """A cache with rows of so many positions, always the same numbers."""
    cache = KVCache(model.layers, model.key_heads, model.head_dim, model.compute_dtype, model.device)
    for number, length in enumerate(lengths):
        found = numbers(model.layers, 2, model.key_heads, length, model.head_dim, seed=number)
        cache.insert(found.to(model.compute_dtype))
    return cache


def decoded(model: CausalLM, cache: KVCache, more: int = 0) -> Tensor:
    """Hidden states behind one new token of each row, and behind so many that are no row."""
    buckets = cache.in_order()
    positions = torch.tensor([row.position for bucket in buckets for row in bucket.rows] + [0] * more)
    with torch.inference_mode():
        return model.hidden(torch.arange(len(positions)) % 90 + 3, positions, DecodeAttention.of(buckets))


def by_several_calls() -> AbstractContextManager:
    return patch.object(CpuKernels, "layer", side_effect=AssertionError("a layer by one call"))


@pytest.mark.parametrize("lengths", [[5], [63, 1, 20], [70, 3, 200, 64, 9, 63, 129, 40]])
@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_a_layer_by_one_call_computes_what_several_calls_do(kernels, kind, changes, lengths):
    model = sampled_from(kind, changes)
    caches = [cache_of(model, lengths) for _ in range(2)]
    with patch.object(CpuKernels, "layer", autospec=True, side_effect=CpuKernels.layer) as called:
        found = decoded(model, caches[0])
    assert called.call_count == model.layers
    with patch.object(CachedRows, "addresses", None), by_several_calls():
        wanted = decoded(model, caches[1])
    assert torch.equal(found, wanted), "the same functions, called from C"
    for one, other in zip(*(cache.in_order() for cache in caches), strict=True):
        assert torch.equal(one.storage, other.storage)


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_it_is_as_exact_as_torchs_operators(kernels, kind, changes, monkeypatch):
    model, lengths = sampled_from(kind, changes), [70, 3, 200]
    exact = in_float32(kind, changes)
    wanted = decoded(exact, cache_of(exact, lengths))
    found = decoded(model, cache_of(model, lengths))
    for user in (packed_matrix, extension, llama_layers):
        monkeypatch.setattr(user, "cpu_kernels", lambda: None)
    torchs = decoded(model, cache_of(model, lengths))
    assert not torch.equal(found, torchs)
    assert errors_of(found, wanted) <= 1.2 * errors_of(torchs, wanted) < 0.02


def test_a_pass_has_the_same_bits_twice_and_after_new_weights(kernels):
    model, lengths = sampled_from("llama", {}), [5, 80]
    found = decoded(model, cache_of(model, lengths))
    assert torch.equal(decoded(model, cache_of(model, lengths)), found)
    other = {name: weight * 0.5 for name, weight in model.own_weights()}
    kept = {name: weight.clone() for name, weight in model.own_weights()}
    with torch.inference_mode():
        model.take_weights(other)
        changed = decoded(model, cache_of(model, lengths))
        model.take_weights(kept)
    assert not torch.equal(changed, found)
    assert torch.equal(decoded(model, cache_of(model, lengths)), found)


def test_rows_that_only_make_a_product_larger_come_from_several_calls(kernels):
    model = sampled_from("llama", {})
    with by_several_calls():
        found = decoded(model, cache_of(model, [5]), more=MIN_ROWS - 1)
    assert torch.equal(found[:1], decoded(model, cache_of(model, [5])))


def test_an_exact_model_and_more_rows_than_pay_come_from_several_calls(kernels):
    with by_several_calls():
        decoded(sampled_from("llama", {}, exact=True), cache_of(sampled_from("llama", {}), [5, 7]))
        many = [3] * (kernels.most_rows + 1)
        model = sampled_from("llama", {})
        assert decoded(model, cache_of(model, many)).isfinite().all()


def test_a_model_whose_matrices_have_odd_widths_is_sampled_from_by_onednn(kernels):
    model = rounded_like_the_engine(two_of("llama", intermediate_size=33)[1])
    pack_model(model)
    with by_several_calls():
        assert decoded(model, cache_of(model, [5, 9])).isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_engine_leaves_products_to_onednn(kernels, deterministic, threads):
    model = load_causal_lm("tiny-random", torch.bfloat16)
    config = EmbeddedEngineConfig.model_validate({"threads": 1})
    EmbeddedEngine({"policy": PolicyModel(model=model, stop_ids=frozenset({0}))}, config, deterministic)
    assert model.packed is not None
    for matrix in model.packed:
        assert matrix.address is None if deterministic else needed(matrix.address)
