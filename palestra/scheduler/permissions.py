"""Who may do what: one table, for the API and for the test that goes through it.

A key may do something if its user's role may, and the key's scopes contain the rule's, so a key can be weaker than its
user and never stronger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

OPERATOR_TENANT = "default"  # its admins run the cluster; they do not see into other tenants


class Role(StrEnum):
    """What a user is in its tenant."""

    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"


class Scope(StrEnum):
    """What a key can be limited to."""

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    EPISODES = "episodes"
    KEYS_WRITE = "keys:write"
    CLUSTER_READ = "cluster:read"
    USERS_ADMIN = "users:admin"
    AUDIT_READ = "audit:read"
    CLUSTER_ADMIN = "cluster:admin"


class Action(StrEnum):
    """Everything that a route can do."""

    JOB_SUBMIT = "job.submit"
    JOB_LIST = "job.list"
    JOB_READ = "job.read"  # its state, logs, events, metrics and artifacts
    JOB_CANCEL = "job.cancel"
    JOB_RESUBMIT = "job.resubmit"
    JOB_ROTATE_KEY = "job.rotate_key"  # another key for its data plane; the one of before opens nothing any more
    EPISODE_PLAY = "episode.play"  # be told a job's data plane and its key
    SELF_READ = "self.read"
    KEY_MAKE = "key.make"
    KEY_LIST = "key.list"
    KEY_REVOKE = "key.revoke"
    KEY_ROTATE = "key.rotate"
    USER_LIST = "user.list"
    USER_ADD = "user.add"
    USER_CHANGE = "user.change"
    USER_REMOVE = "user.remove"
    AUDIT_READ = "audit.read"
    CLUSTER_READ = "cluster.read"
    CLUSTER_DRAIN = "cluster.drain"
    TENANT_LIST = "tenant.list"
    TENANT_ADD = "tenant.add"
    TENANT_CHANGE = "tenant.change"
    TENANT_SET_PRIVATE = "tenant.set_private"  # whether jobs of one's own tenant are private unless they say otherwise


_ALL = frozenset(Role)
_WORKING = frozenset({Role.ADMIN, Role.MEMBER})
_ADMIN = frozenset({Role.ADMIN})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What an action needs."""

    scope: Scope | None  # None: any key will do
    roles: frozenset[Role]  # who may do it
    others: frozenset[Role]  # who may do it to what belongs to another user of the same tenant
    private: frozenset[Role] = _ADMIN  # of `others`, who may do it also to a private job; the rest do not see it
    operator: bool = False  # only in the tenant that runs the cluster


PERMISSIONS: Mapping[Action, Rule] = {
    Action.JOB_SUBMIT: Rule(scope=Scope.JOBS_WRITE, roles=_WORKING, others=frozenset()),
    Action.JOB_LIST: Rule(scope=Scope.JOBS_READ, roles=_ALL, others=_ALL),
    Action.JOB_READ: Rule(scope=Scope.JOBS_READ, roles=_ALL, others=_ALL),
    Action.JOB_CANCEL: Rule(scope=Scope.JOBS_WRITE, roles=_WORKING, others=_ADMIN),
    Action.JOB_RESUBMIT: Rule(scope=Scope.JOBS_WRITE, roles=_WORKING, others=_WORKING),
    Action.JOB_ROTATE_KEY: Rule(scope=Scope.JOBS_WRITE, roles=_WORKING, others=_ADMIN),
    Action.EPISODE_PLAY: Rule(scope=Scope.EPISODES, roles=_WORKING, others=_WORKING),
    Action.SELF_READ: Rule(scope=None, roles=_ALL, others=frozenset()),
    Action.KEY_MAKE: Rule(scope=Scope.KEYS_WRITE, roles=_ALL, others=_ADMIN),
    Action.KEY_LIST: Rule(scope=None, roles=_ALL, others=_ADMIN),
    Action.KEY_REVOKE: Rule(scope=Scope.KEYS_WRITE, roles=_ALL, others=_ADMIN),
    Action.KEY_ROTATE: Rule(scope=Scope.KEYS_WRITE, roles=_ALL, others=_ADMIN),
    Action.USER_LIST: Rule(scope=Scope.USERS_ADMIN, roles=_ADMIN, others=_ADMIN),
    Action.USER_ADD: Rule(scope=Scope.USERS_ADMIN, roles=_ADMIN, others=_ADMIN),
    Action.USER_CHANGE: Rule(scope=Scope.USERS_ADMIN, roles=_ADMIN, others=_ADMIN),
    Action.USER_REMOVE: Rule(scope=Scope.USERS_ADMIN, roles=_ADMIN, others=_ADMIN),
    Action.AUDIT_READ: Rule(scope=Scope.AUDIT_READ, roles=_ADMIN, others=_ADMIN),
    Action.CLUSTER_READ: Rule(scope=Scope.CLUSTER_READ, roles=_ALL, others=_ALL),
    Action.CLUSTER_DRAIN: Rule(scope=Scope.CLUSTER_ADMIN, roles=_ADMIN, others=_ADMIN, operator=True),
    Action.TENANT_LIST: Rule(scope=Scope.CLUSTER_ADMIN, roles=_ADMIN, others=_ADMIN, operator=True),
    Action.TENANT_ADD: Rule(scope=Scope.CLUSTER_ADMIN, roles=_ADMIN, others=_ADMIN, operator=True),
    Action.TENANT_CHANGE: Rule(scope=Scope.CLUSTER_ADMIN, roles=_ADMIN, others=_ADMIN, operator=True),
    Action.TENANT_SET_PRIVATE: Rule(scope=Scope.USERS_ADMIN, roles=_ADMIN, others=_ADMIN),
}


def scopes_of(role: Role) -> frozenset[Scope]:
    """All that a role can use: what a new key has where nothing narrower is asked for."""
    return frozenset(rule.scope for rule in PERMISSIONS.values() if rule.scope is not None and role in rule.roles)
