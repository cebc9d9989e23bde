"""What lies between the matrix products of a Llama layer, and decoding layers, compiled on this machine.

Between two products there are a dozen small operators of torch. While an engine samples they take longer to call than
to compute, and while a trainer computes gradients each reads and writes memory once more (docs/benchmarks.md).
`cpu_kernels.c` has them as a few functions in bfloat16, which the machine's C compiler makes ready in less than a
second when the first of them is needed. Without a compiler `TorchOperators` computes the same, and rounds at the same
places. Of few rows, products are a reading of the weights: the layers of a decoding pass are one call each.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from palestra.models.kernel_arguments import CachedRows, DecodingLayer, MatrixAddress

log = logging.getLogger("palestra.models")
_SOURCE = Path(__file__).with_suffix(".c")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60  # that a compiler may take
# Sums may be added in another order, which lets them be vectors; NaN and infinity keep their meaning.
_FLAGS = "-O3 -march=native -fPIC -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_WIDEST = "-mprefer-vector-width=512"  # which not all compilers know
_BLOCKS = 32  # as in the source
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
    """The compiled functions, of tensors on the CPU; without a gradient of their own.

    Attributes:
        most_rows: how many rows `product` and `layer` multiply faster than oneDNN does; 0: never.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take over a compiled library."""
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.palestra_most_rows.restype = _COUNT
        self._library = library
        self.most_rows: int = library.palestra_most_rows()

    def norm(self, stream: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add to a residual stream, in place, and return its RMS norm, bfloat16 [N, width], and the rows' factors.

        Args:
            stream: float32 [N, width], contiguous.
            added: bfloat16 [N, width]; None: nothing.
            weight: float32 [width].
            eps: of the norm.
        """
        _are_exact(stream, weight)
        more = None if added is None else added.contiguous()
        out, factors = torch.empty(stream.shape, dtype=torch.bfloat16), torch.empty((len(stream), 1))
        start = None if more is None else more.data_ptr()
        given = stream.data_ptr(), start, weight.data_ptr(), eps, out.data_ptr(), factors.data_ptr()
        self._library.palestra_norm(*given, *stream.shape)
        return out, factors

    def norm_gradient(
        self, of_out: Tensor, stream: Tensor, factors: Tensor, weight: Tensor, more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of a norm's input, with `more` added, and of its weights; see `TorchOperators`."""
        of_stream, parts = torch.empty_like(stream), torch.zeros((_BLOCKS, len(weight)))
        given, extra = of_out.contiguous(), None if more is None else more.contiguous()
        _are_exact(stream, factors, weight, *(() if extra is None else (extra,)))
        start = None if extra is None else extra.data_ptr()
        pointers = (one.data_ptr() for one in (given, stream, factors, weight))
        self._library.palestra_norm_gradient(*pointers, start, of_stream.data_ptr(), parts.data_ptr(), *stream.shape)
        return of_stream, parts.sum(dim=0)

    def rotate(self, whole: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [1, H, N, D] and keys [1, K, N, D], rotated, and values; see `TorchOperators`."""
        (queries, keys), width = heads, cos.shape[-1]
        out = torch.empty((len(whole), whole.shape[1] // width, width), dtype=torch.bfloat16)
        tensors = (whole.contiguous(), cos.contiguous(), sin.contiguous(), out)
        self._library.palestra_rotate(*(one.data_ptr() for one in tensors), *out.shape[:2], queries + keys, width)
        parts = out.transpose(0, 1).unsqueeze(0)
        return parts[:, :queries], parts[:, queries : queries + keys], parts[:, queries + keys :]

    def gate(self, both: Tensor) -> Tensor:
        """Return silu(gate) * up, bfloat16 [N, inner], of gate and up beside one another, [N, 2 * inner]."""
        given = both.contiguous()
        out = torch.empty((len(given), given.shape[1] // 2), dtype=torch.bfloat16)
        self._library.palestra_gate(given.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def gate_gradient(self, both: Tensor, of_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `gate` returned, and the gradient of `both`, given that of the result; see `TorchOperators`."""
        given = both.contiguous(), of_out.contiguous()
        again, of_both = torch.empty_like(given[1]), torch.empty_like(given[0])
        pointers = (one.data_ptr() for one in (*given, again, of_both))
        self._library.palestra_gate_gradient(*pointers, *again.shape)
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
        """Put the keys and values of one token a row into a cache, and return what it sees, bfloat16 [R, H, D].

        Args:
            new: queries [1, H, R, D], keys and values [1, K, R, D]; of what `rotate` returns, nothing is copied.
            keys: bfloat16 [R, K, C, D], contiguous; written to.
            values: as `keys`.
            lengths: int64 [R], how many positions are filled, less than C.
            scale: factor of the scores.
            window: how many positions a token sees, its own included; None: all before it.
        """
        assert keys.is_contiguous()
        assert values.is_contiguous()
        stride, width = new[0].stride(2), keys.shape[3]
        parts: Sequence[Tensor] = new
        if any(one.stride()[1:] != (width, stride, 1) for one in new):
            beside = torch.cat(new, dim=1)[0].transpose(0, 1).contiguous().transpose(0, 1).unsqueeze(0)
            parts, stride = torch.split(beside, [one.shape[1] for one in new], dim=1), beside.stride(2)
        out = torch.empty((len(keys), new[0].shape[1], width), dtype=torch.bfloat16)
        self._library.palestra_attend(
            *(one.data_ptr() for one in parts),
            stride,
            *(one.data_ptr() for one in (keys, values, lengths, out)),
            len(keys),
            keys.shape[1],
            new[0].shape[1] // keys.shape[1],
            width,
            keys.shape[2],
            window or 0,
            scale,
        )
        return out

    def product(self, rows: Tensor, matrix: MatrixAddress) -> Tensor:
        """Return the product of rows, bfloat16 [N, width], with a packed matrix, plus its biases: bfloat16 [N, outs].

        The bits of a row do not depend on the other rows.
        """
        assert rows.dtype == torch.bfloat16
        assert rows.shape[1] == matrix.width
        given, out = rows.contiguous(), torch.empty((len(rows), matrix.outs), dtype=torch.bfloat16)
        self._library.palestra_product(ctypes.addressof(matrix), given.data_ptr(), out.data_ptr(), len(rows))
        return out

    def layer(
        self,
        stream: Tensor,
        matrices: Sequence[MatrixAddress],
        norms: Sequence[tuple[Tensor, float]],
        rotation: tuple[Tensor, Tensor],
        layer: DecodingLayer,
        rows: CachedRows,
    ) -> None:
        """Compute a whole layer for one new token of each row in a cache: into the stream, and into the cache.

        Args:
            stream: float32 [N, hidden], contiguous; N as many as `rows`.
            matrices: of queries, keys and values together, of what attention returns, of gate and up together, of the
                gated block's result.
            norms: weights float32 [hidden] and eps of the two.
            rotation: cosines and sines, float32 [N, 1, D], the first half of the sines negative.
            layer: what it is.
            rows: of the cache, with addresses.
        """
        (queries, keys), width = layer.heads, rotation[0].shape[-1]
        angles = [one.contiguous() for one in rotation]
        _are_exact(stream, *angles, *(weight for weight, _ in norms))
        assert rows.addresses is not None
        assert len(rows) == len(stream) == len(angles[0])
        assert [one.width for one in matrices] == [
            len(norms[0][0]),
            queries * width,
            len(norms[1][0]),
            matrices[3].width,
        ]
        assert [one.outs for one in matrices[:3]] == [
            (queries + 2 * keys) * width,
            stream.shape[1],
            2 * matrices[3].width,
        ]
        assert matrices[3].outs == stream.shape[1] == matrices[0].width
        numbers = 2 * stream.shape[1] + 2 * matrices[0].outs + queries * width + 3 * matrices[3].width
        room = torch.empty((len(stream), numbers), dtype=torch.bfloat16)
        self._library.palestra_layer(
            stream.data_ptr(),
            *stream.shape,
            ctypes.addressof(found := (MatrixAddress * 4)(*matrices)),
            *(one for weight, eps in norms for one in (weight.data_ptr(), eps)),
            *(one.data_ptr() for one in angles),
            ctypes.addressof(rows.addresses),
            layer.number,
            queries,
            keys,
            width,
            layer.window or 0,
            layer.scale,
            room.data_ptr(),
        )
        del found  # C has read it


def _are_exact(*tensors: Tensor) -> None:
    """Make sure that numbers lie where C reads them."""
    assert all(one.is_contiguous() and one.dtype == torch.float32 for one in tensors)


@functools.cache
def cpu_kernels() -> CpuKernels | None:
    """Compile the functions, the first time; None: this machine can't, and torch's operators compute instead."""
    if sys.platform != "linux":  # elsewhere torch has no OpenMP whose threads could be used as well
        return None
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        log.warning("layers are computed without compiled kernels, and slower: there is no C compiler (cc)")
        return None
    with tempfile.TemporaryDirectory(prefix="palestra-kernels-") as folder:
        try:
            return CpuKernels(ctypes.CDLL(str(_compiled(compiler, Path(folder)))))
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            log.warning(
                "layers are computed without compiled kernels, and slower: %s", " ".join(str(said).split())[:500]
            )
            return None


def _compiled(compiler: str, folder: Path) -> Path:
    """Return a library that was made in a folder.

    Raises:
        subprocess.SubprocessError: the compiler refuses, or takes too long.
        OSError: it can't be started.
    """
    object_file, library = folder / "kernels.o", folder / "kernels.so"
    settings = os.environ | {"LC_ALL": "C"}
    run = functools.partial(
        subprocess.run, check=True, capture_output=True, text=True, timeout=_SECONDS, env=settings, cwd=folder
    )
    compiling = [compiler, *_FLAGS.split(), "-c", str(_SOURCE), "-o", str(object_file)]
    try:
        run([*compiling, _WIDEST])
    except subprocess.CalledProcessError:
        run(compiling)
    # Linked without OpenMP: its functions are those that torch has loaded, and so are the threads.
    run([compiler, "-shared", str(object_file), "-o", str(library)])
    return library
