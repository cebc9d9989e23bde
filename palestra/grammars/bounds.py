"""Limits on the time and memory of one grammar.

The limits of `llguidance` apply first: they count steps, so every machine refuses the same grammars. They do not cover
all of compilation, though: an intersection of patterns multiplies before it is counted. So a grammar is first compiled
in another process (`worker`), whose processor time and memory the kernel limits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The most that one grammar may use before it is refused.

    Attributes:
        compile_cpu_seconds: of compiling and a few random replies.
        compile_wall_seconds: of compiling on a busy machine.
        lexer_states: states of the lexer's automaton, about 2 kB each.
    """

    compile_cpu_seconds: float = 2.0
    memory_mib: int = 128
    compile_wall_seconds: float = 20.0
    lexer_states: int = 50_000


BOUNDS = Bounds()
# The trainer walks grammars that the engine has walked, so a grammar that was just inside the engine's bounds must not
# fail in the trainer. A repeated step has to give the same result, so it must not matter how busy the machine is.
TRAINER_BOUNDS = Bounds(compile_cpu_seconds=16.0, memory_mib=512, compile_wall_seconds=3600.0)
