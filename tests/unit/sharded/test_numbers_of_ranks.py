"""A checkpoint of some number of ranks loads on another number, with its moments, bit for bit.

Rows of tiny-random's weights can't be shared out evenly over three ranks, so that parts differ in size.
"""

from __future__ import annotations

import pytest

from palestra.trainer.base import OptimParams, PolicySpec
from unit.sharded.ranks import (
    LORA,
    LOSS,
    equal,
    moments,
    names,
    on_the_loop,
    one_process,
    rank_trainer,
    rows,
    rows_with_pictures,
    same,
    saved_tensors,
    trained,
)

pytestmark = pytest.mark.slow
SPECS = {
    "full": PolicySpec(model="tiny-random"),
    "lora": PolicySpec(model="tiny-random", adapter=LORA),
    "pictures": PolicySpec(model="tiny-random-vision", vision="trained"),
}
WAYS = [(2, 3), (3, 2), (1, 3), (3, 1)]
WITH_PICTURES = [(1, 2), (2, 1), (2, 3)]


@pytest.fixture(scope="module")
def trainers(loop, shown):
    """A trainer of each number of ranks; its processes start with the first test that needs them."""
    found = {1: one_process(shown), 2: rank_trainer(2, shown.folder), 3: rank_trainer(3, shown.folder)}
    yield found
    for trainer in found.values():
        loop.run(trainer.close())


@pytest.mark.parametrize(
    ("kind", "writers", "readers"),
    [
        *((kind, *way) for kind in ("full", "lora") for way in WAYS),
        *(("pictures", *way) for way in WITH_PICTURES),
    ],
)
@on_the_loop
async def test_a_checkpoint_of_some_ranks_is_continued_by_others(kind, writers, readers, trainers, shown, tmp_path):
    writer, reader, spec = trainers[writers], trainers[readers], SPECS[kind]
    batch = rows_with_pictures(shown) if kind == "pictures" else rows()
    name, _, update, path = await trained(writer, tmp_path / "written", [batch], spec)
    assert update.applied
    other = next(names)
    await reader.create(other, spec)
    state = await reader.load(other, path.parent)
    assert state is not None
    assert (state["step"], state["n"]) == (1, 1)
    assert reader.version(other) == writer.version(name)
    again = await reader.save(other, tmp_path / "again" / other, {"step": 1}, "s")
    assert any(key.startswith("exp_avg_sq.") for key in moments(path))
    for read in (moments, saved_tensors):
        same(read(again), read(path))
    # Both go on alike, which moments and counts of updates decide as well.
    for trainer, own in ((writer, name), (reader, other)):
        await trainer.forward_backward(own, batch, LOSS, "next")
        await trainer.optim_step(own, OptimParams(learning_rate=1e-3), "next u")
    tolerance = 1e-4 if kind == "pictures" else 1e-5
    equal(dict((await reader.weights(other)).tensors()), dict((await writer.weights(name)).tensors()), tolerance)
    await writer.remove(name)
    await reader.remove(other)
