"""Kernels that this machine's compiler makes: against exact arithmetic, torch's operators, and what can go wrong."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra_cpu import kernel_library
from palestra_cpu.cpu_kernels import CpuKernels, compiled_kernels, cpu_kernels
from palestra_cpu.torch_operators import TorchOperators

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="compiled on Linux alone")]
WIDTH, HEADS, GROUPS = 64, 6, 2


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    found = cpu_kernels()
    assert found is not None, "this machine has no C compiler"
    return found


def run_version(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition("\n")[0]


@pytest.fixture
def not_compiled_yet():
    compiled_kernels.cache_clear()
    yield
    compiled_kernels.cache_clear()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("width", [1, 33, 576])
def test_a_norm_is_that_of_the_sum_and_the_sum_stays(kernels, rows, width):
    stream, added, weight = drawn(rows, width).float(), drawn(rows, width, seed=1), drawn(width, seed=2).float()
    for more in (None, added):
        found = stream.clone()
        out, factors = kernels.norm(found, more, weight, 1e-5)
        whole = stream if more is None else stream + more
        assert torch.equal(found, whole)
        exact = F.rms_norm(whole.double(), (width,), weight.double(), 1e-5)
        assert ((out.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all(), "half a step of bfloat16"
        assert torch.allclose(factors, (found.double().pow(2).mean(dim=1, keepdim=True) + 1e-5).rsqrt().float())


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("width", [1, 33, 576])
def test_the_gradient_of_a_norm_is_that_of_autograd(kernels, rows, width):
    stream, of_out = drawn(rows, width).float(), drawn(rows, width, seed=1)
    weight, more = drawn(width, seed=2).float(), drawn(rows, width, seed=3).float()
    for extra in (None, more):
        exact = stream.double().requires_grad_(), weight.double().requires_grad_()
        F.rms_norm(exact[0], (width,), exact[1], 1e-5).backward(of_out.double())
        wanted = exact[0].grad + (0 if extra is None else extra.double()), exact[1].grad
        factors = kernels.norm(stream, None, weight, 1e-5)[1]
        for way in (kernels, TorchOperators()):
            found = way.norm_gradient(of_out, stream, factors, weight, extra)
            for one, other in zip(found, wanted, strict=True):
                assert one.dtype == torch.float32
                assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max() + 1)


@pytest.mark.parametrize("rows", [1, 6, 200])
def test_the_gradient_of_a_gate_is_that_of_autograd_and_the_gate_is_made_again(kernels, rows):
    both, of_out = drawn(rows, 2 * WIDTH) * 3, drawn(rows, WIDTH, seed=1)
    exact = both.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (F.silu(gate) * up).backward(of_out.double())
    for way in (kernels, TorchOperators()):
        again, of_both = way.gate_gradient(both, of_out)
        assert torch.equal(again, way.gate(both))
        assert float((of_both - exact.grad).norm()) <= 3e-3 * float(exact.grad.norm()), "three roundings"
    found, wanted = kernels.gate_gradient(both, of_out)[1], TorchOperators.gate_gradient(both, of_out)[1]
    assert (found != wanted).float().mean() < 0.01


def test_what_is_large_or_no_number_has_the_gradient_that_torch_says(kernels):
    numbers = torch.tensor([[-3e38, -200.0, -89.0, -87.5, 87.5, 200.0, 3e38, float("nan"), float("inf"), 0.0]])
    both = torch.cat((numbers, torch.ones_like(numbers)), dim=1).to(torch.bfloat16)
    of_out = torch.ones(numbers.shape, dtype=torch.bfloat16)
    found, wanted = kernels.gate_gradient(both, of_out), TorchOperators.gate_gradient(both, of_out)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-7, atol=1e-30, equal_nan=True)


def test_the_gradient_of_a_norm_has_the_same_bits_however_many_threads_there_are(kernels):
    given = drawn(333, 576, seed=1), drawn(333, 576).float(), drawn(333, 1).float(), drawn(576, seed=2).float(), None
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(kernels.norm_gradient(*given))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for made in found[1:] for one, other in zip(made, found[0], strict=True))


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_heads_are_rotated_to_the_same_bits_as_by_torch(kernels, rows):
    whole = drawn(rows, (HEADS + 2 * GROUPS) * WIDTH)
    angles = torch.rand((rows, 1, WIDTH // 2), generator=torch.Generator().manual_seed(3)) * 100
    cos, sin = torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    found, wanted = (made(whole, cos, sin, (HEADS, GROUPS)) for made in (kernels.rotate, TorchOperators.rotate))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one != other).float().mean() < 0.001, "a product and a sum may be one step, which rounds once"
        assert torch.allclose(one.float(), other.float(), rtol=2**-7)


def test_every_number_of_bfloat16_goes_through_a_gate_as_through_torchs(kernels):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    both = torch.stack((numbers, drawn(len(numbers))), dim=1)
    found, wanted = kernels.gate(both)[:, 0], TorchOperators.gate(both)[:, 0]
    tiny = (numbers > -100) & (numbers < -80)  # where e^x is bounded, and results are below 1e-30
    assert (found != wanted)[numbers.isfinite() & ~tiny].float().mean() < 0.001
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-30, equal_nan=True)
    assert found[numbers.isnan()].isnan().all()


def attended(
    kernels: CpuKernels, lengths: list[int], capacity: int, window: int | None, size: float = 1.0, width: int = WIDTH
):
    """What rows see by kernels, and by exact arithmetic; also checks what was written into the cache."""
    rows = len(lengths)
    new = drawn(1, HEADS, rows, width, seed=4) * size, *(drawn(1, GROUPS, rows, width, seed=s) for s in (5, 6))
    keys, values = (drawn(rows, GROUPS, capacity, width, seed=seed) for seed in (7, 8))
    wanted, filled = [], (keys.clone(), values.clone())
    for row, length in enumerate(lengths):
        for cache, one in zip(filled, new[1:], strict=True):
            cache[row, :, length] = one[0, :, row]
        seen = slice(0 if window is None else max(0, length + 1 - window), length + 1)
        known = (cache[row : row + 1, :, seen].double() for cache in filled)
        query = new[0][:, :, row : row + 1].double()
        wanted.append(F.scaled_dot_product_attention(query, *known, scale=0.125, enable_gqa=True)[0, :, 0])
    found = kernels.attend(new, keys, values, torch.tensor(lengths), 0.125, window)
    assert torch.equal(keys, filled[0])
    assert torch.equal(values, filled[1])
    return found, torch.stack(wanted)


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize(
    ("lengths", "capacity", "window"),
    [([0], 64, None), ([5, 63, 0], 64, None), ([255, 256, 257, 900], 1024, None), ([3, 700, 40], 704, 33)],
)
def test_attention_is_exact_but_for_the_rounding_of_its_result(kernels, lengths, capacity, window, size):
    found, wanted = attended(kernels, lengths, capacity, window, size)
    assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("width", [2, 33, 64, 80, 128, 256])
def test_heads_may_have_any_width(kernels, width):
    found, wanted = attended(kernels, [0, 70, 300], 320, None, width=width)
    assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=2e-5)


def test_queries_keys_and_values_may_lie_anywhere(kernels):
    whole = drawn(1, 3, HEADS + 2 * GROUPS, WIDTH).transpose(1, 2)
    beside = whole.split([HEADS, GROUPS, GROUPS], dim=1)
    apart = tuple(one.contiguous() for one in beside)
    caches = [(drawn(3, GROUPS, 64, WIDTH, seed=1), drawn(3, GROUPS, 64, WIDTH, seed=2)) for _ in range(2)]
    found = [
        kernels.attend(new, *cache, torch.tensor([3, 60, 9]), 0.125, None)
        for new, cache in zip((beside, apart), caches, strict=True)
    ]
    assert torch.equal(*found)


def test_a_row_gets_the_same_bits_whatever_is_beside_it_and_however_many_threads_there_are(kernels):
    lengths, threads = [7, 300, 63, 500, 1, 12, 499, 256] * 4, torch.get_num_threads()
    whole = attended(kernels, lengths, 512, None)[0]
    new = drawn(1, HEADS, len(lengths), WIDTH, seed=4), *(drawn(1, GROUPS, len(lengths), WIDTH, seed=s) for s in (5, 6))
    keys, values = (drawn(len(lengths), GROUPS, 512, WIDTH, seed=seed) for seed in (7, 8))
    for row, length in enumerate(lengths):
        part = tuple(one[:, :, row : row + 1] for one in new)
        here = slice(row, row + 1)
        alone = kernels.attend(part, keys[here], values[here], torch.tensor([length]), 0.125, None)
        assert torch.equal(alone[0], whole[row])
    try:
        torch.set_num_threads(1)
        assert torch.equal(attended(kernels, lengths, 512, None)[0], whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_what_is_no_number_stays_none_and_harms_no_other_row(kernels, broken):
    new = drawn(1, HEADS, 2, WIDTH), drawn(1, GROUPS, 2, WIDTH, seed=1), drawn(1, GROUPS, 2, WIDTH, seed=2)
    new[["query", "key", "value"].index(broken)][:, :, 0] = float("nan")
    keys, values = torch.zeros((2, 2, GROUPS, 64, WIDTH), dtype=torch.bfloat16)
    found = kernels.attend(new, keys, values, torch.tensor([5, 5]), 0.125, None)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
    stream = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    assert kernels.norm(stream, None, torch.ones(2), 1e-5)[0].isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float64])
def test_results_are_of_their_own_types_while_another_thread_makes_a_model(kernels, other):
    """transformers sets the process's default type meanwhile; C writes float32."""
    stream, weight = drawn(300, 64).float(), torch.ones(64)
    before = torch.get_default_dtype()
    wanted = kernels.norm(stream.clone(), None, weight, 1e-5)
    of_wanted = kernels.norm_gradient(wanted[0], stream, wanted[1], weight, None)
    try:
        torch.set_default_dtype(other)
        with torch.device("meta"):
            found = kernels.norm(stream.clone(), None, weight, 1e-5)
            of_found = kernels.norm_gradient(found[0], stream, found[1], weight, None)
    finally:
        torch.set_default_dtype(before)
    for one, wanted_one in zip((*found, *of_found), (*wanted, *of_wanted), strict=True):
        assert one.dtype == wanted_one.dtype
        assert torch.equal(one, wanted_one)


