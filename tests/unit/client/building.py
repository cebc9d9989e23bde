"""An episode as a client has it."""

from __future__ import annotations

from palestra.client.episode import Episode, ModelEndpoint

EPISODE = Episode(
    episode_id="train-000000-00",
    kind="train",
    task_id="t",
    task={},
    policy=ModelEndpoint(base_url="http://x/v1", api_key="pe-key", model="policy", version="0.0"),
    lease_seconds=60.0,
)
