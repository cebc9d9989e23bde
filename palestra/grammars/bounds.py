"""The bounds on what one grammar may cost in time and memory.

The limits of `llguidance` come first: they count steps, so that equal grammars are refused equally on every machine.
Compiling has gaps in them, though: the intersection of patterns multiplies before it is counted. So a grammar is first
compiled in a process of which the kernel bounds processor time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The most that one grammar may use before it is refused.

    Attributes:
        compile_cpu_seconds: processor time of compiling, including a few random replies.
        memory_mib: memory that this may take.
        compile_wall_seconds: time that this may take on a machine that is busy with other work.
        lexer_states: states of the automaton that recognises lexemes; about 2 kB each.
        tree_places: most places in the replies of a grammar that is walked whole when it is compiled; 0: none is.
    """

    compile_cpu_seconds: float = 2.0
    memory_mib: int = 128
    compile_wall_seconds: float = 20.0
    lexer_states: int = 50_000
    tree_places: int = 256


BOUNDS = Bounds()
# The trainer walks grammars that the engine has walked, so a grammar that was just inside the engine's bounds must not
# fail in the trainer. A repeated step has to give the same result, so it must not matter how busy the machine is.
TRAINER_BOUNDS = Bounds(compile_cpu_seconds=16.0, memory_mib=512, compile_wall_seconds=3600.0)
