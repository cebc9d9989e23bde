from __future__ import annotations

from unit.rollout.conftest import bench, store  # noqa: F401 - fixtures
