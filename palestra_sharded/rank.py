"""One rank of a sharded trainer: its part of every policy, and the requests that all ranks get in the same order."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from palestra.algorithms.base import ForwardOutput, ForwardOutputs
from palestra.algorithms.loss import LossSpec
from palestra.config import TrainerConfig
from palestra.errors import ConfigError
from palestra.models.causal_lm import CausalLM
from palestra.models.device import check_offload, device_of, precision_of, reproducible_products, return_freed_memory
from palestra.models.loading import LoadedModels, load_parted
from palestra.models.numerics import KERNELS, check_numerics, numerics
from palestra.models.shared_cores import set_threads
from palestra.pictures.blobs import Blobs, StoredPictures
from palestra.trainer.base import OptimParams, OptimReport, PolicySpec, StepReport
from palestra.trainer.metrics import SentSums
from palestra.trainer.torch_trainer import NetworkLoading
from palestra.types.calls import PolicyVersion
from palestra.types.records import TrainSample
from palestra_sharded.group import Exchange, Problem, RankGroup
from palestra_sharded.network import ShardedNetwork
from palestra_sharded.policy import RankPolicy

# The job ends the other ranks when one is lost. This limit is for ranks that answer the job, but not one another.
COLLECTIVE = timedelta(minutes=30)
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # with two: what is offloaded is added up on the CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """What a rank needs to know to begin.

    Attributes:
        number: rank, from 0.
        meeting: rendezvous file of ranks on one machine, which must not exist yet; None: each rank has its own bundle,
            and they meet at the first rank's address.
        threads: for arithmetic; None: as many as the bundle has cores.
        deterministic: whether equal requests must give equal bits.
        pictures: folder with the pictures of rows; None: no pictures.
        numerics: what the job's process computes with, which ranks must match; {}: not checked.
    """

    number: int
    meeting: Path | None
    config: TrainerConfig
    threads: int | None
    deterministic: bool
    pictures: Path | None = None
    numerics: Mapping[str, str] = field(default_factory=dict)


class Rank:
    """The methods of a rank's process, called by one thread, beginning with `begin` and `join`."""

    def begin(self, order: RankOrder) -> None:
        """Choose the device."""
        self._order, self._config = order, order.config
        self._policies: dict[str, RankPolicy] = {}
        self._exchange: Exchange | None
        self._pictures = None if order.pictures is None else StoredPictures(Blobs(order.pictures))
        set_threads(order.threads)
        if order.deterministic:
            reproducible_products()
            torch.use_deterministic_algorithms(True)
        if order.numerics:
            here = numerics(KERNELS in order.numerics)
            check_numerics(order.numerics, here, "the job's other processes compute")
        self._device = device_of(self._config.device, "trainer.device")
        if self._device.type == "cuda":
            index = 0 if order.meeting is None else order.number  # in a bundle a rank sees only its own device
            if index >= torch.cuda.device_count():
                raise ConfigError(
                    f"trainer.devices is {self._config.devices}, and torch sees {torch.cuda.device_count()} CUDA "
                    "devices here; lower it"
                )
            self._device = torch.device("cuda", index)
            torch.cuda.set_device(self._device)
        check_offload(self._config, self._device)

    def listen(self, address: str) -> int:
        """Open the rendezvous port of several machines, and return it; it listens only at the cluster's address."""
        listener = socket.create_server((address, 0))
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            port,
            self._config.devices,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def join(self, at: tuple[str, int] | None) -> None:
        """Connect the ranks. `at` is where the first one listens; None: all ranks are on one machine."""
        count = self._config.devices
        store = self._meeting_point(at)
        dist.init_process_group(
            _BACKENDS[self._device.type], store=store, rank=self._order.number, world_size=count, timeout=COLLECTIVE
        )
        self._mesh: DeviceMesh = init_device_mesh(self._device.type, (count,))
        self._group = RankGroup(self._device)
        self._one_machine, self._exchange = False, None
        if self._order.meeting is not None:  # several machines may see the same files too, and yet share no memory
            folder = self._order.meeting.parent
            self._one_machine = self._group.share(folder)
            if self._one_machine and self._device.type == "cpu":
                self._exchange = Exchange(folder)

    def _meeting_point(self, at: tuple[str, int] | None) -> Store:
        if at is None:
            return FileStore(str(self._order.meeting), self._config.devices)
        if self._order.number == 0:
            return self._store
        # So that this rank says why before the job's time is over; a TCPStore tries longer than its timeout.
        seconds = self._config.stuck_seconds * 0.75
        try:
            socket.create_connection(at, timeout=seconds).close()
        except OSError as error:
            raise ConnectionError(
                f"{socket.gethostname()} can't reach rank 0 at {at[0]}:{at[1]} within {seconds:.0f} s ({error}); look "
                "at the network between these machines"
            ) from error
        return TCPStore(*at, self._config.devices, is_master=False)

    def create(self, policy: str, spec: PolicySpec) -> None:
        """Load a policy, and keep this rank's shard; see `Trainer.create`."""

        def loading() -> NetworkLoading:  # one for each network: sharing out a model takes its whole weights away
            return NetworkLoading(
                LoadedModels(load_parted, pictures=self._pictures),
                precision_of(self._config.dtype, self._device),
                self._device,
            )

        problem: Exception | None = None
        beside: dict[ForwardOutput, CausalLM] = {}
        try:
            model, tokenizer = loading().trained(spec, spec.seed)
            for one in (replace(spec, teacher=None), replace(spec, reference=None)):
                beside |= loading().frozen(one, model, tokenizer)
            if self._config.activation_checkpointing:
                model.recompute_blocks()
        except Exception as error:  # noqa: BLE001 - raised when all ranks have come here
            problem = error
        self._group.check(problem)
        frozen = {name: self._network(other) for name, other in beside.items()}
        self._policies[policy] = RankPolicy(self._network(model), frozen, tokenizer, self._config, self._group)
        return_freed_memory()

    def _network(self, model: CausalLM) -> ShardedNetwork:
        """Share out a model, and read this rank's part of it if that is still in its files."""
        model.compute_in(precision_of(self._config.dtype, self._device))
        network, problem = self._shared_out(model), Problem()
        problem.catch(network.read)
        self._group.check(problem.error)
        if model.unread is not None:
            # Between layers that are gathered malloc leaves holes, of as much again as a rank's part of the weights.
            hooks = [block.register_forward_hook(lambda *_: return_freed_memory()) for block in model.blocks]
            with torch.no_grad():
                network.compute(model.try_out)
            for hook in hooks:
                hook.remove()
        return network

    def _shared_out(self, model: CausalLM) -> ShardedNetwork:
        config = self._config
        return ShardedNetwork(
            model, self._mesh, config.cpu_offload, precision_of(config.dtype, self._device), self._exchange
        )

    def remove(self, policy: str) -> None:
        """Forget a policy."""
        self._policies.pop(policy).close()

    def forward(self, policy: str, batch: Sequence[TrainSample], outputs: Collection[ForwardOutput]) -> ForwardOutputs:
        """Return numbers of this rank's rows; see `Trainer.forward`."""
        mine = self._policies[policy]
        mine.check_outputs(outputs)
        return mine.outputs(batch, outputs)

    def gradient(
        self, policy: str, version: PolicyVersion, batch: Sequence[TrainSample], loss: LossSpec, logprobs: bool
    ) -> tuple[StepReport, SentSums]:
        """Add the gradient of all ranks' rows; see `RankPolicy.add_gradient`."""
        mine = self._policies[policy]
        mine.version = version
        return mine.add_gradient(batch, loss, logprobs)

    def step(self, policy: str, params: OptimParams) -> OptimReport:
        """Apply the gradient of all ranks to this rank's part of the weights."""
        return self._policies[policy].optimizer.step(params)

    def untrainable(self, policy: str, batch: Sequence[TrainSample]) -> dict[str, str]:
        """Return episodes that cannot be trained. Only the first rank is called. See `Trainer.untrainable`."""
        return self._policies[policy].untrainable(batch)

    def choices(self, policy: str, grammar: str, max_tokens: int, most: int) -> tuple[tuple[int, ...], ...]:
        """Return every reply under a grammar. Only the first rank is called. See `Trainer.choices`."""
        return self._policies[policy].choices(grammar, max_tokens, most)

    def fill(self, policy: str, folder: Path, moments: bool) -> None:
        """Write a checkpoint's files into a folder; see `RankPolicy.fill`."""
        self._policies[policy].fill(folder, moments)

    def read(self, policy: str, folder: Path) -> None:
        """Take over a checkpoint; see `RankPolicy.read`."""
        self._policies[policy].read(folder)

    def publish(self, policy: str, path: Path, dtype: str) -> None:
        """Write the weights for engines; see `RankPolicy.publish` and `RankPolicy.publish_parts`."""
        mine = self._policies[policy]
        publish = mine.publish_parts if self._one_machine else mine.publish
        publish(path, getattr(torch, dtype))

    def peak_bytes(self) -> int:
        """Return the peak memory of this rank's process.

        `getrusage` is wrong here: its figure survives `exec`, so a small process started by a large one reports the
        large one's peak.
        """
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
