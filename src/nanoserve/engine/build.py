"""From an `EngineConfig` to the parts of an engine: every "auto" is resolved here, once.

The executor table is one of the three places where our own code is imported late: a backend is
loaded when it was chosen, so an engine that does not run on PyTorch never imports it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from nanoserve.config import Dtype, EngineConfig, ModelConfig
from nanoserve.engine.executor import Backend, Executor, ExecutorSpec
from nanoserve.kernels.cpu import library
from nanoserve.model.generation import eos_token_ids, load_tokenizer
from nanoserve.model.hub import Checkpoint, find
from nanoserve.model.weights import WeightTensor, dummy_weights, load_model_config, load_weights
from nanoserve.planner.budget import auto_budget, predicted_step_time
from nanoserve.planner.hardware import memory_bytes
from nanoserve.planner.measured import budget_key, load_budget, load_cached_ceilings
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.scheduling.scheduler import Scheduler
from nanoserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PORTABLE = "portable"
DEFAULT_BATCHED_TOKENS = 128
"""Token budget of a step where the machine was never measured: small enough that a prompt's chunk
does not hold up the other streams for long on a slow CPU, large enough for its matrices."""


FULL_PRECISION: Dtype = "float32"
"""In which a cache keeps whatever any backend computes."""

MAX_POSITIONS = 2**31 - 1
"""Of a cache, its scratch block included: a step's arrays are int32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of. `config` is what was asked for, its token budget resolved."""

    config: EngineConfig
    checkpoint: Checkpoint
    model_config: ModelConfig
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    executor: Executor
    scheduler: Scheduler


def build_parts(
    config: EngineConfig, donor: EngineParts | None = None, *, track_freed: bool = False
) -> EngineParts:
    """Find, check and load everything. Raises ValueError for what cannot be honoured."""
    checkpoint = (
        donor.checkpoint
        if donor
        else find(config.model, revision=config.revision, load_format=config.load_format)
    )
    model = donor.model_config if donor else load_model_config(checkpoint)
    tokenizer = donor.tokenizer if donor else load_tokenizer(checkpoint, config.tokenizer)
    spec = resolve_spec(config, model, tokenizer)
    logger.info("%s", describe_cache(spec))
    executor = make_executor(spec, weight_tensors(config, checkpoint, model), donor)
    config = resolve_budget(config, spec)
    return EngineParts(
        config=config,
        checkpoint=checkpoint,
        model_config=model,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(checkpoint, model, tokenizer.eos_token_id),
        executor=executor,
        scheduler=make_scheduler(config, spec, track_freed=track_freed),
    )


def check_donor(config: EngineConfig, donor: EngineConfig) -> None:
    """Raise ValueError unless both name the same weights and tokenizer."""
    for name in ("model", "revision", "load_format", "dummy_seed", "tokenizer"):
        wanted, shared = getattr(config, name), getattr(donor, name)
        if wanted != shared:
            raise ValueError(
                f"{name} is {wanted!r}, but the donor's weights were loaded with {shared!r}"
            )


def weight_tensors(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> Iterable[WeightTensor]:
    if checkpoint.kind == "dummy":
        return dummy_weights(model, config.dummy_seed)
    return load_weights(checkpoint, model)


def make_executor(
    spec: ExecutorSpec, tensors: Iterable[WeightTensor], donor: EngineParts | None
) -> Executor:
    """The executor table. A donor of the same backend may share its weights."""
    given = donor.executor if donor else None
    if spec.executor == "native":
        from nanoserve.engine.native import NativeExecutor

        return NativeExecutor(
            spec, tensors, donor=given if isinstance(given, NativeExecutor) else None
        )
    from nanoserve.engine.eager import EagerExecutor
    from nanoserve.engine.graph import GraphExecutor

    holder = given.eager if isinstance(given, GraphExecutor) else given
    eager_donor = holder if isinstance(holder, EagerExecutor) else None
    if spec.executor == "eager":
        return EagerExecutor(spec, tensors, donor=eager_donor)
    return GraphExecutor(spec, tensors, donor=eager_donor)


def make_shadow(parts: EngineParts) -> Executor:
    """An executor over the same weights and block ids whose cache is full precision, for an audit.

    It shares the weights. Raises ValueError where there would be nothing to compare.
    """
    spec = parts.executor.spec
    if spec.layout == "recompute":
        raise ValueError("--kv-audit: --kv-layout recompute keeps no cache to compare")
    if spec.cache_dtype in (spec.dtype, FULL_PRECISION):
        raise ValueError(
            f"--kv-audit compares a reduced cache with a full one, and --kv-cache-dtype "
            f"{spec.cache_dtype} is not reduced (int8 is)"
        )
    executor: Backend = "native" if spec.executor == "native" else "eager"
    shadow = replace(spec, cache_dtype=FULL_PRECISION, executor=executor)
    tensors = weight_tensors(parts.config, parts.checkpoint, parts.model_config)
    return make_executor(shadow, tensors, parts)


def resolve_spec(config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer) -> ExecutorSpec:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config, device)
    cache_dtype = config.cache.dtype or dtype
    max_model_len = config.scheduler.max_model_len or model.n_positions
    if max_model_len > model.n_positions:
        raise ValueError(
            f"--max-model-len {max_model_len} exceeds the model's {model.n_positions} positions"
        )
    block_size = resolve_block_size(config, max_model_len)
    return ExecutorSpec(
        model=model,
        executor=resolve_executor(config, device, dtype),
        dtype=dtype,
        quantization=config.quantization,
        cache_dtype=cache_dtype,
        layout=config.cache.layout,
        block_size=block_size,
        num_blocks=resolve_num_blocks(
            config, model, cache_dtype, block_size, max_model_len, device
        ),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        device=device,
        kernels=config.kernels,
        threads=config.threads,
        num_token_ids=min(tokenizer.num_ids, model.vocab_size),
    )


