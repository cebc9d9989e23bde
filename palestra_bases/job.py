"""One job at a base server: its policies, under names that no other job can say, and its calls."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.engine.base import EngineRequest
from palestra.engine.remote_weights import RemoteWeights
from palestra.errors import (
    ConfigError,
    EngineFailure,
    Forbidden,
    InvalidRequest,
    NotFound,
    PalestraError,
    TooManyRequests,
)
from palestra.models.weights import SavedWeights, WeightSource
from palestra.process.stub import Method, Server, method_of
from palestra.threads import in_thread
from palestra.trainer.base import PolicySpec
from palestra.types.calls import PolicyVersion, SampledTokens
from palestra.types.records import TrainSample
from palestra_bases.base import BaseDescription, SamplerSpec
from palestra_bases.protocol import PARTS, MessageSocket, event

if TYPE_CHECKING:
    from palestra_bases.serving import LoadedBase

log = logging.getLogger("palestra.base")
MOST_CALLS = 4096  # of a job that are executed at the same time
MOST_NAME = 256  # characters of the name of a job or a policy


class HostedJob:
    """Executes the calls of one job over its connection."""

    def __init__(self, base: LoadedBase, tenant: str, name: str, channel: MessageSocket, most_policies: int) -> None:
        self.tenant, self.name, self.channel = tenant, name, channel
        self._base, self._most = base, most_policies
        self._engine, self._trainer = base.parts_of(tenant)
        self._sampled: set[str] = set()
        self._trained: set[str] = set()
        self._said: dict[str, PolicyVersion] = {}  # what the job knows of the trainer's versions
        self._sources: dict[str, tuple[int, WeightSource]] = {}  # the newest of each policy, with its number
        self._making = asyncio.Lock()  # policies one after another, so that they are counted
        targets = {"base": self, "engine": _JobEngine(self), "trainer": _JobTrainer(self)}
        parts = {name: (protocol, targets[name]) for name, protocol in PARTS.items()}
        self._server = Server(channel, parts, self._sent, MOST_CALLS)
        self._serving = asyncio.create_task(self._serve())

    @property
    def policies(self) -> int:
        """Return the number of policies; one that is trained and sampled counts once."""
        return len(self._sampled | self._trained)

    async def _sent(self, error: Exception) -> Exception:
        if isinstance(error, PalestraError):
            return error
        log.error("a call of job %s of %s failed", self.name, self.tenant, exc_info=error)
        return EngineFailure(f"the base server failed: {type(error).__name__}: {error}; its log has more")

    def say_version(self, policy: str) -> None:
        """Tell the job which version the trainer has of a policy, where it has changed."""
        version = self._trainer.version(self._named(policy))
        if self._said.get(policy) != version:
            self._said[policy] = version
            self.channel.send(event("version", (policy, version)))

    async def ended(self) -> None:
        """Wait until all is freed after the connection's end. Raises InvalidRequest if the job sent no message."""
        await asyncio.shield(self._serving)

    async def _serve(self) -> None:
        try:
            await self._server.run()
        finally:
            self.channel.close()
            await self._free()

    async def _free(self) -> None:
        for policy in sorted(self._sampled):
            await self._engine.remove_policy(self._named(policy))
        for policy in sorted(self._trained):
            with contextlib.suppress(NotFound):  # removed with its tenant
                await self._trainer.remove(self._named(policy))
        self._sampled, self._trained, self._sources = set(), set(), {}

    # BaseCalls

    async def describe(self) -> BaseDescription:
        """Return what a job has to know of the model; see `BaseCalls.describe`."""
        return self._base.description

    async def sample(self, policy: str, spec: SamplerSpec) -> None:
        """Give the engine one of the job's policies; see `BaseCalls.sample`."""
        await in_thread(lambda: self._check_folder(spec.model))
        async with self._making:
            self._check_capacity(policy, self._sampled)
            await self._base.sample(self._named(policy), spec)
            self._sampled.add(policy)

    # Rights

    def _named(self, policy: str) -> str:
        return f"{self.tenant}/{self.name}/{policy}"

    def _full(self, policy: str, known: set[str]) -> str:
        if policy not in known:
            raise NotFound(f"job {self.name} has no policy {policy!r} at this base server")
        return self._named(policy)

    def _check_capacity(self, policy: str, known: set[str]) -> None:
        """Refuse a policy that the job has, one more than it may have, or a name with a slash."""
        check_plain_name(policy, "a policy")
        if policy in known:
            raise ConfigError(f"job {self.name} has a policy {policy!r} already")
        if policy not in self._sampled | self._trained and self.policies >= self._most:
            raise TooManyRequests(
                f"job {self.name} has {self.policies} policies at this base server, which is the limit of a job; past "
                "versions count, so a smaller pool frees some"
            )

    def _check_folder(self, model: str | None) -> None:
        """Refuse a model in a folder that is not the tenant's; the base itself may be in any."""
        # A relative path would be one from where the server runs; names of a hub are no paths here.
        if model is not None:
            with _no_path_refused():
                if "\0" in model:
                    raise ValueError("NUL")
                is_path = not self._base.is_base(model) and (Path(model).is_absolute() or Path(model).exists())
            if is_path:
                self._allowed(Path(model))

    def _check_spec(self, spec: PolicySpec) -> None:
        for model in (spec.model, spec.reference, spec.teacher):
            self._check_folder(model)
        self._base.check(spec)

    def _check_rows(self, batch: Sequence[TrainSample], any_ids: bool) -> None:
        """Raise an error for rows with columns of wrong lengths, or with unknown tokens.

        On a GPU such an index would end the process, and with it other jobs.
        """
        for number, row in enumerate(batch):
            shape = (len(row.ids),) if row.ids.ndim == 1 else None
            columns = {name: getattr(row, name) for name in _COLUMNS}
            wrong = [name for name, column in columns.items() if column is not None and column.shape != shape]
            if wrong or row.versions.shape != (len(row.ids), 2):
                raise InvalidRequest(
                    f"row {number}: {(wrong or ['versions'])[0]} does not have one entry for each of its ids", "batch"
                )
            if row.media:
                raise InvalidRequest(f"row {number} has images, and the models of base servers read text only", "batch")
            if not all(0 <= span.start <= span.start + span.tokens <= len(row.ids) for span in row.grammars):
                raise InvalidRequest(f"row {number} has a grammar outside of its ids", "batch")
            most = self._base.description.vocab_size
            for ids in () if any_ids else (row.ids, row.targets):
                if ids is not None and ids.size and not 0 <= ids.min() <= ids.max() < most:
                    raise InvalidRequest(f"row {number} has tokens that the model does not have", "batch")

    def _allowed(self, path: Path) -> Path:
        """Return a folder without symbolic links, also below it, that lead out of the tenant's folder."""
        root = self._base.folder_of(self.tenant)

        def check(one: Path) -> None:
            if not one.is_relative_to(root):
                raise Forbidden(
                    f"{one} is not in {root}, where this base server reads and writes files of {self.tenant}"
                )

        with _no_path_refused():
            check(found := path.resolve())
            for link in _links(found):
                check(link.resolve())
        return found

    def _writable(self, path: Path) -> Path:
        """Return a folder that a job may have replaced; see `_allowed`."""
        found, own = self._allowed(path), self._base.own_folder()
        if found == self._base.folder_of(self.tenant):
            raise Forbidden(f"{path} has all files of {self.tenant}; a job has a folder in it")
        if found.is_relative_to(own) or own.is_relative_to(found):
            raise Forbidden(f"{path} and {own}, where this base server has its keys, overlap; jobs have other folders")
        return found

    def _source(self, sent: WeightSource) -> WeightSource:
        if isinstance(sent, SavedWeights):
            return SavedWeights(self._allowed(sent.folder))
        if not isinstance(sent, RemoteWeights):
            raise InvalidRequest("weights are in a folder, or the trainer has them", "source")
        number, source = self._sources.get(sent.policy, (0, None))
        if source is None or number != sent.number:
            raise InvalidRequest(
                f"the trainer has newer weights of {sent.policy!r} than those that were named", "source"
            )
        return source


