"""`nanoserve plan`: what fits into a memory and how fast it should decode; nothing is loaded.

A `Plan` is a frozen value; the table and the JSON are two views of it, so they cannot disagree.
Step times need measured ceilings and are absent where none were given: nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from nanoserve.config import ModelConfig
from nanoserve.planner.memory import MemoryPlan, format_bytes, plan_memory
from nanoserve.planner.model import StepShape, num_parameters
from nanoserve.planner.steptime import Ceilings, predict_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The expected decode step of `num_seqs` sequences at the plan's context."""

    num_seqs: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences together."""
        return self.num_seqs / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to "will it fit, and how fast": one model, one memory, one context."""

    model_name: str
    num_parameters: int
    dtype: str
    kv_dtype: str
    memory: MemoryPlan
    step_times: tuple[StepTime, ...]

    @property
    def shares(self) -> dict[str, tuple[int, float]]:
        """Bytes of each term and its share of the memory; they add up to all of it."""
        memory = self.memory
        terms = {"weights": memory.weight_bytes, "KV cache": memory.kv_bytes}
        terms["free"] = memory.free_bytes
        return {name: (value, value / memory.memory_bytes) for name, value in terms.items()}


def make_plan(
    model_name: str,
    model: ModelConfig,
    *,
    memory_bytes: int,
    context: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    ceilings: Ceilings | None = None,
) -> Plan:
    """Plan `memory_bytes` for sequences of `context` tokens (None: all the model's positions).

    With `ceilings`, the decode step is predicted for one sequence and for as many as fit; a dtype
    whose matmul rate was not measured, or a memory in which none fits, has no prediction. Raises
    ValueError as `plan_memory` does.
    """
    context = model.n_positions if context is None else context
    kv_dtype = kv_dtype or dtype
    memory = plan_memory(
        model, memory_bytes=memory_bytes, context=context, dtype=dtype, kv_dtype=kv_dtype
    )
    step_times: tuple[StepTime, ...] = ()
    if ceilings and dtype in ceilings.matmul_flops_per_s and memory.num_sequences:
        step_times = tuple(
            StepTime(
                num_seqs=num_seqs,
                step_s=predict_step_s(
                    ceilings,
                    model,
                    StepShape(num_seqs=num_seqs, context=context),
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                ),
            )
            for num_seqs in sorted({1, memory.num_sequences} - {0})
        )
    return Plan(
        model_name=model_name,
        num_parameters=num_parameters(model),
        dtype=dtype,
        kv_dtype=kv_dtype,
        memory=memory,
        step_times=step_times,
    )


def plan_table(plan: Plan) -> Table:
    """The plan for a terminal."""
    memory = plan.memory
    table = Table(
        title=f"{plan.model_name}: {plan.num_parameters:,} parameters, weights {plan.dtype}, "
        f"KV {plan.kv_dtype}",
        title_justify="left",
    )
    table.add_column("term")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for name, (num_bytes, share) in plan.shares.items():
        table.add_row(name, format_bytes(num_bytes), f"{share:.1%}")
    table.add_section()
    table.add_row("memory", format_bytes(memory.memory_bytes), "")
    table.add_row("KV per token", format_bytes(memory.kv_bytes_per_token), "")
    table.add_row(
        f"KV per {memory.context:,} tokens", format_bytes(memory.kv_bytes_per_sequence), ""
    )
    table.add_section()
    table.add_row(f"sequences of {memory.context:,} tokens", f"{memory.num_sequences:,}", "")
    table.add_row("tokens, shared out freely", f"{memory.num_tokens:,}", "")
    if plan.step_times:
        table.add_section()
    for time in plan.step_times:
        table.add_row(
            f"expected step, {time.num_seqs:,} at once",
            f"{time.step_s * 1e3:,.1f} ms",
            f"{time.tokens_per_s:,.0f} tok/s",
        )
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for a program (`--json`)."""
    memory = plan.memory
    return {
        "model": plan.model_name,
        "num_parameters": plan.num_parameters,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_dtype,
        "memory_bytes": memory.memory_bytes,
        "context": memory.context,
        "weight_bytes": memory.weight_bytes,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_bytes_per_sequence": memory.kv_bytes_per_sequence,
        "kv_bytes": memory.kv_bytes,
        "free_bytes": memory.free_bytes,
        "num_sequences": memory.num_sequences,
        "num_tokens": memory.num_tokens,
        "steps": [
            {"num_seqs": t.num_seqs, "step_s": t.step_s, "tokens_per_s": t.tokens_per_s}
            for t in plan.step_times
        ],
    }
