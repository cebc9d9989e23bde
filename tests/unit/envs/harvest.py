"""The world of `bench/harvest.py`, which benchmarks and tests play alike."""

from __future__ import annotations

import runpy
from pathlib import Path

Harvest = runpy.run_path(str(Path(__file__).parents[3] / "bench" / "harvest.py"))["Harvest"]
