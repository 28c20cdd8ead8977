"""`nanoserve plan`: what fits into a memory and how fast it should decode; nothing is loaded.

A `Plan` is a frozen value; the tables and the JSON are views of it, so they cannot disagree. The
memory is counted from the model's shape alone. Step times need ceilings, measured or given, and are
absent where there are none: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from nanoserve.config import ModelConfig
from nanoserve.planner.memory import MemoryPlan, format_bytes, plan_memory
from nanoserve.planner.model import StepShape, num_parameters
from nanoserve.planner.steptime import Ceilings, predict_step_s

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
"""Precisions of K and V that a plan compares; float16 and bfloat16 are of one size."""


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
class Choice:
    """One precision of K and V: what fits, what of it would fit were buffers free, how fast."""

    kv_dtype: str
    memory: MemoryPlan
    without_buffers: MemoryPlan
    step_times: tuple[StepTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to "will it fit, and how fast": one model, one memory, one context.

    `weights` is how they are kept, a dtype or a quantisation. `choice` is the precision of K and V
    that was asked for, `choices` are all there are.
    """

    model_name: str
    num_parameters: int
    dtype: str
    weights: str
    choice: Choice
    choices: tuple[Choice, ...]

    @property
    def kv_dtype(self) -> str:
        return self.choice.kv_dtype

    @property
    def memory(self) -> MemoryPlan:
        return self.choice.memory

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        return self.choice.step_times

    @property
    def shares(self) -> dict[str, tuple[int, float]]:
        """Bytes of each term and its share of the memory; they add up to all of it."""
        memory = self.memory
        terms = {
            "weights": memory.weight_bytes,
            "step buffers": memory.buffer_bytes,
            "KV cache": memory.kv_bytes,
            "free": memory.free_bytes,
        }
        return {name: (value, value / memory.memory_bytes) for name, value in terms.items()}


def make_plan(
    model_name: str,
    model: ModelConfig,
    *,
    memory_bytes: int,
    context: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    quantization: str | None = None,
    ceilings: Ceilings | None = None,
) -> Plan:
    """Plan `memory_bytes` for sequences of `context` tokens (None: all the model's positions).

    With `ceilings`, the decode step is predicted for one sequence and for as many as fit; weights
    whose matmul rate is not among them, or a memory in which none fits, have no prediction. Raises
    ValueError as `plan_memory` does.
    """
    context = model.n_positions if context is None else context

    def choose(kv: str) -> Choice:
        return make_choice(
            model,
            memory_bytes=memory_bytes,
            context=context,
            dtype=dtype,
            kv_dtype=kv,
            quantization=quantization,
            ceilings=ceilings,
        )

    return Plan(
        model_name=model_name,
        num_parameters=num_parameters(model),
        dtype=dtype,
        weights=quantization or dtype,
        choice=choose(kv_dtype or dtype),
        choices=tuple(map(choose, KV_DTYPES)),
    )


def make_choice(
    model: ModelConfig,
    *,
    memory_bytes: int,
    context: int,
    dtype: str,
    kv_dtype: str,
    quantization: str | None,
    ceilings: Ceilings | None,
) -> Choice:
    """One precision of K and V planned. Raises ValueError as `plan_memory` does."""
    with_buffers, without = (
        plan_memory(
            model,
            memory_bytes=memory_bytes,
            context=context,
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantization=quantization,
            with_buffers=counted,
        )
        for counted in (True, False)
    )
    weights, count = quantization or dtype, with_buffers.num_sequences
    times: tuple[StepTime, ...] = ()
    if ceilings and weights in ceilings.matmul_flops_per_s and count:
        shapes = [StepShape(num_seqs=num, context=context) for num in sorted({1, count})]
        times = tuple(
            StepTime(
                num_seqs=shape.num_seqs,
                step_s=predict_step_s(ceilings, model, shape, dtype=weights, kv_dtype=kv_dtype),
            )
            for shape in shapes
        )
    return Choice(kv_dtype=kv_dtype, memory=with_buffers, without_buffers=without, step_times=times)


def plan_tables(plan: Plan) -> list[Table]:
    """The plan for a terminal: what was asked, then every precision of K and V beside it."""
    return [terms_table(plan), choices_table(plan)]


