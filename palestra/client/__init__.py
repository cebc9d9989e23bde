"""What a user's script needs: claim episodes, hand in rewards. Loads neither torch nor ray."""

from palestra.client.client import AsyncClient, Client
from palestra.client.episode import Episode, ModelEndpoint, RolloutResult
from palestra.client.worker import Worker

__all__ = ["AsyncClient", "Client", "Episode", "ModelEndpoint", "RolloutResult", "Worker"]
