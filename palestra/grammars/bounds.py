"""What a grammar may cost.

The limits of `llguidance` come first: they count steps, so that equal grammars are refused equally on every machine.
They do not hold everywhere, though: the intersection of patterns multiplies before it is counted. So the processor time
and the memory of the process that does it are bounded, too, by the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Most that one grammar may take.

    Attributes:
        compile_cpu_seconds: processor time of compiling it, first mask and a few steps included.
        step_cpu_seconds: processor time of one token: accept it, and find the tokens that may come next.
        memory_mib: memory of its process, beyond what the tokenizer takes.
        compile_wall_seconds: time that compiling may take where the machine is busy with something else.
        step_wall_seconds: the same for a request of tokens.
        lexer_states: states of the automaton that recognises lexemes; about 2 kB each.
    """

    compile_cpu_seconds: float = 2.0
    step_cpu_seconds: float = 0.5
    memory_mib: int = 128
    compile_wall_seconds: float = 20.0
    step_wall_seconds: float = 10.0
    lexer_states: int = 50_000


BOUNDS = Bounds()
# A grammar that the engine has walked is walked again: what was just inside the bounds there must not fail here. And a
# step that is repeated has to come out the same, so it must not matter how busy the machine is.
TRAINER_BOUNDS = Bounds(
    compile_cpu_seconds=16.0,
    step_cpu_seconds=4.0,
    memory_mib=512,
    compile_wall_seconds=3600.0,
    step_wall_seconds=3600.0,
)