def terms_table(plan: Plan) -> Table:
    """Each term and its share; what it is made of; what fits; how fast."""
    table = Table(
        title=f"{plan.model_name}: {plan.num_parameters:,} parameters, weights {plan.weights}, "
        f"KV {plan.kv_dtype}",
        title_justify="left",
    )
    table.add_column("term")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    sections = (share_rows(plan), part_rows(plan.memory), fit_rows(plan), time_rows(plan))
    for rows in filter(None, sections):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def share_rows(plan: Plan) -> list[Sequence[str]]:
    return [
        (name, format_bytes(num_bytes), f"{share:.1%}")
        for name, (num_bytes, share) in plan.shares.items()
    ]


def part_rows(memory: MemoryPlan) -> list[Sequence[str]]:
    """What the terms are made of, and where each part comes from."""
    return [
        ("memory", format_bytes(memory.memory_bytes), ""),
        ("KV per token", format_bytes(memory.kv_bytes_per_token), ""),
        (f"KV per {memory.context:,} tokens", format_bytes(memory.kv_bytes_per_sequence), ""),
        ("per sequence, activations of its row", format_bytes(memory.activation_bytes), ""),
        ("per sequence, its row of logits", format_bytes(memory.logits_bytes), "64 at most"),
        ("a prompt's chunk, its activations", format_bytes(memory.prefill_bytes), ""),
    ]


def fit_rows(plan: Plan) -> list[Sequence[str]]:
    memory, ideal = plan.memory, plan.choice.without_buffers
    return [
        (f"sequences of {memory.context:,} tokens", f"{memory.num_sequences:,}", ""),
        ("ignoring step buffers", f"{ideal.num_sequences:,}", ""),
        ("tokens, shared out freely", f"{memory.num_tokens:,}", ""),
    ]


def time_rows(plan: Plan) -> list[Sequence[str]]:
    return [
        (
            f"expected step, {time.num_seqs:,} at once",
            f"{time.step_s * 1e3:,.1f} ms",
            f"{time.tokens_per_s:,.0f} tok/s",
        )
        for time in plan.step_times
    ]


def choices_table(plan: Plan) -> Table:
    """Sequences, tokens and, where it can be expected, the rate of each precision of K and V."""
    context = plan.memory.context
    table = Table(title=f"KV in other precisions, {context:,} tokens each", title_justify="left")
    table.add_column("KV")
    for head in ("per token", "sequences", "tokens", "expected tok/s"):
        table.add_column(head, justify="right")
    for choice in plan.choices:
        rate = f"{choice.step_times[-1].tokens_per_s:,.0f}" if choice.step_times else ""
        table.add_row(
            choice.kv_dtype,
            format_bytes(choice.memory.kv_bytes_per_token),
            f"{choice.memory.num_sequences:,}",
            f"{choice.memory.num_tokens:,}",
            rate,
        )
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for a program (`--json`)."""
    return {
        "model": plan.model_name,
        "num_parameters": plan.num_parameters,
        "dtype": plan.dtype,
        "weights": plan.weights,
        "memory_bytes": plan.memory.memory_bytes,
        "context": plan.memory.context,
        "weight_bytes": plan.memory.weight_bytes,
        "terms": {
            name: {"bytes": value, "share": share} for name, (value, share) in plan.shares.items()
        },
        **choice_json(plan.choice),
        "kv_cache_dtypes": [choice_json(choice) for choice in plan.choices],
    }


def choice_json(choice: Choice) -> dict[str, Any]:
    memory = choice.memory
    return {
        "kv_cache_dtype": choice.kv_dtype,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_bytes_per_sequence": memory.kv_bytes_per_sequence,
        "activation_bytes_per_sequence": memory.activation_bytes,
        "logits_bytes_per_sequence": memory.logits_bytes,
        "prefill_bytes": memory.prefill_bytes,
        "buffer_bytes": memory.buffer_bytes,
        "kv_bytes": memory.kv_bytes,
        "free_bytes": memory.free_bytes,
        "num_sequences": memory.num_sequences,
        "num_sequences_ignoring_buffers": choice.without_buffers.num_sequences,
        "num_tokens": memory.num_tokens,
        "steps": [
            {"num_seqs": t.num_seqs, "step_s": t.step_s, "tokens_per_s": t.tokens_per_s}
            for t in choice.step_times
        ],
    }
