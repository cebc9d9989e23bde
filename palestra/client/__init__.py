"""Clients of a job for user scripts: claim episodes, call the model, submit rewards.

Importing this package loads neither torch nor ray, so that it is quick to install and to start.
"""

from palestra.client.async_client import AsyncClient
from palestra.client.client import Client
from palestra.client.episode import Episode, ModelEndpoint, RolloutResult
from palestra.client.worker import Worker

__all__ = ["AsyncClient", "Client", "Episode", "ModelEndpoint", "RolloutResult", "Worker"]
