"""Collections of garbage examine few objects at a time."""

from __future__ import annotations

import gc

from palestra.http.server import tune_gc

ALIVE = 200_000  # objects that are made and kept, such as the calls of a step
MOST = 20_000  # objects that one collection may examine: about 10 ms


def test_a_collection_examines_few_objects_however_many_are_alive() -> None:
    thresholds, examined = gc.get_threshold(), list[int]()

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            young = (gc.get_objects(generation) for generation in range(info["generation"] + 1))
            examined.append(sum(map(len, young)))

    gc.collect()
    tune_gc()
    gc.callbacks.append(look)
    try:
        kept = [[number] for number in range(ALIVE)]
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    assert len(kept) == ALIVE
    assert len(examined) > 10
    assert max(examined) < MOST
