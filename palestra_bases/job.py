"""One job at a base server: its policies, under names that no other job can say, and its calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from palestra.backend.frames import Frame, write_frame
from palestra.backend.typed import arguments_of, typed
from palestra.engine.base import EngineRequest
from palestra.errors import ConfigError, Forbidden, InvalidRequest, NotFound, PalestraError, TooManyRequests
from palestra.models.saved_weights import SavedWeights
from palestra.models.weights import WeightSource
from palestra.process.codec import SentError
from palestra.process.stub import Method, method_of
from palestra.threads import in_thread
from palestra.trainer.base import PolicySpec, Trainer
from palestra.types.calls import PolicyVersion, SampledTokens, TokenSequence
from palestra.types.records import TrainSample
from palestra_bases.base import SamplerSpec, SharedBase
from palestra_bases.weights import WeightsPlace

log = logging.getLogger("palestra.base")
# The methods of a trainer that are called with what the message has, under the policy's full name.
_OF_TRAINER = {"create", "forward", "forward_backward", "optim_step", "untrainable", "choices"}
_OF_TRAINER |= {"save", "save_weights", "load", "remove"}
_described = cache(Method.of)
MOST_NAME = 256  # characters of the name of a job or a policy


class HostedJob:
    """Executes the calls of one job's process."""

    def __init__(self, base: SharedBase, tenant: str, name: str, process: str, most_policies: int) -> None:
        """Begin without policies.

        Args:
            name: of the job, which the tenant's other jobs do not have.
            process: names the job's process; another process of the same job begins anew.
            most_policies: how many the job may have.
        """
        self.tenant, self.name, self.process = tenant, name, process
        self._base, self._most = base, most_policies
        self._engine, self._trainer = base.parts_of(tenant)
        self._sampled: set[str] = set()
        self._trained: set[str] = set()
        self._sources: dict[str, tuple[int, WeightSource]] = {}  # the newest of each policy, with its number
        self._answers: dict[int, asyncio.Task[bytes]] = {}
        self._making = asyncio.Lock()  # policies one after another, so that they are counted

    @property
    def policies(self) -> int:
        """Return how many policies the job has, those that are trained and sampled counted once."""
        return len(self._sampled | self._trained)

    def answer(self, number: int, frame: Frame) -> asyncio.Task[bytes]:
        """Execute a call once, and return the task whose result is the answer's message.

        Args:
            number: of the call in its process; a call that is sent again gets the first answer.
        """
        if number not in self._answers:
            self._answers[number] = asyncio.create_task(self._answer(number, frame))
        return self._answers[number]

    def forget_answers(self, oldest: int) -> None:
        """Forget the answers to calls before `oldest`, which have arrived; `close` waits for those that are made."""
        for done in [known for known, task in self._answers.items() if known < oldest and task.done()]:
            del self._answers[done]

    def keep_answers(self, waiting: Sequence[int]) -> None:
        """Forget all answers but those to some calls, and those that are still made."""
        self._answers = {number: task for number, task in self._answers.items() if number in waiting or not task.done()}

    async def _answer(self, number: int, frame: Frame) -> bytes:
        try:
            return write_frame({"id": number, **await self._call(frame)})
        except PalestraError as error:
            return write_frame({"id": number, "error": SentError.of(error)})
        except Exception as error:
            log.exception("a call of job %s of %s failed", self.name, self.tenant)
            failed = PalestraError(f"the base server failed: {type(error).__name__}: {error}; its log has more")
            return write_frame({"id": number, "error": SentError.of(failed)})

    async def generate(self, frame: Frame) -> AsyncGenerator[SampledTokens, None]:
        """Sample a reply; see `Engine.generate`."""
        request = typed(EngineRequest, frame.header.get("with"), frame.arrays, "request")
        full, base = self._full(request.policy, self._sampled), self._base.description
        most = min(base.max_positions, base.max_context)
        if request.prompt.ids.size + request.sampling.max_tokens > most:  # the engine has reserved no memory for more
            raise InvalidRequest(f"prompt and reply have at most {most} tokens together", "max_tokens")
        wanted = replace(request, policy=full)
        async for piece in self._engine.generate(wanted):
            yield piece

    async def close(self) -> None:
        """Free all policies, after the calls that have begun."""
        await asyncio.gather(*self._answers.values(), return_exceptions=True)
        for policy in sorted(self._sampled):
            await self._engine.remove_policy(self._named(policy))
        for policy in sorted(self._trained):
            with contextlib.suppress(NotFound):  # removed with its tenant
                await self._trainer.remove(self._named(policy))
        self._sampled, self._trained, self._sources, self._answers = set(), set(), {}, {}

    # Calls

    async def _call(self, frame: Frame) -> dict[str, Any]:
        """Return the result of a call, and the version that its policy has in the trainer."""
        do, given = frame.header.get("do"), frame.header.get("with")
        if not isinstance(do, str) or not isinstance(given, dict):
            raise InvalidRequest("a call has `do`, a text, and `with`, a table")
        kind, _, name = do.partition(".")
        if kind == "trainer" and name in _OF_TRAINER:
            return await self._train(name, given, frame)
        found = getattr(HostedJob, f"_do_{name}", None) if kind == "base" else None
        if found is None:
            raise InvalidRequest(f"there is no call {do!r}")
        return {"result": await found(self, **arguments_of(_described(found), given, frame.arrays))}

    async def _train(self, name: str, given: dict[str, Any], frame: Frame) -> dict[str, Any]:
        """Call a method of the trainer."""
        arguments = arguments_of(method_of(Trainer, name), given, frame.arrays)
        policy = arguments["policy"]
        if name == "create":
            spec = arguments["spec"]
            await in_thread(lambda: self._check_spec(spec))
            async with self._making:
                self._check_room(policy, self._trained)
                await self._trainer.create(self._named(policy), spec)
                self._trained.add(policy)
            return {"result": None, "version": self._trainer.version(self._named(policy))}
        arguments["policy"] = self._full(policy, self._trained)
        if "batch" in arguments:
            self._check_rows(arguments["batch"], any_ids=name == "untrainable")
        if "folder" in arguments:
            folder = arguments["folder"]
            arguments["folder"] = await in_thread(lambda: self._writable(folder))
        if (step := arguments.get("state", arguments).get("step")) is not None:
            _check_count(step, "step")
        elif name == "save":
            raise InvalidRequest("a checkpoint's state has a step", "state")
        result = await getattr(self._trainer, name)(**arguments)
        if name == "remove":
            self._trained.discard(policy)
            return {"result": None}
        return {"result": result, "version": self._trainer.version(self._named(policy))}

    async def _do_describe(self) -> Any:
        return self._base.description

    async def _do_sample(self, policy: str, spec: SamplerSpec) -> None:
        await in_thread(lambda: self._check_folder(spec.model))
        async with self._making:
            self._check_room(policy, self._sampled)
            await self._base.sample(self._named(policy), spec)
            self._sampled.add(policy)

    async def _do_weights(self, policy: str) -> int:
        source = await self._trainer.weights(self._full(policy, self._trained))
        number = self._sources[policy][0] + 1 if policy in self._sources else 1
        self._sources[policy] = (number, source)
        return number

    async def _do_begin_incarnation(self, policy: str, incarnation: int) -> None:
        _check_count(incarnation, "incarnation")
        self._trainer.begin_incarnation(self._full(policy, self._trained), incarnation)

    async def _do_sync_weights(self, policy: str, version: PolicyVersion, source: WeightsPlace) -> None:
        weights = await in_thread(lambda: self._source(source))
        await self._engine.sync_weights(self._full(policy, self._sampled), version, weights)

    async def _do_add_policy(self, name: str, like: str, version: PolicyVersion, source: WeightsPlace | None) -> None:
        weights = None if source is None else await in_thread(lambda: self._source(source))
        async with self._making:
            full = self._full(like, self._sampled)
            if name not in self._sampled:
                self._check_room(name, self._sampled)
            await self._engine.add_policy(self._named(name), full, version, weights)
            self._sampled.add(name)

    async def _do_remove_policy(self, name: str) -> None:
        if name in self._sampled:
            self._sampled.discard(name)
            await self._engine.remove_policy(self._named(name))

    async def _do_score(self, policy: str, prompt: TokenSequence) -> list[float]:
        return await self._engine.score(self._full(policy, self._sampled), prompt)

    # Rights

    def _named(self, policy: str) -> str:
        """Return the name that a policy of this job has in engine and trainer."""
        return f"{self.tenant}/{self.name}/{policy}"

    def _full(self, policy: str, known: set[str]) -> str:
        """Return the full name of a policy that the job has."""
        if policy not in known:
            raise NotFound(f"job {self.name} has no policy {policy!r} at this base server")
        return self._named(policy)

    def _check_room(self, policy: str, known: set[str]) -> None:
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
                is_path = not self._base.is_base(model) and (Path(model).is_absolute() or Path(model).exists())
            if is_path:
                self._allowed(Path(model))

    def _check_spec(self, spec: PolicySpec) -> None:
        """Refuse a policy that this base can't train, or that is read from files of others."""
        for model in (spec.model, spec.reference, spec.teacher):
            self._check_folder(model)
        self._base.check(spec)

    def _check_rows(self, batch: Sequence[TrainSample], any_ids: bool) -> None:
        """Refuse rows whose columns have other lengths, or tokens that the model does not have.

        On a GPU such an index would end the process, and the jobs of others with it.
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
        if own is not None and (found.is_relative_to(own) or own.is_relative_to(found)):
            raise Forbidden(f"{path} and {own}, where this base server has its keys, overlap; jobs have other folders")
        return found

    def _source(self, place: WeightsPlace) -> WeightSource:
        """Return the weights that a job has named."""
        if place.folder is not None:
            return SavedWeights(self._allowed(place.folder))
        number, source = self._sources.get(place.policy or "", (0, None))
        if source is None or number != place.number:
            raise InvalidRequest(
                f"the trainer has newer weights of {place.policy!r} than those that were named", "source"
            )
        return source


def check_plain_name(name: str, whose: str) -> None:
    """Refuse a name that could be read as two, or that fills or garbles a log.

    Raises:
        ConfigError: the name can't be used.
    """
    if not name or "/" in name or len(name) > MOST_NAME or not name.isprintable():
        raise ConfigError(
            f"{whose} can't be called {name[:MOST_NAME]!r}: names have 1 to {MOST_NAME} printable characters, and no /"
        )


def _check_count(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidRequest(f"{name} is a number from 0 to {2**31 - 1}", name)


@contextlib.contextmanager
def _no_path_refused() -> Iterator[None]:
    """Refuse what the system takes for no path: it is too long, or a link that leads to itself."""
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
