"""The same with a real, tiny model: in deterministic mode the weights are bit-identical to the undisturbed run's."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from outcome import assert_complete, assert_same_metrics
from servers import TINY, Job, run_through

pytestmark = pytest.mark.slow


# A critic, a reference, and a coefficient that follows the divergence: all of it is in the checkpoint.
PPO = TINY | {"algorithm": {"name": "ppo", "kl": {"coefficient": 0.1, "target": 0.01, "place": "reward"}}}


# Twin values, the copy that follows them, and episodes of earlier steps, which are read out of the store again.
SAC = TINY | {"algorithm": {"name": "sac", "replay": {"draws": 2, "episodes": 4}}}


# An adapter in place of all weights: the policy's, the critic's, and a reference on the same base.
LORA = PPO | {
    "policies": {"policy": TINY["policies"]["policy"] | {"adapter": {"rank": 4, "targets": ["q_proj", "down_proj"]}}}
}


def tensors(job: Job) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(job.checkpoints()[-1].glob("*.safetensors")):
        found |= {f"{path.name} {name}": tensor for name, tensor in safetensors.torch.load_file(path).items()}
    return found


# 2 claims and 4 chats are of each validation, 6 claims and 12 chats of each step.
@pytest.mark.parametrize(
    ("every", "fault"),
    [
        pytest.param(10, "after_chat_commit:26", id="while step 2 is gathered, and step 1 has to be repeated"),
        pytest.param(
            2,
            "after_end_commit:24",
            id="while step 3 is gathered, and step 2 is in the checkpoint",
            marks=pytest.mark.long,
        ),
        pytest.param(1, "before_step:2", id="before the update of step 2"),
        pytest.param(
            10, "before_publish:4", id="before step 3 is published, and all has to be repeated", marks=pytest.mark.long
        ),
    ],
)
def test_weights_are_bit_identical_after_a_kill(tmp_path, undisturbed_tiny, every, fault):
    with Job(tmp_path, TINY | {"checkpoint": {"every_steps": every}}) as job:
        run_through(job, [fault])
        assert_complete(job)
        assert_same_metrics(job, undisturbed_tiny)
        found, wanted = tensors(job), tensors(undisturbed_tiny)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture(scope="module")
def undisturbed_ppo(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-ppo"), PPO) as job:
        run_through(job, [])
        assert_complete(job)
        yield job


@pytest.mark.parametrize(
    ("every", "fault"),
    [
        pytest.param(
            10,
            "after_chat_commit:26",
            id="while step 2 is gathered, and step 1 has to be repeated",
            marks=pytest.mark.long,
        ),
        pytest.param(1, "before_step:2", id="between the updates of critic and policy in step 2"),
        pytest.param(
            1, "before_checkpoint_rename:2", id="while the checkpoint of step 2 is written", marks=pytest.mark.long
        ),
        pytest.param(
            2,
            "before_publish:4",
            id="before step 3 is published, from the checkpoint of step 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_policy_and_critic_of_ppo_are_bit_identical_after_a_kill(tmp_path, undisturbed_ppo, every, fault):
    with Job(tmp_path, PPO | {"checkpoint": {"every_steps": every}}) as job:
        run_through(job, [fault])
        assert_complete(job)
        assert_same_metrics(job, undisturbed_ppo)
        found, wanted = tensors(job), tensors(undisturbed_ppo)
        assert found.keys() == wanted.keys()
        assert any(name.startswith("critic-optimizer") for name in wanted)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture(scope="module")
def undisturbed_sac(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-sac"), SAC) as job:
        run_through(job, [], "--choices")
        assert_complete(job)
        yield job


@pytest.mark.parametrize(
    ("every", "fault"),
    [
        pytest.param(
            10,
            "after_chat_commit:26",
            id="while step 2 is gathered, and step 1 has to be repeated",
            marks=pytest.mark.long,
        ),
        pytest.param(1, "before_step:4", id="between the updates of critic and policy, in the second draw of step 2"),
        pytest.param(
            2,
            "before_publish:4",
            id="before step 3 is published, from the checkpoint of step 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_policy_critic_and_copy_of_sac_are_bit_identical_after_a_kill(tmp_path, undisturbed_sac, every, fault):
    with Job(tmp_path, SAC | {"checkpoint": {"every_steps": every}}) as job:
        run_through(job, [fault], "--choices")
        assert_complete(job)
        assert_same_metrics(job, undisturbed_sac)
        found, wanted = tensors(job), tensors(undisturbed_sac)
        assert found.keys() == wanted.keys()
        assert any(name.startswith("critic-target") for name in wanted)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.fixture(scope="module")
def undisturbed_lora(tmp_path_factory):
    with Job(tmp_path_factory.mktemp("undisturbed-lora"), LORA) as job:
        run_through(job, [])
        assert_complete(job)
        yield job


@pytest.mark.parametrize(
    ("every", "fault"),
    [
        pytest.param(
            10,
            "after_chat_commit:26",
            id="while step 2 is gathered, and step 1 has to be repeated",
            marks=pytest.mark.long,
        ),
        pytest.param(1, "before_step:2", id="between the updates of critic and policy in step 2"),
        pytest.param(
            2,
            "before_publish:4",
            id="before step 3 is published, from the checkpoint of step 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_adapters_of_policy_and_critic_are_bit_identical_after_a_kill(tmp_path, undisturbed_lora, every, fault):
    with Job(tmp_path, LORA | {"checkpoint": {"every_steps": every}}) as job:
        run_through(job, [fault])
        assert_complete(job)
        assert_same_metrics(job, undisturbed_lora)
        found, wanted = tensors(job), tensors(undisturbed_lora)
        assert found.keys() == wanted.keys()
        assert any(name.startswith("adapter_model") and bool(t.any()) for name, t in wanted.items() if "lora_B" in name)
        assert not any(name.startswith("model") for name in wanted)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_training_has_changed_the_weights(undisturbed_tiny):
    from palestra.models.catalog import model_folder

    before = safetensors.torch.load_file(f"{model_folder('tiny-random')}/model.safetensors")
    after = safetensors.torch.load_file(undisturbed_tiny.checkpoints()[-1] / "model.safetensors")
    assert [name for name in before if torch.equal(before[name], after[name])] == []
