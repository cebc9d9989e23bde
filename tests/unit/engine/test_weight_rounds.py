"""Whole weights that are broadcast to servers: who gets them together, and what is done where one is lost."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from palestra.errors import ConfigError, EngineFailure, EngineServerError, ModelError
from palestra.models.weights import LocalWeights
from palestra.types.calls import PolicyVersion
from palestra_engines.vllm.rendezvous import Rendezvous
from palestra_engines.vllm.weight_rounds import Receiver, WeightRounds
from palestra_engines.vllm.worker.palestra_weight_group import WeightGroup, WeightLayout, own_address, reach_store
from unit.engine.engine_servers import OWNER, ScriptedGroup, on_server

pytestmark = pytest.mark.ci

FIRST, SECOND, THIRD = (PolicyVersion(0, number) for number in range(3))
NEW = LocalWeights([("model.norm.weight", torch.arange(4.0))])
WEIGHTS = [(f"w{number}", torch.full((8,), float(number))) for number in range(12)]
UPDATE = ["/pause", "palestra_receive", "/finish_weight_update", "/reset_prefix_cache", "/resume"]


@pytest.fixture
def place():
    return Rendezvous(None, "gloo", 10.0)


@pytest.fixture
def hasty():
    return Rendezvous(None, "gloo", 0.5)


OTHER = ScriptedGroup.info | {"weight_transfer_config": {"backend": "nccl"}}


def changes(server: ScriptedGroup) -> list[str]:
    return [path for path, _ in server.asked]


# One server, by its routes


@pytest.mark.parametrize("workers", [1, 3])
async def test_every_worker_of_a_paused_server_gets_all_weights_and_stays_in_the_group(tmp_path, place, workers):
    server = ScriptedGroup(workers)
    async with on_server(server, tmp_path, rendezvous=place) as engine:
        await engine.check_servers()
        server.asked.clear()
        await engine.sync_weights("policy", SECOND, NEW)
        joined = [*server.groups]
        assert {size for _, size in joined} == {1 + workers}
        assert changes(server) == ["/pause", "palestra_join", *UPDATE[1:]]
        assert engine.version("policy") == SECOND
        server.asked.clear()
        await engine.sync_weights("policy", THIRD, LocalWeights([("model.norm.weight", torch.arange(4.0) + 4)]))
        assert changes(server) == UPDATE
        assert server.groups == joined
        assert [one["model.norm.weight"].tolist() for one in server.received.values()] == [[4, 5, 6, 7]] * workers
        assert server.version == f"{THIRD}-{OWNER}"
        await asyncio.sleep(0)
        assert engine.load().moved_bytes == 32


async def test_weights_that_do_not_fit_are_refused_before_the_server_is_asked(tmp_path, place):
    server = ScriptedGroup()
    async with on_server(server, tmp_path, rendezvous=place) as engine:
        await engine.check_servers()
        before = changes(server)
        with pytest.raises(ModelError, match=r"model\.norm\.weight.*3"):
            await engine.sync_weights("policy", SECOND, LocalWeights([("model.norm.weight", torch.ones(3))]))
        with pytest.raises(ModelError, match=r"new.*model\.norm\.weight"):
            await engine.sync_weights("policy", SECOND, LocalWeights([]))
        assert changes(server) == before
        await engine.sync_weights("policy", SECOND, NEW)
        assert engine.version("policy") == SECOND


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (
            type("Other", (ScriptedGroup,), {"info": OTHER}),
            "--weight-transfer-config.*palestra_f",
        ),
        (type("Several", (ScriptedGroup,), {"replicas": 2}), "--data-parallel-size"),
        (type("Old", (ScriptedGroup,), {"torch_version": "2.4.1+cu124"}), r"2\.4\.1"),
    ],
)
async def test_a_server_that_can_not_take_part_is_refused_before_anything_is_sampled(tmp_path, place, server, said):
    async with on_server(found := server(), tmp_path, rendezvous=place) as engine:
        with pytest.raises(ConfigError, match=said) as raised:
            await engine.check_servers()
        assert "\n" not in str(raised.value)
        assert not found.bodies


async def test_a_server_with_an_older_module_is_refused(tmp_path, place):
    server = ScriptedGroup()
    server.answers["/collective_rpc"] = (500, {"error": {"message": "no attribute 'palestra_join'"}})
    async with on_server(server, tmp_path, rendezvous=place) as engine:
        with pytest.raises(ConfigError, match=r"--worker-extension-cls.*'palestra_join'"):
            await engine.check_servers()


async def test_a_server_that_does_not_reach_the_trainer_is_refused(tmp_path, place):
    place.port = 9  # where nothing listens
    async with on_server(ScriptedGroup(), tmp_path, rendezvous=place) as engine:
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.*engine\.weights_"):
            await engine.check_servers()


async def test_a_server_that_lost_its_place_gets_all_weights_again_over_another_group(tmp_path, place):
    server, hurts = ScriptedGroup(), [0]

    def hurt(number: int) -> None:
        if not hurts:
            return
        hurts.pop()
        server.ranks[0].close()
        raise RuntimeError("Connection closed by peer")

    server.hurt = hurt
    async with on_server(server, tmp_path, rendezvous=place) as engine:
        await engine.sync_weights("policy", SECOND, NEW)
        assert engine.version("policy") == SECOND
        assert server.received[0]["model.norm.weight"].tolist() == [0, 1, 2, 3]
        assert len({name for name, _ in server.groups}) == 2
        assert [path for path in changes(server) if path in UPDATE][-6:] == [UPDATE[0], UPDATE[1], *UPDATE[1:]]


async def test_a_server_that_fails_again_and_again_fails_the_engine(tmp_path, place):
    server = ScriptedGroup()

    def hurt(number: int) -> None:
        raise RuntimeError("there is no memory left")

    server.hurt = hurt
    async with on_server(server, tmp_path, rendezvous=place) as engine:
        failure = asyncio.ensure_future(engine.failure())
        with pytest.raises(EngineFailure, match=r"0\.1.*left"):
            await asyncio.wait_for(engine.sync_weights("policy", SECOND, NEW), 30)
        assert "there is no memory left" in await asyncio.wait_for(failure, 5)
        assert changes(server).count("palestra_receive") == 2
        assert "/finish_weight_update" not in changes(server)


async def test_a_server_that_stands_still_in_a_broadcast_is_given_up_in_time(tmp_path, hasty):
    server, goes_on = ScriptedGroup(), threading.Event()
    server.hurt = lambda number: goes_on.wait(30)
    try:
        async with on_server(server, tmp_path, rendezvous=hasty) as engine:
            with pytest.raises(EngineFailure, match="sent weights"):
                await asyncio.wait_for(engine.sync_weights("policy", SECOND, NEW), 15)
            assert engine.version("policy") == FIRST
    finally:
        goes_on.set()


# Several servers, as rounds see them


class Server:
    """A server whose only worker is a thread.

    Attributes:
        groups: names of those that it has joined.
        received: tensors of the last broadcast, by name.
        at: called in its thread before it takes a tensor, with the number of the tensor.
    """

    def __init__(self, place: Rendezvous, name: str) -> None:
        self.place, self.address, self.ranks = place, name, 1
        self.groups: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.at = lambda number: None
        self.moved = 0
        self.receiver = Receiver(self, self._moved)

    def _moved(self, size: int) -> None:
        self.moved += size

    async def join(self, name: str, first_rank: int, size: int) -> None:
        def work() -> None:
            address = own_address(self.place.host, self.place.port, self.place.seconds)
            store = reach_store(self.place.host, self.place.port, self.place.seconds)
            self.group = WeightGroup(store, name, "gloo", first_rank, size, address, self.place.seconds)
            self.groups.append(name)

        await self._answer(work)

    async def receive(self, layout: WeightLayout) -> None:
        def work() -> None:
            self.received = {}
            for number, (name, tensor) in enumerate(self.group.receive(layout)):
                self.at(number)
                self.received[name] = tensor

        await self._answer(work)

    async def _answer(self, work) -> None:
        try:
            await asyncio.to_thread(work)
        except RuntimeError as error:
            raise EngineServerError(str(error)) from error

    async def take(self, rounds: WeightRounds, source, delay: float = 0.0) -> None:
        with rounds.expecting(self.receiver, source):
            await asyncio.sleep(delay)
            await rounds.receive(self.receiver, source, source.named, torch.float32)

    def has_all(self, weights=WEIGHTS) -> bool:
        return self.received.keys() == dict(weights).keys() and all(
            torch.equal(self.received[name], one) for name, one in weights
        )


def servers_of(place: Rendezvous, count: int = 3) -> tuple[WeightRounds, list[Server]]:
    return WeightRounds(place, bucket_bytes=32), [Server(place, f"server {number}") for number in range(count)]


async def test_servers_that_take_the_same_weights_get_one_broadcast_and_others_their_own(place):
    rounds, servers = servers_of(place)
    both, alone = LocalWeights(WEIGHTS), LocalWeights(WEIGHTS)  # equal, and yet two sources
    delays = (0.0, 0.3)
    await asyncio.gather(
        *(one.take(rounds, both, delay) for one, delay in zip(servers, delays, strict=False)),
        servers[2].take(rounds, alone),
    )
    assert all(one.has_all() for one in servers)
    assert servers[0].groups == servers[1].groups != servers[2].groups
    assert [one.moved for one in servers] == [12 * 8 * 4] * 3
    await asyncio.gather(*(one.take(rounds, both) for one in servers[:2]))
    assert [len(one.groups) for one in servers] == [1, 1, 1]  # they have stayed in their groups
    await asyncio.gather(*(one.take(rounds, both) for one in servers[1:]))
    assert [len(one.groups) for one in servers] == [1, 2, 2]
    assert servers[1].groups[1] == servers[2].groups[1]


async def test_a_server_that_is_late_or_gives_up_holds_up_the_others_up_to_the_limit(hasty):
    rounds, servers = servers_of(hasty)
    source = LocalWeights(WEIGHTS)

    async def gives_up() -> None:
        with rounds.expecting(servers[1].receiver, source):
            await asyncio.sleep(0.2)

    await asyncio.wait_for(
        asyncio.gather(servers[0].take(rounds, source), gives_up(), servers[2].take(rounds, source, 3.0)), 20
    )
    assert servers[0].has_all()
    assert not servers[1].groups
    assert servers[2].has_all()  # in a round of its own
    assert servers[0].groups != servers[2].groups


async def test_a_server_that_is_lost_in_a_broadcast_does_not_cost_the_others_their_weights(place):
    place.seconds = 1.0
    rounds, servers = servers_of(place)
    goes_on = threading.Event()

    def stands(number: int) -> None:
        if number == 3:
            goes_on.wait(30)

    servers[1].at = stands
    source = LocalWeights(WEIGHTS)
    try:
        found = await asyncio.wait_for(
            asyncio.gather(*(one.take(rounds, source) for one in servers), return_exceptions=True), 30
        )
    finally:
        goes_on.set()
    assert [type(one) for one in found] == [type(None), EngineFailure, type(None)]
    assert "server 1 did not answer" in str(found[1])
    assert servers[0].has_all()
    assert servers[2].has_all()
    assert [len(one.groups) for one in servers] == [2, 1, 2]
    await asyncio.gather(servers[0].take(rounds, source), servers[2].take(rounds, source))
    assert [len(one.groups) for one in servers] == [2, 1, 2]  # the group without the lost one has stayed


async def test_a_server_that_always_answers_with_an_error_is_the_only_one_without_weights(place):
    place.seconds = 1.0
    rounds, servers = servers_of(place)

    def fails(number: int) -> None:
        servers[1].group.close()
        raise RuntimeError("there is no memory left")

    servers[1].at = fails
    source = LocalWeights(WEIGHTS)
    found = await asyncio.wait_for(
        asyncio.gather(*(one.take(rounds, source) for one in servers), return_exceptions=True), 30
    )
    assert [type(one) for one in found] == [type(None), EngineServerError, type(None)]
    assert "there is no memory left" in str(found[1])
    assert servers[0].has_all()
    assert servers[2].has_all()


async def test_where_the_call_that_leads_is_cancelled_another_one_leads(place):
    place.seconds = 2.0
    rounds, servers = servers_of(place, 2)
    source, begun, goes_on = LocalWeights(WEIGHTS), threading.Event(), threading.Event()

    def waits(number: int) -> None:
        begun.set()
        goes_on.wait(20)

    servers[0].at = waits
    leading = asyncio.ensure_future(servers[0].take(rounds, source))
    other = asyncio.ensure_future(servers[1].take(rounds, source))
    while not begun.is_set():
        await asyncio.sleep(0.005)
    leading.cancel()
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait_for(other, 20)
    assert servers[1].has_all()
    assert leading.cancelled()


async def test_a_server_that_is_closed_leaves_its_groups(place):
    rounds, servers = servers_of(place, 2)
    source = LocalWeights(WEIGHTS)
    await asyncio.gather(*(one.take(rounds, source) for one in servers))
    rounds.forget(servers[0].receiver)
    assert not rounds._groups
    await servers[1].take(rounds, source)
    assert servers[1].has_all()
    assert len(servers[1].groups) == 2


@pytest.mark.parametrize("address", ["10.99.99.99", "127.0.0.1:1"])
def test_an_address_at_which_nothing_can_listen_is_said_with_what_to_do(address, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(99, "Cannot assign requested address (while attempting to bind on address (…))")

    monkeypatch.setattr("socket.create_server", refuse)
    said = f"nothing can listen at {address} for servers that get weights: Cannot assign requested address; give an ad"
    with pytest.raises(ConfigError, match=rf"{said}dress.*engine.weights_address"):
        Rendezvous(address, "gloo", 1.0)
