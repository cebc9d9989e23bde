"""Permissions: an admin may do everything in its tenant; a member all except admins' actions, and others' objects."""

from __future__ import annotations

from enum import StrEnum

OPERATOR_TENANT = "default"  # its admins run the cluster; they do not see into other tenants


class Role(StrEnum):
    """The role of a user in its tenant."""

    ADMIN = "admin"
    MEMBER = "member"


class Action(StrEnum):
    """Every action of a route.

    Attributes:
        JOB_READ: read a job's state, logs, events, metrics and artifacts.
        JOB_ROTATE_KEY: replace the key of a job's data plane.
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


# For admins of OPERATOR_TENANT.
OPERATOR = frozenset({Action.CLUSTER_DRAIN, Action.TENANT_LIST, Action.TENANT_ADD, Action.TENANT_CHANGE})
# For admins.
ADMIN = OPERATOR | {
    Action.USER_LIST,
    Action.USER_ADD,
    Action.USER_CHANGE,
    Action.USER_REMOVE,
    Action.AUDIT_READ,
    Action.TENANT_SET_PRIVATE,
}
# A member does these to what is its own, an admin also to what is another user's.
OWN = frozenset(
    {
        Action.JOB_CANCEL,
        Action.JOB_ROTATE_KEY,
        Action.KEY_MAKE,
        Action.KEY_LIST,
        Action.KEY_REVOKE,
        Action.KEY_ROTATE,
    }
)
