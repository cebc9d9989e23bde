"""The configuration of a job: typed and checked, without torch. `load_config` reads a `JobConfig` from TOML."""

from palestra.config.algorithm import (
    ALGORITHM_NAMES,
    AlgorithmConfig,
    ClippedConfig,
    DrGRPOConfig,
    GRPOConfig,
    OwnAlgorithmConfig,
    PolicyGradientConfig,
)
from palestra.config.engine import EmbeddedEngineConfig, EngineConfig, FakeEngineConfig
from palestra.config.job import (
    SMOLLM2,
    TINY,
    CheckpointConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JobConfig,
    JobKind,
    RolloutConfig,
    ServerConfig,
    StoreConfig,
    TasksConfig,
    TrainerConfig,
)
from palestra.config.loading import SAVED_CONFIG, UNSET, dump_config, load_config, parse_config
from palestra.config.policy import DEFAULT_CONTEXT, OptimizerConfig, PolicyConfig, SamplingConfig, with_model
from palestra.config.renames import in_present_names
from palestra.config.roles import MAX_AGENT, Roles, is_agent_name

__all__ = [
    "ALGORITHM_NAMES",
    "DEFAULT_CONTEXT",
    "MAX_AGENT",
    "SAVED_CONFIG",
    "SMOLLM2",
    "TINY",
    "UNSET",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClippedConfig",
    "DrGRPOConfig",
    "EmbeddedEngineConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FakeEngineConfig",
    "GRPOConfig",
    "JobConfig",
    "JobKind",
    "OptimizerConfig",
    "OwnAlgorithmConfig",
    "PolicyConfig",
    "PolicyGradientConfig",
    "Roles",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "StoreConfig",
    "TasksConfig",
    "TrainerConfig",
    "dump_config",
    "in_present_names",
    "is_agent_name",
    "load_config",
    "parse_config",
    "with_model",
]
