"""Two ranks compute what one process computes, with real processes and gloo; the model is tiny-random."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import GSPOLoss
from palestra.config import AdapterConfig, TrainerConfig
from palestra.errors import ConfigError, InvalidAlgorithm, NotFound, TrainerLost, WorkerCrashLoop
from palestra.models.causal_lm import load_tokenizer
from palestra.trainer import checkpoint
from palestra.trainer.base import OptimParams, PolicySpec
from palestra_sharded.trainer import MOST_LOSSES, ShardedTrainer
from unit.sharded.ranks import (
    LORA,
    LOSS,
    SETTINGS,
    alive,
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
from unit.trainer.test_torch_trainer import batch_of_two_groups

pytestmark = pytest.mark.slow
SILENCE = 15.0


@pytest.fixture(scope="module")
def two_ranks(loop, shown):
    """A trainer whose two processes start with the first test that needs them: their imports take seconds.

    It computes layers again in the backward pass, which the whole job of test_sharded_training.py does not.
    """
    trainer = rank_trainer(2, shown.folder, stuck_seconds=SILENCE, activation_checkpointing=True)
    yield trainer
    pids = trainer.pids
    loop.run(trainer.close())
    assert not any(map(alive, pids))


CASES = {
    "one gradient": {"batches": [rows()]},
    "accumulated": {"batches": [rows(), rows(3)]},
    "clipped": {"batches": [rows()], "params": OptimParams(learning_rate=1e-3, max_grad_norm=0.1)},
    "one row": {"batches": [rows(1)]},
    "one episode over micro-batches": {"batches": [batch_of_two_groups()]},
    "lora": {"batches": [rows()], "spec": PolicySpec(model="tiny-random", adapter=LORA, seed=3)},
    "lora on the head": {
        "batches": [rows()],
        "spec": PolicySpec(model="tiny-random", adapter=AdapterConfig(rank=4, targets=["q_proj", "lm_head"])),
    },
    "a loss over sequences": {
        "batches": [[replace(each, episode_id=f"e{n // 3}") for n, each in enumerate(batch_of_two_groups())]],
        "loss": LossSpec.of(GSPOLoss()),
    },
    "entropy": {"batches": [rows()], "loss": LOSS.model_copy(update={"entropy_coefficient": 0.3})},
}


@pytest.mark.parametrize("case", CASES)
@on_the_loop
async def test_two_ranks_compute_the_gradient_of_one_process(case, two_ranks, tmp_path):
    one = one_process()
    _, wanted, update, at = await trained(one, tmp_path / "one", **CASES[case])
    name, found, own_update, own = await trained(two_ranks, tmp_path / "two", **CASES[case])
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.rows, ours.trained_tokens, ours.flat_tokens) == (
            theirs.rows,
            theirs.trained_tokens,
            theirs.flat_tokens,
        )
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-6)
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert own_update.grad_norm == pytest.approx(update.grad_norm, rel=1e-5)
    equal(moments(own), moments(at))
    await two_ranks.remove(name)
    await one.close()


@on_the_loop
async def test_numbers_of_a_reference_and_of_the_policy_are_those_of_one_process(two_ranks, tmp_path):
    spec, wanted = PolicySpec(model="tiny-random", reference="tiny-random", adapter=LORA), ("old_logprobs",)
    one, name = one_process(), next(names)
    for trainer in (one, two_ranks):
        await trainer.create(name, spec)
    for outputs in (wanted, ("reference_logprobs", "old_logprobs"), ()):
        theirs, ours = await one.forward(name, rows(5), outputs), await two_ranks.forward(name, rows(5), outputs)
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            for a, b in zip(ours[key], value, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="compute values"):
        await two_ranks.forward(name, rows(2), ("values",))
    assert await two_ranks.untrainable(name, rows(2), "check") == {}
    await two_ranks.remove(name)
    with pytest.raises(NotFound):
        two_ranks.version(name)
    await one.close()


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@on_the_loop
async def test_checkpoints_of_one_process_and_of_two_ranks_load_in_the_other_bit_for_bit(adapter, two_ranks, tmp_path):
    one, spec = one_process(), PolicySpec(model="tiny-random", adapter=adapter)
    for number, (writer, reader) in enumerate(((one, two_ranks), (two_ranks, one))):
        name, _, _, path = await trained(writer, tmp_path / f"{number}", [rows()], spec)
        other = next(names)
        await reader.create(other, spec)
        state = await reader.load(other, path.parent)
        assert state is not None
        assert (state["step"], state["n"]) == (1, 1)
        assert reader.version(other) == writer.version(name)
        again = await reader.save(other, tmp_path / "again" / other, {"step": 1}, "s")
        for read in (moments, saved_tensors):
            same(read(again), read(path))
        # Both go on alike, which the counts of updates decide as well.
        for trainer, own in ((writer, name), (reader, other)):
            await trainer.forward_backward(own, rows(4), LOSS, "next")
            await trainer.optim_step(own, OptimParams(learning_rate=1e-3), "next u")
        source, own = await reader.weights(other), await writer.weights(name)
        found, wanted = dict(source.tensors()), dict(own.tensors())
        equal(found, wanted)
        await two_ranks.remove(name if writer is two_ranks else other)
    await one.close()


@on_the_loop
async def test_what_is_published_is_what_one_process_rounds(two_ranks, tmp_path):
    name, _, _, path = await trained(two_ranks, tmp_path, [rows()])
    saved, published = saved_tensors(path), dict((await two_ranks.weights(name)).tensors())
    assert published.keys() <= saved.keys()
    assert all(torch.equal(value, saved[key]) for key, value in published.items())
    two_ranks._weights_dtype = "bfloat16"
    try:
        for key, value in (await two_ranks.weights(name)).tensors():
            rounded = saved[key].to(torch.bfloat16) if saved[key].ndim > 1 else saved[key]
            assert value.dtype == rounded.dtype
            assert torch.equal(value, rounded)
    finally:
        two_ranks._weights_dtype = "float32"
    assert checkpoint.good(path.parent, 1) is not None
    await two_ranks.remove(name)


@on_the_loop
async def test_a_loss_that_fails_on_one_rank_is_taken_back_on_all(two_ranks, tmp_path):
    name, _, _, _ = await trained(two_ranks, tmp_path, [rows()])
    odd = rows()
    odd[-1] = replace(odd[-1], advantages=np.full_like(odd[-1].advantages, np.nan))
    with pytest.raises(InvalidAlgorithm, match=r"episode.*e5"):
        await two_ranks.forward_backward(name, odd, LOSS, "odd")
    report = await two_ranks.optim_step(name, OptimParams(learning_rate=1.0), "nothing")
    assert (report.grad_norm, report.applied) == (0.0, True)
    assert (await two_ranks.forward_backward(name, rows(), LOSS, "odd")).rows == 6
    await two_ranks.remove(name)


@pytest.mark.parametrize("vision", ["trained", "frozen"])
@on_the_loop
async def test_rows_with_pictures_have_the_gradient_and_the_checkpoint_of_one_process(
    vision, two_ranks, shown, tmp_path
):
    batch, spec = rows_with_pictures(shown), PolicySpec(model="tiny-random-vision", vision=vision)
    one = one_process(shown)
    _, wanted, update, at = await trained(one, tmp_path / "one", [batch], spec)
    name, found, own_update, own = await trained(two_ranks, tmp_path / "two", [batch], spec)
    assert (found[0].rows, found[0].trained_tokens) == (wanted[0].rows, wanted[0].trained_tokens)
    for a, b in zip(found[0].logprobs, wanted[0].logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert own_update.grad_norm == pytest.approx(update.grad_norm, rel=1e-4)
    equal(moments(own), moments(at), 1e-4)
    assert any("vision_model" in key for key in moments(own)) == (vision == "trained")
    ours, theirs = saved_tensors(own), saved_tensors(at)
    assert any("vision_model" in key for key in ours)
    equal(ours, theirs, 1e-4)
    published = dict((await two_ranks.weights(name)).tensors())
    assert any("vision_model" in key for key in published) == (vision == "trained")
    await two_ranks.remove(name)
    await one.close()


@on_the_loop
async def test_a_picture_that_is_not_there_is_taken_back_by_all_ranks(two_ranks, shown, tmp_path):
    batch, name = rows_with_pictures(shown), next(names)
    await two_ranks.create(name, PolicySpec(model="tiny-random-vision", vision="trained"))
    gone = "0" * 64
    lacking = [replace(batch[0], media=tuple(span._replace(digest=gone) for span in batch[0].media)), *batch[1:]]
    with pytest.raises(NotFound, match=rf"no picture.*{gone}"):
        await two_ranks.forward_backward(name, lacking, LOSS, "lacking")
    report = await two_ranks.optim_step(name, OptimParams(learning_rate=1.0), "nothing")
    assert (report.grad_norm, report.applied) == (0.0, True)
    assert (await two_ranks.forward_backward(name, batch, LOSS, "lacking")).rows == 4
    await two_ranks.remove(name)


def rounding_ranks() -> ShardedTrainer:
    own = {"devices": 2, "dtype": "bfloat16", "activation_checkpointing": True}
    return ShardedTrainer(TrainerConfig.model_validate(SETTINGS | own), 2, "bfloat16")


@pytest.fixture(scope="module")
def two_rounding_ranks(loop):
    """A trainer that computes in bfloat16, and layers again in the backward pass."""
    trainer = rounding_ranks()
    yield trainer
    loop.run(trainer.close())


ROUNDED = {
    "full": None,
    "lora": PolicySpec(model="tiny-random", adapter=LORA, seed=3),
    "loaded whole": PolicySpec(model="tiny-random-vision"),  # so that no weight waits in a file
}


@pytest.mark.parametrize("spec", ROUNDED.values(), ids=ROUNDED)
@on_the_loop
async def test_in_bfloat16_ranks_round_what_one_process_rounds(spec, two_rounding_ranks, tmp_path):
    """The products of a rank have other numbers of rows, so that their sums differ by their last bits; no more."""
    one = one_process(dtype="bfloat16")
    name, found, own_update, own = await trained(two_rounding_ranks, tmp_path / "two", [rows()], spec)
    _, wanted, update, at = await trained(one, tmp_path / "one", [rows()], spec)
    assert own_update.grad_norm == pytest.approx(update.grad_norm, rel=1e-3)
    for a, b in zip(found[0].logprobs, wanted[0].logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2)
    equal(moments(own), moments(at), tolerance=2e-2)
    await two_rounding_ranks.remove(name)
    await one.close()


def write_wide_model(folder):
    """Write a model of 156 million weights in bfloat16, and return how many bytes they are in float32."""
    tokenizer = load_tokenizer("tiny-random")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=22,
        num_attention_heads=12,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config)
    model.tie_weights()
    weights = {
        name: torch.ones(weight.shape, dtype=torch.bfloat16)
        if weight.ndim == 1
        else torch.empty(weight.shape, dtype=torch.bfloat16).uniform_(-0.03, 0.03)
        for name, weight in model.named_parameters()
    }
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return 4 * sum(weight.numel() for weight in weights.values())


def anonymous_bytes(process: int) -> int:
    """Return what a process has of memory that is not of files, of which the kernel keeps what it likes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@contextlib.contextmanager
