"""The policies of a job: what a call needs of each of them, which one plays an agent, and their versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

from palestra.config import JobConfig, PolicyConfig, Roles
from palestra.engine.base import Engine, EngineLoad
from palestra.errors import NotFound
from palestra.grammars.pool import Grammars
from palestra.renderers import Renderer
from palestra.renderers.probes import Unseen
from palestra.types.calls import PolicyVersion

NO_PLAYERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRuntime:
    """Everything that a session needs to sample from one policy.

    Attributes:
        name: of the policy in the job.
        config: of the policy, with the `max_context` that its model has.
        renderer: turns messages into ids and back.
        engine: samples.
        grammars: compiles the grammars of constrained replies.
    """

    name: str
    config: PolicyConfig
    renderer: Renderer
    engine: Engine
    grammars: Grammars

    @property
    def version(self) -> PolicyVersion:
        """Return the version of the weights that a call which begins now samples from; of a frozen policy, 0.0."""
        return self.engine.version(self.name)

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """Return a function from a token to its bytes, also for control tokens."""
        return self.renderer.vocabulary.bytes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySet:
    """All policies of a job, by name; what samples, trains or shows a policy asks this object.

    Attributes:
        runtimes: by name, in the order of the configuration.
        roles: which of them plays which agent, and which are frozen.
        past: the past versions that the engine has, by names such as `white@5`, oldest first; see `add_past`.
    """

    runtimes: Mapping[str, PolicyRuntime]
    roles: Roles
    past: dict[str, PolicyRuntime] = field(default_factory=dict)

    @classmethod
    def of(cls, config: JobConfig, runtimes: Mapping[str, PolicyRuntime]) -> Self:
        """Return the policies of a job.

        Args:
            runtimes: one for each of its policies, by name.
        """
        return cls(runtimes=runtimes, roles=config.players)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all policies in the order of the configuration, and then of past versions."""
        return (*self.runtimes, *self.past)

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the policies that are not frozen."""
        return tuple(name for name in self.runtimes if name not in self.roles.frozen)

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """Return for each policy the version that a call which begins now samples from."""
        return {name: runtime.version for name, runtime in (*self.runtimes.items(), *self.past.items())}

    @property
    def engine_loads(self) -> list[EngineLoad]:
        """Return what each engine has to do; an engine that samples several policies counts once."""
        engines = {id(runtime.engine): runtime.engine for runtime in self.runtimes.values()}
        return [engine.load() for engine in engines.values()]

    def add_past(self, name: str, policy: str) -> None:
        """Let calls be answered by a past version, which the engine has under its name already.

        Args:
            name: of the version, such as `white@5`.
        """
        now = self.runtimes[policy]
        self.past[name] = replace(now, name=name, config=now.config.model_copy(update={"frozen": True}))

    def remove_past(self, name: str) -> None:
        """Let no further call be answered by a past version; one that is not there is ignored."""
        self.past.pop(name, None)

    def runtime(self, name: str) -> PolicyRuntime:
        """Return a policy.

        Raises:
            NotFound: there is none of this name.
        """
        runtime = self.runtimes.get(name) or self.past.get(name)
        if runtime is None:
            raise NotFound(f"there is no model {name!r} here; this job has {', '.join(map(repr, self.names))}")
        return runtime

    def unseen(self, name: str) -> Unseen:
        """Return what a policy's model is never shown of messages; a policy that is gone may be shown all."""
        runtime = self.runtimes.get(name) or self.past.get(name)
        return frozenset() if runtime is None else runtime.renderer.unseen

    def asked(self, model: str, agent: str, players: Mapping[str, str] = NO_PLAYERS) -> PolicyRuntime:
        """Return the policy that a request is answered by.

        It is the one that the request names. The default policy's name, which every claim gives as its `model`, stands
        for the policy of the agent's role, so that an agent plays its role without knowing what the policies are.

        Args:
            players: who plays the roles of the episode that have a pool, by the role.

        Raises:
            NotFound: there is no such policy.
        """
        # Frameworks know one name and send it with every call; to them the roles of their agents must not matter.
        roles = self.roles.of_episode(players)
        return self.runtime(roles.policy_of(agent) if model == roles.default else model)
