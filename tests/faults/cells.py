"""The table of faults: who is hurt, how, and at which moment of a job. What can't be tried is here with its reason."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from itertools import product
from signal import Signals

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
WORKER, MODEL_SERVER, RAYLET, NODE = "worker", "model server", "raylet", "node"
SCHEDULER, DATABASE = "scheduler", "database connection"
ENGINE_WORKER, TRAINER_RANK, VLLM_SERVER = "engine worker", "trainer rank", "vLLM server"
BACKENDS = {  # of a job that runs alone and that workers play; all others are hurt in the service
    ENGINE_WORKER: "one of two processes of `engine.replicas = 2`, which samples",
    TRAINER_RANK: "one of two processes of `trainer.devices = 2`, with a real model",
    VLLM_SERVER: "the process of vLLM that samples, of the only server of a job; another server is started",
}
COMPONENTS = {
    WORKER: "a process that claims episodes and calls the model",
    MODEL_SERVER: "the process of the job, which is its Ray worker process: one actor, one process",
    SCHEDULER: "`palestra serve`",
    DATABASE: "the PostgreSQL process of the session with which the scheduler writes",
    RAYLET: "Ray's own process on the machine of the job; Ray then takes the machine for lost",
    NODE: "a machine with both engine workers and the runner of a job, whose own process is on another machine",
} | BACKENDS
SIGNALS = {KILL: "SIGKILL", STOP: "SIGSTOP"}
PAST_THE_LEASE = {  # what a SIGSTOP outlasts
    WORKER: "until its lease of 3 s has run out",
    MODEL_SERVER: "for ever: it has to be given up after 30 s, and replaced; after 5 s where it was told to end",
    RAYLET: "until Ray has given up the machine, and the job is over; then the machine goes",
    NODE: "all its processes stand still until the job is over; then the machine goes",
    SCHEDULER: "for 5 s, in which the job goes on without it; one of 40 s is below",
    DATABASE: "for 12 s, longer than a request is tried again",
    ENGINE_WORKER: "for ever: it has to be given up after 3 s without progress, and replaced",
    TRAINER_RANK: "for ever: all ranks have to be given up after 20 s of silence, and started again",
    VLLM_SERVER: "for ever: it has to be given up after 20 s without progress, and replaced",
}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment in the life of a job: its model server stands still at a named point while somebody is hurt.

    Where replies are sampled by engine workers, it is one of these that stands still in the middle of one. It is hurt
    then, or its machine is.
    """

    name: str
    point: str  # of `palestra/faults.py`
    passes: tuple[int, int]  # the pass at which the server stops: of a job with workers, of one that plays itself
    what: str

    @property
    def asks_to_cancel(self) -> bool:
        return self.point == "during_stop"

    def fault(self, component: str) -> str:
        """What arms a machine so that servers stop there."""
        # Of two engine workers, each has about half of the passes.
        alone = component not in (WORKER, *BACKENDS) and (component, self.point) != (NODE, "during_generation")
        return f"{self.point}:{self.passes[alone]}:STOP"


# A job with workers has 20 claims and ends, 40 chats; one that plays itself claims several at once.
MOMENTS = (
    Moment(name="at claim", point="after_claim_commit", passes=(10, 4), what="committed, and not answered"),
    Moment(name="mid-generation", point="during_generation", passes=(18, 60), what="part of a reply is sampled"),
    Moment(name="at end", point="after_end_commit", passes=(10, 30), what="the reward is committed, and not answered"),
    Moment(name="mid-step", point="after_step", passes=(2, 2), what="updated, and nothing of it is on disk"),
    Moment(
        name="mid-checkpoint", point="before_checkpoint_rename", passes=(2, 2), what="written, and not yet in place"
    ),
    Moment(name="mid-publish", point="before_publish", passes=(3, 3), what="trained, and not yet sampled from"),
    Moment(name="at job start", point="during_start", passes=(1, 1), what="its store is open, and nothing listens"),
    Moment(name="at cancel", point="during_stop", passes=(1, 1), what="it was told to end, and is about to save"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault."""

    component: str
    signal: Signals
    moment: Moment

    @property
    def name(self) -> str:
        return f"{self.component}-{SIGNALS[self.signal]}-{self.moment.name}".replace(" ", "-")


CELLS = tuple(
    Cell(component=component, signal=number, moment=moment)
    for moment, component, number in product(MOMENTS, COMPONENTS, SIGNALS)
)


def impossible(cell: Cell) -> str | None:
    """Why a fault can't be tried; None: it can."""
    if (cell.component, cell.moment.name) == (WORKER, "at job start"):
        return "a job that does not listen yet has no address, so no worker has found it, and none holds anything of it"
    return None


def cell(component: str, number: Signals, moment: str) -> Cell:
    """By its names."""
    (found,) = (c for c in CELLS if (c.component, c.signal, c.moment.name) == (component, number, moment))
    return found
