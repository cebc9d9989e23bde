from __future__ import annotations

import asyncio

import pytest

from palestra.errors import (
    Conflict,
    IllegalTransition,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    TooManyRequests,
)
from palestra.types.states import JobState
from palestra_control.jobs import Resources
from unit.control.building import REQUEST, ask, change_numbers, running, submit
from unit.control.conftest import url_of_database

SECRET = "pk_0123456789ab_" + "s" * 43


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """Both databases in both tiers: this is what they promise."""
    return url_of_database(request, tmp_path)


async def test_a_job_comes_back_as_it_was_submitted(store, clock):
    config = {"name": "żółw 🐢 \u0000", "steps": 2**62, "x": [1, None, {"y": 0.1}], "'; DROP TABLE jobs; --": True}
    asked = ask(
        name="żółw 🐢 ' \" % _ \\",
        kind="inference",
        priority="high",
        config=config,
        resources=Resources(cpus=0.5, gpus=0.25, memory_gib=1 / 3),
        attached=True,
        restarts_limit=7,
    )
    made = await store.submit_job("a", "ann@example.org", asked)
    job = await store.job("a", made.job_id)
    assert job == made
    assert (job.name, job.kind, job.priority, job.config) == (asked.name, "inference", "high", config)
    assert (job.resources, job.attached, job.restarts_limit, job.restarts_left) == (asked.resources, True, 7, 7)
    assert (job.tenant, job.user, job.state, job.created_at) == ("a", "ann@example.org", JobState.QUEUED, clock.wall)
    assert (job.starts, job.url, job.run_dir, job.node, job.cancel_requested) == (0, None, None, None, False)


async def test_the_same_key_and_request_give_the_same_job_and_another_request_is_a_conflict(store):
    jobs = await asyncio.gather(*(store.submit_job("a", "ann", REQUEST, "k1") for _ in range(20)))
    assert len({job.job_id for job in jobs}) == 1
    assert len(await store.queue()) == 1
    await store.change_state(jobs[0].job_id, JobState.QUEUED, JobState.STARTING, "")
    assert (await store.submit_job("a", "ann", REQUEST, "k1")).state is JobState.STARTING
    for other in (ask(name="b"), ask(config={"steps": 4}), ask(resources=Resources(cpus=2.0)), ask(attached=True)):
        with pytest.raises(Conflict, match="k1"):
            await store.submit_job("a", "ann", other, "k1")
    with pytest.raises(Conflict):
        await store.submit_job("a", "bob", REQUEST, "k1")
    assert (await store.submit_job("b", "ann", REQUEST, "k1")).job_id != jobs[0].job_id
    assert await change_numbers(store) == [1, 2]


async def test_without_a_key_every_submit_is_a_new_job(store):
    assert (await submit(store)).job_id != (await submit(store)).job_id


async def test_the_limit_of_open_jobs_holds_when_all_come_at_once(store):
    outcomes = await asyncio.gather(
        *(store.submit_job("a", "ann", REQUEST, f"k{i}", most_open=3) for i in range(10)), return_exceptions=True
    )
    kept = [job for job in outcomes if not isinstance(job, Exception)]
    assert len(kept) == 3
    assert all(isinstance(o, TooManyRequests) for o in outcomes if isinstance(o, Exception))
    await store.submit_job("a", "bob", REQUEST, most_open=3)
    await store.submit_job("b", "ann", REQUEST, most_open=3)
    again = next(i for i, o in enumerate(outcomes) if not isinstance(o, Exception))
    assert (await store.submit_job("a", "ann", REQUEST, f"k{again}", most_open=3)).job_id == kept[0].job_id
    await store.request_cancel("a", kept[0].job_id, "enough")
    await store.submit_job("a", "ann", REQUEST, most_open=3)


