from __future__ import annotations

import httpx2

from palestra.config import JobConfig
from palestra.runtime.local import local_job
from palestra.types.calls import PolicyVersion
from unit.building import TASK


async def test_a_claim_names_the_policy_and_the_version_that_the_engine_samples_from(tmp_path):
    config = JobConfig.model_validate(
        {"run_dir": tmp_path, "server": {"port": 0}, "engine": {"kind": "fake"}, "policies": {"actor": {}}}
    )
    async with local_job(config, lambda kind, data: None) as job:
        await job.plane.store.groups.register("train", 0, 1, TASK, 2)
        engine = job.plane.sessions.context.policies.runtime("actor").engine
        async with httpx2.AsyncClient(base_url=job.url, headers={"Authorization": f"Bearer {job.api_key}"}) as http:
            for number, version in enumerate([PolicyVersion(0, 0), PolicyVersion(1, 7)]):
                await engine.sync_weights("actor", version, None)
                answer = await http.post("/claim_episode", json={"worker_id": "w", "request_id": f"r{number}"})
                episode = answer.json()["episode"]
                assert (episode["model"], episode["version"]) == ("actor", str(version))
                assert episode["policies"] == {"actor": str(version)}
