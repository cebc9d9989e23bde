"""The budget of a tenant: handed out to its jobs in parts, exceeded by none of them, and given back by each."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.store.browsing import browse
from palestra.store.ledger import NOTHING, Allowance, Limits
from palestra.store.spending import spent_ms, sums
from palestra.types.states import JobState
from palestra_service.jobs.budgets import ALLOWANCE_FILE, AllowanceFile
from palestra_service.jobs.launcher import Ended, Ending, ServerOrder
from palestra_service.model_server import ModelServer
from palestra_service.placement.tenants import MICRO, Quota
from palestra_service.store import allowances
from palestra_service.store.allowances import Need, Spent, given_to, given_to_job
from palestra_service.store.control_store import ControlStore
from unit.control.building import submit
from unit.control.launching import FakeLauncher
from unit.control.test_quotas import Operator

GAMES = {
    "steps": 1000,
    "engine": {"kind": "fake", "reply_tokens": 6},
    "policies": {"policy": {"sampling": {"max_tokens": 8}}},
    "environment": {"name": "gomoku"},
    "rollout": {"group_size": 2, "groups_per_step": 2},
    "evaluation": {"every_steps": 0},
}
SERVED = {"kind": "inference", "engine": {"kind": "fake", "reply_tokens": 6}}


class RealJobs(FakeLauncher):
    """A launcher that runs jobs in threads of this process."""

    async def start(self, order: ServerOrder):
        server = ModelServer()
        await server.start(order.config, str(order.folder), "127.0.0.1")
        listening = await super().start(order)

        async def over() -> None:
            ended = await server.ended()
            if not self.servers[order.job_id].over.done():
                self.servers[order.job_id].over.set_result(ended)

        self.tasks = [*getattr(self, "tasks", []), asyncio.ensure_future(over())]
        return listening


@asynccontextmanager
async def operating(folder, launcher):
    with ControlStore(f"sqlite:///{folder / 'control.db'}") as store:
        operator = Operator(store, folder, launcher)
        await operator.plane.administration.first_start()
        scheduling = asyncio.ensure_future(operator.scheduler.run())
        try:
            async with operator.http:
                await operator.http.post("/tenants", json={"name": "blue"})
                yield operator
        finally:
            scheduling.cancel()
            await asyncio.gather(scheduling, return_exceptions=True)


def used_by(operator: Operator, job_id: str) -> tuple[int, int]:
    with browse(operator.scheduler.folder_of(job_id) / "run" / "run.db") as connection:
        return sum(one.tokens for one in sums(connection)), spent_ms(connection)


def warnings(operator: Operator, job_id: str) -> list[str]:
    with browse(operator.scheduler.folder_of(job_id) / "run" / "run.db") as connection:
        rows = connection.exec_driver_sql("SELECT data FROM events WHERE kind = 'warning' ORDER BY event_id")
        return [json.loads(data)["code"] for (data,) in rows if "budget" in data]


@pytest.mark.slow
async def test_several_jobs_of_a_tenant_end_cleanly_within_its_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra_service.jobs.scheduler.LOOK_SECONDS", 0.1)
    async with operating(tmp_path, RealJobs()) as operator:
        await operator.quota("blue", tokens=60_000)
        ids = [(await submit(operator.store, "blue", config=GAMES)).job_id for _ in range(3)]
        for job_id in ids:
            await operator.becomes(job_id, JobState.COMPLETED)
        used = {job_id: used_by(operator, job_id) for job_id in ids}
        total = sum(tokens for tokens, _ in used.values())
        assert 45_000 < total <= 60_000
        assert (await operator.store.read(lambda c: given_to(c, "blue"))).tokens == total
        (tenant,) = [one for one in (await operator.http.get("/tenants")).json() if one["name"] == "blue"]
        assert tenant["spent"]["tokens"] == total
        last = [warnings(operator, job_id) for job_id in ids]
        assert all("budget_100" in codes for codes in last)
        assert any(codes[:2] == ["shared_budget_50", "shared_budget_80"] for codes in last)
        for job_id in ids:
            job = await operator.store.job(None, job_id)
            assert job.reason.startswith("the budget of tenant blue is spent, after step ")
            checkpoints = operator.scheduler.folder_of(job_id) / "run" / "checkpoints"
            assert sorted(checkpoints.glob("step-*")), "it ends at a checkpoint"

        waiting = (await submit(operator.store, "blue", config=GAMES)).job_id
        if total == 60_000:
            await operator.waits(waiting, "the budget of tenant blue has no tokens left")
        await operator.quota("blue", tokens=80_000)  # and one that waits for it goes on
        await operator.becomes(waiting, JobState.COMPLETED)
        assert (await operator.store.read(lambda c: given_to(c, "blue"))).tokens <= 80_000


@pytest.mark.slow
async def test_a_submission_says_what_former_runs_took_and_a_job_what_two_steps_mean(tmp_path):
    prices = {"prices": {"device_hour": 1.0, "tokens": {"policy": [1.0, 2.0]}}}
    config = GAMES | {"steps": 12} | prices
    async with operating(tmp_path, RealJobs()) as operator:

        async def submitted(**changes) -> tuple[str, str]:
            answer = await operator.http.post("/jobs", json={"config": config | changes})
            assert answer.status_code == 201, answer.text
            return answer.json()["job_id"], answer.json()["estimate"]

        job_id, estimate = await submitted()
        assert estimate == "unknown until step 2"
        await operator.becomes(job_id, JobState.COMPLETED)
        run = operator.scheduler.folder_of(job_id) / "run"
        with browse(run / "run.db") as connection:
            rows = connection.exec_driver_sql("SELECT data FROM events WHERE kind = 'estimate'").all()
            total = sum(one.tokens for one in sums(connection))
        (text,) = [json.loads(data)["text"] for (data,) in rows]
        found = re.fullmatch(r"by its first 2 steps, the job takes ([\d,]+) \(.*\) tokens, .* hours, .* money", text)
        assert found is not None, text
        assert int(found[1].replace(",", "")) == pytest.approx(total, rel=0.35)  # replies are of random lengths
        _, again = await submitted(seed=5, name="again")
        assert again.startswith(f"{total:,} (")
        assert again.endswith("by a former run of the same configuration")
        _, other = await submitted(steps=7)
        assert other == "unknown until step 2"


async def test_the_budget_of_a_served_job_ends_it_for_good(tmp_path):
    async with operating(tmp_path, RealJobs()) as operator:
        config = SERVED | {"budget": {"hours": 1e-7}}
        job_id = (await submit(operator.store, "blue", kind="inference", config=config)).job_id
        await operator.becomes(job_id, JobState.COMPLETED)
        job = await operator.store.job(None, job_id)
        assert job.reason == "its budget is spent; with a larger one, submit it again"
        assert job.starts == 1


async def test_a_job_under_a_spent_budget_waits_and_says_why(tmp_path):
    async with operating(tmp_path, FakeLauncher()) as operator:
        await operator.quota("blue", tokens=0)
        job_id = (await submit(operator.store, "blue")).job_id
        await operator.waits(job_id, "the budget of tenant blue has no tokens left")
        await operator.quota("blue", tokens=10)
        await operator.becomes(job_id, JobState.RUNNING)
        path = operator.scheduler.folder_of(job_id) / ALLOWANCE_FILE
        found = AllowanceFile(path)()
        assert found.of == "tenant blue"
        assert found.limits == Limits(tokens=1)  # an eighth of what is left
        operator.launcher.end(job_id, Ending.LOST, "killed")  # it has used nothing, and its part goes back
        await operator.quota("blue", tokens=None)
        async with asyncio.timeout(10):
            while (await operator.store.job(None, job_id)).starts < 2:
                await asyncio.sleep(0.01)
        await operator.becomes(job_id, JobState.RUNNING)
        assert not path.exists()
        assert await operator.store.read(lambda c: given_to(c, "blue")) == Spent()


async def test_a_job_whose_store_is_being_made_or_damaged_is_charged_what_it_was_given(tmp_path):
    async with operating(tmp_path, FakeLauncher()) as operator:
        await operator.quota("blue", tokens=6400)
        job_id = (await submit(operator.store, "blue")).job_id
        await operator.becomes(job_id, JobState.RUNNING)
        given_ = await operator.store.read(lambda c: given_to(c, "blue"))
        assert given_.tokens == 800
        run = operator.scheduler.folder_of(job_id) / "run"
        run.mkdir()
        (run / "run.db").touch()
        operator.store.changed.notify()
        operator.launcher.end(job_id, Ending.COMPLETED)
        await operator.becomes(job_id, JobState.COMPLETED)
        assert operator.scheduler.problem is None
        assert await operator.store.read(lambda c: given_to(c, "blue")) == given_


async def test_a_budget_of_money_needs_prices(tmp_path):
    async with operating(tmp_path, FakeLauncher()) as operator:
        await operator.quota("default", money=5)
        answer = await operator.http.post("/jobs", json={"config": GAMES})
        assert answer.status_code == 422
        assert "add the table [prices]" in answer.text
        answer = await operator.http.post("/jobs", json={"config": GAMES | {"prices": {"device_hour": 1}}})
        assert answer.status_code == 201, answer.text
        waiting = (await submit(operator.store, "default", config=GAMES)).job_id  # before the budget was set
        await operator.waits(waiting, "add the table [prices]")


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # the job
        st.sampled_from(["grant", "grant", "grant", "settle"]),
        st.floats(0, 1),  # share of what it has that it uses
        st.integers(0, 2000),  # that it wants beyond that
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(limit=st.integers(0, 5000), steps=STEPS)
def test_what_is_given_out_never_exceeds_the_budget(tmp_path_factory, limit, steps):
    async def play() -> None:
        folder = tmp_path_factory.mktemp("budget")
        with ControlStore(f"sqlite:///{folder / 'control.db'}") as store:
            used = dict.fromkeys(map(str, range(4)), 0)
            quota = Quota(tokens=limit)
            for number, what, share, more in steps:
                job = str(number)
                has = await store.read(lambda c, job=job: given_to_job(c, job)) or Spent()
                used[job] += int((has.tokens - used[job]) * share)
                if what == "settle":
                    await store.write(lambda c, job=job: allowances.settle(c, job, Spent(tokens=used[job])))
                else:
                    need = Need(Spent(tokens=used[job]), Spent(tokens=used[job] + more))
                    got = await store.write(
                        lambda c, job=job, need=need: allowances.grant(c, "blue", job, quota, need, 4)
                    )
                    assert got.tokens >= has.tokens
                    assert got.last or got.tokens >= need.wanted.tokens
                    assert got.micros is got.ms is None
                assert (await store.read(lambda c: given_to(c, "blue"))).tokens <= limit
            assert sum(used.values()) <= limit

    asyncio.run(play())


def test_an_allowance_is_never_less_than_before(tmp_path):
    path = tmp_path / ALLOWANCE_FILE
    read = AllowanceFile(path)

    def written(**values) -> Allowance:
        one = {"tokens": 5, "micros": 7, "ms": None, "last": False, "of": "tenant ω\N{PILE OF POO}", "percent": 3.0}
        path.write_text(json.dumps(one | values))
        return read()

    assert written().limits == Limits(5, 7 * MICRO, None)
    assert written(tokens=3, micros=2**62).limits == Limits(5, 2**62 * MICRO, None)
    assert written(tokens=None, last=True) == Allowance(
        Limits(None, 2**62 * MICRO, None), True, "tenant ω\N{PILE OF POO}", 3.0
    )
    assert Limits(*NOTHING) == Limits(0, 0, 0)
    assert Ended(ending=Ending.COMPLETED).reason == ""