async def test_a_life_is_recorded_with_times_and_reasons(store, clock):
    job = await submit(store)
    steps = [
        (JobState.STARTING, "there is room"),
        (JobState.RUNNING, "it answers"),
        (JobState.QUEUED, "node n1 was lost"),
        (JobState.STARTING, "again"),
        (JobState.RUNNING, "it answers"),
        (JobState.COMPLETED, "30 steps"),
    ]
    for following, reason in steps:
        clock.advance(1.0)
        before = await store.job("a", job.job_id)
        url = "http://n1:1" if following is JobState.RUNNING else before.url
        after = await store.change_state(job.job_id, before.state, following, reason, url=url, node="n1")
        assert (after.state, after.reason, after.changed_at) == (following, reason, clock.wall)
        assert (after.url is None) == (following is not JobState.RUNNING)
    changes = await store.changes("a", job.job_id)
    assert [(c.following, c.reason) for c in changes] == [(JobState.QUEUED, "submitted"), *steps]
    assert [c.previous for c in changes] == [None, *(c.following for c in changes[:-1])]
    assert [c.at - job.created_at for c in changes] == [0, 1, 2, 3, 4, 5, 6]
    assert [c.number for c in changes] == [1, 2, 3, 4, 5, 6, 7]
    assert await store.changes("a", job.job_id, after=5) == changes[5:]
    assert (await store.job("a", job.job_id)).starts == 2


async def test_only_one_of_many_wins_the_same_move(store):
    job = await submit(store)
    outcomes = await asyncio.gather(
        *(
            store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, f"by {i}", node=f"n{i}")
            for i in range(16)
        ),
        store.request_cancel("a", job.job_id, "no"),
        return_exceptions=True,
    )
    won = [o for o in outcomes[:16] if not isinstance(o, Exception)]
    assert len(won) == 1
    assert all(isinstance(o, Conflict) for o in outcomes[:16] if isinstance(o, Exception))
    last = await store.job("a", job.job_id)
    assert (last.node, last.starts, last.cancel_requested) == (won[0].node, 1, True)
    assert len(await store.changes("a", job.job_id)) == 2


async def test_a_legal_move_from_a_state_that_was_not_expected_is_refused(store):
    job = await running(store)
    for expected in (JobState.STARTING, {JobState.QUEUED, JobState.STARTING}, ()):
        with pytest.raises(Conflict, match=r"running.*longer") as caught:
            await store.change_state(job.job_id, expected, JobState.FAILED, "it did not start")
        assert not isinstance(caught.value, IllegalTransition)
    assert await store.job("a", job.job_id) == job
    await store.change_state(job.job_id, [JobState.STARTING, JobState.RUNNING], JobState.FAILED, "it fell")


async def test_a_move_that_the_lifecycle_does_not_have_changes_nothing(store):
    job = await submit(store)
    with pytest.raises(IllegalTransition):
        await store.change_state(job.job_id, JobState.QUEUED, JobState.RUNNING, "", url="http://x")
    assert await store.job("a", job.job_id) == job
    assert len(await store.changes("a", job.job_id)) == 1
    with pytest.raises(TypeError):
        await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "", state="running")
    assert await store.job("a", job.job_id) == job


async def test_a_move_that_is_committed_but_not_answered_can_be_repeated(store, monkeypatch):
    """The operation runs twice, as where a database dies after the commit and before it says so."""
    job = await submit(store)
    write = store._db.submit

    async def twice(operation, tag=None):
        await write(operation, tag)
        return await write(operation, tag)

    monkeypatch.setattr(store._db, "submit", twice)
    started = await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "")
    assert (started.state, started.starts) == (JobState.STARTING, 1)
    await submit(store)
    await store.request_cancel("a", job.job_id, "")
    await store.append_audit("a", "ann", None, "x", "y")
    assert len(await store.queue()) == 1
    assert await change_numbers(store) == [1, 2, 3]
    assert len(await store.audit("a")) == 1


