"""Ranks that are reached by TCP and meet at the first one, as on several machines; here all are on this one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import TrainerConfig
from palestra.errors import TrainerLost
from palestra.process.child import LocalProcess, popen
from palestra.trainer.base import OptimParams, PolicySpec
from palestra_sharded.processes import RankPlaces
from palestra_sharded.rank import Rank, RankOrder
from palestra_sharded.trainer import ShardedTrainer
from unit.trainer.test_torch_trainer import batch_of_two_groups

pytestmark = pytest.mark.slow
NOWHERE = "203.0.113.1"  # of a network for documents, which no machine has (RFC 5737)


class Elsewhere:
    """Starts programs as a machine of a cluster does: connected by TCP, with an address of its own."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def __call__(self, module: str, variables: Mapping[str, str]) -> LocalProcess:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
        with theirs:
            process = LocalProcess(popen(("-m", module), theirs, os.environ | variables), ours)
        process.address = self.address
        return process


def trainer(folder: Path, address: str, seconds: float) -> ShardedTrainer:
    settings = {"threads": 1, "dtype": "float32", "devices": 2, "stuck_seconds": seconds}
    places = RankPlaces(start=Elsewhere(address), folder=folder)
    return ShardedTrainer(TrainerConfig.model_validate(settings), 2, "float32", places=places)


async def test_ranks_of_several_machines_train_and_leave_weights_where_all_machines_see_them(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    shared = tmp_path / "shared"
    shared.mkdir()
    over_nodes = trainer(shared, "127.0.0.1", 60.0)
    try:
        await over_nodes.create("policy", PolicySpec(model="tiny-random"))
        loss = LossSpec.of(PPOClipLoss(clip_high_threshold=1.3))
        report = await over_nodes.forward_backward("policy", batch_of_two_groups(), loss, "g")
        assert report.trained_tokens > 0
        update = await over_nodes.optim_step("policy", OptimParams(learning_rate=1e-3), "u")
        assert update.applied
        source = await over_nodes.weights("policy")
        assert source.path.is_relative_to(shared)
        assert dict(source.tensors())
    finally:
        await over_nodes.close()
    assert not list(shared.iterdir())


async def test_a_first_rank_that_lacks_its_address_is_named(tmp_path):
    lost = trainer(tmp_path, NOWHERE, 60.0)
    try:
        with pytest.raises(TrainerLost) as raised:
            await lost.create("policy", PolicySpec(model="tiny-random"))
    finally:
        await lost.close()
    said = str(raised.value)
    assert "\n" not in said
    assert "rank 0 failed: OSError: " in said
    assert NOWHERE in said


def rank(number: int) -> Rank:
    config = TrainerConfig(devices=2, device="cpu", stuck_seconds=12.0)
    found = Rank()
    found.begin(RankOrder(number=number, meeting=None, config=config, threads=None, deterministic=False))
    return found


def test_a_rank_that_cannot_reach_the_first_one_says_so():
    with socket.create_server(("127.0.0.3", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"0.*127.0.0.3:{port}.*9") as raised:
        rank(1).join(("127.0.0.3", port))
    assert "\n" not in str(raised.value)


def test_the_meeting_point_is_open_at_the_address_of_the_cluster_alone():
    first = rank(0)
    port = first.listen("127.0.0.3")
    socket.create_connection(("127.0.0.3", port), timeout=10).close()
    for other in ("127.0.0.1", "127.0.0.2"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=10)
