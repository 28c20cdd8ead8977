"""nanoserve: a GPT-2 inference engine from scratch that measures what a KV cache buys and costs.

This is the package's face: the names that users import, and nothing else. It stays light: importing
it loads neither torch nor any extra, because executors are looked up only when an engine is built.
"""

from nanoserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nanoserve.llm import LLM
from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "FinishReason",
    "ModelConfig",
    "RequestDelta",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TokenLogprob",
    "__version__",
]
