"""The limits of a scheduler, and which of them contradict one another.

They come from a configuration with its automatic values resolved; whatever passes here can be
planned with, so that no step ever meets a limit that cannot be kept.
"""

from __future__ import annotations

from nanoserve.config import SchedulerConfig


def slide_window(config: SchedulerConfig, max_model_len: int) -> int | None:
    """Tokens that stay when a full window slides, half of it by default; None if none slides."""
    if config.context_overflow == "error":
        return None
    return max_model_len // 2 if config.slide_window is None else config.slide_window


def check_limits(
    config: SchedulerConfig,
    max_model_len: int,
    max_num_batched_tokens: int,
    *,
    keeps_nothing: bool,
) -> None:
    """Raise ValueError if the limits contradict one another."""
    limits = {
        "--max-model-len": max_model_len,
        "--max-num-batched-tokens": max_num_batched_tokens,
    }
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if keeps_nothing and max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"--max-num-batched-tokens {max_num_batched_tokens} must be at least --max-model-len "
            f"{max_model_len} with --kv-layout recompute, which never splits a request"
        )
    window = slide_window(config, max_model_len)
    if window is not None and not 1 <= window < max_model_len:
        raise ValueError(
            f"--slide-window must be between 1 and {max_model_len - 1} (--max-model-len minus 1), "
            f"got {window}"
        )
