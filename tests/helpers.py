"""A tiny model with a tokenizer of its own, and engines over it whose doings can be looked at.

The model is written to disk once and loaded the ordinary way: every bias and norm is drawn (zeros
and ones would hide mix-ups). Its vocabulary has one id more than its tokenizer, which must never be
drawn, and an end-of-text token that can be. Engines share the weights of one donor, and blocks that
their schedulers let go are filled with NaN before anyone reuses them.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
from numpy.typing import NDArray
from safetensors.numpy import save_file

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.build import make_scheduler
from nanoserve.engine.eager import EagerExecutor
from nanoserve.engine.engine import Engine
from nanoserve.engine.metrics import RequestAccount, replay
from nanoserve.llm import engine_config
from nanoserve.model.weights import tensor_shapes
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.request import RequestDelta, RequestOutput, SamplingParams
from nanoserve.tokenizer.vocabulary import BYTE_ALPHABET

SIZES: dict[str, int] = {
    "vocab_size": 384,
    "n_positions": 256,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
}
NUM_TOKEN_IDS = 383
"""The tokenizer's: 256 bytes, 126 pairs, and the end of text, which comes last."""
EOS = NUM_TOKEN_IDS - 1
MAX_STEPS = 10_000
"""More than any test here needs: an engine that stands still must fail, not hang."""

