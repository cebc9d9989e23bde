"""The policies of a job: their runtimes, roles and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from palestra.config import JobConfig, PolicyConfig, Roles, past_of
from palestra.engine.base import Engine, EngineLoad
from palestra.errors import NotFound
from palestra.grammars.pool import Grammars
from palestra.renderers import Renderer
from palestra.renderers.probes import Unseen
from palestra.types.calls import PolicyVersion

if TYPE_CHECKING:
    from palestra.trainer.quarantine import Quarantine

NO_PLAYERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRuntime:
    """Everything that a session needs to sample from one policy.

    Attributes:
        grammars: compiles the grammars of constrained replies.
    """

    name: str
    config: PolicyConfig
    renderer: Renderer
    engine: Engine
    grammars: Grammars

    @property
    def version(self) -> PolicyVersion:
        """Return the weights' version for calls that begin now; 0.0 for a frozen policy."""
        return self.engine.version(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySet:
    """All policies of a job by name, for sampling, training and display.

    Attributes:
        runtimes: in the order of the configuration.
        roles: assigns policies to agents, and marks frozen ones.
        past: past versions in the engine, by names such as `white@5`, oldest first; see `add_past`.
        held: policies whose newest version plays the job's own episodes alone; see `why_held`.
    """

    runtimes: Mapping[str, PolicyRuntime]
    roles: Roles
    past: dict[str, PolicyRuntime] = field(default_factory=dict)
    held: dict[str, Quarantine] = field(default_factory=dict)

    @classmethod
    def of(cls, config: JobConfig, runtimes: Mapping[str, PolicyRuntime]) -> Self:
        """Return the policies of a job."""
        return cls(runtimes=runtimes, roles=config.players)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all policies in the order of the configuration, then of past versions."""
        return (*self.runtimes, *self.past)

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the names of the policies that are trained."""
        return tuple(name for name in self.runtimes if name not in self.roles.frozen)

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """Return for each policy the version that a call which begins now samples from."""
        return {name: runtime.version for name, runtime in (*self.runtimes.items(), *self.past.items())}

    @property
    def engine_loads(self) -> list[EngineLoad]:
        """Return the load of each engine; an engine of several policies counts once."""
        engines = {id(runtime.engine): runtime.engine for runtime in self.runtimes.values()}
        return [engine.load() for engine in engines.values()]

    def add_past(self, name: str, policy: str) -> None:
        """Add a past version that the engine has already loaded. `name` is that of the version, such as `white@5`."""
        now = self.runtimes[policy]
        self.past[name] = replace(now, name=name, config=now.config.model_copy(update={"frozen": True}))

    def remove_past(self, name: str) -> None:
        """Remove a past version; unknown names are ignored."""
        self.past.pop(name, None)

    def runtime(self, name: str) -> PolicyRuntime:
        """Return a policy."""
        runtime = self.runtimes.get(name) or self.past.get(name)
        if runtime is None:
            raise NotFound(f"there is no model {name!r} here; this job has {', '.join(map(repr, self.names))}")
        return runtime

    def why_held(self, name: str) -> str | None:
        """Return why an audit keeps a policy, or a past version, for the job's own episodes; None: it does not."""
        # The chat playground's checkpoints are named after steps as well: `white@step-20`.
        policy, step = past_of(name.replace("@step-", "@")) or (name, None)
        held = self.held.get(policy)
        return None if held is None or (step is not None and not held.holds(step)) else str(held)

    def unseen(self, name: str) -> Unseen:
        """Return the parts of messages that a policy's model is not shown; empty for a removed policy."""
        runtime = self.runtimes.get(name) or self.past.get(name)
        return frozenset() if runtime is None else runtime.renderer.unseen

    def asked(self, model: str, agent: str, players: Mapping[str, str] = NO_PLAYERS) -> PolicyRuntime:
        """Return the policy that answers a request.

        The request names the policy. The default policy's name, which every claim gives as its `model`, means the
        policy of the agent's role, so agents need not know the policies. `players` are the policies of the episode's
        roles that have a pool.
        """
        # Frameworks know one name and send it with every call; to them the roles of their agents must not matter.
        roles = self.roles.of_episode(players) if players else self.roles
        name = roles.policy_of(agent) if roles.named and model == roles.default else model
        return self.runtimes.get(name) or self.runtime(name)
