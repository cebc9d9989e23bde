"""The interface of engine kinds. Pool, wiring, control plane and checks do not depend on any kind.

A kind is a folder with a section of the configuration and an `EngineDriver`, named by an entry point of the group
`palestra.engines`: `palestra/engine/<kind>/` here, or any other package.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from palestra.config import JobConfig, PooledEngineConfig
from palestra.config.engine import drivers
from palestra.errors import EngineFailure
from palestra.threads import in_thread

if TYPE_CHECKING:
    from palestra.engine.base import Engine
    from palestra.engine.cards import CardTurns
    from palestra.engine.pool.options import CheckCapacity, StartWorker
    from palestra.engine.pool.state import KeptWeights
    from palestra.engine.pool.worker import StartedWorker
    from palestra.grammars.pool import Grammars
    from palestra.models.device import DeviceName
    from palestra.models.loading import LoadedModels
    from palestra.models.weights import WeightSource
    from palestra.pictures.blobs import StoredPictures
    from palestra.renderers import Renderer

    Keep = Callable[[str, WeightSource], Awaitable[KeptWeights]]

Settings = TypeVar("Settings", bound=PooledEngineConfig)
START_SECONDS = 900.0  # to load the models


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """A job, as drivers get it.

    Attributes:
        config: in a worker's process, `config.engine` has this worker's settings.
        weights: folders that replace the policies' `model`, by policy.
        pictures: source of the prompts' images; None: vision-language models get no images.
        trainer_is_here: whether the trainer shares this process's GPUs.
        worker: number of the loaded worker, among those of the job.
    """

    config: JobConfig
    weights: Mapping[str, str] = field(default_factory=dict)
    pictures: StoredPictures | None = None
    trainer_is_here: bool = True
    worker: int = 0

    def model_of(self, policy: str) -> str:
        """Return the name or the folder of a policy's model."""
        return self.weights.get(policy, self.config.policies[policy].model)

    def with_engine(self, table: PooledEngineConfig) -> EngineJob:
        """Return the job with other settings of the engine."""
        return replace(self, config=self.config.model_copy(update={"engine": table}))

    @cached_property
    def models(self) -> LoadedModels:
        """Return this process's models, shared by its engine and trainer."""
        from palestra.models.loading import LoadedModels

        return LoadedModels(pictures=self.pictures)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledPolicy:
    """What sessions need to know about a sampled policy.

    Attributes:
        max_context: largest number of tokens in prompt and reply together.
    """

    renderer: Renderer
    grammars: Grammars
    vocab_size: int
    max_context: int


class SampledModel(NamedTuple):
    """What a job needs to know about a model loaded by its workers; see `SampledPolicy`."""

    vocab_size: int
    max_context: int


class LoadedEngine(NamedTuple):
    """An engine of this process, and its policies by name."""

    engine: Engine
    policies: Mapping[str, SampledPolicy]
    check: Callable[[], Awaitable[None]] | None = None  # raises PalestraError if the engine can't be used


class Computes(NamedTuple):
    """How processes of a job compute an engine's models, as configured."""

    device: DeviceName
    dtype: str
    threads: int | None
    cache_gib: float | None  # of each worker, for keys and values


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """Starts the workers of one kind.

    Attributes:
        start: starts a worker, by its number among those of its kind.
        most: limit; None: any number.
        policies: returns what sessions need to know about the policies, by name, after the first start.
    """

    start: StartWorker
    count: int
    most: int | None
    policies: Callable[[], Mapping[str, SampledPolicy]]
    check_capacity: CheckCapacity | None = None
    start_seconds: float = START_SECONDS


class HostedWorkers(Protocol):
    """Workers as processes, each with the engine that `EngineDriver.load` returns."""

    async def start(self, number: int) -> StartedWorker:
        """Start a worker, and return when it has loaded its models; see `StartWorker`."""
        ...

    @property
    def models(self) -> Mapping[str, SampledModel]:
        """Return the models of the newest worker, by policy; all workers have the same ones."""
        ...


class WorkerHost(Protocol):
    """Starts processes for inference workers.

    Attributes:
        in_bundles: whether each worker has a whole bundle of its own, perhaps on another machine.
    """

    in_bundles: bool

    def processes(self, job: EngineJob, cards: CardTurns | None = None) -> HostedWorkers:
        """Return what starts workers that load the engine of a job. `cards` are the GPUs of each; None: each finds its
        own.
        """
        ...


