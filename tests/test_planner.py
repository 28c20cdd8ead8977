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
from nanoserve.planner.memory import (
    HUGE_PAGE_BYTES,
    LOGIT_ROWS,
    PREFILL_ROWS,
    MemoryModel,
    activation_row_bytes,
    format_bytes,
    logits_row_bytes,
    mapped_bytes,
    parse_bytes,
    plan_memory,
)
from nanoserve.planner.model import (
    StepShape,
    kv_bytes_per_token,
    num_parameters,
    read_weight_bytes,
    step_bytes,
    step_flops,
    stored_weight_bytes,
    weight_bytes,
)
from nanoserve.planner.plan import KV_DTYPES, make_plan, plan_json, plan_tables
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


@pytest.mark.parametrize("weights,bits", [("int8", 8), ("int8-weight-only", 8), ("int4", 4.5)])
def test_quantised_weights_are_kept_with_their_scales_and_positions(
    weights: str, bits: float
) -> None:
    """By hand: an untied embedding is packed like the matrices, positions take two bytes."""
    positions = 2 * 1024 * 768
    assert stored_weight_bytes(SMALL, weights) == read_weight_bytes(SMALL, weights) + positions
    untied = replace(SMALL, tie_word_embeddings=False)
    scales = 0 if weights == "int4" else 4 * 50257
    embedding = 50257 * 768 * bits / 8 + scales
    assert stored_weight_bytes(untied, weights) == stored_weight_bytes(SMALL, weights) + embedding


@pytest.mark.parametrize(
    "model, dtype, kv_dtype, context, expected",
    [
        (SMALL, "float32", "float32", 256, 1_338),
        (SMALL, "float16", "float16", 256, 2_704),
        (SMALL, "float16", "int8", 256, 5_244),
        (XL, "float16", "float16", 1_024, 72),
    ],
)
def test_sequences_in_24_gib(
    model: ModelConfig, dtype: str, kv_dtype: str, context: int, expected: int
) -> None:
    """Ignoring what a step holds; with that, by hand, some fewer."""
    memory = {"memory_bytes": 24 * 2**30, "context": context}
    plan = plan_memory(model, **memory, dtype=dtype, kv_dtype=kv_dtype)
    assert plan.num_sequences == expected
    whole = plan_memory(model, **memory, dtype=dtype, kv_dtype=kv_dtype, with_buffers=True)
    each = activation_row_bytes(model, dtype)
    taken = PREFILL_ROWS * each + LOGIT_ROWS * 4 * 50257
    room = 24 * 2**30 - weight_bytes(model, dtype) - taken
    each += context * kv_bytes_per_token(model, kv_dtype)
    assert whole.num_sequences == room // each < expected


def test_what_a_decode_row_holds() -> None:
    """x, norm, q, k, v and the heads' result are widths, then the MLP; logits are float32."""
    assert activation_row_bytes(SMALL, "float32") == (6 * 768 + 3072) * 4
    assert activation_row_bytes(SMALL, "float16") == (6 * 768 + 3072) * 2
    assert logits_row_bytes(SMALL) == 201_028


def test_logits_are_held_for_at_most_so_many_rows() -> None:
    """Below the limit a sequence brings a row of logits, above it none."""

    def sequences(memory_bytes: int) -> int:
        return plan_memory(
            SMALL, memory_bytes=memory_bytes, context=16, dtype="float32", with_buffers=True
        ).num_sequences

    each = 16 * 73_728 + 30_720
    base = weight_bytes(SMALL, "float32") + PREFILL_ROWS * 30_720
    below = base + 40 * (each + 201_028)
    assert (sequences(below), sequences(below - 1)) == (40, 39)
    above = base + LOGIT_ROWS * 201_028 + 100 * each
    assert (sequences(above), sequences(above - 1)) == (100, 99)
    edge = base + LOGIT_ROWS * (each + 201_028)
    assert (sequences(edge), sequences(edge - 1)) == (LOGIT_ROWS, LOGIT_ROWS - 1)


@given(st.integers(498 * 10**6, 10**12), st.integers(1, 1024), st.booleans())
def test_a_plan_adds_up(memory_bytes: int, context: int, with_buffers: bool) -> None:
    plan = plan_memory(
        SMALL,
        memory_bytes=memory_bytes,
        context=context,
        dtype="float32",
        with_buffers=with_buffers,
    )
    terms = plan.weight_bytes + plan.buffer_bytes + plan.kv_bytes + plan.free_bytes
    assert terms == memory_bytes
    assert plan.free_bytes >= 0
    if plan.num_sequences:
        assert plan.free_bytes < plan.bytes_per_sequence
    assert plan.num_tokens >= plan.num_sequences * context


