"""CUDA graphs for decoding passes.

A pass over a small model has thousands of kernels, which take less time than Python takes to launch them. So a pass
over one bucket is captured once, with as many rows as its storage has, and replayed with other ids, positions and
lengths. Captured addresses must stay valid: new weights overwrite the old ones in place, and reallocated storage drops
its graphs.
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
    """Captures decoding passes, and replays them."""

    def __init__(self, record: Record, kept_bytes: int) -> None:
        """Create without graphs. `kept_bytes` limits the buckets without rows that keep their graphs."""
        self._record, self.kept_bytes = record, kept_bytes
        self._failed = False

    def scores(self, bucket: Bucket, policy: str, ids: Sequence[int], compute: Pass) -> Tensor | None:
        """Compute the newest tokens of all rows of a bucket; return logits, float32 [rows, V].

        None: passes of this model cannot be captured. `ids` [rows] are the newest tokens; unused rows are computed too,
        into their own first position. `compute` must not read from the device, and changes only the storage.
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
        """Return the input for ids, positions and lengths, int64 [3, rows]; the logits; and a replay function."""
        inputs = given.to(storage.device)
        ids, positions, lengths = inputs

        def whole() -> Tensor:
            return compute(ids, positions, DecodeAttention([(storage, lengths)]))

        return inputs, *self._record(whole)


def graphs_for(device: torch.device) -> DecodeGraphs | None:
    """Return the graphs of a device; None: it does not support them."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.get_device_properties(device).total_memory // KEPT_SHARE
    return DecodeGraphs(CudaRecorder(device), kept)


class CudaRecorder:
    """Captures computations on a CUDA device as graphs that share memory for temporary tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):  # torch refuses a pool of which all graphs are gone: this one stays
            self._first = self._graph(lambda: torch.zeros(1, device=device))

    def __call__(self, compute: Compute) -> tuple[Tensor, Callable[[], object]]:
        """Run a computation a few times; return its result, and a function that recomputes it into the same tensor."""
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
