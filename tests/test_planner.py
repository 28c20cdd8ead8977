"""The planner: pinned arithmetic, sizes as people type them, predictions from given ceilings."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nanoserve.config import ModelConfig
from nanoserve.planner.memory import format_bytes, parse_bytes, plan_memory
from nanoserve.planner.model import (
    StepShape,
    kv_bytes_per_token,
    num_parameters,
    read_weight_bytes,
    step_bytes,
    step_flops,
    weight_bytes,
)
from nanoserve.planner.plan import make_plan, plan_json, plan_table
from nanoserve.planner.steptime import (
    Ceilings,
    num_eager_operations,
    predict_crossover,
    predict_step_s,
)


def gpt2(n_layer: int, n_head: int, n_embd: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=50257,
        n_positions=1024,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_inner=4 * n_embd,
    )


SMALL = gpt2(12, 12, 768)
XL = gpt2(48, 25, 1600)
CEILINGS = Ceilings(
    read_bytes_per_s=20e9,
    matmul_flops_per_s={"float32": 150e9, "bfloat16": 400e9},
    dispatch_s=2e-6,
)


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((12, 12, 768), 124_439_808),
        ((24, 16, 1024), 354_823_168),
        ((36, 20, 1280), 774_030_080),
        ((48, 25, 1600), 1_557_611_200),
        ((6, 12, 768), 81_912_576),
    ],
)
def test_parameters_are_the_published_counts(shape: tuple[int, int, int], expected: int) -> None:
    assert num_parameters(gpt2(*shape)) == expected


def test_an_untied_head_is_counted() -> None:
    untied = replace(SMALL, tie_word_embeddings=False)
    assert num_parameters(untied) - num_parameters(SMALL) == 50257 * 768


def test_a_narrow_mlp_is_counted_as_it_is() -> None:
    narrow = replace(SMALL, n_inner=768)
    per_layer = 2 * 768 * (3072 - 768) + (3072 - 768)
    assert num_parameters(SMALL) - num_parameters(narrow) == 12 * per_layer


@pytest.mark.parametrize(
    "dtype, expected", [("float32", 73_728), ("float16", 36_864), ("bfloat16", 36_864)]
)
def test_kv_bytes_of_a_token(dtype: str, expected: int) -> None:
    assert kv_bytes_per_token(SMALL, dtype) == expected


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"one of float32, float16, bfloat16, int8, got 'float8'"):
        weight_bytes(SMALL, "float8")


def test_an_int8_token_brings_a_scale_for_each_head_of_each_layer() -> None:
    assert kv_bytes_per_token(SMALL, "int8") == 19_008


def test_step_bytes_count_the_tied_head_once_and_positions_not_at_all() -> None:
    moved = step_bytes(SMALL, StepShape(context=100), dtype="float32")
    weights = (124_439_808 - 1024 * 768) * 4
    assert moved == weights + (100 + 1) * 73_728


def test_step_bytes_leave_out_the_embedding_where_the_head_is_its_own() -> None:
    untied = replace(SMALL, tie_word_embeddings=False)
    step = StepShape(context=1)
    assert step_bytes(untied, step, dtype="float32") == step_bytes(SMALL, step, dtype="float32")


@pytest.mark.parametrize("weights,bits", [("int8", 8), ("int8-weight-only", 8), ("int4", 4.5)])
def test_quantised_weights_are_read_as_they_are_stored(weights: str, bits: float) -> None:
    """By hand on the 124M shape: 123,532,032 weights in matrices, 133,201 output channels."""
    assert num_parameters(SMALL) == 124_439_808
    matrices = 12 * 12 * 768 * 768 + 50257 * 768
    channels = 12 * (5 * 768 + 3072) + 50257
    rest = 124_439_808 - 1024 * 768 - matrices
    scales = 0 if weights == "int4" else 4 * channels
    assert read_weight_bytes(SMALL, weights) == matrices * bits / 8 + scales + 4 * rest
    assert read_weight_bytes(SMALL, "float32") == 4 * (124_439_808 - 1024 * 768)
    step = StepShape(context=100)
    moved = step_bytes(SMALL, step, dtype=weights, kv_dtype="int8")
    assert moved == read_weight_bytes(SMALL, weights) + 101 * 19_008


def test_step_bytes_of_a_batch_read_the_weights_once() -> None:
    one, eight = (
        step_bytes(SMALL, StepShape(num_seqs=n, context=64), dtype="float32", kv_dtype="float16")
        for n in (1, 8)
    )
    assert eight - one == 7 * 65 * 36_864


@given(st.integers(1, 40), st.integers(0, 200))
def test_flops_of_a_prefill_are_those_of_its_tokens(num_new: int, before: int) -> None:
    """Attention in one step over n tokens equals the sum of n steps of one; only heads differ."""
    context = before + num_new
    together = step_flops(SMALL, StepShape(context=context, num_new=num_new))
    one_by_one = sum(step_flops(SMALL, StepShape(context=before + i + 1)) for i in range(num_new))
    assert one_by_one - together == (num_new - 1) * 2 * 50257 * 768


def test_flops_of_one_token_are_twice_the_matrices() -> None:
    matrices = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    attention = 12 * 4 * 768
    assert step_flops(SMALL, StepShape(context=1)) == 2 * matrices + attention + 2 * 50257 * 768


@pytest.mark.parametrize(
    "values", [{"context": 0}, {"context": 2, "num_new": 3}, {"context": 2, "num_seqs": 0}]
)
def test_impossible_steps_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a step needs"):
        StepShape(**values)


@pytest.mark.parametrize(
    "model, dtype, context, expected",
    [
        (SMALL, "float32", 256, 1_338),
        (SMALL, "float16", 256, 2_704),
        (XL, "float16", 1_024, 72),
    ],
)
def test_sequences_in_24_gib(model: ModelConfig, dtype: str, context: int, expected: int) -> None:
    plan = plan_memory(model, memory_bytes=24 * 2**30, context=context, dtype=dtype)
    assert plan.num_sequences == expected


@given(st.integers(600 * 10**6, 10**12), st.integers(1, 1024))
def test_a_plan_adds_up(memory_bytes: int, context: int) -> None:
    plan = plan_memory(SMALL, memory_bytes=memory_bytes, context=context, dtype="float32")
    assert plan.weight_bytes + plan.kv_bytes + plan.free_bytes == memory_bytes
    assert 0 <= plan.free_bytes < plan.kv_bytes_per_sequence
    assert plan.num_tokens >= plan.num_sequences * context


def test_a_narrower_cache_holds_more() -> None:
    both = [
        plan_memory(SMALL, memory_bytes=2**33, context=512, dtype="float32", kv_dtype=kv_dtype)
        for kv_dtype in ("float32", "float16")
    ]
    assert both[1].num_sequences == pytest.approx(2 * both[0].num_sequences, abs=1)


def test_weights_that_do_not_fit_say_so() -> None:
    with pytest.raises(ValueError, match=r"474\.7 MiB in float32.*raise --gpu-memory"):
        plan_memory(SMALL, memory_bytes=100 * 2**20, context=16, dtype="float32")


@pytest.mark.parametrize("context", [0, -1, 1025])
def test_a_context_outside_the_model_is_refused(context: int) -> None:
    with pytest.raises(
        ValueError, match=f"between 1 and the model's 1024 positions, got {context}"
    ):
        plan_memory(SMALL, memory_bytes=2**33, context=context, dtype="float32")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5KiB", 1536),
        ("0.1GB", 10**8),
        ("1000", 1000),
        (" 7 B ", 7),
        (12345, 12345),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_sizes_as_people_type_them(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "24G", "GiB", "-1GiB", "0", "0.5", "nan", "inf", "1e9", "24GiBs", "1,5GiB", -3]
)
def test_sizes_that_mean_nothing(text: str | int) -> None:
    with pytest.raises(ValueError, match="--memory must be a positive size such as 24GiB"):
        parse_bytes(text, option="--memory")


@given(st.integers(0, 10**15))
def test_sizes_for_people_keep_their_magnitude(num_bytes: int) -> None:
    number, unit = format_bytes(num_bytes).replace(",", "").split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert float(number) * factor == pytest.approx(num_bytes, rel=0.06, abs=0.5)


def test_a_decode_step_is_predicted_by_its_bytes() -> None:
    step = StepShape(context=512)
    expected = step_bytes(SMALL, step, dtype="float32") / 20e9
    assert predict_step_s(CEILINGS, SMALL, step, dtype="float32") == expected


def test_a_recomputed_step_is_predicted_by_its_operations() -> None:
    step = StepShape(context=512, num_new=512)
    expected = step_flops(SMALL, step) / 150e9
    assert predict_step_s(CEILINGS, SMALL, step, dtype="float32") == expected


def test_dispatch_is_added_only_where_operations_are_dispatched() -> None:
    step = StepShape(context=512)
    plain = predict_step_s(CEILINGS, SMALL, step, dtype="float32")
    eager = predict_step_s(
        CEILINGS, SMALL, step, dtype="float32", num_operations=num_eager_operations(SMALL)
    )
    assert eager - plain == pytest.approx(num_eager_operations(SMALL) * 2e-6)


def test_a_dtype_that_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"no matmul rate for float16 .*float32, bfloat16"):
        predict_step_s(CEILINGS, SMALL, StepShape(context=1), dtype="float16")


def test_the_crossover_is_where_recomputing_costs_more_than_reading() -> None:
    crossover = predict_crossover(CEILINGS, SMALL, dtype="float32")
    assert crossover is not None

    def ratio(context: int) -> float:
        naive, cached = (
            predict_step_s(CEILINGS, SMALL, StepShape(context=context, num_new=n), dtype="float32")
            for n in (context, 1)
        )
        return naive / cached

    assert ratio(crossover) > 1.05 >= ratio(crossover - 1)
    assert 10 < crossover < 40


def test_a_machine_that_computes_for_nothing_gains_little_from_a_cache() -> None:
    free = replace(CEILINGS, matmul_flops_per_s={"float32": 1e18})
    slow = predict_crossover(CEILINGS, SMALL, dtype="float32")
    assert slow is not None
    assert (predict_crossover(free, SMALL, dtype="float32") or 1024) > 2 * slow


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_ceilings_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        replace(CEILINGS, read_bytes_per_s=rate)


def test_ceilings_survive_json() -> None:
    assert Ceilings.from_json(json.loads(json.dumps(CEILINGS.to_json()))) == CEILINGS


@pytest.mark.parametrize("value", [None, [], {}, {"read_bytes_per_s": "fast"}, "text"])
def test_what_is_not_ceilings_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a record of ceilings"):
        Ceilings.from_json(value)


def test_a_plan_shows_shares_and_steps() -> None:
    plan = make_plan("gpt2", SMALL, memory_bytes=24 * 2**30, context=256, ceilings=CEILINGS)
    assert sum(num_bytes for num_bytes, _ in plan.shares.values()) == 24 * 2**30
    assert sum(share for _, share in plan.shares.values()) == pytest.approx(1)
    one, many = plan.step_times
    assert (one.num_seqs, many.num_seqs) == (1, 1_338)
    assert many.tokens_per_s > one.tokens_per_s
    terminal = Console(file=io.StringIO(), width=100)
    terminal.print(plan_table(plan))
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    for text in ("124,439,808 parameters", "1,338", "72.0 KiB", "tok/s"):
        assert text in shown


def test_a_plan_for_a_program_has_the_same_numbers() -> None:
    plan = make_plan("gpt2-xl", XL, memory_bytes=24 * 2**30, dtype="float16", ceilings=CEILINGS)
    answer = json.loads(json.dumps(plan_json(plan)))
    assert (answer["num_sequences"], answer["context"]) == (72, 1024)
    assert answer["kv_cache_dtype"] == "float16"
    assert answer["steps"] == []  # float16 was not measured: nothing is guessed


def test_a_plan_without_ceilings_predicts_nothing() -> None:
    assert make_plan("gpt2", SMALL, memory_bytes=2**33).step_times == ()


def test_a_plan_in_which_no_sequence_fits() -> None:
    plan = make_plan("gpt2", SMALL, memory_bytes=500 * 10**6, ceilings=CEILINGS)
    assert (plan.memory.num_sequences, plan.step_times) == (0, ())
    assert plan.memory.num_tokens == (500 * 10**6 - 497_759_232) // 73_728
