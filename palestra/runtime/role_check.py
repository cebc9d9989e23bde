"""What is odd in the roles of a job: policies that play nothing, roles that nothing has, and copies that pools need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from palestra.config import JobConfig


def odd_roles(config: JobConfig, agents: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) for each policy that no agent is played by, and each role of an agent that there is not.

    Both are possible where workers outside of the job call policies by their names, or name agents as they like.

    Args:
        config: the job, which names an environment.
        agents: names of the environment's agents; (): not known before an episode.
    """
    roles = config.players
    teachers = {config.teacher_of(name) for name in config.trained_policies}
    played = {roles.default, *roles.named.values(), *teachers}
    for name in config.policies:
        if name not in played:
            yield (
                f"policies.{name}",
                f"no role has the policy {name!r}, so the environment's agents never call it; give it one in [roles], "
                "or remove it",
            )
    for role in config.roles if agents else ():
        if role.partition("/")[0] not in agents:
            yield (
                f"roles.{role}",
                f"the environment has no agent {role!r} (it has {', '.join(map(repr, agents))}), so this role is never "
                "played",
            )


def past_copies(config: JobConfig, policy: str) -> int:
    """Return how many past versions of a policy the engine may have, each with weights of its own."""
    if config.kind != "training":
        return 0
    roles = config.players
    return sum(pool.size for role, pool in roles.pools.items() if roles.named[role] == policy)
