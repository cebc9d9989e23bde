"""What the graphics cards of a job do, wherever a job is looked at; the library of their driver is a script."""

from __future__ import annotations

import httpx2
from in_process import serving
from prometheus_client.parser import text_string_to_metric_families
from unit.models.scripted_nvml import NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_SUPPORTED, Card, Nvml

from palestra.models.gpus import GpuMeter, GpuReader
from palestra.runtime import local


async def test_status_metrics_and_the_page_have_the_figures_of_the_cards(tmp_path, monkeypatch):
    cards = Card(0), Card(1, use=NVML_ERROR_NOT_SUPPORTED), Card(2, handle=NVML_ERROR_GPU_IS_LOST)
    meter = GpuMeter(GpuReader(None, lambda: Nvml(*cards)).read)
    monkeypatch.setattr(local, "gpus_of_job", lambda config: meter.now)
    async with serving(tmp_path) as job:
        headers = {"authorization": f"Bearer {job.api_key}"}
        async with httpx2.AsyncClient(base_url=job.url, headers=headers) as http:
            status = (await http.get("/status")).json()
            (run,) = (await http.get("/dashboard/api/runs")).json()["runs"]
            text = (await http.get("/metrics")).text
    assert [card["utilisation"] for card in status["gpus"]] == [0.25, None, None]
    assert status["gpus"][2]["problem"] == "NVML: error 15"
    assert run["live"]["gpus"] == status["gpus"]
    assert status["gpu_problem"] == run["live"]["gpu_problem"] == ""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(s.labels["gpu"], s.value) for s in families["palestra_gpu_utilisation"].samples] == [("0", 0.25)]
    memory = {(s.labels["gpu"], s.labels["what"]): s.value for s in families["palestra_gpu_memory_bytes"].samples}
    assert memory == {
        ("0", "used"): 2.0**30,
        ("0", "all"): 80 * 2.0**30,
        ("1", "used"): 2 * 2.0**30,
        ("1", "all"): 80 * 2.0**30,
    }
    assert [s.value for s in families["palestra_gpu_power_watts"].samples] == [300.5, 300.501]
    assert [s.value for s in families["palestra_gpu_temperature_celsius"].samples] == [50.0, 51.0]


async def test_a_job_without_cards_says_nothing_of_any(tmp_path):
    async with serving(tmp_path) as job:
        headers = {"authorization": f"Bearer {job.api_key}"}
        async with httpx2.AsyncClient(base_url=job.url, headers=headers) as http:
            status = (await http.get("/status")).json()
            assert "palestra_gpu" not in (await http.get("/metrics")).text
    assert (status["gpus"], status["gpu_problem"]) == ([], "")
