"""A base server's doors: keys, protocol, names, folders, sizes; and a link that is lost and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
from bases import GivenBase, Whole, served, tenant_of
from websockets.asyncio.client import unix_connect
from websockets.exceptions import InvalidStatus

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.engine.fake import FakeEngine, digits_script
from palestra.errors import (
    BaseServerLost,
    ConfigError,
    Conflict,
    EngineFailure,
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    TooManyRequests,
    Unauthorized,
)
from palestra.models.weights import SavedWeights
from palestra.process.channel import Call, raw
from palestra.trainer.base import PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra.types.calls import GrammarSpan, MediaSpan, PolicyVersion, SamplingParams
from palestra_bases import link, protocol
from palestra_bases.base import SamplerSpec
from palestra_bases.link import Link
from palestra_bases.protocol import PROTOCOL, Hello, MessageSocket, event, first, pack_messages, unpack_messages
from palestra_bases.remote import RemoteEngine, RemoteTrainer
from palestra_bases.server import HostedJobs
from unit.building import engine_request, make_sample

SPEC = SamplerSpec(model="given")
POLICY = PolicySpec(model="given")
LOSS = LossSpec.of(PPOClipLoss())
SAMPLING = SamplingParams(temperature=1.0, max_tokens=20, seed=3)
ROW = make_sample([1, 2, 3, 4], [2, 3])


@pytest.fixture
async def parts():
    engine = FakeEngine(digits_script(12, 258), piece_tokens=1, piece_delay_seconds=0.01)
    trainer = FakeTrainer(2)
    yield engine, trainer
    await engine.close()
    await trainer.close()


@pytest.fixture
async def base(parts, tmp_path):
    async with served(*parts, tmp_path, most_policies=2) as made:
        yield made


async def reply(engine, policy="policy"):
    request = engine_request(np.arange(5, dtype=np.int32), SAMPLING, policy)
    return [token async for piece in engine.generate(request) for token in piece.ids]


async def test_a_key_that_is_not_known_opens_nothing(base):
    with pytest.raises(Unauthorized, match=r"key.*server"):
        await Link(base.address, "key-of-eve", "job").renew()


async def test_a_job_of_another_protocol_is_told_both_versions(base, monkeypatch):
    monkeypatch.setattr(link, "PROTOCOL", 99)
    with pytest.raises(ConfigError, match=r"speaks.*99.*3"):
        await base.job()


async def test_a_job_never_reaches_the_policies_of_another(base):
    (engine, trainer), (other_engine, other_trainer) = await base.job("ada"), await base.job("ben")
    await engine.sample("policy", SPEC)
    await trainer.create("policy", POLICY)
    for name in ("policy", "ada/job/policy", "../../ada/job/policy"):
        with pytest.raises(NotFound):
            await other_trainer.forward_backward(name, [ROW], LOSS, "g")
        with pytest.raises(NotFound):
            await other_trainer.weights(name)
        with pytest.raises(NotFound):
            await other_engine.score(name, engine_request(np.arange(3, dtype=np.int32), SAMPLING).prompt)
        with pytest.raises(NotFound):
            await reply(other_engine, name)
    assert await reply(engine)


async def test_a_name_that_could_be_read_as_another_jobs_is_refused(base):
    engine, trainer = await base.job()
    for name in ("b/policy", "/", "", "x" * 300, "\x1b[2J"):
        with pytest.raises(ConfigError, match="be called"):
            await engine.sample(name, SPEC)
        with pytest.raises(ConfigError, match="be called"):
            await trainer.create(name, POLICY)
    for name in ("one/policy", "", "x" * 300, "two\nlines"):
        with pytest.raises(ConfigError, match=r"job.*called"):
            await base.job(job=name)


async def test_files_outside_of_the_folder_are_neither_read_nor_written(base, tmp_path):
    engine, trainer = await base.job()
    await engine.sample("policy", SPEC)
    await trainer.create("policy", POLICY)
    (tmp_path / "link").symlink_to("/")
    outside = SavedWeights(tmp_path.parent / "elsewhere")
    for folder in (tmp_path.parent / "elsewhere", tmp_path / ".." / "elsewhere", tmp_path / "link" / "etc"):
        with pytest.raises(Forbidden, match="writes files"):
            await trainer.save("policy", folder, {"step": 1}, "s")
        with pytest.raises(Forbidden):
            await trainer.load("policy", folder)
    with pytest.raises(Forbidden):
        await engine.add_policy("policy@1", "policy", PolicyVersion(0, 1), outside)
    with pytest.raises(Forbidden, match="its keys"):
        await trainer.save("policy", tmp_path / "server" / "keys", {"step": 1}, "s")
    for model in ("/etc", "..", "."):
        with pytest.raises(Forbidden):
            await trainer.create("other", PolicySpec(model=model))
    assert (await trainer.save("policy", tmp_path / "run", {"step": 1}, "s")).is_dir()


async def test_links_below_a_folder_lead_nowhere_else(base, tmp_path):
    engine, trainer = await base.job()
    await trainer.create("policy", POLICY)
    outside = tmp_path.parent / f"{tmp_path.name}-of-others"
    outside.mkdir()
    run = tmp_path / "run"
    (run / "deep").mkdir(parents=True)
    (run / "inside").symlink_to(run / "deep")
    (run / "again").symlink_to(run / "again")
    with pytest.raises(InvalidRequest):
        await trainer.load("policy", run)
    (run / "again").unlink()
    assert await trainer.load("policy", run) is None
    (run / "deep" / "step-000001").symlink_to(outside)
    for refused in (
        trainer.load("policy", run),
        trainer.load("policy", run / "inside", 1),
        trainer.save("policy", run, {"step": 1}, "s"),
        trainer.create("other", PolicySpec(model=str(run))),
        engine.sample("other", SamplerSpec(model=str(run / "deep"))),
    ):
        with pytest.raises(Forbidden):
            await refused


async def test_a_folder_with_all_files_or_with_the_keys_is_never_replaced(base, tmp_path):
    _, trainer = await base.job()
    await trainer.create("policy", POLICY)
    (tmp_path / "more").mkdir()
    for folder in (tmp_path, tmp_path / "more" / "..", tmp_path / "server", tmp_path / "server" / "keys"):
        with pytest.raises(Forbidden):
            await trainer.save_weights("policy", folder, 1, "w")


@pytest.mark.parametrize("folder", ["x\0y", "x" * 5000, "x/" * 3000])
async def test_what_is_no_path_is_an_invalid_request(base, tmp_path, folder, caplog):
    _, trainer = await base.job()
    await trainer.create("policy", POLICY)
    with pytest.raises(InvalidRequest):
        await trainer._link.remote.call("trainer.create", "other", {"model": folder})
    with pytest.raises(InvalidRequest):
        await trainer._link.remote.call("base.sample", "other", {"model": folder})
    if "/" not in folder[:2] and len(folder) < 9:
        with pytest.raises(InvalidRequest):
            await trainer._link.remote.call("trainer.load", "policy", f"{tmp_path}/{folder}", None)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_policies_that_are_made_at_the_same_time_are_counted(base):
    engine, trainer = await base.job()
    made = await asyncio.gather(
        *(engine.sample(f"s{number}", SPEC) for number in range(4)),
        *(trainer.create(f"t{number}", POLICY) for number in range(4)),
        return_exceptions=True,
    )
    assert [type(one) for one in made].count(TooManyRequests) == 6


async def test_a_reply_is_no_longer_than_the_memory_that_is_kept_for_it(base):
    engine, _ = await base.job()
    await engine.sample("policy", SPEC)
    for ids, most in (
        (np.arange(5, dtype=np.int32), 2044),
        (np.ones(2048, np.int32), 1),
        (np.ones((2, 1024), np.int32), 1),
    ):
        with pytest.raises(InvalidRequest):
            async for _ in engine.generate(engine_request(ids, replace(SAMPLING, max_tokens=most))):
                pass


async def test_a_job_has_no_more_policies_than_it_may(base):
    engine, _ = await base.job()
    for name in ("a", "b"):
        await engine.sample(name, SPEC)
    with pytest.raises(TooManyRequests, match=r"2.*policies"):
        await engine.sample("c", SPEC)
    await engine.remove_policy("a")
    await engine.sample("c", SPEC)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (replace(ROW, advantages=np.zeros(3, np.float32)), "0.*advantages"),
        (replace(ROW, versions=np.zeros((4, 3), np.int32)), "0.*versions"),
        (replace(ROW, ids=np.array([1, 2, 3, 259], np.int32)), "tokens.*model"),
        (replace(ROW, ids=np.array([1, 2, -3, 9], np.int32)), "tokens.*model"),
        (replace(ROW, loss_mask=np.zeros(4, np.int32)), "int32.*bool"),
        (replace(ROW, media=(MediaSpan(0, 1, "00"),)), "0.*images"),
        (replace(ROW, grammars=(GrammarSpan(2, 3, "{}"),)), "0.*outside"),
        (replace(ROW, grammars=(GrammarSpan(2**63, -(2**63), "{}"),)), "0.*outside"),
    ],
)
async def test_rows_that_would_end_a_process_are_refused(base, row, said):
    _, trainer = await base.job()
    await trainer.create("policy", POLICY)
    with pytest.raises(InvalidRequest, match=said):
        await trainer.forward_backward("policy", [row], LOSS, "g")
    await trainer.forward_backward("policy", [ROW], LOSS, "g")


async def test_a_message_that_is_too_long_is_not_sent(base, monkeypatch):
    _, trainer = await base.job()
    await trainer.create("policy", POLICY)
    monkeypatch.setattr(link, "MOST_BYTES", 2_000)
    with pytest.raises(PayloadTooLarge, match="2,000"):
        await trainer.forward_backward("policy", [ROW] * 50, LOSS, "g")
    await trainer.forward_backward("policy", [ROW], LOSS, "g")


async def test_bytes_that_are_no_message_close_their_own_connection_alone(base, parts):
    engine, _ = await base.job("ada")
    await engine.sample("policy", SPEC)
    stranger = await base.link("ben")
    await stranger._connection.send(b"nonsense")
    with pytest.raises(InvalidRequest, match="such message"):
        raise await asyncio.wait_for(stranger.failure(), 30)
    assert await reply(engine)


async def test_a_job_that_does_not_read_is_not_read_either_and_gets_every_answer_later(base):
    hello, name, count = Hello(PROTOCOL, "job"), "trainer." + "x" * 4_000, 3_000

    async def send(connection) -> None:
        for number in range(1, count + 1):
            await connection.send(pack_messages(Call(number, name, raw(()))))

    keys = [("authorization", "Bearer key-of-ada")]
    path = base.address.removeprefix("unix:")
    async with unix_connect(path, additional_headers=keys, max_queue=1, compression=None) as connection:
        await connection.send(pack_messages(event("hello", hello)))
        first(await connection.recv(), "welcome", None)
        sending = asyncio.create_task(send(connection))
        assert not (await asyncio.wait({sending}, timeout=1.5))[0]
        answered = []
        while len(answered) < count:
            found = unpack_messages(await asyncio.wait_for(connection.recv(), 30))
            assert len(found) <= 64
            answered += [one.id for one in found]
        await sending
    assert answered == list(range(1, count + 1))


class Connection:
    """Takes one message, and then is full until it is ended."""

    def __init__(self):
        self.taken, self.ended = [], asyncio.Event()

    async def send(self, data):
        self.taken += unpack_messages(data)
        await self.ended.wait()

    async def __aiter__(self):
        await self.ended.wait()
        return
        yield


async def test_replies_wait_for_room_and_for_no_connection_that_has_ended(monkeypatch):
    monkeypatch.setattr(protocol, "MOST_DUE", 3)
    connection = Connection()
    channel = MessageSocket(connection)

    async def receive() -> None:
        async for _ in channel.frames():
            pass

    receiving = asyncio.create_task(receive())
    channel.send(event("version", 0))
    await asyncio.sleep(0.01)
    assert len(connection.taken) == 1
    for number in range(4):
        await asyncio.wait_for(channel.drain(), 1)
        channel.send(event("version", number))
    waiting = asyncio.create_task(channel.drain())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    connection.ended.set()
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(receiving, 1)


async def test_two_keys_of_one_connection_are_refused(base, caplog):
    keys = [("authorization", "Bearer key-of-ada")] * 2
    with pytest.raises(InvalidStatus, match="401"):
        await unix_connect(base.address.removeprefix("unix:"), additional_headers=keys)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("ends", ["eof", "close", "abort"])
async def test_a_client_without_a_websocket_that_goes_leaves_no_error_in_the_log(base, caplog, ends):
    for pieces in (
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 3,),
        (b"\xff\r\n\r\n",),
    ):
        for wait in (0.0, 0.01):
            reader, writer = await asyncio.open_unix_connection(base.address.removeprefix("unix:"))
            writer.writelines(pieces)
            await asyncio.sleep(wait)
            if ends == "eof":
                writer.write_eof()
            elif ends == "abort":
                writer.transport.abort()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await reader.read()
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_a_second_process_of_a_job_takes_its_place(base, parts):
    _, trainer = await base.job()
    await trainer.create("policy", POLICY)
    _, again = await base.job()
    await again.create("policy", POLICY)  # under the same name, because the first one's are freed
    with pytest.raises(Conflict, match="another process"):
        raise await asyncio.wait_for(trainer._link.failure(), 30)


async def test_with_its_connection_the_server_forgets_a_job_which_begins_again(base, parts):
    engine, trainer = await base.job()
    await engine.sample("policy", SPEC)
    await trainer.create("policy", POLICY)
    wanted = await reply(engine)
    reading = asyncio.ensure_future(reply(engine))
    await asyncio.sleep(0.05)
    for job in base.server._jobs.values():  # as a network loses a connection
        job.channel._connection.transport.abort()
    await asyncio.wait_for(engine._link.lost(), 30)
    with pytest.raises(BaseServerLost):
        await trainer.forward_backward("policy", [ROW], LOSS, "g")
    trainer.forget()
    await asyncio.wait_for(engine._link.renew(), 30)
    await engine.sample("policy", SPEC)  # under the same names, because those of before are freed
    await trainer.create("policy", POLICY)
    assert not reading.done()
    await engine.resume()
    assert await asyncio.wait_for(reading, 30) == wanted  # every token once, in order
    assert trainer.version("policy") == PolicyVersion(0, 0)
    assert base.server.jobs == [("ada", "job", 1)]


async def test_a_call_that_has_begun_is_executed_before_its_job_is_forgotten(base, parts, monkeypatch):
    _, trainer = await base.job()
    await trainer.create("policy", POLICY)
    begun, may_end, create = asyncio.Event(), asyncio.Event(), parts[1].create

    async def slow(*given) -> None:
        begun.set()
        await may_end.wait()
        await create(*given)

    monkeypatch.setattr(parts[1], "create", slow)
    creating = asyncio.ensure_future(trainer.create("second", POLICY))
    await asyncio.wait_for(begun.wait(), 30)
    trainer._link._connection.transport.abort()  # as if the process were killed
    await asyncio.sleep(0.05)
    assert base.server.jobs == [("ada", "job", 1)]
    may_end.set()
    async with asyncio.timeout(30):
        while base.server.jobs:
            await asyncio.sleep(0.01)
    for name in ("policy", "second"):
        with pytest.raises(NotFound):
            parts[1].version(f"ada/job/{name}")
    creating.cancel()


async def test_a_job_that_disconnects_is_forgotten_at_once(base):
    _, trainer = await base.job(job="polite")
    await trainer.create("policy", POLICY)
    await trainer.close()
    async with asyncio.timeout(5):
        while base.server.jobs:
            await asyncio.sleep(0.01)


async def test_a_server_that_was_started_again_has_to_be_given_everything_again(parts, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        async with served(*parts, tmp_path) as first:
            connection = Link(first.address, "key-of-ada", "job", 30.0)
            engine, trainer = Whole(RemoteEngine(connection)), Whole(RemoteTrainer(connection, 2))
            await connection.renew()
            await engine.sample("policy", SPEC)
            await trainer.create("policy", POLICY)
            wanted = await reply(engine)
            waiting = asyncio.ensure_future(reply(engine))
            await asyncio.sleep(0.05)
        second = HostedJobs(GivenBase(FakeEngine(digits_script(12, 258)), FakeTrainer(2), tmp_path), tenant_of)
        await stack.enter_async_context(second.listen(tmp_path / "socket"))
        await asyncio.wait_for(connection.lost(), 30)
        with pytest.raises(BaseServerLost):
            await trainer.forward_backward("policy", [ROW], LOSS, "g")
        assert not waiting.done()
        trainer.forget()
        await connection.renew()
        await engine.sample("policy", SPEC)
        await trainer.create("policy", POLICY)
        assert not waiting.done()
        await engine.resume()
        assert await asyncio.wait_for(waiting, 30) == wanted
        await engine.close()


async def test_a_server_that_stays_away_is_given_up(parts, tmp_path):
    async with served(*parts, tmp_path) as base:
        connection = Link(base.address, "key-of-ada", "job", 0.2)
        engine = RemoteEngine(connection)
        await connection.renew()
    await asyncio.wait_for(connection.lost(), 30)
    with pytest.raises(EngineFailure, match="be reached"):
        await connection.renew()
    assert "could not be reached for 0.2 s" in await asyncio.wait_for(engine.failure(), 30)
    assert not connection.is_lost  # else the job would try to begin again for ever
    with pytest.raises(EngineFailure, match="be reached"):
        await engine.sample("policy", SPEC)
    await engine.close()


async def test_an_address_of_no_known_kind_is_refused():
    with pytest.raises(ConfigError, match=r"ws://.*wss://"):
        Link("http://127.0.0.1:1", "key", "job")
