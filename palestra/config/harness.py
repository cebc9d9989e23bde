"""The `[harness]` table: an agent that is a program plays the episodes of a job."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from palestra.config.section import Positive, Seconds, Section


class HarnessConfig(Section):
    """A program plays each episode in a workspace, and what it leaves there is scored."""

    name: str = Field(min_length=1, description="Name of the harness; `palestra harness list` has all.")
    score: Path | None = Field(
        None,
        description="Python file whose function `score(task, result)` returns the reward; `FILE:NAME` for another "
        "function. None: `reward` of `palestra.train`.",
    )
    folder: Path | None = Field(
        None, description="Folder or archive, such as a repository, that each workspace begins with. None: empty."
    )
    timeout_seconds: Seconds = Field(600.0, description="An episode whose program runs longer fails.")
    max_calls: Positive | None = Field(
        None,
        description="Answered model calls after which the program is ended and its workspace scored, as truncated; "
        "looked at every second. None: any number.",
    )
    max_tokens: Positive | None = Field(
        None, description="The same for sampled tokens of an episode. None: any number."
    )
