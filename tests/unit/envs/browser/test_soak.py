"""The soak of `bench/browser_soak.py`, in small: killed browsers change no reward, and leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machine import require

require("chromium", packages=("miniwob", "playwright"))
pytestmark = [pytest.mark.browser, pytest.mark.slow]
SOAK = Path(__file__).parents[4] / "bench/browser_soak.py"


def test_killed_browsers_change_no_reward_and_leave_nothing():
    command = [sys.executable, str(SOAK), "--episodes", "12", "--kills", "2", "--together", "4"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=170, check=True).stdout
    found = json.loads(printed)
    assert (found["episodes"], found["rewards that differ"]) == (12, [])
    assert found["with kills"]["kills"] == 2
    assert found["with kills"]["failed attempts"] >= 1
    assert found["left"] == {"processes": 0, "profiles": 0}
