from __future__ import annotations

from itertools import product

import pytest

from palestra.control.rights.permissions import PERMISSIONS, Action, Role, Scope, scopes_of
from palestra.errors import Forbidden
from unit.control.building import identity

# What is meant, written down a second time: A admin, M member, V viewer; then the same to what is another user's.
MEANT = {
    Action.JOB_SUBMIT: ("AM", ""),
    Action.JOB_LIST: ("AMV", "AMV"),
    Action.JOB_READ: ("AMV", "AMV"),
    Action.JOB_CANCEL: ("AM", "A"),
    Action.JOB_RESUBMIT: ("AM", "AM"),
    Action.JOB_ROTATE_KEY: ("AM", "A"),
    Action.EPISODE_PLAY: ("AM", "AM"),
    Action.SELF_READ: ("AMV", ""),
    Action.KEY_MAKE: ("AMV", "A"),
    Action.KEY_LIST: ("AMV", "A"),
    Action.KEY_REVOKE: ("AMV", "A"),
    Action.KEY_ROTATE: ("AMV", "A"),
    Action.USER_LIST: ("A", "A"),
    Action.USER_ADD: ("A", "A"),
    Action.USER_CHANGE: ("A", "A"),
    Action.USER_REMOVE: ("A", "A"),
    Action.AUDIT_READ: ("A", "A"),
    Action.CLUSTER_READ: ("AMV", "AMV"),
    Action.CLUSTER_DRAIN: ("A", "A"),
    Action.TENANT_LIST: ("A", "A"),
    Action.TENANT_ADD: ("A", "A"),
    Action.TENANT_CHANGE: ("A", "A"),
    Action.TENANT_SET_PRIVATE: ("A", "A"),
}
OPERATOR = {Action.CLUSTER_DRAIN, Action.TENANT_LIST, Action.TENANT_ADD, Action.TENANT_CHANGE}


def test_every_action_has_a_rule():
    assert set(PERMISSIONS) == set(Action) == set(MEANT)


@pytest.mark.parametrize(("action", "role", "operator"), list(product(Action, Role, [True, False])))
def test_every_cell_of_the_matrix(action, role, operator):
    who = identity(role, tenant="default" if operator else "a", user="ann")
    own, others = MEANT[action]
    letter = role.name[0]
    there = operator or action not in OPERATOR
    assert who.may(action) == (there and letter in own)
    assert who.may(action, "ann") == (there and letter in own)
    assert who.may(action, "bob") == (there and letter in own and letter in others)
    assert who.sees(action, "ann")
    sees = who.may(action, "bob") and who.sees(action, "bob")
    assert sees == (there and letter in own and letter in others and letter == "A")


@pytest.mark.parametrize(("action", "role"), list(product(Action, Role)))
def test_a_key_without_the_scope_may_not(action, role):
    scope = PERMISSIONS[action].scope
    if scope is None:
        assert identity(role, scopes=frozenset()).may(action)
        return
    who = identity(role, scopes=frozenset(Scope) - {scope})
    assert not who.may(action)
    with pytest.raises(Forbidden, match=scope if role in PERMISSIONS[action].roles else role):
        who.require(action)


def test_a_larger_role_has_more_scopes_and_every_scope_is_used():
    assert scopes_of(Role.VIEWER) < scopes_of(Role.MEMBER) < scopes_of(Role.ADMIN) == frozenset(Scope)
