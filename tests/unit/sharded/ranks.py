"""Rows, trainers and what they leave, for tests that compare ranks with one process or with other ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from dataclasses import replace

import numpy as np
import torch

from palestra.algorithms.loss import LossSpec
from palestra.algorithms.losses import PPOClipLoss
from palestra.config import AdapterConfig, TrainerConfig
from palestra.models.loading import LoadedModels
from palestra.pictures.blobs import StoredPictures
from palestra.pictures.pixels import encode_picture
from palestra.trainer.base import OptimParams, PolicySpec
from palestra.trainer.moment_files import read_moments
from palestra.trainer.optimizer import moments_folder, read_named
from palestra.trainer.torch_policy import OPTIMIZER
from palestra.trainer.torch_trainer import TorchTrainer
from palestra_sharded.processes import RankPlaces
from palestra_sharded.trainer import ShardedTrainer
from unit.trainer.test_torch_trainer import batch_of_two_groups
from unit.vision.seeing import Shown
from unit.vision.test_trainer import some_rows

LOSS = LossSpec.of(PPOClipLoss(clip_high_threshold=1.3))
SETTINGS = {"threads": 1, "dtype": "float32", "micro_batch_tokens": 40}
LORA = AdapterConfig(rank=4)
names = (f"policy-{number}" for number in itertools.count())


def on_the_loop(test):
    """Run an asynchronous test on the module's loop, which pytest-asyncio has only where all of a package has it."""

    @functools.wraps(test)
    def run(loop, **given):
        loop.run(test(**given))

    parameters = [inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    run.__signature__ = inspect.Signature([*parameters, *inspect.signature(test).parameters.values()])
    return run


def rank_trainer(devices, pictures=None, deterministic=False, places: RankPlaces | None = None, **settings):
    """A trainer over so many ranks, which start with its first policy."""
    config = TrainerConfig.model_validate(SETTINGS | {"devices": devices} | settings)
    return ShardedTrainer(config, 2, "float32", deterministic, places, pictures)


def one_process(pictures=None, **settings):
    models = LoadedModels(pictures=None if pictures is None else StoredPictures(pictures))
    return TorchTrainer(TrainerConfig.model_validate(SETTINGS | settings), 2, models)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def rows(count=6, **changes):
    """Rows of episodes of their own: some share a prompt, one has two turns."""
    return [replace(each, episode_id=f"e{n}", **changes) for n, each in enumerate(batch_of_two_groups()[:count])]


async def trained(trainer, folder, batches, spec=None, params=None, loss=LOSS):
    """The reports, and after one update the checkpoint's folder: first moments in it are a tenth of the gradient."""
    name = next(names)
    await trainer.create(name, spec or PolicySpec(model="tiny-random"))
    reports = [
        await trainer.forward_backward(name, batch, loss, f"g{n}", logprobs=True) for n, batch in enumerate(batches)
    ]
    update = await trainer.optim_step(name, params or OptimParams(learning_rate=1e-3), "u")
    await trainer.weights(name)
    path = await trainer.save(name, folder / name, {"step": 1}, "s")
    return name, reports, update, path


def moments(path):
    """First and second moments and counts of updates by name, however they were written."""
    shards = moments_folder(path, OPTIMIZER)
    if not shards.is_dir():
        return read_named(path, OPTIMIZER)
    weights = {name: torch.nn.Parameter(value) for name, value in saved_tensors(path).items()}
    return read_moments(shards, list(weights.items()))


def saved_tensors(path):
    import safetensors.torch

    files = [*path.glob("model*.safetensors"), *path.glob("adapter_model.safetensors")]
    found = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}


def equal(found, wanted, tolerance=1e-5):
    """Every tensor within `tolerance` of its norm."""
    assert found.keys() == wanted.keys()
    worst = max(float((found[name] - value).norm() / value.norm().clamp_min(1e-12)) for name, value in wanted.items())
    assert worst <= tolerance


def same(found, wanted):
    """Every tensor bit for bit."""
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def rows_with_pictures(shown):
    """Three rows with pictures and one of text, so that a rank may have micro-batches without any."""
    drawn = Shown()
    found = some_rows(drawn)
    for image in drawn.images.values():
        shown.put(encode_picture(image))
    return [replace(each, advantages=np.where(each.loss_mask, 1.0, 0.0).astype(np.float32)) for each in found] + rows(1)