def watched(processes: list[int]):
    """Yield a list with the most that each process has had of such memory; it is complete at the end of the block."""
    most, ended = [anonymous_bytes(process) for process in processes], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[:] = [max(pair) for pair in zip(most, map(anonymous_bytes, processes), strict=True)]

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield most
    finally:
        ended.set()
        watching.join()


@on_the_loop
async def test_no_rank_has_a_whole_model_in_memory_while_it_loads(tmp_path):
    whole, name = write_wide_model(tmp_path / "wide"), next(names)
    trainer = rounding_ranks()
    await trainer.create(name, PolicySpec(model="tiny-random"))
    before = [anonymous_bytes(process) for process in trainer.pids]
    with watched(trainer.pids) as most:
        await trainer.create(next(names), PolicySpec(model=str(tmp_path / "wide")))
    grown = [after - first for first, after in zip(before, most, strict=True)]
    peaks = await trainer.peak_bytes()
    await trainer.close()
    # Half of the weights is its part, and it has gathered a layer for a trial. One that had loaded all would have had
    # the whole weights beside its part.
    assert max(grown) < 0.7 * whole, [size / whole for size in grown]
    assert min(grown) > 0.5 * whole, [size / whole for size in grown]
    assert all(peak > size for peak, size in zip(peaks, most, strict=True))


