"""The budget of a tenant at a real service: several jobs at once, one of them killed, and the commands that show it."""

from __future__ import annotations

import json
import os
import signal

import pytest
from service import LONG, Service, until

from palestra.errors import StoreError
from palestra.store.browsing import browse
from palestra.store.spending import sums

pytestmark = pytest.mark.service
BUDGET = 30_000


def used_by(service: Service, job_id: str) -> int:
    try:
        with browse(service.state / "jobs" / job_id / "run" / "run.db") as connection:
            return sum(one.tokens for one in sums(connection))
    except StoreError:  # it is being made
        return 0


def test_a_tenants_jobs_spend_no_more_than_its_budget_though_one_is_killed(tmp_path):
    with Service(tmp_path) as service:
        service.start()
        made = service.command("tenants", "quota", "default", "--tokens", BUDGET)
        assert made.returncode == 0, made.stderr
        assert f"tokens {BUDGET} (0 spent)" in made.stdout
        control = service.client()
        settings = LONG["environment"]
        config = LONG | {"environment": settings | {"validation_tasks": 0}, "evaluation": {"every_steps": 0}}
        jobs = [control.submit(config, name=f"job-{number}") for number in range(3)]
        assert jobs[0].estimate == "unknown until step 2"
        killed = jobs[0]
        until(lambda: used_by(service, killed.job_id) > 500, "it has spent something", 90)
        for process in service.processes_of(killed.job_id):
            os.kill(process.pid, signal.SIGKILL)
        for job in jobs:
            view = job.wait()
            assert view.state == "completed", view
            assert "the budget of tenant default is spent" in view.reason
        assert killed.view().starts == 2
        total = sum(used_by(service, job.job_id) for job in jobs)
        assert 0.7 * BUDGET < total <= BUDGET
        (tenant,) = control.request("GET", "/tenants")
        assert tenant["spent"]["tokens"] == total  # also of the killed one
        assert any("shared_budget_80" in str(event.data) for job in jobs for event in job.events())
        shown = service.command("cost", "--tenant", "default", "--since", "1h", "--json")
        assert shown.returncode == 0, shown.stderr
        found = json.loads(shown.stdout)
        assert found["total"]["prompt_tokens"] + found["total"]["reply_tokens"] == total
        other = service.command("cost", "--tenant", "blue", "--since", "1h")
        assert other.returncode == 2
        assert "your key is of tenant default" in other.stderr
