"""AdamW over the named weights of one network, and its state on disk.

Moments are twice as large as the weights, are created after the first gradient, and stay. `tune_malloc` makes the heap
keep freed memory, where moments would fragment the space that activations reuse (+200 MB in `make demo`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from palestra.errors import CheckpointError
from palestra.models.tensor_file import write_tensors
from palestra.trainer.base import OptimParams, OptimReport

_LINE = 64  # bytes, between which tensors begin: what torch's own allocator promises
T = TypeVar("T")


def zeros_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros with the shapes and types of tensors, [n, d] or [d], in one memory mapping, on Linux.

    They share one storage, which is freed with the last of them.
    """
    starts, end = list[int](), 0
    for tensor in tensors:
        starts.append(end)
        end += math.ceil(max(tensor.nbytes, 1) / _LINE) * _LINE
    try:
        memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {end / 2**30:.1f} GiB of moments") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


Named = Sequence[tuple[str, nn.Parameter]]
_MOMENTS = ("exp_avg", "exp_avg_sq")
_APART_BYTES = 2**26  # of weights on a CPU, from which on their moments lie outside of the heap


class Optimizer:
    """AdamW over the given weights, each once, by name."""

    def __init__(self, parameters: Named) -> None:
        self.parameters = parameters
        self.adamw = torch.optim.AdamW(
            [  # norms and biases, in the second group, do not decay, as in the Trainer of transformers
                {"params": [p for _, p in parameters if p.ndim >= 2]},
                {"params": [p for _, p in parameters if p.ndim < 2]},
            ],
            fused=True,
        )
        self._apart: dict[nn.Parameter, tuple[Tensor, Tensor]] | None = None  # memory for the moments of each weight

    def gradient(self) -> list[Tensor | None]:
        """Return a copy of each weight's gradient, [n, d] or [d]; None for a weight without a gradient."""
        return [None if p.grad is None else p.grad.clone() for _, p in self.parameters]

    def put_gradient(self, gradient: Sequence[Tensor | None]) -> None:
        """Set each weight's gradient to what `gradient` returned."""
        for (_, parameter), own in zip(self.parameters, gradient, strict=True):
            parameter.grad = own

    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to a global L2 norm of at most `max_norm`, and return the norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_([p for _, p in self.parameters], max_norm))

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a weight, gradient or moment, [n, d] or [d]: here, all of it."""
        return tensor

    def step(self, params: OptimParams) -> OptimReport:
        """Apply the gradient unless it is not finite, and clear it."""
        norm = self.clip(params.max_grad_norm)
        applied = math.isfinite(norm)
        if applied:
            self._apply(params)
        self.adamw.zero_grad(set_to_none=True)
        return OptimReport(learning_rate=params.learning_rate, grad_norm=norm if applied else 0.0, applied=applied)

    @torch.no_grad()
    def _apply(self, params: OptimParams) -> None:
        """Update all weights that have a gradient, and their moments."""
        for group, decay in zip(self.adamw.param_groups, (params.weight_decay, 0.0), strict=True):
            states = [
                [*(self.part_of(each) for each in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])), state["step"]]
                for p in group["params"]
                if p.grad is not None
                for state in (self.state_of(p),)
            ]
            if not states:
                continue
            weights, gradients, first, second, steps = map(list, zip(*states, strict=True))
            adamw(
                weights,
                gradients,
                first,
                second,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=params.betas[0],
                beta2=params.betas[1],
                lr=params.learning_rate,
                weight_decay=decay,
                eps=params.epsilon,
                maximize=False,
            )

    def forget_moments(self) -> None:
        """Free the memory of the moments; the next update would begin without any."""
        self.adamw.state.clear()
        self._apart = None

    def write(self, folder: Path, prefix: str) -> None:
        """Write the moments into files `PREFIX-N.safetensors` of an existing folder."""
        state = self.adamw.state
        write_named(
            folder,
            prefix,
            ((f"{key}.{name}", value) for name, p in self.parameters for key, value in state.get(p, {}).items()),
        )

    def read(self, folder: Path, prefix: str) -> None:
        """Load moments written by `write`, here or by ranks; weights without stored moments start without."""
        moments: dict[str, dict[str, Tensor]] = {}
        for key, value in self._read(folder, prefix).items():
            kind, _, name = key.partition(".")
            moments.setdefault(name, {})[kind] = value
        self._restore(moments)

    def _read(self, folder: Path, prefix: str) -> dict[str, Tensor]:
        """Return the moments of a folder, [n, d] or [d], by kind and name."""
        if not moments_folder(folder, prefix).is_dir():
            return read_named(folder, prefix)
        from palestra.trainer.moment_files import read_moments  # loads a library that one process seldom needs

        return read_moments(moments_folder(folder, prefix), self.parameters)

    def _restore(self, moments: Mapping[str, dict[str, Tensor]]) -> None:
        """Load the state of each parameter, by name, as read from a checkpoint on the CPU."""
        for name, parameter in self.parameters:
            own = moments.get(name)
            if own is not None and (
                "step" not in own or any(key not in own or own[key].shape != parameter.shape for key in _MOMENTS)
            ):
                raise CheckpointError(f"the moments of {name} are not all there, or not of its shape: another model")
        self._apart = None  # zeros again, for weights that have no moments in the checkpoint
        state = self.adamw.state_dict()
        names = {parameter: name for name, parameter in self.parameters}
        ordered = [names[parameter] for group in self.adamw.param_groups for parameter in group["params"]]
        state["state"] = {number: moments[name] for number, name in enumerate(ordered) if name in moments}
        self.adamw.load_state_dict(state)
        for parameter in names:
            own = self.adamw.state.get(parameter, {})
            if own and (places := self._moments_apart(parameter)) is not None:
                own["step"] = own["step"].clone()  # a view of the file, which would stay mapped
                for key, place in zip(_MOMENTS, places, strict=True):
                    own[key] = place.copy_(own[key])

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments of a weight, [n, d] or [d], and its update count; all are zero at first."""
        state: dict[str, Tensor] = self.adamw.state[parameter]
        if not state:
            places = self._moments_apart(parameter) or [torch.zeros_like(parameter) for _ in _MOMENTS]
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {"step": step, **dict(zip(_MOMENTS, places, strict=True))}
        return state

    def _moments_apart(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor] | None:
        """Return memory for both moments of a weight, [n, d] or [d]; None: use ordinary memory."""
        if self._apart is None:
            weights = [p for _, p in self.parameters if type(p.data) is Tensor and p.device.type == "cpu"]
            if sys.platform != "linux" or sum(p.nbytes for p in weights) < _APART_BYTES:
                weights = []
            zeros, half = zeros_apart([*weights, *weights]) if weights else [], len(weights)
            self._apart = {p: (a, b) for p, a, b in zip(weights, zeros[:half], zeros[half:], strict=True)}
        return self._apart.get(parameter)


def moments_folder(folder: Path, prefix: str) -> Path:
    """Return the folder, within a checkpoint, of moments written by ranks."""
    return folder / f"{prefix}-shards"


def write_named(folder: Path, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write named tensors into `PREFIX-0.safetensors` of an existing folder, or no file if there are none. Tensors are
    [n, d], [d] or scalars.
    """
    if named := list(tensors):
        write_tensors(named, folder / f"{prefix}-0.safetensors")


def read_named(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of all files `PREFIX-*.safetensors` of a folder, [n, d], [d] or scalar, on
    the CPU, by name.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob(f"{prefix}-*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found