def resolve_executor(config: EngineConfig, device: str, dtype: str) -> Backend:
    """`auto` is native where that can run, else eager; on a CPU the log says why, once.

    Raises ValueError, naming the obstacle and what removes it, for an executor asked for by name
    that cannot run, and where none can.
    """
    if config.executor == "graph":
        if (obstacle := graph_obstacle(config, device)) is not None:
            raise ValueError(f"--executor graph: {obstacle}")
        return "graph"
    native = None if config.executor == "eager" else native_obstacle(config, device, dtype)
    eager = eager_obstacle(config)
    if config.executor == "native" or (config.executor == "auto" and native is None):
        if native is not None:
            raise ValueError(f"--executor native: {native}")
        is_slow = library.choose() == PORTABLE and library.named() is None
        if config.executor == "auto" and eager is None and is_slow:
            return fall_back("its portable path, all that this machine runs, is slower")
        return "native"
    if eager is not None:
        other = f"; native: {native}" if config.executor == "auto" else ""
        raise ValueError(f"--executor {config.executor}: eager: {eager}{other}")
    return "eager" if config.executor == "eager" or device != "cpu" else fall_back(str(native))


def native_obstacle(config: EngineConfig, device: str, dtype: str) -> str | None:
    """Why the native executor cannot run this; None if it can."""
    if device != "cpu":
        return f"it computes on the CPU, got --device {device}"
    if config.kernels != "auto":
        return f"it has kernels of its own (--kernels auto), got --kernels {config.kernels}"
    if dtype == "float16":
        return "it has no float16 weights (--dtype float32 or bfloat16)"
    try:
        library.load()
    except library.UnavailableError as error:
        return str(error)
    return None


def eager_obstacle(config: EngineConfig) -> str | None:
    """Why the eager executor cannot run this; None if it can. PyTorch is not imported for that."""
    if config.quantization is not None:
        return f"--quantization {config.quantization} needs the native executor"
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'nanoserve[torch]')"
    return None


def graph_obstacle(config: EngineConfig, device: str) -> str | None:
    """Why no step can be captured and replayed here; None if it can."""
    if device != "cuda":
        return f"it replays CUDA graphs, got --device {device} (--executor eager works)"
    if config.cache.layout == "recompute":
        return "--kv-layout recompute has no decode step to replay (--executor eager has)"
    return eager_obstacle(config)


@functools.cache
def fall_back(obstacle: str) -> Backend:
    """Eager, and one line in the log for each obstacle, however many engines meet it."""
    logger.warning("the eager executor is used; native: %s", obstacle)
    return "eager"


def resolve_device(device: str) -> str:
    """`auto` looks for the GPU's driver, which needs no PyTorch."""
    if device == "auto":
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    return device


def resolve_dtype(config: EngineConfig, device: str) -> Dtype:
    if config.dtype == "auto":
        return "float16" if device == "cuda" else "float32"
    return config.dtype


def resolve_block_size(config: EngineConfig, max_model_len: int) -> int:
    """Positions a block holds: this, and nothing else, tells the layouts apart."""
    return {
        "recompute": 0,
        "contiguous": max_model_len,
        "slots": 1,
        "paged": config.cache.block_size,
    }[config.cache.layout]


