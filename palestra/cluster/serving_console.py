"""Console output while a model is served: which model, how many calls it answers, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from palestra.cluster.console import Console, models_of
from palestra.config import JobConfig

if TYPE_CHECKING:
    from palestra.cluster.local import LocalJob


def console_of(config: JobConfig, file: IO[str] | None = None) -> Console:
    """Return the console for this kind of job; `file` gets the lines instead of standard output."""
    return (ServingConsole if config.kind == "inference" else Console)(config, file=file)


class ServingConsole(Console):
    """Shows an inference job on a terminal, or as plain lines."""

    def report(self, kind: str, data: dict[str, Any]) -> None:
        """Print the totals when the job has ended; other events are not shown.

        Args:
            kind: kind of the event.
            data: data of the event.
        """
        if kind == "served":
            tokens = data["prompt_tokens"] + data["completion_tokens"]
            self._out.print(f"served {data['calls']:,} calls, {tokens:,} tokens")

    def finished(self, state: str, checkpoint: Path | None) -> None:
        """Print how to serve the model again.

        Args:
            state: the job's last state.
            checkpoint: not used: nothing is trained.
        """
        folder = self._config.folder
        self._out.print(f"stopped; serve it again under the same key with --resume (the run is in {folder})")

    def _headline(self) -> str:
        return f"serving {models_of(self._config)}"

    def _situation(self, job: LocalJob | None) -> tuple[object, str]:
        return super()._situation(None) if job is None else ("", "")  # plain lines about calls would only fill a log

    def _now(self, job: LocalJob | None) -> Sequence[RenderableType]:
        if job is None:
            return (Text("loading the model", style="dim"),)
        context = job.plane.sessions.context
        counts = context.counts
        tokens = counts["prompt_tokens"] + counts["completion_tokens"]
        parts = [
            f"calls {counts['calls']:,} answered, {job.plane.sessions.in_flight:,} in flight",
            f"{tokens:,} tokens",
            f"{context.rate.per_second:,.0f} tok/s",
        ]
        return Text(job.progress.phase), Text("   ".join(parts), style="dim")
