"""The bounds on what one grammar may cost in time and memory.

The limits of `llguidance` come first: they count steps, so that equal grammars are refused equally on every machine.
They have gaps, though: the intersection of patterns multiplies before it is counted. So the kernel also bounds the
processor time and the memory of the process that does the work.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The most that one grammar may use before it is refused.

    Attributes:
        compile_cpu_seconds: processor time of compiling, including the first mask and a few trial steps.
        step_cpu_seconds: processor time of one token: accept it, and find the tokens that may follow.
        memory_mib: memory of the grammar's process, beyond the tokenizer's.
        compile_wall_seconds: time that compiling may take on a machine that is busy with other work.
        step_wall_seconds: time that a request for tokens may take on a busy machine.
        lexer_states: states of the automaton that recognises lexemes; about 2 kB each.
        tree_places: most places in the replies of a grammar that is walked whole when it is compiled, and needs no
            process afterwards; 0: none is.
    """

    compile_cpu_seconds: float = 2.0
    step_cpu_seconds: float = 0.5
    memory_mib: int = 128
    compile_wall_seconds: float = 20.0
    step_wall_seconds: float = 10.0
    lexer_states: int = 50_000
    tree_places: int = 256


BOUNDS = Bounds()
# The trainer walks grammars that the engine has walked, so a grammar that was just inside the engine's bounds must not
# fail in the trainer. A repeated step has to give the same result, so it must not matter how busy the machine is.
TRAINER_BOUNDS = Bounds(
    compile_cpu_seconds=16.0,
    step_cpu_seconds=4.0,
    memory_mib=512,
    compile_wall_seconds=3600.0,
    step_wall_seconds=3600.0,
)
