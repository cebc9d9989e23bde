"""Record what TRL computes for its GRPO family, DPO and reward models: values and gradients, on tensors drawn here.

In an environment of its own, with CPU torch:

    python -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0 trl==1.16.0
    trl-venv/bin/python tests/unit/algorithms/record_trl.py > tests/unit/algorithms/trl_losses.json

`test_trl.py` compares Palestra's losses with the file. TRL's own method computes them: only the forward pass of the
model is replaced, by a tensor of logprobs whose gradient is recorded.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch
import trl
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer

BATCH, LENGTH, MAX_LENGTH = 6, 9, 12
CASES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.03},
    "gspo by tokens": {
        "loss_type": "dapo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.03,
        "epsilon_high": 0.04,
    },
}


def trainer(logprobs: torch.Tensor, settings: dict) -> SimpleNamespace:
    """What `GRPOTrainer._compute_loss` reads of a trainer."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    arguments = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    given = {"epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"} | settings
    return SimpleNamespace(
        **given,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        args=arguments,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1.0,
        max_completion_length=MAX_LENGTH,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def pairs(mask: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor, beta: float) -> dict:
    """What `DPOTrainer._compute_loss` makes of three pairs; the first half of the rows are the chosen replies."""
    logprobs = (logprobs * mask).clone().requires_grad_(True)
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask], dim=1)
    other = {"entropy": mask * 0.0, "mean_logits": mask * 0.0, "is_top1": mask.bool()}  # for metrics
    models = (SimpleNamespace(log_probs=found, **other) for found in (logprobs, reference * mask))
    model = torch.nn.Identity()
    model.is_gradient_checkpointing = False
    given = SimpleNamespace(
        model=model,
        ref_model=lambda **_: next(models),
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": whole * 0, "attention_mask": whole * 0 + 1, "completion_mask": whole}
    loss = DPOTrainer._compute_loss(given, lambda **_: next(models), inputs, return_outputs=False)
    loss.backward()
    said = {name: values[-1] for name, values in given._metrics["train"].items() if name.startswith("rewards/")}
    return {"beta": beta, "loss": float(loss.detach()), "gradient": logprobs.grad.tolist(), "metrics": said}


def rewards(given: torch.Tensor, coefficient: float | None) -> dict:
    """What `RewardTrainer.compute_loss` makes of three pairs; the first half of the rewards are of chosen replies."""
    found = given.clone().requires_grad_(True)
    itself = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, gather=lambda x: x),
        args=SimpleNamespace(center_rewards_coefficient=coefficient),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(len(given), 1)}
    model = lambda **_: SimpleNamespace(logits=found.unsqueeze(-1))  # noqa: E731
    loss = RewardTrainer.compute_loss(itself, model, inputs)
    loss.backward()
    said = {name: values[-1] for name, values in itself._metrics["train"].items() if name in ("accuracy", "margin")}
    return {
        "coefficient": coefficient or 0.0,
        "rewards": given.tolist(),
        "loss": float(loss.detach()),
        "gradient": found.grad.tolist(),
        "metrics": said,
    }


def main() -> None:
    """Write the fixtures to standard output."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 1, 4, 7, 2, 9])
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    old = -torch.rand(BATCH, LENGTH, generator=draw) * 3
    now = old + torch.randn(BATCH, LENGTH, generator=draw) * 0.3
    advantages = torch.randn(BATCH, generator=draw)
    found = {}
    for name, settings in CASES.items():
        logprobs = now.clone().requires_grad_(True)
        inputs = {
            "prompt_ids": torch.zeros(BATCH, 1, dtype=torch.long),
            "prompt_mask": torch.ones(BATCH, 1, dtype=torch.long),
            "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "num_items_in_batch": mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(trainer(logprobs, settings), None, inputs)
        loss.backward()
        found[name] = {"settings": settings, "loss": float(loss.detach()), "gradient": logprobs.grad.tolist()}
    overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    replies = [0, 1, 79, 80, 81, 90, 99, 100]
    document = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "mask": mask.tolist(),
        "max_length": MAX_LENGTH,
        "old_logprobs": old.tolist(),
        "logprobs": now.tolist(),
        "advantages": advantages.tolist(),
        "cases": found,
        "pairs": [pairs(mask, now * 2, old, beta) for beta in (0.1, 1.0, 30.0)],
        "rewards": [
            rewards(scale * torch.randn(BATCH, generator=draw), coefficient)
            for scale, coefficient in ((1.0, None), (1.0, 0.01), (50.0, 2.0))
        ],
        "overlong": {"max": 100, "cache": 20, "lengths": replies, "rewards": overlong([[0] * n for n in replies])},
    }
    json.dump(document, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
