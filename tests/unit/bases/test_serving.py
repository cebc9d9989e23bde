"""A base server over a real model: what one tenant can reach of another."""

from __future__ import annotations

import numpy as np
import pytest

from palestra.config import AdapterConfig
from palestra.errors import Forbidden, InvalidRequest
from palestra.models.weights import SavedWeights
from palestra.trainer.base import PolicySpec
from palestra.types.calls import PolicyVersion, SamplingParams
from palestra_bases.base import SamplerSpec
from palestra_bases.link import Link
from palestra_bases.models import SharedModelOptions
from palestra_bases.remote import RemoteEngine, RemoteTrainer
from palestra_bases.serving import BaseOptions, base_server
from unit.building import engine_request

ADAPTER = AdapterConfig(rank=2)
SPEC = PolicySpec(model="tiny-random", adapter=ADAPTER)


async def test_each_tenant_has_a_folder_of_its_own(tmp_path):
    runs, keys = tmp_path / "runs", tmp_path / "base" / "keys"
    shared = SharedModelOptions(models=("tiny-random",))
    options = BaseOptions(shared=shared, folder=tmp_path / "base", runs=runs, port=0, tenants=("ada", "ben"))
    async with base_server(options) as server:
        links = {name: Link(server.address, (keys / name).read_text().strip(), "job") for name in ("ada", "ben")}
        for link in links.values():
            await link.renew()
        ada, ben = (RemoteTrainer(link, 2).trainer for link in links.values())
        own = RemoteEngine(links["ada"])
        engine = own.engine
        for trainer in (ada, ben):
            await trainer.create("policy", SPEC)
        await own.sample("policy", SamplerSpec(model="tiny-random", adapter=ADAPTER))
        theirs = await ben.save("policy", runs / "ben" / "job", {"step": 1}, "s")
        (runs / "ada").mkdir()
        (runs / "ada" / "link").symlink_to(theirs.parent)
        for folder in (theirs.parent, runs / "ada" / "link"):
            for refused in (
                ada.load("policy", folder, 1),
                ada.save("policy", folder, {"step": 9}, "s"),
                ada.save_weights("policy", folder / theirs.name, 1, "w"),
                ada.create("other", PolicySpec(model=str(folder / theirs.name), adapter=ADAPTER)),
                own.sample("other", SamplerSpec(model=str(folder / theirs.name))),
                engine.sync_weights("policy", PolicyVersion(0, 1), SavedWeights(folder / theirs.name)),
            ):
                with pytest.raises(Forbidden):
                    await refused
        assert [path.name for path in theirs.parent.iterdir()] == [theirs.name]
        assert (await ada.save("policy", runs / "ada" / "job", {"step": 1}, "s2")).is_dir()
        two = engine_request(np.ones((2, 2), np.int32), SamplingParams(temperature=1.0, max_tokens=2, seed=1))
        with pytest.raises(InvalidRequest):
            [piece async for piece in engine.generate(two)]
        for link in links.values():
            await link.leave()
