"""The job's own players: agents and environments use the same sessions as remote workers, without HTTP."""

from palestra.runners.pool import RunnerPool
from palestra.runners.runner import Runner

__all__ = ["Runner", "RunnerPool"]
