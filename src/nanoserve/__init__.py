"""nanoserve: a GPT-2 inference engine from scratch that measures what a KV cache buys and costs.

This is the package's face: the names that users import, and nothing else. It stays light: importing
it loads neither torch nor any extra, because executors are looked up only when an engine is built.
"""

from typing import TYPE_CHECKING, Any

from nanoserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from nanoserve.llm import LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`LLM` on first use: the engine's imports are no business of `nanoserve --help`."""
    if name == "LLM":
        from nanoserve.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
