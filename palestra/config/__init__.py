"""The configuration of a job: typed and checked, without torch. `load_config` reads a `JobConfig` from TOML."""

from palestra.config.engine import EmbeddedEngineConfig, EngineConfig, FakeEngineConfig
from palestra.config.job import (
    DEFAULT_CONTEXT,
    SMOLLM2,
    TINY,
    AlgorithmConfig,
    CheckpointConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JobConfig,
    JobKind,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
    StoreConfig,
    TasksConfig,
    TrainerConfig,
)
from palestra.config.loading import SAVED_CONFIG, UNSET, dump_config, load_config, parse_config
from palestra.config.renames import in_present_names

__all__ = [
    "DEFAULT_CONTEXT",
    "SAVED_CONFIG",
    "SMOLLM2",
    "TINY",
    "UNSET",
    "AlgorithmConfig",
    "CheckpointConfig",
    "EmbeddedEngineConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FakeEngineConfig",
    "JobConfig",
    "JobKind",
    "OptimizerConfig",
    "PolicyConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "StoreConfig",
    "TasksConfig",
    "TrainerConfig",
    "dump_config",
    "in_present_names",
    "load_config",
    "parse_config",
]
