"""Compiles this package's C files with the machine's C compiler, and loads the library.

Each machine's own compiler makes them, and may reorder sums; a wrongly vectorised loop would be a model that samples
and learns something else, without an error.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from palestra_cpu.attention_kernels import AttentionKernels, CachedRuns, Runs
from palestra_cpu.kernel_arguments import CachedRows, DecodingLayer, MatrixAddress
from palestra_cpu.torch_operators import TorchOperators

if TYPE_CHECKING:
    from palestra_cpu.cpu_kernels import CpuKernels

_SOURCES = ("cpu_kernels.c", "attention_kernels.c")
_COMPILERS = ("cc", "gcc", "clang")
# A compiler may take this much processor time, so that what computes does not depend on how busy the machine is. The
# second limit is for one that waits for something that never comes.
_PROCESSOR_SECONDS, _WALL_SECONDS = 60, 1800
_LIMITED = ("/bin/sh", "-c", f'ulimit -t {_PROCESSOR_SECONDS} 2> /dev/null; exec "$@"', "sh")
# Sums and products may be computed in another order, which lets them be vectors; NaN and infinity keep their meaning.
_FLAGS = "-O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_WIDEST = "-mprefer-vector-width=512"  # which not all compilers know


def kernel_library() -> tuple[ctypes.CDLL, str]:
    """Return the compiled functions, and the compiler's name and version. Raises subprocess.SubprocessError: the
    compiler fails, or takes too long.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C compiler ({_COMPILERS[0]})")
    with tempfile.TemporaryDirectory(prefix="palestra-kernels-", ignore_cleanup_errors=True) as folder:
        said = _run([compiler, "--version"], Path(folder)).stdout.strip()
        return ctypes.CDLL(str(_compiled(compiler, Path(folder)))), said.partition("\n")[0] or compiler


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; errors are those of `kernel_library`."""
    return subprocess.run(
        [*_LIMITED, *command],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_WALL_SECONDS,
        env=os.environ | {"LC_ALL": "C"},
        cwd=folder,
    )


def _compiled(compiler: str, folder: Path) -> Path:
    """Return a library compiled into a folder; errors are those of `kernel_library`."""
    library = folder / "kernels.so"

    def compile_file(name: str) -> str:
        compiling = [compiler, *_FLAGS.split(), "-c", str(Path(__file__).with_name(name))]
        try:
            _run([*compiling, _WIDEST], folder)
        except subprocess.CalledProcessError:
            _run(compiling, folder)
        return str(Path(name).with_suffix(".o"))

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_file, _SOURCES))
    # Linked without OpenMP: its functions are those that torch has loaded, and so are the threads.
    _run([compiler, "-shared", *objects, "-o", str(library), "-lm"], folder)
    return library


_ROWS, _WIDTH, _HEADS, _GROUPS, _DIM = 70, 576, 6, 2, 64  # enough for two threads, and no whole number of vectors
_INNER, _FILLED = 160, 5  # of the gated block; positions of a cache
_SCALE, _EPS = 0.125, 1e-5
_MOST = 0.01  # of the norm of what is right: several times what rounding to bfloat16 makes


def wrong_functions(kernels: CpuKernels) -> list[str]:
    """Return the names of functions whose results differ from torch's operators; it takes about 20 ms."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        wrong = [name for name, found, wanted in _results(kernels) if not _near(found, wanted)]
    return list(dict.fromkeys(wrong))


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers of any shape are the same but for rounding."""
    return bool((found.float() - wanted.float()).norm() <= _MOST * wanted.float().norm())


def _results(kernels: CpuKernels) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each function, its result and the expected one, of equal shapes."""
    draw, right = torch.Generator().manual_seed(0), TorchOperators()

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return random numbers of the shape [...]."""
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(dtype)

    def pairs(name: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield from ((name, one, other) for one, other in zip(found, wanted, strict=True))

    stream, weight, more = (
        drawn(*shape, dtype=torch.float32) for shape in ((_ROWS, _WIDTH), (_WIDTH,), (_ROWS, _WIDTH))
    )
    added, of_out = drawn(_ROWS, _WIDTH), drawn(_ROWS, _WIDTH)
    normed = right.norm(stream.clone(), added, weight, _EPS)
    yield from pairs("norm", kernels.norm(stream.clone(), added, weight, _EPS), normed)
    given = of_out, stream, right.norm(stream, None, weight, _EPS)[1], weight, more
    yield from pairs("norm_gradient", kernels.norm_gradient(*given), right.norm_gradient(*given))
    both = drawn(_ROWS, 2 * _WIDTH) * 3
    yield "gate", kernels.gate(both), right.gate(both)
    yield from pairs("gate_gradient", kernels.gate_gradient(both, of_out), right.gate_gradient(both, of_out))
    whole = drawn(_ROWS, (_HEADS + 2 * _GROUPS) * _DIM)
    cos, sin = (drawn(_ROWS, 1, _DIM, dtype=torch.float32) for _ in range(2))
    new = kernels.rotate(whole, cos, sin, (_HEADS, _GROUPS))
    yield from pairs("rotate", new, right.rotate(whole, cos, sin, (_HEADS, _GROUPS)))
    cache = drawn(1, 2, _ROWS, _GROUPS, _FILLED + 3, _DIM)
    seen = _decoded(new, cache)
    lengths = torch.full((_ROWS,), _FILLED, dtype=torch.int64, device="cpu")
    keys, values = cache[0].clone()
    yield "attend", kernels.attend(new, keys, values, lengths, _SCALE, None), seen
    if kernels.attention is not None:
        yield from _runs(kernels.attention, new, drawn(_ROWS, _HEADS, _DIM))
        shapes = (whole.shape[1], _WIDTH), (_WIDTH, _HEADS * _DIM), (2 * _INNER, _WIDTH), (_WIDTH, _INNER)
        plain = [drawn(*shape) / shape[1] ** 0.5 for shape in shapes]
        yield from _multiplied(kernels, stream, plain, [weight, weight.flip(0)], (cos, sin), cache)


def _decoded(new: tuple[Tensor, Tensor, Tensor], cache: Tensor) -> Tensor:
    """Return expected attention, float32 [R, H, D], over `_FILLED` positions of a cache [1, 2, R, K, C, D]."""
    queries, *pair = (one[0].transpose(0, 1).float() for one in new)
    keys, values = (
        torch.cat((old[:, :, :_FILLED].float(), one.unsqueeze(2)), dim=2)
        for old, one in zip(cache[0], pair, strict=True)
    )
    weights = (queries.reshape(_ROWS, _GROUPS, -1, _DIM) @ keys.transpose(2, 3) * _SCALE).softmax(dim=-1)
    return (weights @ values).flatten(1, 2)


def _multiplied(
    kernels: CpuKernels,
    stream: Tensor,
    plain: list[Tensor],
    norms: list[Tensor],
    angles: tuple[Tensor, Tensor],
    cache: Tensor,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a product and a decoding layer's update of a stream, if matrices have C's layout; see `_results`."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(one, 64) for one in plain]
    found = [MatrixAddress.of(one, matrix, None, trusted=False) for one, matrix in zip(packed, plain, strict=True)]
    addresses = [one for one in found if one is not None]
    if len(addresses) < len(plain):
        return
    right, heads = TorchOperators(), (_HEADS, _GROUPS)

    def product(rows: Tensor, number: int) -> Tensor:
        """Return the product of rows [R, in] with a matrix, bfloat16 [R, out]."""
        return (rows.float() @ plain[number].float().t()).to(torch.bfloat16)

    normed, wanted = right.norm(stream, None, norms[0], _EPS)[0], stream.clone()
    whole = product(normed, 0)
    yield "product", kernels.product(normed, addresses[0]), whole
    new = right.rotate(whole, *angles, heads)
    seen = _decoded(new, cache).flatten(1).to(torch.bfloat16)
    again = right.norm(wanted, product(seen, 1), norms[1], _EPS)[0]
    wanted += product(right.gate(product(again, 2)), 3)

    kept, made = cache.clone(), stream.clone()
    rows = CachedRows([(kept, torch.full((_ROWS,), _FILLED, dtype=torch.int64, device="cpu"))])
    layer = DecodingLayer(number=0, heads=heads, scale=_SCALE, window=None)
    kernels.layer(made, addresses, [(weight, _EPS) for weight in norms], angles, layer, rows)
    yield "layer", made - stream, wanted - stream
    yield "layer", kept[0, 0, :, :, _FILLED], new[1][0].transpose(0, 1)


def _runs(
    kernels: AttentionKernels, new: tuple[Tensor, Tensor, Tensor], of_out: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the attention of two runs and its gradient; the second begins after half of the first."""
    first, behind = 45, 20
    runs = Runs([first, _ROWS - first], parents=[-1, 0], behind=[0, behind], trees=[0])
    seen = torch.ones((_ROWS, _ROWS), dtype=torch.bool, device="cpu").tril()
    seen[first:, behind:first] = False
    queries, keys, values = (one[0].float() for one in new)
    keys, values = (one.repeat_interleave(_HEADS // _GROUPS, dim=0) for one in (keys, values))
    scores = (queries @ keys.transpose(1, 2) * _SCALE).masked_fill(~seen, -torch.inf)
    weights, given = scores.softmax(dim=-1), of_out.float().transpose(0, 1)
    out = (weights @ values).transpose(0, 1)
    made = kernels.trees(new, runs, _SCALE, None)
    yield "trees", made[0], out
    yield "trees", made[1], scores.logsumexp(dim=-1)
    of_weights = given @ values.transpose(1, 2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(dim=-1, keepdim=True)) * _SCALE
    gradients = kernels.trees_gradient(of_out, new, made, runs, _SCALE, None)
    of_keys, of_values = of_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ given
    yield "trees_gradient", gradients[0][0], of_scores @ keys
    for found, wanted in zip(gradients[1:], (of_keys, of_values), strict=True):
        yield "trees_gradient", found[0], wanted.reshape(_GROUPS, -1, _ROWS, _DIM).sum(dim=1)
    cache = torch.zeros((1, 2, _GROUPS, first, _DIM), dtype=torch.bfloat16, device="cpu")
    pieces = [(start, end, tuple(one[:, :, start:end] for one in new)) for start, end in ((0, 30), (30, first))]
    for start, end, (query, key, value) in pieces:
        found = kernels.prompts(0, (query, key, value), CachedRuns([(cache, start, end - start)]), _SCALE, None)
        yield "prompts", found, out[start:end]