def resolve_num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    cache_dtype: str,
    block_size: int,
    max_model_len: int,
    device: str,
) -> int:
    """Blocks of the pool: what was asked for, or what is needed within half of what is free.

    Raises ValueError for less than one sequence needs, for more than the machine has, and for more
    positions than a slot's number (int32) can tell apart.
    """
    if block_size == 0:
        return 0
    block_bytes = block_size * kv_bytes_per_token(model, cache_dtype)
    blocks_per_sequence = -(-max_model_len // block_size)
    wanted = config.scheduler.max_num_seqs * blocks_per_sequence
    limit = config.cache.memory_bytes
    if limit is not None and device == "cpu" and limit > memory_bytes():
        raise ValueError(
            f"--kv-cache-memory-bytes {limit} is more than this machine's memory, {memory_bytes()}"
        )
    if limit is None and device == "cpu":
        limit = min(available_memory_bytes() // 2, wanted * block_bytes)
    num_blocks = wanted if limit is None else limit // block_bytes
    if num_blocks < blocks_per_sequence:
        raise ValueError(
            f"the KV cache may take {limit} bytes, one sequence of {max_model_len} tokens needs "
            f"{blocks_per_sequence * block_bytes} (--kv-cache-memory-bytes, --max-model-len)"
        )
    if (num_blocks + 1) * block_size > MAX_POSITIONS:
        raise ValueError(
            f"the KV cache would hold {(num_blocks + 1) * block_size} positions, more than the "
            f"{MAX_POSITIONS} that can be told apart (--block-size, --kv-cache-memory-bytes, "
            "--max-num-seqs)"
        )
    return num_blocks


def available_memory_bytes() -> int:
    """The smaller of what the machine has free and what the cgroup's limit leaves.

    Files the kernel has cached can be dropped, so they do not count as used. Without /proc (not
    Linux) it is the machine's physical memory.
    """
    if not Path("/proc/meminfo").exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo").read_text().split("MemAvailable:", 1)[1]
    available = int(meminfo.split()[0]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = int(text) - used + int(stat.get("inactive_file", 0))
        available = min(available, max(0, free))
    return available


def describe_cache(spec: ExecutorSpec) -> str:
    """The start-up line: how many tokens and full-length requests fit."""
    if spec.layout == "recompute":
        return "KV cache: none (recompute keeps nothing)"
    num_tokens = spec.num_blocks * spec.block_size
    num_bytes = num_tokens * kv_bytes_per_token(spec.model, spec.cache_dtype)
    num_requests = spec.num_blocks // -(-spec.max_model_len // spec.block_size)
    return (
        f"KV cache: {spec.layout}, {spec.cache_dtype}, {num_bytes / 2**20:.1f} MiB for "
        f"{num_tokens} tokens, {num_requests} requests of {spec.max_model_len}"
    )


def resolve_budget(config: EngineConfig, spec: ExecutorSpec) -> EngineConfig:
    """`config` with the token budget as a number, so that a replay never chooses another one."""
    budget = config.scheduler.max_num_batched_tokens or automatic_budget(
        spec, config.scheduler.max_num_seqs
    )
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=budget))


def make_scheduler(config: EngineConfig, spec: ExecutorSpec, *, track_freed: bool) -> Scheduler:
    """A fresh scheduler; `config` has its token budget resolved."""
    budget = config.scheduler.max_num_batched_tokens
    assert budget is not None, "resolve_budget comes before"
    return Scheduler(
        config.scheduler,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size or None,
        max_model_len=spec.max_model_len,
        max_num_batched_tokens=budget,
        track_freed=track_freed,
    )


def automatic_budget(spec: ExecutorSpec, max_num_seqs: int) -> int:
    """The token budget of a step that nobody chose, see `planner.budget`; the log says which.

    What `nanoserve bench interference` found for just this model and executor here; else what the
    machine's ceilings predict; else `DEFAULT_BATCHED_TOKENS`. Where nothing is kept every step
    brings whole texts, and a smaller budget would let the first ones starve the rest: it holds a
    window of every sequence that may run.
    """
    if spec.layout == "recompute":
        return max_num_seqs * spec.max_model_len
    if (budget := load_budget(spec_budget_key(spec))) is not None:
        logger.info("token budget of a step: %d, as measured on this machine", budget)
        return budget
    ceilings = load_cached_ceilings(spec.device, spec.threads)
    # How fast quantised weights are multiplied with is no ceiling that is measured.
    if ceilings is None or (spec.quantization or spec.dtype) not in ceilings.matmul_flops_per_s:
        return DEFAULT_BATCHED_TOKENS
    step_time = predicted_step_time(
        ceilings,
        spec.model,
        dtype=spec.dtype,
        kv_dtype=spec.cache_dtype,
        is_eager=spec.executor == "eager",
    )
    budget = auto_budget(step_time)
    logger.info("token budget of a step: %d, by this machine's measured ceilings", budget)
    return budget


def spec_budget_key(spec: ExecutorSpec) -> str:
    """Under what a measured token budget is kept."""
    return budget_key(
        spec.model,
        executor=spec.executor,
        dtype=spec.quantization or spec.dtype,
        kv_dtype=spec.cache_dtype,
        layout=spec.layout,
        device=spec.device,
        threads=spec.threads,
    )