async def lose(trainer, name: str, sent: signal.Signals) -> float:
    """Send a signal to the second rank, see a request end with an error, and return the seconds that it took."""
    os.kill(trainer.pids[1], sent)
    started = time.monotonic()
    with pytest.raises(TrainerLost, match=r"rank 1 (was killed by SIGKILL|has been silent for)"):
        await trainer.forward_backward(name, rows(), LOSS, "lost")
    assert trainer.is_lost
    await asyncio.wait_for(trainer.lost(), 1.0)
    with pytest.raises(TrainerLost):
        await trainer.weights(name)
    return time.monotonic() - started


@on_the_loop
async def test_a_rank_that_is_killed_or_stopped_ends_the_request_and_all_ranks(two_ranks, tmp_path):
    """Last of this file: the trainer gives up at its end."""
    name, _, _, path = await trained(two_ranks, tmp_path, [rows()])
    pids, folder = two_ranks.pids, two_ranks._ranks.folder
    assert await lose(two_ranks, name, signal.SIGKILL) < 10.0
    await two_ranks.renew()
    assert not two_ranks.is_lost
    assert not folder.exists()
    assert not any(map(alive, pids))
    await two_ranks.create(name, PolicySpec(model="tiny-random"))
    assert (await two_ranks.load(name, path.parent))["step"] == 1
    await two_ranks.forward_backward(name, rows(), LOSS, "goes on")
    assert await lose(two_ranks, name, signal.SIGSTOP) < SILENCE + 15.0
    two_ranks._losses = MOST_LOSSES - 1
    with pytest.raises(WorkerCrashLoop, match=r"rank.*1"):
        await two_ranks.renew()
    assert not two_ranks.is_lost