class EngineDriver(Generic[Settings]):
    """One kind of engine. A kind that computes in the job's processes only needs `section` and `load`.

    Drivers are created without arguments and have no state. Their module is imported to check a configuration, so it
    imports torch and similar packages only inside methods.
    """

    section: type[Settings]

    # Before the start

    def check(self, job: JobConfig, key: str, table: Settings) -> Iterator[tuple[str, str]]:
        """Yield what makes the engine impossible on this machine: the key to change, and a sentence.

        It may read files and ask servers, but must not start or write anything. `key` is the table's, such as `engine`.
        """
        yield from ()

    def check_models(self, job: JobConfig, table: Settings) -> Iterator[tuple[str, str]]:
        """Yield models that the engine would refuse after minutes: the key to change, and a sentence."""
        yield from ()

    def beginning(self, job: JobConfig, table: Settings) -> str | None:
        """Describe what a job does before it listens, if that takes long; None: it loads models."""
        return None

    # Resources

    def computes(self, table: Settings) -> Computes | None:
        """Return how processes of the job compute the models; None: other programs do, or there is no model."""
        return None

    def process_count(self, table: Settings, policies: int) -> int:
        """Return how many computing processes are started at first."""
        return table.started_count

    def uses_cards(self, table: Settings) -> bool:
        """Return whether workers started on this machine use its GPUs."""
        from palestra.models.device import device_of

        computes = self.computes(table)
        return computes is not None and device_of(computes.device, "engine.device").type == "cuda"

    # The start

    def load(self, job: EngineJob, table: Settings) -> LoadedEngine:
        """Load all policies' models, and return an engine of this process. Blocks until it can sample."""
        raise NotImplementedError

    def workers(self, job: EngineJob, table: Settings, host: WorkerHost, others: int = 0) -> Workers:
        """Return what starts a pool's workers: by default, processes that `load` an engine each. Blocks briefly.
        `others` counts other engine processes that compute on this machine.
        """
        processes = host.processes(job.with_engine(table.model_copy(update={"replicas": 1})))
        return Workers(
            start=processes.start,
            count=table.worker_count,
            most=None,
            policies=lambda: self.policies(job, processes.models),
        )

    def policies(self, job: EngineJob, models: Mapping[str, SampledModel]) -> dict[str, SampledPolicy]:
        """Return what sessions need to know about policies whose models workers have loaded, by name."""
        if not self.section.has_model:
            return byte_policies(job.config)
        from palestra.grammars.matcher import vocabulary_of
        from palestra.grammars.pool import Grammars
        from palestra.models.causal_lm import load_tokenizer
        from palestra.models.loading import picture_tokens
        from palestra.renderers import select_renderer

        found = {}
        for name, (vocab_size, max_context) in models.items():
            tokenizer = load_tokenizer(job.model_of(name))
            shown = None if job.pictures is None else picture_tokens(job.model_of(name), tokenizer, job.pictures)
            found[name] = SampledPolicy(
                renderer=select_renderer(tokenizer, job.config.rollout.changed_history == "keep", shown),
                grammars=Grammars(vocabulary_of(tokenizer, vocab_size)),
                vocab_size=vocab_size,
                max_context=max_context,
            )
        return found

    # Weights

    def keeper(self, table: Settings, folder: Path | None) -> Keep:
        """Return what keeps new weights until all workers of a pool have read them. `folder` is shared with other
        machines; None: all workers are on this machine.
        """
        from palestra.models.kept_weights import KeptSource, WeightKeeper
        from palestra.models.weights import SavedWeights

        keeper = WeightKeeper(table.precision, folder)

        async def keep(policy: str, source: WeightSource) -> KeptWeights:
            if not table.has_model:  # no worker reads them
                return KeptSource(SavedWeights(Path("/dev/null")))
            try:
                return await in_thread(lambda: keeper.keep(source))
            except OSError as error:
                raise EngineFailure(
                    f"the weights of {policy} can't be written for the engine's workers: {error}"
                ) from error

        return keep


def byte_policies(config: JobConfig) -> dict[str, SampledPolicy]:
    """Return policies without a model, whose tokens are bytes."""
    from palestra.grammars.pool import Grammars
    from palestra.renderers import ByteTokenizer, ChatMLRenderer

    tokenizer = ByteTokenizer()
    return {
        name: SampledPolicy(
            renderer=ChatMLRenderer(tokenizer),
            grammars=Grammars(),
            vocab_size=tokenizer.vocab_size,
            max_context=policy.max_context,
        )
        for name, policy in config.policies.items()
    }


def driver_of(table: PooledEngineConfig) -> EngineDriver[Any]:
    """Return the driver of a table's kind."""
    driver: EngineDriver[Any] = drivers()[table.kind]
    return driver