Weights = Mapping[str, oracle.Float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A checkpoint folder, and the same model for the oracle."""

    folder: Path
    config: ModelConfig
    weights: Weights


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE that merges a consonant and a vowel, and a space and a letter."""
    pairs = [(a, b) for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou"]
    pairs += [("Ġ", letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    pieces = [*BYTE_ALPHABET, *(a + b for a, b in pairs), "<|endoftext|>"]
    assert len(pieces) == NUM_TOKEN_IDS
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("\n".join(f"{a} {b}" for a, b in pairs))


def draw_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights by which every token before a position counts, and a text hardly repeats itself."""
    rng = np.random.default_rng(seed)
    state: dict[str, NDArray[np.float32]] = {}
    for name, shape in tensor_shapes(config).items():
        is_gain = "ln_" in name and name.endswith(".weight")
        scale = {"wte.weight": 0.3, "wpe.weight": 0.9, "lm_head.weight": 0.3}.get(name)
        scale = scale or (0.1 if len(shape) == 1 else shape[0] ** -0.5)
        state[name] = rng.normal(1.0 if is_gain else 0.0, scale, shape).astype(np.float32)
    return state


def write_model(folder: Path, *, seed: int = 3, **changes: int) -> TinyModel:
    """A whole checkpoint: config, weights, tokenizer. The head is not tied."""
    raw = {"model_type": "gpt2", "tie_word_embeddings": False, **SIZES, **changes}
    config = ModelConfig.from_hf(raw)
    state = draw_weights(config, seed)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(state, folder / "model.safetensors")
    write_tokenizer(folder)
    weights = {name: data.astype(np.float64) for name, data in state.items()}
    return TinyModel(folder=folder, config=config, weights=weights)


@cache
def tiny_model(num_positions: int = SIZES["n_positions"]) -> TinyModel:
    """The model of these tests, written once a run."""
    folder = Path(tempfile.mkdtemp(prefix="nanoserve-tests-"))
    atexit.register(shutil.rmtree, folder)
    return write_model(folder, n_positions=num_positions)


def tiny_config(num_positions: int = SIZES["n_positions"], **options: Any) -> EngineConfig:
    """Of an engine over the tiny model, eager unless asked; `options` are the command line's."""
    options = {"executor": "eager", **options}
    return engine_config(model=str(tiny_model(num_positions).folder), device="cpu", **options)


@cache
def donor(num_positions: int = SIZES["n_positions"]) -> Engine:
    """Holds the weights that all engines share."""
    return Engine(tiny_config(num_positions, max_num_seqs=1))


def tiny_engine(
    *,
    num_positions: int = SIZES["n_positions"],
    clock: Callable[[], float] = time.perf_counter,
    **options: Any,
) -> Engine:
    config = tiny_config(num_positions, **options)
    return Engine(config, donor=donor(num_positions), clock=clock, poison_freed=True)


def pool_bytes(num_tokens: int, kv_dtype: str = "float32") -> int:
    """Memory that holds K and V of `num_tokens` tokens of the tiny model."""
    return num_tokens * kv_bytes_per_token(tiny_model().config, kv_dtype)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that look like nothing in particular."""
    drawn = np.random.default_rng([length, seed]).integers(0, EOS, length)
    return [int(token_id) for token_id in drawn]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


def drain(engine: Engine) -> list[RequestDelta]:
    """Step until nothing is left; every delta, in order. Fails if that never comes."""
    deltas: list[RequestDelta] = []
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished:
            return deltas
        deltas += engine.step()
    raise AssertionError(f"unfinished after {MAX_STEPS} steps: {list(engine._groups)}")


def outputs_of(deltas: Sequence[RequestDelta]) -> dict[str, RequestOutput]:
    return {delta.request_id: delta.output for delta in deltas if delta.output is not None}


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[RequestOutput]:
    """All prompts as one batch; one output a prompt, in their order."""
    return run_each(engine, [(prompt, params) for prompt in prompts])


def run_each(
    engine: Engine, asked: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[RequestOutput]:
    """As `run`, each prompt with parameters of its own."""
    first = engine.log.num_arrivals
    ids = [f"run-{first + number}" for number in range(len(asked))]
    for request_id, (prompt, params) in zip(ids, asked, strict=True):
        engine.add(request_id, prompt, params)
    outputs = outputs_of(drain(engine))
    return [outputs[request_id] for request_id in ids]


def tokens_of(output: RequestOutput, choice: int = 0) -> list[int]:
    return list(output.outputs[choice].token_ids)


def account_of(engine: Engine, request_id: str, choice: int = 0) -> RequestAccount:
    """The engine's own record of a finished request."""
    (found,) = (
        account
        for account in engine.log.finished
        if (account.request.request_id, account.request.choice) == (request_id, choice)
    )
    return found


def was_recomputed(account: RequestAccount) -> bool:
    """Whether it ever went back to positions that it had passed."""
    return list(account.starts) != sorted(account.starts)


def watch(engine: Engine) -> list[StepBatch]:
    """From now on, every batch that the executor is given."""
    batches: list[StepBatch] = []
    execute = engine.executor.execute

    def execute_and_note(batch: StepBatch) -> Any:
        batches.append(batch)
        return execute(batch)

    engine.executor.execute = execute_and_note  # type: ignore[method-assign]
    return batches


def break_rows_of(engine: Engine, request_id: str) -> None:
    """From now on, every row of logits of this unfinished request is NaN."""
    executor = engine.executor
    assert isinstance(executor, EagerExecutor)
    sample = executor._sample
    outputs = [s.request.output_token_ids for s in engine._groups[request_id].sequences]

    def sample_broken(batch: StepBatch, hidden: Any, rows: slice) -> StepResult:
        for row in range(*rows.indices(len(batch.sampling))):
            if any(batch.sampling[row].output_token_ids is output for output in outputs):
                hidden[row] = float("nan")
        return sample(batch, hidden, rows)

    executor._sample = sample_broken  # type: ignore[method-assign]


def fail_once(engine: Engine) -> None:
    """The next step fails, half-way through its layers."""
    executor = engine.executor
    assert isinstance(executor, EagerExecutor)
    append = executor.cache.append

    def fail(layer: int, *more: Any) -> None:
        append(layer, *more)
        if layer == 1:
            executor.cache.append = append  # type: ignore[method-assign]
            raise RuntimeError("the machine hiccuped")

    executor.cache.append = fail  # type: ignore[method-assign, assignment]


def assert_replays(engine: Engine) -> None:
    """The engine's log, fed to a fresh scheduler, gives the same plans."""
    scheduler = make_scheduler(engine.config, engine.spec, track_freed=False)
    assert replay(engine.log, scheduler) == engine.log.num_steps
    scheduler.check_integrity()
    assert scheduler.has_unfinished == engine.scheduler.has_unfinished
    assert scheduler.counters == engine.scheduler.counters


def assert_nothing_left(engine: Engine) -> None:
    """Every block is back, nothing remembers a request, and the log tells the whole story."""
    engine.scheduler.check_integrity()
    pool = engine.scheduler.pool
    assert pool.num_available == pool.num_blocks
    assert not engine.has_unfinished
    assert not engine.scheduler.has_unfinished
    assert not engine.log.active
    assert_replays(engine)


def sizes_seen(batches: Sequence[StepBatch]) -> list[tuple[int, ...]]:
    """Per step, how many tokens each sequence advanced."""
    return [tuple(np.diff(batch.query_starts).tolist()) for batch in batches]
