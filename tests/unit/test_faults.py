from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from palestra.faults import FAULT_POINTS, _parse


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_every_point_can_be_armed_with_or_without_a_number(point):
    assert _parse(point) == (point, 1, signal.SIGKILL)
    assert _parse(f"{point}:3") == (point, 3, signal.SIGKILL)
    assert _parse(f"{point}:3:STOP") == (point, 3, signal.SIGSTOP)


def test_nothing_is_armed_by_default():
    assert _parse(None) is None
    assert _parse("") is None


@pytest.mark.parametrize(
    "setting", ["before_lunch:1", "before_step:x", "before_step:-1", "before_step:1:2", "before_step:1:", ":3"]
)
def test_a_wrong_setting_is_refused_with_the_known_names(setting):
    with pytest.raises(ValueError, match="after_publish"):
        _parse(setting)


def test_both_sides_of_every_place_are_points():
    of_a_place = {point for point in FAULT_POINTS if not point.startswith(("during_", "between_"))}
    places = {point.partition("_")[2] for point in of_a_place}
    assert {f"{side}_{place}" for side in ("before", "after") for place in places} == of_a_place
    assert {"claim_commit", "chat_commit", "end_commit", "manifest_commit", "step", "publish"} < places


def run_with(setting: str | None, code: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PALESTRA_FAULT"}
    if setting is not None:
        environment["PALESTRA_FAULT"] = setting
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


PASSES = """
from palestra.faults import fault_point
for number in range(1, 5):
    fault_point("before_step")
    fault_point("after_step")
    print(number, flush=True)
"""


def test_the_named_pass_of_the_named_point_kills_and_no_other():
    assert run_with(None, PASSES).stdout.split() == ["1", "2", "3", "4"]
    killed = run_with("before_step:3", PASSES)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.split() == ["1", "2"]
    assert run_with("after_step:2", PASSES).stdout.split() == ["1"]


def test_a_stopped_process_goes_on_and_does_not_stop_again():
    environment = os.environ | {"PALESTRA_FAULT": "before_step:3:STOP"}
    with subprocess.Popen([sys.executable, "-c", PASSES], env=environment, stdout=subprocess.PIPE, text=True) as held:
        _, status = os.waitpid(held.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        held.send_signal(signal.SIGCONT)
        assert held.communicate()[0].split() == ["1", "2", "3", "4"]
        assert held.returncode == 0


def test_a_wrong_setting_stops_the_process_at_import():
    refused = run_with("before_lunch", "import palestra.faults")
    assert refused.returncode != 0
    assert "PALESTRA_FAULT" in refused.stderr
