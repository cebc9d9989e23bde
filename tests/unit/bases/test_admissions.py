"""Which jobs a base server of a service lets in, and what happens to one that is let in no longer."""

from __future__ import annotations

import asyncio

import pytest
from bases import served

from palestra.engine.fake import FakeEngine, digits_script
from palestra.errors import NotFound, PalestraError, StoreError, Unauthorized
from palestra.trainer.base import PolicySpec
from palestra.trainer.fake import FakeTrainer
from palestra_bases.admissions import Admission, Admissions, key_digest, new_key, write_admissions
from palestra_bases.base import SamplerSpec


def admission(job_id: str, key: str, weight: float = 1.0) -> Admission:
    return Admission(job_id=job_id, weight=weight, digest=key_digest(key))


def test_a_key_is_good_from_when_it_is_written_until_it_is_no_longer_there(tmp_path):
    path, first, second = tmp_path / "admissions.json", new_key(), new_key()
    write_admissions(path, [admission("job-1", first, 2.0)])
    admissions = Admissions(path)
    assert admissions.of(first) == "job-1"
    for key in (None, "", second, first[:-1]):
        with pytest.raises(Unauthorized, match=r"job.*runs"):
            admissions.of(key)
    write_admissions(path, [admission("job-1", first, 2.0), admission("job-2", second, 0.5)])
    assert admissions.of(second) == "job-2"  # read again, because it was not known
    assert admissions.weights == {"job-1": 2.0, "job-2": 0.5}
    write_admissions(path, [admission("job-2", second)])
    admissions.read()
    assert (admissions.take_gone(), admissions.take_gone()) == ({"job-1"}, set())
    with pytest.raises(Unauthorized):
        admissions.of(first)
    assert path.stat().st_mode & 0o777 == 0o600
    assert second not in path.read_text()


def test_a_job_that_is_admitted_again_before_its_end_was_noticed_is_not_ended(tmp_path):
    path, key = tmp_path / "admissions.json", new_key()
    write_admissions(path, [admission("job-1", key)])
    admissions = Admissions(path)
    write_admissions(path, [])
    admissions.read()
    write_admissions(path, [admission("job-1", new_key())])
    admissions.read()
    assert admissions.take_gone() == set()
    with pytest.raises(Unauthorized):
        admissions.of(key)


@pytest.mark.parametrize("content", [None, "", "[]", '{"job-1": {}}', '{"job-1": 3}', "{"])
def test_a_file_that_is_damaged_lets_no_job_in_and_forgets_none(tmp_path, content):
    path, key = tmp_path / "admissions.json", new_key()
    write_admissions(path, [admission("job-1", key)])
    admissions = Admissions(path)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(StoreError, match="base server"):
        admissions.read()
    assert admissions.of(key) == "job-1"
    assert admissions.take_gone() == set()


async def test_a_tenant_that_is_removed_loses_its_connection_and_its_policies_and_no_other_does(tmp_path):
    engine, trainer = FakeEngine(digits_script(12, 258)), FakeTrainer(2)
    async with served(engine, trainer, tmp_path) as base:
        (ada, training), (ben, other) = await base.job("ada"), await base.job("ben")
        for sampled, trained in ((ada, training), (ben, other)):
            await sampled.sample("policy", SamplerSpec(model="given"))
            await trained.create("policy", PolicySpec(model="given"))
        await base.server.remove("ada")
        assert base.server.jobs == [("ben", "job", 1)]
        assert await other.weights("policy") is not None
        with pytest.raises(PalestraError):
            async with asyncio.timeout(5):
                await training.weights("policy")
        with pytest.raises(NotFound):
            trainer.version("ada/job/policy")
    await engine.close()
    await trainer.close()
