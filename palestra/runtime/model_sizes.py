"""How many bytes the models of a job take, in memory and on the disk, by the numbers of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from palestra.config import EmbeddedEngineConfig, JobConfig
from palestra.runtime.role_check import past_copies

TRAINED_BYTES = 16  # a parameter that is trained: weight, gradient and two moments in float32
SAVED_BYTES = 12  # a parameter in a checkpoint: weight and two moments in float32
VERSION_BYTES = 4  # a parameter in a past version on the disk
BYTES = {"bfloat16": 2, "float32": 4}  # a parameter that is only read
HERE, ENGINE, RANKS = "here", "engine", "ranks"  # parts of a job with models: its process, workers, the trainer's ranks


@dataclass(slots=True)
class Sizes:
    """Bytes of all models of a job.

    Attributes:
        trained: in the trainer's memory, of weights that are trained, with gradients and moments.
        sampled: in the memory of each inference worker, of the same weights.
        kept: of the copy of them that the job keeps for workers which are started later.
        shared: of weights that never change, which all policies share: by model, precision, device and the part of the
            job that has them; `HERE` if engine and trainer are in one process.
        saved: of one checkpoint of each policy.
        versions: on the disk, of the past versions of pools.
    """

    trained: int = 0
    sampled: int = 0
    kept: int = 0
    shared: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    saved: int = 0
    versions: int = 0

    @property
    def worker(self) -> int:
        """Return the bytes of all models in one inference worker that is no part of the job's process."""
        return self.sampled + self.shared_by(ENGINE)

    def shared_by(self, *parts: str) -> int:
        """Return the bytes of weights that never change in some parts of the job, of one worker's copy.

        Args:
            parts: `HERE`, `ENGINE` or `RANKS`.
        """
        return sum(size for (*_, part), size in self.shared.items() if part in parts)


def add_policy(sizes: Sizes, config: JobConfig, name: str, model: str, parameters: int, tower: int = 0) -> None:
    """Add what a policy takes: in the engine, in the trainer, and of networks beside it.

    Args:
        model: its weights; of an adapter, its base.
        tower: those of them that only see, and are trained only where the policy says so.
    """
    policy, adds = config.policies[name], _Shared(sizes, config)
    if config.kind != "training" or policy.frozen:
        adds.in_engine(model, parameters)
        if config.kind == "training" and any(config.teacher_of(other) == name for other in config.trained_policies):
            adds.in_trainer(model, parameters)
        return
    algorithm = config.algorithm_of(name)
    if algorithm.kl is not None and algorithm.kl.reference is None:
        adds.in_trainer(model, parameters)
    if policy.adapter is not None:  # one base for all; what is trained beside it is small, and so are past versions
        adds.in_engine(model, parameters)
        adds.in_trainer(model, parameters)
        return
    networks, copied = algorithm.trained_networks, 4 * algorithm.copied_networks
    fixed = 0 if policy.vision == "trained" else tower
    trained = parameters - fixed
    past = past_copies(config, name)
    each = BYTES[getattr(config.engine, "dtype", "bfloat16")]
    sizes.sampled += parameters * each * (1 + past)
    # Beside workers the job keeps one copy, which a worker that is started again reads.
    sizes.kept += parameters * each * config.engine.pooled
    sizes.trained += trained * (TRAINED_BYTES * networks + copied) + fixed * BYTES["float32"]
    sizes.saved += trained * (SAVED_BYTES * networks + copied) + fixed * BYTES["float32"]
    # One more than a pool has: the oldest is removed when the newest is whole.
    sizes.versions += parameters * VERSION_BYTES * (past + 1) if past else 0


def is_on_card(device: str) -> bool:
    """Return whether models with a configured device are on a graphics card of this machine.

    Args:
        device: `auto`, `cpu` or `cuda`.
    """
    import torch

    return device != "cpu" and torch.cuda.is_available()


def copies_of(config: JobConfig) -> int:
    """Return how many copies of its models a job samples from: one for each worker, none in servers that run already.

    What such servers take is no longer free, or is the memory of another machine.
    """
    return config.engine.started_count


def add_reference(sizes: Sizes, config: JobConfig, model: str, parameters: int) -> None:
    """Add a model that only a penalty reads; the arguments are those of `add_policy`."""
    _Shared(sizes, config).in_trainer(model, parameters)


class _Shared:
    """Adds weights that never change, each once."""

    def __init__(self, sizes: Sizes, config: JobConfig) -> None:
        self._shared = sizes.shared
        device, trainers = str(getattr(config.engine, "device", "auto")), config.trainer.device
        if not is_on_card("auto"):  # so that `auto` and `cpu` are one
            device = trainers = "cpu"
        is_here = isinstance(config.engine, EmbeddedEngineConfig) and copies_of(config) == 1
        self.in_engine = self._adder(
            str(getattr(config.engine, "dtype", "bfloat16")), device, HERE if is_here else ENGINE
        )
        ranks = RANKS if config.trainer.devices > 1 else HERE  # ranks share out one copy
        self.in_trainer = self._adder(config.trainer.dtype, trainers, ranks)

    def _adder(self, dtype: str, device: str, part: str) -> Callable[[str, int], None]:
        def add(model: str, parameters: int) -> None:
            self._shared[model, dtype, device, part] = parameters * BYTES[dtype]

        return add
