"""Models of several tenants that are trained at the same time, in common passes, learn what each learns alone."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from palestra_bases.training.queue import QueuedCall, TrainingQueue
from unit.tinker.serving import Client, Model, data_of, running

STEPS = 4


def train(model: Model) -> list[str]:
    """Send all requests of a model before the first has a result; return the futures of its steps."""
    futures = []
    for number in range(STEPS):
        futures.append(model.computes(data_of(number)))
        futures.append(model.steps(1e-2))
    return futures


async def busy(queue: TrainingQueue) -> asyncio.Event:
    """Keep the trainer busy until the event is set."""
    over = asyncio.Event()
    queue.add_tenant("other")
    queue.submit(QueuedCall("other", "other/p", over.wait))
    return over


@pytest.mark.slow
def test_models_of_several_tenants_share_passes_and_learn_what_each_learns_alone(tmp_path):
    ranks = {"ada": (2, 8), "ben": (4,)}
    with running(tmp_path / "together") as server:
        models = {
            rank: Client(server.url, server.key(tenant)).model(rank=rank, seed=rank)
            for tenant, each in ranks.items()
            for rank in each
        }
        go_on = server.do(lambda: busy(server.server.shared.queue))
        futures = {rank: train(model) for rank, model in models.items()}
        while sum(one.waiting for one in server.server.shared.queue.load().tenants) < 1 + len(models):
            time.sleep(0.01)
        server.loop.call_soon_threadsafe(go_on.set)
        for rank, asked in futures.items():
            for future in asked:
                models[rank].client.result(future)
        found = {rank: model.logprobs() for rank, model in models.items()}
        load = server.server.shared.queue.load()
    assert load.merged_passes > 0
    tokens = {one.tenant: one.tokens for one in load.tenants}
    assert tokens["ada"] > 1.5 * tokens["ben"] > 0
    assert all(one.waiting == 0 for one in load.tenants)
    for rank, logprobs in found.items():
        with running(tmp_path / f"alone-{rank}") as server:
            model = Client(server.url, server.key()).model(rank=rank, seed=rank)
            for future in train(model):
                model.client.result(future)
            wanted = model.logprobs()
            assert server.server.shared.queue.load().merged_passes == 0
        for mine, own in zip(logprobs, wanted, strict=True):
            np.testing.assert_allclose(mine, own, atol=5e-3)