async def test_cancel(store):
    queued, live, over = await submit(store), await running(store), await running(store)
    await store.change_state(over.job_id, JobState.RUNNING, JobState.COMPLETED, "done")
    assert (await store.request_cancel("a", queued.job_id, "by ann")).state is JobState.CANCELLED
    assert (await store.changes("a", queued.job_id))[-1].reason == "by ann"
    for _ in range(2):
        asked = await store.request_cancel("a", live.job_id, "by ann")
        assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    assert (await store.request_cancel("a", over.job_id, "by ann")).state is JobState.COMPLETED
    assert [job.job_id for job in await store.live() if job.cancel_requested] == [live.job_id]
    with pytest.raises(Conflict, match="cancellation"):
        await store.change_state(live.job_id, JobState.RUNNING, JobState.QUEUED, "lost")
    await store.change_state(live.job_id, JobState.RUNNING, JobState.CANCELLED, "by ann")


async def test_queue_and_live_are_in_order_of_submission_over_all_tenants(store, clock):
    jobs = []
    for i in range(6):
        clock.wall -= 100  # the clock going back does not change the order
        jobs.append(await submit(store, "ab"[i % 2]))
    assert [job.job_id for job in await store.queue()] == [job.job_id for job in jobs]
    for job in reversed(jobs[::2]):
        await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "")
    assert [job.job_id for job in await store.live()] == [job.job_id for job in jobs[::2]]
    assert [job.job_id for job in await store.queue()] == [job.job_id for job in jobs[1::2]]


async def test_no_method_shows_another_tenants_job_or_that_it_exists(store):
    job = await running(store, "a")
    never = "job-" + "0" * 16
    for call in (
        lambda job_id: store.job("b", job_id),
        lambda job_id: store.changes("b", job_id),
        lambda job_id: store.request_cancel("b", job_id, ""),
    ):
        messages = []
        for job_id in (job.job_id, never):
            with pytest.raises(NotFound) as caught:
                await call(job_id)
            messages.append(str(caught.value).replace(job_id, ""))
        assert messages[0] == messages[1]
    messages = []
    for cursor in (job.job_id, never):
        with pytest.raises(InvalidRequest) as caught:
            await store.jobs("b", cursor=cursor)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert (await store.jobs("b")).jobs == ()
    assert (await store.jobs("b", user="ann", name="addition")).jobs == ()
    await store.append_audit("a", "ann", None, "job.submit", job.job_id)
    assert await store.audit("b") == []
    assert not (await store.job("a", job.job_id)).cancel_requested
    mine = await submit(store, "b")  # numbers do not tell how much others do
    assert [c.number for c in await store.changes("b", mine.job_id)] == [1]


async def test_filters(store):
    first = await submit(store, user="ann", name="x")
    await submit(store, user="bob", name="x", kind="inference")
    third = await submit(store, user="ann", name="y")
    await store.request_cancel("a", third.job_id, "")

    async def names(**filters):
        return [(job.user, job.name) for job in (await store.jobs("a", **filters)).jobs]

    assert await names() == [("ann", "y"), ("bob", "x"), ("ann", "x")]
    assert await names(user="ann") == [("ann", "y"), ("ann", "x")]
    assert await names(name="x", user="ann") == [("ann", "x")]
    assert await names(kind="inference") == [("bob", "x")]
    assert await names(states=[JobState.CANCELLED]) == [("ann", "y")]
    assert await names(states=[JobState.CANCELLED, JobState.QUEUED], user="ann") == [("ann", "y"), ("ann", "x")]
    assert await names(states=[JobState.FAILED]) == []
    assert first.state is JobState.QUEUED


