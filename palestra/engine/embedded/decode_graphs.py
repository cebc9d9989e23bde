"""Decoding passes that a GPU runs by one launch: CUDA graphs.

A pass over a small model is some thousand kernels, which take less time than Python takes to launch them. So a pass
over one bucket is recorded once, with as many rows as its storage has places, and run again with other ids, positions
and lengths. What a record refers to stays where it is: new weights are written over the old ones, and storage that
moves takes its records with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from palestra.engine.embedded.kv_cache import Bucket, DecodeAttention

log = logging.getLogger("palestra.engine")

Compute = Callable[[], Tensor]
Pass = Callable[[Tensor, Tensor, DecodeAttention], Tensor]
"""(ids [R], positions [R], attention) -> scores of all tokens, float32 [R, V]."""
Record = Callable[[Compute], tuple[Tensor, Callable[[], object]]]
"""(computation) -> its result, and what computes it again into the same tensor."""

KEPT_SHARE = 8  # buckets without rows, which keep their records, have at most this part of the GPU's memory


class DecodeGraphs:
    """Records passes, and runs them again.

    Attributes:
        kept_bytes: see `__init__`.
    """

    def __init__(self, record: Record, kept_bytes: int) -> None:
        """Prepare to record.

        Args:
            record: see `CudaRecorder`.
            kept_bytes: buckets without rows keep their records while they have at most so many bytes together.
        """
        self._record, self.kept_bytes = record, kept_bytes
        self._failed = False

    def scores(self, bucket: Bucket, policy: str, ids: Sequence[int], compute: Pass) -> Tensor | None:
        """Compute the newest tokens of all rows of a bucket; returns scores of all tokens, float32 [rows, V].

        None: passes of this model can't be recorded.

        Args:
            bucket: with at least one row. Places without a row are computed as well, into their own first position.
            ids: [rows], the newest token of each.
            compute: the pass. It must not read anything from the device, nor change anything but the storage.
        """
        if self._failed:
            return None
        places = bucket.storage.shape[2]
        idle = [0] * (places - len(bucket.rows))
        given = torch.tensor(
            [
                [*ids, *idle],
                [*(row.position for row in bucket.rows), *idle],
                [*(row.length for row in bucket.rows), *idle],
            ]
        )
        if policy not in bucket.captured:
            try:
                bucket.captured[policy] = self._recorded(bucket.storage, given, compute)
            except (RuntimeError, NotImplementedError) as error:  # some models copy numbers to the device in each pass
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                log.warning("decoding passes can't be recorded as CUDA graphs, and take longer: %s", error)
                self._failed = True
                return None
        scores: Tensor
        inputs, scores, again = bucket.captured[policy]
        inputs.copy_(given)
        again()
        return scores[: len(bucket.rows)].clone()  # another record may have its temporary tensors there

    def _recorded(self, storage: Tensor, given: Tensor, compute: Pass) -> tuple[Tensor, Tensor, Callable[[], object]]:
        """Return the tensor for ids, positions and lengths, int64 [3, places]; the scores; and what computes them."""
        inputs = given.to(storage.device)
        ids, positions, lengths = inputs

        def whole() -> Tensor:
            return compute(ids, positions, DecodeAttention([(storage, lengths)]))

        return inputs, *self._record(whole)


def graphs_for(device: torch.device) -> DecodeGraphs | None:
    """Return what records passes on a device; None: it has no graphs."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.get_device_properties(device).total_memory // KEPT_SHARE
    return DecodeGraphs(CudaRecorder(device), kept)


class CudaRecorder:
    """Records computations on a CUDA device as graphs, whose temporary tensors share their memory."""

    def __init__(self, device: torch.device) -> None:
        """Prepare to record on a device."""
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):  # torch refuses a pool of which all graphs are gone: this one stays
            self._first = self._graph(lambda: torch.zeros(1, device=device))

    def __call__(self, compute: Compute) -> tuple[Tensor, Callable[[], object]]:
        """Compute a few times; returns the result, and what computes it again into the same tensor."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries choose their kernels, and take the memory that they keep
                compute()
            try:
                found, graph = self._graph(compute)
            except torch.OutOfMemoryError:  # a recording does not get the free memory that torch keeps for later
                torch.cuda.empty_cache()
                found, graph = self._graph(compute)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return found, graph.replay

    def _graph(self, compute: Compute) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")  # others may use the device meanwhile
        try:
            found = compute()
        finally:
            graph.capture_end()
        return found, graph
