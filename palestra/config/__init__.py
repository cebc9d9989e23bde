"""The configuration of a job: typed and checked, without torch. `load_config` reads a `JobConfig` from TOML."""

from palestra.config.actor_critic import A2CConfig, ActorCriticConfig, PPOConfig, SACConfig, TokenCredit
from palestra.config.algorithm import ALGORITHM_NAMES, OwnAlgorithmConfig
from palestra.config.algorithm_base import REWARD_NAME, AlgorithmConfig, LossAggMode
from palestra.config.differences import name_differences, name_settings
from palestra.config.engine import Alike, EngineConfig, MixedEngineConfig, PooledEngineConfig
from palestra.config.imitation import DistillConfig, SFTConfig
from palestra.config.job import BUILT_IN, SMOLLM2, TINY, TINY_QWEN_VL, TINY_VISION, JobConfig, JobKind
from palestra.config.judge import JudgeAccess, JudgeConfig
from palestra.config.loading import (
    SAVED_CONFIG,
    UNSET,
    dump_config,
    dump_saved_config,
    find_mistakes,
    load_config,
    load_saved_config,
    parse_config,
    resolve_paths,
)
from palestra.config.networks import CriticConfig, KLConfig, TeacherServerConfig, reference_of
from palestra.config.optimizer import OptimizerConfig
from palestra.config.parts import CheckpointConfig, ServerConfig, StoreConfig, TrainerConfig
from palestra.config.pictures import PicturesConfig
from palestra.config.policy import (
    ALL_LINEAR,
    DEFAULT_CONTEXT,
    AdapterConfig,
    PolicyConfig,
    SamplingConfig,
    UpdatesConfig,
    VisionTraining,
    not_frozen,
    with_model,
)
from palestra.config.policy_gradient import (
    AdvantageScale,
    CISPOConfig,
    ClippedConfig,
    Credit,
    DAPOConfig,
    DrGRPOConfig,
    GroupConfig,
    GRPOConfig,
    GSPOConfig,
    PolicyGradientConfig,
    RAEConfig,
    ReinforcePPConfig,
    RLOOConfig,
    ScaledGroupConfig,
)
from palestra.config.pools import PoolConfig, RoleConfig, past_name, past_of
from palestra.config.roles import MAX_AGENT, Roles, is_agent_name
from palestra.config.rollout import EnvironmentConfig, EvaluationConfig, RolloutConfig, TasksConfig
from palestra.config.seats import SeatsConfig
from palestra.config.watchdog import WatchdogConfig

__all__ = [
    "ALGORITHM_NAMES",
    "ALL_LINEAR",
    "BUILT_IN",
    "DEFAULT_CONTEXT",
    "MAX_AGENT",
    "REWARD_NAME",
    "SAVED_CONFIG",
    "SMOLLM2",
    "TINY",
    "TINY_QWEN_VL",
    "TINY_VISION",
    "UNSET",
    "A2CConfig",
    "ActorCriticConfig",
    "AdapterConfig",
    "AdvantageScale",
    "AlgorithmConfig",
    "Alike",
    "CISPOConfig",
    "CheckpointConfig",
    "ClippedConfig",
    "Credit",
    "CriticConfig",
    "DAPOConfig",
    "DistillConfig",
    "DrGRPOConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GRPOConfig",
    "GSPOConfig",
    "GroupConfig",
    "JobConfig",
    "JobKind",
    "JudgeAccess",
    "JudgeConfig",
    "KLConfig",
    "LossAggMode",
    "MixedEngineConfig",
    "OptimizerConfig",
    "OwnAlgorithmConfig",
    "PPOConfig",
    "PicturesConfig",
    "PolicyConfig",
    "PolicyGradientConfig",
    "PoolConfig",
    "PooledEngineConfig",
    "RAEConfig",
    "RLOOConfig",
    "ReinforcePPConfig",
    "RoleConfig",
    "Roles",
    "RolloutConfig",
    "SACConfig",
    "SFTConfig",
    "SamplingConfig",
    "ScaledGroupConfig",
    "SeatsConfig",
    "ServerConfig",
    "StoreConfig",
    "TasksConfig",
    "TeacherServerConfig",
    "TokenCredit",
    "TrainerConfig",
    "UpdatesConfig",
    "VisionTraining",
    "WatchdogConfig",
    "dump_config",
    "dump_saved_config",
    "find_mistakes",
    "is_agent_name",
    "load_config",
    "load_saved_config",
    "name_differences",
    "name_settings",
    "not_frozen",
    "parse_config",
    "past_name",
    "past_of",
    "reference_of",
    "resolve_paths",
    "with_model",
]
