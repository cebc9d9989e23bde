"""What Palestra asks of a kind of engine. The pool, the wiring, the control plane and the checks know no kind.

A kind is one folder with a section of the configuration and an `EngineDriver`, which an entry point of the group
`palestra.engines` names: `palestra/engine/<kind>/` here, or any other package.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from palestra.config import JobConfig, PooledEngineConfig
from palestra.config.engine_kinds import drivers
from palestra.errors import EngineFailure
from palestra.threads import in_thread

if TYPE_CHECKING:
    from palestra.engine.base import Engine
    from palestra.engine.cards import CardTurns
    from palestra.engine.pool.options import CheckRoom, StartWorker
    from palestra.engine.pool.wanted import KeptWeights
    from palestra.engine.pool.worker import StartedWorker
    from palestra.grammars.pool import Grammars
    from palestra.models.device import DeviceName
    from palestra.models.loading import LoadedModels
    from palestra.models.weights import WeightSource
    from palestra.pictures.stored import StoredPictures
    from palestra.renderers import Renderer

    Keep = Callable[[str, WeightSource], Awaitable[KeptWeights]]

Settings = TypeVar("Settings", bound=PooledEngineConfig)
PREFIX_TOKENS = 32768  # of each policy whose worker is remembered, where the engine does not say what it keeps
START_SECONDS = 900.0  # to load the models


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """A job, as drivers get it.

    Attributes:
        config: the job. In the process of a worker, `config.engine` has the settings of this worker alone.
        weights: folders to load models from, instead of the policies' `model`, by the policy's name.
        pictures: where the images of prompts are found; None: models that read images are not shown any.
        trainer_is_here: whether the trainer shares the GPUs of this process.
        worker: number of the worker that is loaded, among those of the job.
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
        """Return the models of this process, which an engine and a trainer in it share."""
        from palestra.models.loading import LoadedModels

        return LoadedModels(pictures=self.pictures)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledPolicy:
    """What sessions have to know of a policy that an engine samples from.

    Attributes:
        renderer: of the model's chat format.
        grammars: of the model's tokens.
        vocab_size: number of tokens, V.
        max_context: most tokens of prompt and reply together.
    """

    renderer: Renderer
    grammars: Grammars
    vocab_size: int
    max_context: int


class SampledModel(NamedTuple):
    """What a job has to know of a model that its workers have loaded; see `SampledPolicy`."""

    vocab_size: int
    max_context: int


class LoadedEngine(NamedTuple):
    """An engine of this process, and the policies by name."""

    engine: Engine
    policies: Mapping[str, SampledPolicy]
    check: Callable[[], Awaitable[None]] | None = None  # raises PalestraError if the engine can't be used


class Computes(NamedTuple):
    """With what processes of a job compute the models of an engine, as configured."""

    device: DeviceName
    dtype: str
    threads: int | None
    cache_gib: float | None  # of each worker, for keys and values


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """What starts the workers of one kind.

    Attributes:
        start: starts a worker, by its number among those of its kind.
        count: at the start.
        most: that there may be; None: any number.
        policies: returns what sessions have to know of the policies, by name, once a worker has started.
        check_room: see `InferenceManager`.
        prefix_tokens: see `PoolOptions`.
        start_seconds: see `PoolOptions`.
    """

    start: StartWorker
    count: int
    most: int | None
    policies: Callable[[], Mapping[str, SampledPolicy]]
    check_room: CheckRoom | None = None
    prefix_tokens: int = PREFIX_TOKENS
    start_seconds: float = START_SECONDS


class HostedWorkers(Protocol):
    """Workers as processes, each of which has what `EngineDriver.load` returns."""

    async def start(self, number: int) -> StartedWorker:
        """Start a worker, and return when it has loaded its models; see `StartWorker`."""
        ...

    @property
    def models(self) -> Mapping[str, SampledModel]:
        """Return the models of the newest worker, by policy; all workers have the same."""
        ...