def test_a_mapping_is_whole_pages_and_one_more() -> None:
    assert mapped_bytes(5, 0) == 5
    assert mapped_bytes(0, HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    assert mapped_bytes(1, HUGE_PAGE_BYTES) == 2 * HUGE_PAGE_BYTES
    assert mapped_bytes(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES) == 2 * HUGE_PAGE_BYTES
    assert mapped_bytes(HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES) == 3 * HUGE_PAGE_BYTES


def memory_model(**values: float) -> MemoryModel:
    terms = {"runtime_bytes": 10.0, "fixed_bytes": 100.0, "per_sequence_bytes": 3.0}
    sizes = {"kv_bytes_per_token": 2, "block_size": 4, "huge_page_bytes": 0}
    return MemoryModel(**{**terms, **sizes, **values})  # type: ignore[arg-type]


def test_the_memory_model_is_its_terms() -> None:
    """Seven tokens take two blocks of four; one more block is the scratch block."""
    model = memory_model()
    assert model.kv_bytes(5, 7) == (5 * 2 + 1) * 4 * 2
    assert model.peak_bytes(5, 7) == 10 + 100 + 3 * 5 + 88
    paged = memory_model(huge_page_bytes=64)
    assert paged.peak_bytes(5, 7) == 10 + 100 + 128 + 192


@given(st.integers(0, 5000), st.integers(1, 40), st.sampled_from([0, 64]), st.floats(0.0, 9.0))
def test_the_ceiling_is_the_last_batch_within_the_limit(
    limit: int, context: int, page: int, each: float
) -> None:
    model = memory_model(huge_page_bytes=page, per_sequence_bytes=each)
    count = model.num_sequences(limit, context)
    assert count == 0 or model.peak_bytes(count, context) <= limit
    assert model.peak_bytes(count + 1, context) > limit


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
    "text",
    [
        *("", "24G", "GiB", "-1GiB", "0", "0.5", "nan", "inf", "1e9", "24GiBs", "1,5GiB", -3),
        *("8388608TiB", "9" * 400, "9" * 5000 + "TiB", "0." + "3" * 5000 + "GiB"),
    ],
    ids=lambda text: str(text)[:12],
)
def test_sizes_that_mean_nothing(text: str | int) -> None:
    with pytest.raises(
        ValueError, match="--memory must be a positive size such as 24GiB"
    ) as refusal:
        parse_bytes(text, option="--memory")
    assert len(str(refusal.value)) < 200


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


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-310, 1e300, float("nan"), float("inf")])
def test_ceilings_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        replace(CEILINGS, read_bytes_per_s=rate)


@pytest.mark.parametrize("dispatch_s", [-1e-9, float("nan"), float("inf")])
def test_a_dispatch_takes_some_time(dispatch_s: float) -> None:
    """Nothing times NaN or infinity is NaN: a step time that says nothing and no JSON holds."""
    with pytest.raises(ValueError, match="must be positive"):
        replace(CEILINGS, dispatch_s=dispatch_s)


def test_ceilings_survive_json() -> None:
    assert Ceilings.from_json(json.loads(json.dumps(CEILINGS.to_json()))) == CEILINGS


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"read_bytes_per_s": "fast"}, "text", {"read_bytes_per_s": 10**400}],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_ceilings_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a record of ceilings"):
        Ceilings.from_json(value)


def test_a_plan_shows_shares_and_steps() -> None:
    plan = make_plan("gpt2", SMALL, memory_bytes=24 * 2**30, context=256, ceilings=CEILINGS)
    assert list(plan.shares) == ["weights", "step buffers", "KV cache", "free"]
    assert sum(num_bytes for num_bytes, _ in plan.shares.values()) == 24 * 2**30
    assert sum(share for _, share in plan.shares.values()) == pytest.approx(1)
    one, many = plan.step_times
    assert (one.num_seqs, many.num_seqs) == (1, plan.memory.num_sequences)
    assert 1_300 < plan.memory.num_sequences < 1_338
    rows = [choice.memory.num_sequences for choice in plan.choices]
    assert rows[0] < rows[1] == rows[2] < rows[3]
    assert many.tokens_per_s > one.tokens_per_s
    terminal = Console(file=io.StringIO(), width=100)
    for table in plan_tables(plan):
        terminal.print(table)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    for text in ("124,439,808 parameters", "1,338", "72.0 KiB", "tok/s", *KV_DTYPES):
        assert text in shown


def test_a_plan_for_a_program_has_the_same_numbers() -> None:
    plan = make_plan("gpt2-xl", XL, memory_bytes=24 * 2**30, dtype="float16", ceilings=CEILINGS)
    answer = json.loads(json.dumps(plan_json(plan)))
    assert (answer["num_sequences_ignoring_buffers"], answer["context"]) == (72, 1024)
    assert answer["num_sequences"] == 71
    assert sum(term["bytes"] for term in answer["terms"].values()) == 24 * 2**30
    assert [c["kv_cache_dtype"] for c in answer["kv_cache_dtypes"]] == list(KV_DTYPES)
    assert answer["kv_cache_dtype"] == "float16"
    assert answer["steps"] == []  # float16 was not measured: nothing is guessed


def test_a_plan_without_ceilings_predicts_nothing() -> None:
    assert make_plan("gpt2", SMALL, memory_bytes=2**33).step_times == ()


def test_a_plan_in_which_no_sequence_fits() -> None:
    plan = make_plan("gpt2", SMALL, memory_bytes=500 * 10**6, ceilings=CEILINGS)
    assert (plan.memory.num_sequences, plan.step_times) == (0, ())
    assert plan.memory.free_bytes == 0  # what the weights leave is less than a step's buffers
    ideal = plan.choice.without_buffers
    assert (ideal.num_sequences, ideal.num_tokens) == (0, (500 * 10**6 - 497_759_232) // 73_728)


def test_a_plan_of_quantised_weights() -> None:
    """They leave more for K and V; how fast they are multiplied with is no ceiling there is."""
    memory = {"memory_bytes": 2**30, "context": 256, "kv_dtype": "float16", "ceilings": CEILINGS}
    plain, packed = (
        make_plan("gpt2", SMALL, **memory, quantization=quantization)  # type: ignore[arg-type]
        for quantization in (None, "int4")
    )
    assert (plain.weights, packed.weights) == ("float32", "int4")
    assert packed.memory.weight_bytes == stored_weight_bytes(SMALL, "int4")
    assert packed.memory.num_sequences > plain.memory.num_sequences
    assert (len(plain.step_times), packed.step_times) == (2, ())
    known = replace(CEILINGS, matmul_flops_per_s={"int4": 1e12})
    memory |= {"ceilings": known}
    told = make_plan("gpt2", SMALL, **memory, quantization="int4")  # type: ignore[arg-type]
    assert told.step_times[0].step_s < plain.step_times[0].step_s