@pytest.mark.parametrize(
    "text",
    [
        "' OR '1'='1",
        "'; DROP TABLE jobs; --",
        "x' UNION SELECT * FROM keys --",
        "%",
        "_",
        "\\",
        "\0",
        "\ud800",
        "x" * 2**20,
    ],
)
async def test_text_in_filters_and_ids_is_only_text(store, text):
    job = await submit(store)
    assert (await store.jobs("a", name=text)).jobs == ()
    assert (await store.jobs("a", user=text)).jobs == ()
    assert (await store.jobs("a", kind=text)).jobs == ()
    assert (await store.jobs(text[:1000].replace("\0", "").replace("\ud800", ""))).jobs == ()
    with pytest.raises(InvalidRequest):
        await store.jobs("a", cursor=text)
    for call in (store.job("a", text), store.changes("a", text), store.request_cancel("a", text, "")):
        with pytest.raises(NotFound):
            await call
    assert (await store.jobs("a")).jobs == (job,)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"name": ""}, InvalidRequest),
        ({"name": "  "}, InvalidRequest),
        ({"name": "x" * 2**20}, InvalidRequest),
        ({"name": "a\nb"}, InvalidRequest),
        ({"name": "a\0b"}, InvalidRequest),
        ({"name": "\ud800"}, InvalidRequest),
        ({"name": f"my {SECRET}"}, InvalidRequest),
        ({"kind": "mining"}, InvalidRequest),
        ({"priority": "highest"}, InvalidRequest),
        ({"restarts_limit": -1}, InvalidRequest),
        ({"time_limit_seconds": 0.0}, InvalidRequest),
        ({"time_limit_seconds": float("nan")}, InvalidRequest),
        ({"time_limit_seconds": float("inf")}, InvalidRequest),
        ({"config": {"x": float("nan")}}, InvalidRequest),
        ({"config": {"x": 2**70}}, InvalidRequest),
        ({"config": {"x": "\ud800"}}, InvalidRequest),
        ({"config": {"x": {1, 2}}}, InvalidRequest),
        ({"config": {"key": SECRET}}, InvalidRequest),
        ({"config": {"x": "y" * 2**20}}, PayloadTooLarge),
    ],
)
async def test_what_can_not_be_kept_is_refused(store, values, error):
    with pytest.raises(error) as caught:
        await submit(store, **values)
    assert len(str(caught.value)) < 300
    assert SECRET not in str(caught.value)
    assert (await store.jobs("a")).jobs == ()


@pytest.mark.parametrize("limit", [0, -1, 501, 2**70])
async def test_a_limit_out_of_range_is_refused(store, limit):
    for call in (store.jobs("a", limit=limit), store.audit("a", limit=limit)):
        with pytest.raises(InvalidRequest):
            await call


@pytest.mark.parametrize("number", [-1, 2**31, 2**64, 10**30])
async def test_any_number_may_be_asked_after(store, number):
    job = await submit(store)
    expected = 1 if number < 0 else 0
    assert len(await store.changes("a", job.job_id, number)) == expected
    assert await store.audit("a", before=number) == []


async def test_what_concerns_the_queue_is_notified(store):
    job = await submit(store)
    assert store.changed.count == 1
    await store.change_state(job.job_id, JobState.QUEUED, JobState.STARTING, "")
    await store.request_cancel("a", job.job_id, "")
    assert store.changed.count == 3


async def test_a_caller_that_goes_away_does_not_undo_what_it_asked_for(store):
    task = asyncio.create_task(store.submit_job("a", "ann", REQUEST, "k"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        while await change_numbers(store) != [1]:
            await asyncio.sleep(0.01)


async def test_audit_is_newest_first_and_has_no_key(store, clock):
    for i in range(5):
        clock.advance(1)
        await store.append_audit("a", "ann", "k1", "job.submit", f"job {i} with {SECRET}")
    page = await store.audit("a", limit=2)
    assert [(e.number, e.who, e.key_id, e.what) for e in page] == [
        (5, "ann", "k1", "job.submit"),
        (4, "ann", "k1", "job.submit"),
    ]
    assert page[0].at == clock.wall
    assert page[0].target == "job 4 with pk_0123456789ab_[hidden]"
    assert [e.number for e in await store.audit("a", before=page[-1].number)] == [3, 2, 1]


async def test_reasons_and_last_lines_are_cleaned_and_cut(store):
    job = await running(store)
    lines = "x" * 100_000 + f"\n\0 key {SECRET} pj-{'a' * 40} pe-train-000001-00.3.{'b' * 40} \ud800 end"
    job = await store.change_state(job.job_id, JobState.RUNNING, JobState.FAILED, lines, log_tail=lines)
    for text, most in ((job.reason, 4096), (job.log_tail, 65536)):
        assert len(text) == most
        assert text.endswith(
            "\n\ufffd key pk_0123456789ab_[hidden] pj-[hidden] pe-train-000001-00.3.[hidden] \ufffd end"
        )
