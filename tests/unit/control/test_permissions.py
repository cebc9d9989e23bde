from __future__ import annotations

from itertools import product

import pytest

from palestra.errors import Forbidden
from palestra_service.rights import Action, Role
from unit.control.building import identity

# What is meant, written down a second time: what a member may do at all, and to what is another user's.
MEMBER = {
    Action.JOB_SUBMIT,
    Action.JOB_LIST,
    Action.JOB_READ,
    Action.JOB_CANCEL,
    Action.JOB_RESUBMIT,
    Action.JOB_ROTATE_KEY,
    Action.EPISODE_PLAY,
    Action.SELF_READ,
    Action.KEY_MAKE,
    Action.KEY_LIST,
    Action.KEY_REVOKE,
    Action.KEY_ROTATE,
    Action.CLUSTER_READ,
}
TO_OTHERS = {
    Action.JOB_SUBMIT,
    Action.JOB_LIST,
    Action.JOB_READ,
    Action.JOB_RESUBMIT,
    Action.EPISODE_PLAY,
    Action.SELF_READ,
    Action.CLUSTER_READ,
}
OPERATOR = {Action.CLUSTER_DRAIN, Action.TENANT_LIST, Action.TENANT_ADD, Action.TENANT_CHANGE}


@pytest.mark.parametrize(("action", "role", "operator"), list(product(Action, Role, [True, False])))
def test_every_cell_of_the_matrix(action, role, operator):
    who = identity(role, tenant="default" if operator else "a", user="ann")
    admin = role is Role.ADMIN
    may = (operator or action not in OPERATOR) and (admin or action in MEMBER)
    assert who.may(action) == who.may(action, "ann") == may
    assert who.may(action, "bob") == (may and (admin or action in TO_OTHERS))
    if not may:
        with pytest.raises(Forbidden, match=action):
            who.require(action)


@pytest.mark.parametrize("role", Role)
def test_private_jobs_are_seen_by_their_owner_and_by_admins(role):
    who = identity(role, user="ann")
    assert who.sees("ann")
    assert who.sees("bob") == who.sees(None) == (role is Role.ADMIN)