class _Part:
    """Engine or trainer as one job calls it: names, folders, rows and weights in arguments are this job's own.

    A method is called with what the job has sent if its first parameter is `policy`; other ones are written here.
    """

    def __init__(self, job: HostedJob, part: str, target: Any, known: Callable[[], set[str]]) -> None:
        self._job, self._protocol, self._target, self._known = job, PARTS[part], target, known

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = method_of(self._protocol, name)
        if next(iter(method.hints), None) != "policy" or not inspect.iscoroutinefunction(getattr(self._protocol, name)):
            raise InvalidRequest(f"a job can't call {name!r}")
        return partial(self._call, name, method)

    async def _call(self, name: str, method: Method, policy: str, *given: Any) -> Any:
        full = self._job._full(policy, self._known())
        kinds = list(method.hints.items())[1:]
        arguments = [await self._own(name, *kind, value) for kind, value in zip(kinds, given, strict=True)]
        return await getattr(self._target, name)(full, *arguments)

    async def _own(self, name: str, parameter: str, kind: Any, value: Any) -> Any:
        if kind == Sequence[TrainSample]:
            self._job._check_rows(value, any_ids=name == "untrainable")
        elif kind == Mapping[str, Any]:
            _check_state(value)
        elif isinstance(value, Path):
            return await in_thread(lambda: self._job._writable(value))
        elif isinstance(value, WeightSource):
            return await in_thread(lambda: self._job._source(value))
        elif type(value) is int:
            _check_count(value, parameter)
        return value


