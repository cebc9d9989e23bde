"""The parts of a light job, whose engine and trainer are a base server's, and how it continues after a loss.

This module does not load torch: the tokenizer comes from the server as files, and grammars and weights stay there.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.config import DEFAULT_CONTEXT, JobConfig, PolicyConfig
from palestra.config.checks import PLACED
from palestra.engine.base import Engine
from palestra.errors import ConfigError
from palestra.grammars.matcher import vocabulary_of
from palestra.grammars.pool import Grammars
from palestra.models.numerics import check_numerics
from palestra.process.stub import remote_method
from palestra.renderers import select_renderer
from palestra.runtime.parts import Parts
from palestra.session import PolicyRuntime, PolicySet
from palestra.threads import in_thread
from palestra_bases.base import BaseDescription, SamplerSpec
from palestra_bases.link import Link
from palestra_bases.protocol import BaseCalls
from palestra_bases.remote import RemoteEngine, RemoteTrainer

KEY, KEY_FILE = "PALESTRA_BASE_KEY", "PALESTRA_BASE_KEY_FILE"


class SharedBaseConnection:
    """A job's connection to its base server; see `Renewable`."""

    event_of_loss = "base_lost"
    loss = "the connection to the base server was lost"

    def __init__(
        self,
        link: Link,
        engine: RemoteEngine,
        trainer: RemoteTrainer,
        samplers: Mapping[str, SamplerSpec],
        deterministic: bool,
    ) -> None:
        """Store how to begin again. `deterministic`: numbers have to be the same bit by bit after a restart."""
        self._link, self._engine, self._trainer, self._samplers = link, engine, trainer, samplers
        self._deterministic = deterministic
        self.numerics: dict[str, str] = {}

    async def describe(self) -> BaseDescription:
        """Return the server's description of its model."""
        found: BaseDescription = await remote_method(BaseCalls, "describe", self._link.remote, "base")()
        if self._deterministic:
            if not found.deterministic:
                raise ConfigError(
                    f"deterministic = true, and the base server at {self._link.address} is not; start it with "
                    "--deterministic"
                )
            if self.numerics:
                check_numerics(self.numerics, found.numerics, f"the base server at {self._link.address} computed")
        self.numerics = dict(found.numerics)
        return found

    @property
    def is_lost(self) -> bool:
        """Return whether the server has forgotten the job, so that all calls fail until `renew`."""
        return self._link.is_lost

    async def lost(self) -> None:
        """Wait until the server has forgotten the job."""
        await self._link.lost()

    async def renew(self) -> None:
        """Give the server the policies again.

        Calls that wait for the engine do so until `resume`.
        """
        self._trainer.forget()
        await self._link.renew()
        await self.describe()
        await self.sample()

    async def sample(self) -> None:
        """Make the server load the job's sampling weights; see `RemoteEngine.sample`."""
        for name, spec in self._samplers.items():
            await self._engine.sample(name, spec)


async def connect_base(config: JobConfig, weights: Mapping[str, str]) -> tuple[Parts, SharedBaseConnection]:
    """Connect to the base server that a job names, and return the parts of the job. `weights`: folders that replace the
    policies' `model`, by policy. Raises Unauthorized if the key is unknown.
    """
    assert config.base is not None
    if config.base == PLACED:
        raise ConfigError(
            f"policies.*.base is {PLACED!r}, for which a service chooses a base server; for a job of its own name the "
            "address that `palestra base` prints"
        )
    link = Link(config.base, base_key(), _job_id(config))
    engine, trainer = RemoteEngine(link), RemoteTrainer(link, config.checkpoint.keep)
    try:
        await link.renew()
        samplers = {
            name: SamplerSpec(
                model=weights.get(name, policy.model),
                adapter=policy.adapter if config.kind == "training" and not policy.frozen else None,
            )
            for name, policy in config.policies.items()
        }
        base = SharedBaseConnection(link, engine, trainer, samplers, config.deterministic)
        found = await base.describe()
        await base.sample()
        runtimes = await in_thread(lambda: _runtimes(config, engine.engine, found))
    except BaseException:
        await engine.close()
        raise
    parts = Parts(
        engine=engine.engine,
        trainer=trainer.trainer if config.kind == "training" else None,
        policies=PolicySet.of(config, runtimes),
    )
    return parts, base


def base_key() -> str:
    """Return the key for base servers, which is never part of a configuration."""
    if key := os.environ.get(KEY):
        return key
    if (file := os.environ.get(KEY_FILE)) is None:
        raise ConfigError(f"the base server wants a key: set {KEY} to it, or {KEY_FILE} to a file such as keys/default")
    try:
        return Path(file).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE}: {file} can't be read: {error}") from error


def _job_id(config: JobConfig) -> str:
    """Return a job's name at its base server, which stays the same when it is restarted in its folder."""
    return f"{config.name}-{hashlib.sha256(str(config.folder.resolve()).encode()).hexdigest()[:12]}"


def _runtimes(config: JobConfig, engine: Engine, base: BaseDescription) -> dict[str, PolicyRuntime]:
    tokenizer = _tokenizer(base)
    renderer = select_renderer(tokenizer, keep_reasoning=config.rollout.changed_history == "keep")
    vocabulary = vocabulary_of(tokenizer, base.vocab_size)
    return {
        name: PolicyRuntime(
            name=name,
            config=policy.model_copy(update={"max_context": _context(policy, base)}),
            renderer=renderer,
            engine=engine,
            grammars=Grammars(vocabulary),
        )
        for name, policy in config.policies.items()
    }


def _context(policy: PolicyConfig, base: BaseDescription) -> int:
    longest = min(base.max_positions, base.max_context)
    if policy.max_context > longest and policy.max_context != DEFAULT_CONTEXT:
        raise ConfigError(f"max_context is {policy.max_context}, and the base server has room for {longest} tokens")
    return min(policy.max_context, longest)


def _tokenizer(base: BaseDescription) -> Any:
    # Not AutoTokenizer, whose import loads torch.
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory(prefix="palestra-tokenizer-") as folder:
        for name, content in base.tokenizer.items():
            (Path(folder) / Path(name).name).write_bytes(content.tobytes())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.name_or_path = base.tokenizer_name
    return tokenizer
