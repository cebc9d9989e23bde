"""Compiled functions for the operations between a Llama layer's matrix products, and for decoding layers.

Between two products torch has a dozen small operators. In an engine they take longer to call than to compute, and in a
trainer's gradient each reads and writes memory once more (docs/benchmarks.md). `cpu_kernels.c` has them as
a few bfloat16 functions, which the machine's C compiler compiles in a second or two on first use. Without a compiler
`TorchOperators` computes the same, and rounds at the same points. A decoding pass has few rows, so its products take as
long as reading the weights; each of its layers is one call.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from palestra_cpu.attention_kernels import AttentionKernels
from palestra_cpu.kernel_arguments import (
    CachedRows,
    DecodingLayer,
    MatrixAddress,
    beside,
    empty,
    laid,
    start,
    written,
)
from palestra_cpu.kernel_library import kernel_library, wrong_functions

log = logging.getLogger("palestra.models")
_BLOCKS = 32  # as in the source
_HALF, _WHOLE = torch.bfloat16, torch.float32
_POINTER, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "palestra_norm": [_POINTER] * 3 + [_NUMBER] + [_POINTER] * 2 + [_COUNT] * 2,
    "palestra_norm_gradient": [_POINTER] * 7 + [_COUNT] * 2,
    "palestra_rotate": [_POINTER] * 4 + [_COUNT] * 4,
    "palestra_gate": [_POINTER] * 2 + [_COUNT] * 2,
    "palestra_gate_gradient": [_POINTER] * 4 + [_COUNT] * 2,
    "palestra_attend": [_POINTER] * 3 + [_COUNT] + [_POINTER] * 4 + [_COUNT] * 6 + [_NUMBER],
    "palestra_product": [_POINTER] * 3 + [_COUNT],
    "palestra_layer": [_POINTER, _COUNT, _COUNT, _POINTER]
    + [_POINTER, _NUMBER] * 2
    + [_POINTER] * 3
    + [_COUNT] * 5
    + [_NUMBER, _POINTER],
}


class CpuKernels:
    """The compiled functions for tensors on the CPU, without gradients of their own.

    Attributes:
        most_rows: up to so many rows `product` and `layer` are faster than oneDNN; 0: never.
        attention: of runs of tokens; None: the processor has no bfloat16 products.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.palestra_most_rows.restype = _COUNT
        self._library = library
        self.most_rows: int = library.palestra_most_rows()
        self.attention = AttentionKernels(library) if self.most_rows else None

    def norm(self, stream: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add to a residual stream, in place; return its RMS norm, bfloat16 [N, width], and the rows' factors. `stream`
        is float32 [N, width], contiguous; `added` bfloat16 [N, width]; `weight` float32 [width].
        """
        rows, width = stream.shape
        more = None if added is None else laid(added, _HALF, rows, width)
        given = written(stream, _WHOLE, rows, width), more, laid(weight, _WHOLE, width)
        out, factors = empty(_HALF, rows, width), empty(_WHOLE, rows, 1)
        self._library.palestra_norm(*map(start, given), eps, start(out), start(factors), rows, width)
        return out, factors

    def norm_gradient(
        self, of_out: Tensor, stream: Tensor, factors: Tensor, weight: Tensor, more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of a norm's input [N, width], with `more` added, and of its weights [width].

        See `TorchOperators`.
        """
        rows, width = stream.shape
        given = (
            laid(of_out, _HALF, rows, width),
            laid(stream, _WHOLE, rows, width),
            laid(factors, _WHOLE, rows, 1),
            laid(weight, _WHOLE, width),
            None if more is None else laid(more, _WHOLE, rows, width),
        )
        of_stream, parts = empty(_WHOLE, rows, width), empty(_WHOLE, _BLOCKS, width).zero_()
        self._library.palestra_norm_gradient(*map(start, given), start(of_stream), start(parts), rows, width)
        return of_stream, parts.sum(dim=0)

    def rotate(self, whole: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [1, H, N, D] and keys [1, K, N, D], rotated, and values; see `TorchOperators`."""
        (queries, keys), rows, width = heads, len(whole), cos.shape[-1]
        count = queries + 2 * keys
        given = laid(whole, _HALF, rows, count * width), *(laid(one, _WHOLE, rows, 1, width) for one in (cos, sin))
        out = empty(_HALF, rows, count, width)
        self._library.palestra_rotate(*map(start, given), start(out), rows, count, queries + keys, width)
        parts = out.transpose(0, 1).unsqueeze(0)
        return parts[:, :queries], parts[:, queries : queries + keys], parts[:, queries + keys :]

    def gate(self, both: Tensor) -> Tensor:
        """Return silu(gate) * up, bfloat16 [N, inner], for concatenated gate and up, [N, 2 * inner]."""
        rows, width = len(both), both.shape[1] // 2
        given, out = laid(both, _HALF, rows, 2 * width), empty(_HALF, rows, width)
        self._library.palestra_gate(start(given), start(out), rows, width)
        return out

    def gate_gradient(self, both: Tensor, of_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `gate`, [N, inner], and the gradient of `both`, [N, 2 * inner]; see `TorchOperators`."""
        rows, width = of_out.shape
        given = laid(both, _HALF, rows, 2 * width), laid(of_out, _HALF, rows, width)
        again, of_both = empty(_HALF, rows, width), empty(_HALF, rows, 2 * width)
        self._library.palestra_gate_gradient(*map(start, (*given, again, of_both)), rows, width)
        return again, of_both

    def attend(
        self,
        new: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Append keys and values of one token per row to a cache; return the attention output, bfloat16 [R, H, D].

        `new` are queries [1, H, R, D], keys and values [1, K, R, D]; views from `rotate` are not copied. The cache,
        bfloat16 [R, K, C, D], contiguous, is written to; `lengths`, int64 [R], are filled positions, less than C.
        `window` counts a token's own position, None: all before it.
        """
        rows, heads, capacity, width = keys.shape
        queries = new[0].shape[1]
        if new[0].shape[2:] != (rows, width):
            raise ValueError(f"new keys {tuple(new[1].shape)} don't fit a cache of {tuple(keys.shape)}")
        parts, stride = beside(new, (queries, heads))
        cache = [written(one, _HALF, rows, heads, capacity, width) for one in (keys, values)]
        filled, out = laid(lengths, torch.int64, rows), empty(_HALF, rows, queries, width)
        self._library.palestra_attend(
            *map(start, parts),
            stride,
            *map(start, (*cache, filled, out)),
            *(rows, heads, queries // heads, width, capacity, window or 0),
            scale,
        )
        return out

    def product(self, rows: Tensor, matrix: MatrixAddress) -> Tensor:
        """Return the product of rows, bfloat16 [N, width], with a packed matrix, plus biases: bfloat16 [N, outs].

        The bits of a row do not depend on other rows.
        """
        given, out = laid(rows, _HALF, len(rows), matrix.width), empty(_HALF, len(rows), matrix.outs)
        self._library.palestra_product(ctypes.addressof(matrix), start(given), start(out), len(rows))
        return out

    def layer(
        self,
        stream: Tensor,
        matrices: Sequence[MatrixAddress],
        norms: Sequence[tuple[Tensor, float]],
        rotation: tuple[Tensor, Tensor],
        layer: DecodingLayer,
        cached: CachedRows,
    ) -> None:
        """Compute a whole layer for one new token of each row in a cache, updating the stream and the cache.

        Args:
            stream: float32 [N, hidden], contiguous; N is the number of rows in the cache.
            matrices: of queries, keys and values together; of the attention output; of gate and up together; of the
                gated block's output.
            norms: weights float32 [hidden] and eps of both.
            rotation: cosines and sines, float32 [N, 1, D], the first half of the sines negative.
        """
        (rows, hidden), (queries, keys), width = stream.shape, layer.heads, rotation[0].shape[-1]
        inner, all_heads = matrices[3].width, (queries + 2 * keys) * width
        shapes = (all_heads, hidden), (hidden, queries * width), (2 * inner, hidden), (hidden, inner)
        if tuple((one.outs, one.width) for one in matrices) != shapes or cached.shape != (rows, keys, width):
            raise ValueError(f"a layer of {shapes} does not fit its matrices or a cache of {cached.shape}")
        if cached.addresses is None or not 0 <= layer.number < cached.layers:
            raise ValueError(f"a cache of {cached.layers} layers has none with number {layer.number} as C reads it")
        angles = [laid(one, _WHOLE, rows, 1, width) for one in rotation]
        weights = [laid(weight, _WHOLE, hidden) for weight, _ in norms]
        room = empty(_HALF, rows, 2 * hidden + 2 * all_heads + queries * width + 3 * inner)
        four = (MatrixAddress * 4)(*matrices)
        self._library.palestra_layer(
            start(written(stream, _WHOLE, rows, hidden)),
            *(rows, hidden, ctypes.addressof(four)),
            *(one for weight, (_, eps) in zip(weights, norms, strict=True) for one in (start(weight), eps)),
            *map(start, angles),
            ctypes.addressof(cached.addresses),
            *(layer.number, queries, keys, width, layer.window or 0),
            *(layer.scale, start(room)),
        )


class CompiledKernels(NamedTuple):
    """The result of compiling the functions on this machine.

    Attributes:
        kernels: None: torch computes.
        compiler: that made them; empty without kernels.
        problem: why there are none.
    """

    kernels: CpuKernels | None
    compiler: str = ""
    problem: str = ""


@functools.cache
def compiled_kernels() -> CompiledKernels:
    """Compile and test the functions once; after a failure retry once, because a disk may have been
    full, for example.
    """
    if sys.platform != "linux":
        return CompiledKernels(None, problem="compiled on Linux alone")  # elsewhere torch has no OpenMP to use as well
    found = _compiled_once()
    found = found if found.kernels is not None else _compiled_once()
    if found.problem:
        log.warning("layers are computed without compiled kernels, and slower: %s", found.problem)
    return found


def _compiled_once() -> CompiledKernels:
    try:
        library, compiler = kernel_library()
        kernels = CpuKernels(library)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:  # the last: a library without the functions
        said = " ".join(str(getattr(error, "stderr", None) or error).split())[:500]
        return CompiledKernels(None, problem=said)
    wrong = wrong_functions(kernels)
    if wrong:
        return CompiledKernels(None, problem=f"this compiler makes wrong results of {', '.join(wrong)}")
    return CompiledKernels(kernels, compiler)


def cpu_kernels() -> CpuKernels | None:
    """Return the compiled functions; None: torch computes."""
    return compiled_kernels().kernels


def attention_kernels(queries: Tensor, keys: Tensor) -> AttentionKernels | None:
    """Return the functions for queries [1, H, N, D] and keys [1, K, N, D]; None: use torch's attention."""
    if not AttentionKernels.takes(queries, keys):
        return None
    kernels = cpu_kernels()
    return None if kernels is None else kernels.attention