class _JobEngine(_Part):
    def __init__(self, job: HostedJob) -> None:
        super().__init__(job, "engine", job._engine, lambda: job._sampled)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[SampledTokens, None]:
        full, base = self._job._full(request.policy, self._known()), self._job._base.description
        most = min(base.max_positions, base.max_context)
        if request.prompt.ids.size + request.sampling.max_tokens > most:  # the engine has reserved no memory for more
            raise InvalidRequest(f"prompt and reply have at most {most} tokens together", "max_tokens")
        async for piece in self._target.generate(replace(request, policy=full)):
            await self._job.channel.drain()
            yield piece

    async def add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightSource | None) -> None:
        job = self._job
        weights = None if source is None else await in_thread(lambda: job._source(source))
        async with job._making:
            full = job._full(like, job._sampled)
            if name not in job._sampled:
                job._check_capacity(name, job._sampled)
            await self._target.add_policy(job._named(name), full, version, weights)
            job._sampled.add(name)

    async def remove_policy(self, name: str) -> None:
        if name in self._known():
            self._known().discard(name)
            await self._target.remove_policy(self._job._named(name))


class _JobTrainer(_Part):
    def __init__(self, job: HostedJob) -> None:
        super().__init__(job, "trainer", job._trainer, lambda: job._trained)

    async def create(self, policy: str, spec: PolicySpec) -> None:
        job = self._job
        await in_thread(lambda: job._check_spec(spec))
        async with job._making:
            job._check_capacity(policy, job._trained)
            await self._target.create(job._named(policy), spec)
            job._trained.add(policy)
        job.say_version(policy)

    async def remove(self, policy: str) -> None:
        await self._target.remove(self._job._full(policy, self._known()))
        self._known().discard(policy)
        self._job._said.pop(policy, None)

    async def weights(self, policy: str) -> WeightSource:
        source, sources = await self._target.weights(self._job._full(policy, self._known())), self._job._sources
        number = sources[policy][0] + 1 if policy in sources else 1
        sources[policy] = (number, source)
        return RemoteWeights(policy, number)

    async def begin_incarnation(self, policy: str, incarnation: int) -> None:
        _check_count(incarnation, "incarnation")
        self._target.begin_incarnation(self._job._full(policy, self._known()), incarnation)

    async def _call(self, name: str, method: Method, policy: str, *given: Any) -> Any:
        result = await super()._call(name, method, policy, *given)
        self._job.say_version(policy)
        return result


def _check_state(state: Mapping[str, Any]) -> None:
    if "step" not in state:
        raise InvalidRequest("a checkpoint's state has a step", "state")
    _check_count(state["step"], "step")
    try:
        json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a checkpoint's state is no JSON: {error}", "state") from error


def check_plain_name(name: str, whose: str) -> None:
    """Raise ConfigError for a name that is ambiguous, or that would fill or garble a log."""
    if not name or "/" in name or len(name) > MOST_NAME or not name.isprintable():
        raise ConfigError(
            f"{whose} can't be called {name[:MOST_NAME]!r}: names have 1 to {MOST_NAME} printable characters, and no /"
        )


def _check_count(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidRequest(f"{name} is a number from 0 to {2**31 - 1}", name)


@contextlib.contextmanager
def _no_path_refused() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequest(f"a path can't be used: {type(error).__name__}") from error


def _links(folder: Path) -> Iterator[Path]:
    """Yield the symbolic links at any depth in a folder; links to folders are not followed."""
    for where, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(where, name)).is_symlink())


_COLUMNS = [
    field
    for field in TrainSample.__dataclass_fields__
    if field not in ("episode_id", "policy", "media", "versions", "grammars")
]
