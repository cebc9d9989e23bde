"""Tasks of Harbor's format: an instruction, a container, a verifier that writes rewards."""

from palestra_worlds.harbor.boxes import BoxRules
from palestra_worlds.harbor.environment import HarborEnvironment
from palestra_worlds.harbor.task import HarborTask, read_task

__all__ = ["BoxRules", "HarborEnvironment", "HarborTask", "read_task"]