def test_what_c_would_misread_is_refused(kernels):
    stream, both = torch.zeros(3, 64), drawn(3, 128)
    new = drawn(1, HEADS, 2, WIDTH), drawn(1, GROUPS, 2, WIDTH), drawn(1, GROUPS, 2, WIDTH)
    cache, lengths = drawn(2, 2, GROUPS, 64, WIDTH), torch.tensor([1, 2])
    angles = torch.zeros(3, 1, WIDTH)
    for call in (
        lambda: kernels.norm(stream, torch.zeros(3, 64), torch.ones(64), 1e-5),
        lambda: kernels.norm(stream, drawn(1, 64), torch.ones(64), 1e-5),
        lambda: kernels.norm(stream, None, torch.ones(4), 1e-5),
        lambda: kernels.norm(torch.zeros(64, 3).t(), None, torch.ones(64), 1e-5),
        lambda: kernels.norm(stream, None, torch.ones(64, device="meta"), 1e-5),
        lambda: kernels.norm_gradient(drawn(3, 64), stream, torch.ones(3), torch.ones(64), None),
        lambda: kernels.gate(both.float()),
        lambda: kernels.gate_gradient(both, drawn(3, 63)),
        lambda: kernels.rotate(drawn(3, 10 * WIDTH), angles, angles.double(), (HEADS, GROUPS)),
        lambda: kernels.rotate(drawn(3, 9 * WIDTH), angles, angles, (HEADS, GROUPS)),
        lambda: kernels.attend(new, *cache, lengths.int(), 0.125, None),
        lambda: kernels.attend(new, *cache[:, :1], lengths, 0.125, None),
        lambda: kernels.attend(new, *cache.float(), lengths, 0.125, None),
        lambda: kernels.attend((new[0], new[1].float(), new[2]), *cache, lengths, 0.125, None),
        lambda: kernels.attend(new, *cache.transpose(3, 4), lengths, 0.125, None),
    ):
        with pytest.raises(ValueError, match=r"needed|contiguous|fit"):
            call()


