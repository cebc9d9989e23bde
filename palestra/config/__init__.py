"""What a job is: typed, checked, without torch. `JobConfig` is the root; `load_config` reads it from TOML."""

from palestra.config.job import (
    SMOLLM2,
    TINY,
    AlgorithmConfig,
    CheckpointConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JobConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
    StoreConfig,
    TasksConfig,
    TrainerConfig,
)
from palestra.config.loading import dump_config, load_config, parse_config

__all__ = [
    "SMOLLM2",
    "TINY",
    "AlgorithmConfig",
    "CheckpointConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "JobConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "StoreConfig",
    "TasksConfig",
    "TrainerConfig",
    "dump_config",
    "load_config",
    "parse_config",
]
