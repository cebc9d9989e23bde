"""A run in a notebook: metrics, episodes, calls and tokens as frames of pandas or polars, read when asked for."""

from palestra.notebook.recorded_run import RecordedRun, load_run

__all__ = ["RecordedRun", "load_run"]