def test_threads_are_those_of_torch():
    """Two libraries of OpenMP would keep one another's threads from the cores."""
    code = """
        import re
        from pathlib import Path
        from palestra_cpu.cpu_kernels import cpu_kernels
        assert cpu_kernels() is not None
        found = re.findall(r"/\\S*/lib[gi]?omp\\S*", Path("/proc/self/maps").read_text())
        print(len(set(found)))
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_without_a_compiler_there_are_none(not_compiled_yet, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    assert cpu_kernels() is None
    assert "there is no C compiler" in caplog.text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no such >&2; echo header >&2; exit 1", "no such header"),
        ("touch kernels.o kernels.so", "short"),
        ("printf 'd\\351faut' >&2; exit 1", "faut"),
        ("echo 'int other;' | gcc -shared -fPIC -x c - -o kernels.so; touch kernels.o", "palestra_norm"),
    ],
    ids=["refuses", "makes nothing", "speaks latin-1", "makes something else"],
)
def test_a_compiler_that_fails_is_named_and_costs_nothing_but_speed(
    not_compiled_yet, monkeypatch, caplog, tmp_path, script, said
):
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert cpu_kernels() is None
    assert said in caplog.text
    assert not list(folder.iterdir())


def test_without_a_folder_for_temporary_files_there_are_none(not_compiled_yet, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert cpu_kernels() is None
    assert "gone" in caplog.text


def test_a_compiler_may_warn_in_any_encoding(not_compiled_yet, monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nprintf '\\351' >&2\nexec gcc \"$@\"\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cpu_kernels() is not None


def test_a_compiler_that_fails_once_is_asked_once_more(not_compiled_yet, monkeypatch, tmp_path):
    compiler, failed = tmp_path / "cc", tmp_path / "failed"
    compiler.write_text(f'#!/bin/sh\ntest -e {failed} || {{ touch {failed}; exit 1; }}\nexec gcc "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cpu_kernels() is not None
    assert failed.exists()
    assert compiled_kernels().compiler == run_version("gcc")


def test_a_compiler_is_limited_by_its_own_processor_time_and_not_by_that_of_others(
    not_compiled_yet, monkeypatch, caplog, tmp_path
):
    limits, run = [], subprocess.run

    def noted(command, **settings):
        limits.append((command[:4], settings["timeout"]))
        return run(command, **settings)

    monkeypatch.setattr(subprocess, "run", noted)
    monkeypatch.setattr(kernel_library, "_LIMITED", (*kernel_library._LIMITED[:2], 'ulimit -t 1; exec "$@"', "sh"))
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nwhile :; do :; done\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cpu_kernels() is None
    assert "died with" in compiled_kernels().problem
    assert all(seconds >= 1800 for _, seconds in limits)
    assert len(limits) == 2