class WorkerHost(Protocol):
    """Starts processes for inference workers.

    Attributes:
        in_bundles: whether each has a bundle of its own, perhaps on another machine, and all of that bundle.
    """

    in_bundles: bool

    def processes(self, job: EngineJob, cards: CardTurns | None = None) -> HostedWorkers:
        """Return what starts workers that load the engine of a job.

        Args:
            job: its `config.engine` has the settings of each worker.
            cards: GPUs of each; None: those that it finds itself.
        """
        ...


class EngineDriver(Generic[Settings]):
    """One kind of engine. `section` and `load` are all that a kind needs that computes in a process of the job.

    Drivers are made without arguments and have no state. Their module is imported to check a configuration, so it
    imports torch and the like only inside of methods.
    """

    section: type[Settings]

    # Before the start

    def check(self, job: JobConfig, key: str, table: Settings) -> Iterator[tuple[str, str]]:
        """Yield what makes the engine impossible on this machine: the key to change, and a sentence.

        It may read files and ask servers; it starts and writes nothing.

        Args:
            key: of the table, such as `engine`.
        """
        yield from ()

    def check_models(self, job: JobConfig, table: Settings) -> Iterator[tuple[str, str]]:
        """Yield models that the engine can't have and would refuse after minutes: the key to change, and a sentence."""
        yield from ()

    def beginning(self, job: JobConfig, table: Settings) -> str | None:
        """Return what a job does before it listens, in a few words, where that takes long; None: it loads models."""
        return None

    # Resources

    def computes(self, table: Settings) -> Computes | None:
        """Return with what processes of the job compute the models; None: other programs do, or there are none."""
        return None

    def process_count(self, table: Settings, policies: int) -> int:
        """Return how many processes that compute are started at first."""
        return table.started_count

    def uses_cards(self, table: Settings) -> bool:
        """Return whether workers that are started on this machine compute on its GPUs."""
        from palestra.models.device import device_of

        computes = self.computes(table)
        return computes is not None and device_of(computes.device, "engine.device").type == "cuda"

    # The start

    def load(self, job: EngineJob, table: Settings) -> LoadedEngine:
        """Load the models of all policies, and return an engine of this process. Blocks until it can sample.

        Raises:
            ModelError: weights are missing, or the architecture is not supported.
            ConfigError: a setting does not fit a model or this machine.
            EngineFailure: another attempt may succeed.
        """
        raise NotImplementedError

    def workers(self, job: EngineJob, table: Settings, host: WorkerHost, others: int = 0) -> Workers:
        """Return what starts the workers of a pool: by default, processes that `load` an engine each. Blocks a moment.

        Args:
            others: processes of the engine that compute on this machine in addition to these workers.

        Raises:
            ConfigError: they can't be started on this machine.
        """
        processes = host.processes(job.with_engine(table.model_copy(update={"replicas": 1})))
        return Workers(
            start=processes.start,
            count=table.worker_count,
            most=None,
            policies=lambda: self.policies(job, processes.models),
        )

    def policies(self, job: EngineJob, models: Mapping[str, SampledModel]) -> dict[str, SampledPolicy]:
        """Return what sessions have to know of policies whose models workers have loaded, by name."""
        if not self.section.has_model:
            return byte_policies(job.config)
        from palestra.grammars.pool import Grammars
        from palestra.grammars.vocabulary import vocabulary_of
        from palestra.models.causal_lm import load_tokenizer
        from palestra.models.loading import picture_tokens
        from palestra.renderers import select_renderer

        found = {}
        for name, (vocab_size, max_context) in models.items():
            tokenizer = load_tokenizer(job.model_of(name))
            shown = None if job.pictures is None else picture_tokens(job.model_of(name), tokenizer, job.pictures)
            found[name] = SampledPolicy(
                renderer=select_renderer(tokenizer, job.config.rollout.dropped_reasoning == "keep", shown),
                grammars=Grammars(vocabulary_of(tokenizer, vocab_size)),
                vocab_size=vocab_size,
                max_context=max_context,
            )
        return found

    # Weights

    def keeper(self, table: Settings, folder: Path | None) -> Keep:
        """Return what keeps new weights until all workers of a pool have read them.

        Args:
            folder: that other machines see, too; None: all workers are on this machine.
        """
        from palestra.models.kept_weights import KeptSource, WeightKeeper
        from palestra.models.saved_weights import SavedWeights

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
