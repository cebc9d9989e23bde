"""Frames of the real pandas and polars: the numbers of the store, in columns that can be computed with."""

from __future__ import annotations

import json
import re

import pytest
from documents.blocks import ROOT
from unit.dashboard.recorded import REWARDS, calls_of, record

from libraries.child import missing, run

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(missing(), reason="no .venv-peers/libraries; `make libraries` makes it"),
]
READ = """
import json, palestra
run = palestra.load_run({folder!r}, frames={library!r})
frames = [run.metrics(), run.episodes(), run.calls("train-000001-01"), run.tokens(step=5)]
assert all(type(frame).__module__.split(".")[0] == {library!r} for frame in frames)
episodes, tokens = frames[1], frames[3]
groups = episodes.{group_by}("group_index")
print(json.dumps({{
    "columns": [list(frame.columns) for frame in frames],
    "rows": [len(frame) for frame in frames],
    "reward": [float(x) for x in frames[0]["train/reward_mean"]],
    "mean": float(episodes["reward"].mean()),
    "logprobs": [float(x) for x in tokens["logprob"]],
    "tokens": [int(x) for x in tokens["token"]],
    "kinds": [str(frames[0]["train/reward_mean"].dtype), str(tokens["logprob"].dtype), str(tokens["token"].dtype)],
}}))
"""


@pytest.mark.parametrize(("library", "group_by"), [("pandas", "groupby"), ("polars", "group_by")])
async def test_frames_have_the_numbers_of_the_store(tmp_path, library, group_by):
    await record(tmp_path)
    found = json.loads(run(READ.format(folder=str(tmp_path), library=library, group_by=group_by), tmp_path))
    recorded = [chat for group in REWARDS for sample in range(3) for chat in calls_of(group, sample)]
    assert found["rows"] == [2, 9, 2, sum(len(chat.completion_ids) for chat in recorded)]
    assert found["reward"] == [0.5, 0.625]
    rewards = [reward for rewards in REWARDS.values() for reward in rewards]
    assert found["mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert found["logprobs"] == [float(value) for chat in recorded for value in chat.logprobs]
    assert found["tokens"] == [int(value) for chat in recorded for value in chat.completion_ids]
    assert [kind.lower() for kind in found["kinds"]] == ["float64", "float32", "int32"]


async def test_a_metric_that_begins_late_has_gaps(tmp_path):
    await record(tmp_path)
    code = f"""
import palestra
from palestra.notebook.recorded_run import _metric_columns
from palestra.notebook.frames import frame_of
rows = [{{"step": step}} | ({{"late": step / 2}} if step > 150 else {{}}) for step in range(200)]
for library in ("pandas", "polars"):
    late = frame_of(_metric_columns(rows), library)["late"]
    print(library, float(late.sum()), int((late.isna() if library == "pandas" else late.is_null()).sum()))
print(type(palestra.load_run({str(tmp_path)!r}).metrics()).__module__.split(".")[0])
"""
    total = sum(step / 2 for step in range(151, 200))
    assert run(code, tmp_path).split("\n")[:3] == [f"pandas {total} 151", f"polars {total} 151", "pandas"]


async def test_the_blocks_of_the_page_run(tmp_path):
    page = (ROOT / "docs" / "notebook.md").read_text()
    (tmp_path / "runs" / "addition").mkdir(parents=True)
    await record(tmp_path / "runs" / "addition")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    code = "\n".join(block for block in blocks if "ControlClient" not in block and ".watch(" not in block)
    assert code.count("load_run") >= 1
    run(code.replace("train-000012-03", "train-000001-01").replace("step=12", "step=5"), tmp_path)
