from __future__ import annotations

from itertools import product

import pytest

from palestra.errors import Forbidden
from palestra_service.rights import Role
from unit.control.building import identity


def allowed(check, *arguments) -> bool:
    try:
        check(*arguments)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(("role", "tenant"), list(product(Role, ["default", "a"])))
def test_a_member_changes_its_own_an_admin_all_of_its_tenant_and_admins_of_the_first_tenant_the_cluster(role, tenant):
    who, admin = identity(role, tenant=tenant, user="ann"), role is Role.ADMIN
    assert allowed(who.require_own, "ann")
    assert allowed(who.require_own, "bob") == allowed(who.require_admin) == admin
    assert allowed(who.require_operator) == who.is_operator == (admin and tenant == "default")
