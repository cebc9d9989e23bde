"""Names that TRL and verl use for a job's keys, for error messages that suggest the right key."""

from __future__ import annotations

from collections.abc import Mapping

TRL: Mapping[str, str] = {
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every_steps",
    "loss_type": "algorithm.loss_agg_mode",
    "lr_scheduler_type": "policies.NAME.optimizer.schedule",
    "max_completion_length": "policies.NAME.sampling.max_tokens",
    "max_prompt_length": "policies.NAME.max_context",
    "max_steps": "steps",
    "model_name_or_path": "model",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.epochs",
    "output_dir": "run_dir",
    "peft_config": "policies.NAME.adapter",
    "report_to": "tracking",
    "save_steps": "checkpoint.every_steps",
    "save_only_model": "checkpoint.optimizer",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.advantage_scale",
    "vllm_importance_sampling_correction": "algorithm.importance_sampling",
}
VERL: Mapping[str, str] = {
    "adv_estimator": "algorithm.name",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "gamma": "algorithm.discount",
    "grad_clip": "policies.NAME.optimizer.max_grad_norm",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "lam": "algorithm.gae_lambda",
    "lr": "policies.NAME.optimizer.learning_rate",
    "max_response_length": "policies.NAME.sampling.max_tokens",
    "norm_adv_by_std_in_grpo": "algorithm.advantage_scale",
    "ppo_epochs": "algorithm.epochs",
    "save_freq": "checkpoint.every_steps",
    "test_freq": "evaluation.every_steps",
    "total_training_steps": "steps",
    "train_batch_size": "rollout.groups_per_step",
}


def key_of_other_name(name: str) -> str | None:
    """Return the key for a name of TRL or verl, and whose name it is; None: unknown.

    Args:
        name: the last part of an unknown key.
    """
    for library, keys in (("TRL", TRL), ("verl", VERL)):
        if name in keys:
            return f"{library}'s {name} is {keys[name]!r} here"
    return None
