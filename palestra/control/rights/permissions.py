"""The table of permissions: which role and scope each action needs. The API and the test of all routes read it.

A key may do an action if its user's role may, and if the key's scopes contain the rule's scope. So a key can be weaker
than its user and never stronger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

OPERATOR_TENANT = "default"  # its admins run the cluster; they do not see into other tenants


class Role(StrEnum):
    """The role of a user in its tenant, from most to fewest rights."""

    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"


class Scope(StrEnum):
    """A right to which a key can be limited."""

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    EPISODES = "episodes"
    KEYS_WRITE = "keys:write"
    CLUSTER_READ = "cluster:read"
    USERS_ADMIN = "users:admin"
    AUDIT_READ = "audit:read"
    CLUSTER_ADMIN = "cluster:admin"


class Action(StrEnum):
    """Every action that a route can do.

    Attributes:
        JOB_READ: read a job's state, logs, events, metrics and artifacts.
        JOB_ROTATE_KEY: replace the key of a job's data plane; the old one then opens nothing.
        EPISODE_PLAY: get the address and the key of a job's data plane.
        TENANT_SET_PRIVATE: set whether jobs of one's own tenant are private by default.
    """

    JOB_SUBMIT = "job.submit"
    JOB_LIST = "job.list"
    JOB_READ = "job.read"
    JOB_CANCEL = "job.cancel"
    JOB_RESUBMIT = "job.resubmit"
    JOB_ROTATE_KEY = "job.rotate_key"
    EPISODE_PLAY = "episode.play"
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
    TENANT_SET_PRIVATE = "tenant.set_private"


_ALL = frozenset(Role)
_WORKING = frozenset({Role.ADMIN, Role.MEMBER})
_ADMIN = frozenset({Role.ADMIN})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The requirements of an action.

    Attributes:
        scope: that the key must have; None: any key will do.
        roles: that may do the action.
        others: roles that may do it to objects of other users of the same tenant.
        private: of `others`, the roles that may also do it to private jobs; the rest do not see these.
        operator: whether the action is only for the tenant that runs the cluster.
    """

    scope: Scope | None
    roles: frozenset[Role]
    others: frozenset[Role]
    private: frozenset[Role] = _ADMIN
    operator: bool = False


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
    """Return all scopes that a role can use, which a new key has unless fewer are requested."""
    return frozenset(rule.scope for rule in PERMISSIONS.values() if rule.scope is not None and role in rule.roles)
