"""What batching gains: traces, simulated schedules, step costs, and the four experiments on them.

The engines are real, over the tiny model's shape; their executor answers without a model and moves
a fake clock by costs that are known. So predictions can be held to what was "measured", exactly,
and whole experiments run in a second or two.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_bench import FakeYardsticks, ceiling_samples
from helpers import drain, greedy, tiny_engine, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.bench import calibrate as calibrating
from nanoserve.bench import measure as measuring
from nanoserve.bench import report, runner, sampler, session, traces
from nanoserve.bench.batching_plots import (
    batch_scaling_plot,
    draw_batch_scaling,
    draw_gains,
    draw_timeline,
    gains_plot,
    timeline_plot,
)
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.experiments import batch, batching, interference, overhead
from nanoserve.bench.experiments.kvcache import Gate
from nanoserve.bench.findings.batch import batch_findings, batch_paragraph, batch_table, find_knee
from nanoserve.bench.findings.batching import (
    batching_findings,
    batching_paragraph,
    gain_table,
    latency_table,
    transforms_text,
)
from nanoserve.bench.findings.interference import interference_findings, interference_paragraph
from nanoserve.bench.findings.overhead import (
    SampledRow,
    end_to_end_table,
    fit_line,
    overhead_findings,
    overhead_paragraph,
    sampled_text,
    sampler_sentence,
    sampler_table,
)
from nanoserve.bench.measure import Rules
from nanoserve.bench.metrics import describe
from nanoserve.bench.plots import plot_json, save
from nanoserve.bench.proxies import SilentExecutor
from nanoserve.bench.record import Run
from nanoserve.bench.session import Options, Screen
from nanoserve.bench.simulate import Schedule, simulate
from nanoserve.bench.stepcosts import (
    TERMS,
    StepCosts,
    StepWork,
    fit_step_costs,
    hats,
    non_negative_least_squares,
)
from nanoserve.bench.traces import (
    Length,
    equal_lengths,
    from_trace,
    read_trace,
    static_waste,
)
from nanoserve.config import Batching, ModelConfig, SchedulerConfig
from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.build import DEFAULT_BATCHED_TOKENS
from nanoserve.engine.engine import Engine
from nanoserve.engine.executor import Executor
from nanoserve.kernels.cpu import library
from nanoserve.model.hub import BUILT_IN_SHAPES
from nanoserve.planner.budget import (
    GRAIN,
    LARGEST_BUDGET,
    MAX_GAP_RATIO,
    NUM_STREAMS,
    SMALLEST_BUDGET,
    auto_budget,
    predicted_step_time,
)
from nanoserve.planner.measured import save_ceilings
from nanoserve.planner.steptime import Ceilings
from nanoserve.request import TokenLogprob
from nanoserve.scheduling.scheduler import Scheduler

QUIET = Screen(quiet=True)
POLICIES: tuple[Batching, ...] = ("static", "continuous")


def lengths_of(*pairs: tuple[int, int]) -> list[Length]:
    return [Length(prompt=prompt, output=output) for prompt, output in pairs]


def scheduler_of(batching: Batching, slots: int, *, budget: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerConfig(batching=batching, max_num_seqs=slots, enable_prefix_caching=False),
        num_blocks=16 * slots,
        block_size=16,
        max_model_len=256,
        max_num_batched_tokens=budget,
    )


# --- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv", "code"])
def test_the_extract_is_what_its_readme_says(name: traces.TraceName) -> None:
    rows = read_trace(name)
    assert len(rows) == 1000
    assert all(row.length.total <= 1024 for row in rows)
    assert min(row.length.prompt for row in rows) >= 1
    assert min(row.length.output for row in rows) >= 1
    arrivals = [row.arrival_s for row in rows]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    readme = (traces.TRACES_DIR / "README.md").read_text(encoding="utf-8")
    assert traces.SHA256[name] in readme
    mean_prompt = sum(row.length.prompt for row in rows) / 1000
    mean_output = sum(row.length.output for row in rows) / 1000
    assert f"| `{name}.csv` | 1,000 | {mean_prompt:.0f} | {mean_output:.0f} |" in readme


def test_the_extract_is_small_and_carries_its_licence() -> None:
    files = list(traces.TRACES_DIR.iterdir())
    assert sum(path.stat().st_size for path in files) < 60_000
    licence = (traces.TRACES_DIR / "LICENSE").read_text(encoding="utf-8-sig")
    assert licence.startswith("Attribution 4.0 International")
    readme = (traces.TRACES_DIR / "README.md").read_text(encoding="utf-8")
    assert all(words in readme for words in ("What was changed", "Attribution", "Splitwise"))


def test_a_trace_that_was_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(traces.TRACES_DIR, tmp_path / "copy")
    monkeypatch.setattr(traces, "TRACES_DIR", tmp_path / "copy")
    assert len(read_trace("conv")) == 1000
    with (tmp_path / "copy" / "conv.csv").open("a", encoding="utf-8") as file:
        file.write("999.0,1,1\n")
    with pytest.raises(ValueError, match=r"conv\.csv .* was changed"):
        read_trace("conv")


def test_every_transform_is_named() -> None:
    plain = from_trace("conv", 128, 1024)
    cut = from_trace("conv", 128, 1024, prompt_cut=16)
    quarter = from_trace("conv", 128, 1024, divisor=4)
    assert plain.lengths == tuple(row.length for row in read_trace("conv")[:128])
    assert [n.output for n in cut.lengths] == [n.output for n in plain.lengths]
    assert [n.prompt for n in cut.lengths] == [min(n.prompt, 16) for n in plain.lengths]
    assert quarter.lengths[0] == Length(prompt=-(-374 // 4), output=11)
    assert "filtered to prompt + output <= 1,024, first 128" in plain.transform
    assert "prompts cut to 16" in cut.transform
    assert "lengths / 4" in quarter.transform
    assert len({plain.sha256, cut.sha256, quarter.sha256}) == 3
    expected = hashlib.sha256(json.dumps(plain.pairs).encode()).hexdigest()
    assert plain.sha256 == expected


def test_a_shorter_window_takes_the_requests_that_fit_it() -> None:
    short = from_trace("code", 20, 256)
    assert max(length.total for length in short.lengths) <= 256
    with pytest.raises(ValueError, match="1000 requests were asked for"):
        from_trace("code", 1000, 256)


def test_equal_lengths_are_equal() -> None:
    workload = equal_lengths(5, Length(prompt=3, output=2))
    assert workload.pairs == [[3, 2]] * 5
    assert workload.num_output_tokens == 10


@pytest.mark.parametrize(
    "outputs, slots, expected",
    [([4, 4, 4, 4], 2, 1.0), ([1, 3], 2, 6 / 4), ([1, 3, 2], 2, (6 + 2) / 6), ([5], 8, 1.0)],
)
def test_the_waste_of_static_batching_by_arithmetic(
    outputs: list[int], slots: int, expected: float
) -> None:
    assert static_waste(outputs, slots) == pytest.approx(expected)


# --- simulation -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=20),
    st.integers(1, 6),
)
def test_simulated_waste_is_the_arithmetic_one_where_prompts_fit_a_step(
    pairs: list[tuple[int, int]], slots: int
) -> None:
    lengths = lengths_of(*pairs)
    outputs = [length.output for length in lengths]
    static = simulate(scheduler_of("static", slots), lengths)
    continuous = simulate(scheduler_of("continuous", slots), lengths)
    assert static.computed_over_asked == pytest.approx(static_waste(outputs, slots))
    assert continuous.computed_over_asked == 1.0
    assert static.asked_rows == continuous.asked_rows == sum(outputs)
    assert continuous.num_steps <= static.num_steps


def check_slots(schedule: Schedule, lengths: Sequence[Length], slots: int) -> None:
    """Everyone has one slot, and no slot two at a time."""
    assert sorted(span.request for span in schedule.spans) == list(range(len(lengths)))
    for slot in {span.slot for span in schedule.spans}:
        assert slot < slots
        held = sorted(
            (span.first_step, span.freed_step) for span in schedule.spans if span.slot == slot
        )
        assert all(freed < first for (_, freed), (first, _) in pairwise(held))
    for span in schedule.spans:
        assert span.first_step <= schedule.first_token_steps[span.request] <= span.last_step
        assert span.last_step <= span.freed_step


@pytest.mark.parametrize("batching", POLICIES)
@pytest.mark.parametrize("slots, budget", [(3, 16), (4, 64), (8, 24)])
def test_the_engine_takes_the_simulated_steps(batching: Batching, slots: int, budget: int) -> None:
    generator = random.Random(f"{slots}:{budget}")
    lengths = lengths_of(*((generator.randint(1, 40), generator.randint(1, 9)) for _ in range(14)))
    engine = tiny_engine(
        batching=batching,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    schedule = calibrating.simulated(engine, lengths)
    calibrating.add_all(engine, lengths)
    drain(engine)
    steps = [(step.num_tokens, step.num_seqs) for step in engine.log.steps]
    assert steps == [(work.num_rows, work.num_seqs) for work in schedule.works]
    counters = engine.scheduler.counters
    assert counters.computed_rows == schedule.computed_rows
    assert counters.asked_rows == schedule.asked_rows
    assert (counters.computed_rows > counters.asked_rows) == (batching == "static")
    check_slots(schedule, lengths, slots)


def test_a_request_may_join_later() -> None:
    lengths = lengths_of((4, 10), (30, 2))
    schedule = simulate(scheduler_of("continuous", 2, budget=9), lengths, joins_after={1: 3})
    assert [work.num_seqs for work in schedule.works[:3]] == [1, 1, 1]
    assert [work.num_rows for work in schedule.works[3:7]] == [9, 9, 9, 7]
    assert schedule.first_token_steps == (0, 6)
    alone = simulate(scheduler_of("continuous", 2), lengths_of((4, 1), (4, 1)), joins_after={1: 50})
    assert alone.num_steps == 2  # nobody waits for an empty scheduler


def test_static_slots_are_kept_until_the_batch_is_done() -> None:
    schedule = simulate(scheduler_of("static", 2), lengths_of((1, 1), (1, 4), (1, 1)))
    spans = {span.request: span for span in schedule.spans}
    assert (spans[0].last_step, spans[0].freed_step) == (0, 3)
    assert (spans[1].last_step, spans[1].freed_step) == (3, 3)
    assert spans[2].first_step == 4
    assert schedule.computed_rows == 4 * 2 + 1
    assert schedule.asked_rows == 6


# --- step costs -----------------------------------------------------------------------------------


def test_the_work_of_a_step_is_counted_from_its_plan() -> None:
    scheduler = scheduler_of("continuous", 4, budget=10)
    schedule = simulate(scheduler, lengths_of((4, 3), (9, 2)))
    assert schedule.works[0] == StepWork(
        num_rows=10, num_seqs=2, num_logit_rows=1, context_tokens=4 + 6, attended_pairs=10 + 21
    )
    assert schedule.works[1] == StepWork(
        num_rows=4, num_seqs=2, num_logit_rows=2, context_tokens=5 + 9, attended_pairs=5 + 24
    )


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True), st.integers(1, 400))
def test_hats_interpolate_and_go_on_straight(found: list[int], num_rows: int) -> None:
    knots = sorted(found)
    weights = hats(knots, num_rows)
    assert weights.sum() == pytest.approx(1.0)
    if len(knots) > 1:
        assert weights @ np.array(knots, dtype=float) == pytest.approx(num_rows)


TRUE = StepCosts(
    knots=(1, 8, 64),
    row_s=(2e-3, 3e-3, 9e-3),
    term_s=(4e-5, 1e-5, 2e-7, 1e-8),
    median_error=0.0,
    num_steps=0,
)


def random_work(generator: random.Random) -> StepWork:
    num_seqs = generator.randint(1, 8)
    num_rows = num_seqs + generator.choice([0, 0, 3, 17, 50])
    context = num_rows + num_seqs * generator.randint(0, 200)
    return StepWork(
        num_rows=num_rows,
        num_seqs=num_seqs,
        num_logit_rows=generator.randint(0, num_seqs),
        context_tokens=context,
        attended_pairs=context * generator.randint(1, 3),
    )


def test_known_costs_are_found_again() -> None:
    generator = random.Random(5)
    works = [random_work(generator) for _ in range(80)] + [
        replace(random_work(generator), num_rows=64)
    ]
    fitted = fit_step_costs(works, [TRUE(work) for work in works], TRUE.knots)
    assert fitted.median_error == pytest.approx(0.0, abs=1e-9)
    assert fitted.row_s == pytest.approx(TRUE.row_s)
    assert fitted.term_s == pytest.approx(TRUE.term_s)
    assert fitted.to_json()["term_s"].keys() == set(TERMS)


def test_a_term_that_would_be_negative_is_left_out() -> None:
    columns = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    found = non_negative_least_squares(columns, np.array([3.0, 2.0, 1.0]))
    assert found.tolist() == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("num_works, num_seconds", [(0, 0), (2, 1)])
def test_nothing_to_fit_is_an_error(num_works: int, num_seconds: int) -> None:
    works = [random_work(random.Random(1))] * num_works
    with pytest.raises(ValueError, match="no data to fit"):
        fit_step_costs(works, [1.0] * num_seconds, (1,))


def test_probes_fit_the_window_and_vary_every_term() -> None:
    probes = calibrating.make_probes(max_seqs=16, static_seqs=4, budget=64, window=256, longest=700)
    assert len({probe.name for probe in probes}) == len(probes)
    assert all(length.total <= 256 for probe in probes for length in probe.lengths)
    assert {len(p.lengths) for p in probes} >= {1, 2, 4, 8, 16}
    assert [p.batching for p in probes].count("static") == 1
    without = calibrating.make_probes(
        max_seqs=16, static_seqs=None, budget=64, window=256, longest=700
    )
    assert {p.batching for p in without} == {"continuous"}


@pytest.mark.parametrize(
    "first, last, expected", [(1, 8, [1, 2, 4, 8]), (1, 6, [1, 2, 4, 6]), (16, 9, [9])]
)
def test_powers_of_two_end_with_the_last(first: int, last: int, expected: list[int]) -> None:
    assert calibrating.powers_of_two(first, last) == expected


# --- a clock that the executor moves --------------------------------------------------------------


@dataclass
class Clock:
    """Nanoseconds. Reading it costs `tick_ns`, so that nothing ever takes no time at all."""

    now_ns: int = 0
    tick_ns: int = 0

    def __call__(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns

    def seconds(self) -> float:
        return self.now_ns / 1e9

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


class ClockedExecutor(SilentExecutor):
    """No model; a step takes `TRUE` seconds by what its batch holds. `token` is what it draws."""

    def __init__(self, inner: Executor, clock: Clock, token: int = 0) -> None:
        super().__init__(inner)
        self.clock = clock
        self.token = token

    def execute(self, batch: StepBatch) -> StepResult:
        sizes = np.diff(batch.query_starts).astype(np.int64)
        starts = batch.context_lens.astype(np.int64) - sizes
        work = StepWork(
            num_rows=len(batch.token_ids),
            num_seqs=len(batch.context_lens),
            num_logit_rows=len(batch.logit_rows),
            context_tokens=int(batch.context_lens.sum()),
            attended_pairs=int((sizes * starts + sizes * (sizes + 1) // 2).sum()),
        )
        self.clock.sleep(TRUE(work))
        result = super().execute(batch)
        return replace(result, token_ids=result.token_ids + self.token)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(measuring, "perf_counter_ns", fake)
    return fake


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., None]:
    """A function that puts clocked engines into an experiment; static ones draw `static_token`."""

    def prepare(module: Any, **scale: Any) -> None:
        static_token = scale.pop("static_token", 0)

        def open_engine(*args: Any, **kwargs: Any) -> Engine:
            engine = session.open_engine(*args, **kwargs)
            token = static_token if kwargs.get("batching") == "static" else 0
            engine.executor = ClockedExecutor(engine.executor, clock, token)
            engine.clock = clock.seconds
            return engine

        monkeypatch.setattr(module, "open_engine", open_engine)
        monkeypatch.setattr(module, "FULL", replace(module.FULL, **scale))

    return prepare


def options_in(folder: Path, **values: Any) -> Options:
    return Options(out=folder, model=str(tiny_model().folder), device="cpu", seed=1, **values)


# --- batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, expected",
    [
        ((1.0, 1.0, 1.0, 1.0), None),
        ((1.0, 1.0, 2.0, 4.0), 3.0),
        ((1.0, 1.5, 2.0, 4.0), 2.0),
        ((1.0, 2.0, 2.0, 2.0), 1.5),
        ((1.0, 0.5, 0.5, 1.5), 8.0),
    ],
)
def test_the_knee_is_where_a_step_takes_half_as_long_again(
    seconds: tuple[float, ...], expected: float | None
) -> None:
    assert find_knee((1, 2, 4, 8), seconds) == (
        None if expected is None else pytest.approx(expected)
    )


def test_the_predicted_knee_of_a_roofline_follows_its_corner() -> None:
    """Half as far again as the batch at which computing overtakes reading the weights."""
    batches = tuple(range(1, 65))
    floor_s, each_s = 0.020, 0.001
    assert find_knee(batches, [max(floor_s, each_s * b) for b in batches]) == pytest.approx(30.0)


@pytest.fixture
def batch_run(
    house: Callable[..., None], clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    house(
        batch,
        batches=(1, 2, 8, 16),
        contexts=(32, 128, 300),
        rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6),
    )
    monkeypatch.setattr(batch, "make_yardsticks", lambda *_, **__: FakeYardsticks(clock))  # type: ignore[arg-type]
    monkeypatch.setattr(batch, "measured_ceilings", lambda *_: ceiling_samples())
    return batch.measure(options_in(tmp_path), QUIET)


def test_a_step_is_measured_for_every_batch_and_context(batch_run: Run) -> None:
    findings = batch_findings(batch_run)
    assert [curve.context for curve in findings.curves] == [32, 128]  # 300 is beyond the window
    for curve in findings.curves:
        assert [point.batch for point in curve.points] == [1, 2, 8, 16]
        for point in curve.points:
            work = StepWork(
                num_rows=point.batch,
                num_seqs=point.batch,
                num_logit_rows=point.batch,
                context_tokens=point.batch * curve.context,
                attended_pairs=point.batch * curve.context,
            )
            assert point.step.median == pytest.approx(TRUE(work), rel=1e-6)
            assert point.tokens_per_s == pytest.approx(point.batch / TRUE(work), rel=1e-6)
        first, last = curve.points[0], curve.points[-1]
        assert last.slowdown.median == pytest.approx(last.step.median / first.step.median)
        assert curve.gain == pytest.approx(16 * first.step.median / last.step.median)
    medians = [point.step.median for point in findings.main.points]
    assert findings.main.knee == find_knee((1, 2, 8, 16), medians)


def test_a_batch_run_says_what_ran_and_what_was_predicted(batch_run: Run) -> None:
    assert batch_run.checks[-1]["median"] == 1.0
    assert batch_run.header["tokens_sha256"]
    predictions = batch_run.header["predictions"]
    assert set(predictions) == {"context 32", "context 128"}
    small, large = (predictions["context 32"][f"batch {b}"] for b in (1, 16))
    assert large["flops"] == 16 * small["flops"]
    assert small["num_bytes"] < large["num_bytes"] < 16 * small["num_bytes"]


def test_batch_tables_and_paragraph(batch_run: Run) -> None:
    findings = batch_findings(batch_run)
    heads, rows = batch_table(findings)
    assert len(rows) == 8
    assert {len(row) for row in rows} == {len(heads)}
    text = batch_paragraph(findings)
    assert "1.5 times that of one sequence, is at batch" in text
    assert "At context 128" in text


def test_a_sequence_that_writes_another_text_in_a_batch_fails_the_gate(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    house(batch, batches=(1, 8), contexts=(32,))
    monkeypatch.setattr(batch, "make_yardsticks", lambda *_, **__: FakeYardsticks(clock))  # type: ignore[arg-type]
    monkeypatch.setattr(batch, "measured_ceilings", lambda *_: ceiling_samples())
    execute = ClockedExecutor.execute

    def confused(self: ClockedExecutor, given: StepBatch) -> StepResult:
        result = execute(self, given)
        return replace(result, token_ids=result.token_ids + (len(given.context_lens) > 1))

    monkeypatch.setattr(ClockedExecutor, "execute", confused)
    with pytest.raises(VoidError, match="batch 8, context 32, token 0: the batch emits 1"):
        batch.measure(options_in(tmp_path), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


def test_a_cache_too_small_for_the_largest_batch_is_said_beforehand(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house(batch, batches=(1, 8, 4096), contexts=(32,))
    monkeypatch.setattr("nanoserve.engine.build.available_memory_bytes", lambda: 2**24)
    with pytest.raises(ValueError, match="4096 are to be measured"):
        batch.measure(options_in(tmp_path), QUIET)


# --- batching -------------------------------------------------------------------------------------

SMALL: Mapping[str, Any] = {
    "num_requests": 14,
    "divisor": 16,
    "control": Length(prompt=4, output=3),
    "main_slots": 4,
    "slots": (8,),
    "budget_s": 1e6,
    "max_rounds": 6,
    "repetitions": 1,
    "longest": 60,
}


@pytest.fixture
def batching_run(house: Callable[..., None], tmp_path: Path) -> Run:
    house(batching, **SMALL)
    return batching.measure(options_in(tmp_path), QUIET)


def test_predicted_and_measured_makespans_agree_where_costs_are_known(batching_run: Run) -> None:
    """The fit sees other steps than it predicts, so it is right to within a few per cent."""
    findings = batching_findings(batching_run)
    assert len(findings.cases) == 5
    for case in findings.cases:
        assert case.measured is not None
        assert case.measured.gain.median == pytest.approx(case.predicted_gain, rel=0.03)
        assert case.reached == pytest.approx(1.0, rel=0.03)
        for policy in (case.static, case.continuous):
            measured = (
                case.measured.static_s if policy is case.static else case.measured.continuous_s
            )
            assert measured.median == pytest.approx(policy.makespan_s, rel=0.05)


def test_continuous_wastes_nothing_and_static_what_arithmetic_says(batching_run: Run) -> None:
    findings = batching_findings(batching_run)
    for case in findings.cases:
        assert case.continuous.waste == 1.0
        assert case.static.asked_rows == case.num_output_tokens
    assert findings.main.static.waste == pytest.approx(findings.main.arithmetic_waste, rel=0.1)
    assert findings.main.static.waste > 1.3
    assert findings.main.measured is not None
    assert findings.main.measured.gain.median > 1.1


def test_the_control_of_equal_lengths_shows_nothing(batching_run: Run) -> None:
    findings = batching_findings(batching_run)
    assert findings.control.static.waste == 1.0
    assert findings.control.measured is not None
    assert findings.control.measured.gain.median == 1.0
    assert findings.check.smallest_effect == 0.0
    assert findings.control_is_even
    assert "which is noise" in batching_paragraph(findings)


def test_the_timeline_is_as_measured(batching_run: Run) -> None:
    findings = batching_findings(batching_run)
    main = findings.main
    assert main.measured is not None
    ends = {
        "static": main.measured.static_s.median,
        "continuous": main.measured.continuous_s.median,
    }
    for policy, bars in findings.bars.items():
        assert len(bars) == main.num_requests
        assert max(bar.slot for bar in bars) == main.slots - 1
        assert max(bar.end_s for bar in bars) == pytest.approx(ends[policy])
        assert all(0 <= bar.start_s < bar.end_s <= bar.freed_s for bar in bars)
        for before, after in pairwise(bars):
            assert before.slot < after.slot or before.freed_s <= after.start_s + 1e-9
    assert any(bar.freed_s > bar.end_s for bar in findings.bars["static"])
    assert all(bar.freed_s == bar.end_s for bar in findings.bars["continuous"])


def test_records_hold_the_workloads_and_their_hashes(batching_run: Run) -> None:
    header = batching_run.header
    for name, case in header["cases"].items():
        pairs = header["lengths"][case["workload_sha256"]]
        assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest() == case["workload_sha256"]
        own = [sample for sample in batching_run.final_samples if sample.group == name]
        assert own
        assert {s.labels["workload_sha256"] for s in own} == {case["workload_sha256"]}
        assert all("latency p95" not in s.seconds for s in own)  # 14 requests have no p95
    assert header["step_costs"]["num_steps"] > 20
    assert header["setup"]["max_num_batched_tokens"] == DEFAULT_BATCHED_TOKENS


def test_percentiles_need_enough_requests() -> None:
    times = [
        batching.RequestTimes(arrival_s=1.0, first_scheduled_s=1.0, token_s=(2.0, 2.0 + n))
        for n in range(1, 73)
    ]
    assert batching.latency_seconds(times[:71]).keys() == {"latency mean", "ttft mean"}
    found = batching.latency_seconds(times)
    assert found["latency mean"] == pytest.approx(1 + 73 / 2)
    assert found["ttft p95"] == 1.0


def test_policies_that_write_different_texts_fail_the_gate(
    house: Callable[..., None], tmp_path: Path
) -> None:
    house(batching, **SMALL, static_token=1)
    with pytest.raises(VoidError, match="static emits 1, continuous 0"):
        batching.measure(options_in(tmp_path), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


def test_an_engine_that_departs_from_its_simulation_is_an_error(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house(batching, **SMALL)
    right = batching.forecast

    def wrong(*args: Any) -> batching.Forecast:
        found = right(*args)
        schedules = dict(found.schedules)
        schedules["static"] = replace(
            schedules["static"], computed_rows=schedules["static"].computed_rows + 1
        )
        return replace(found, schedules=schedules)

    monkeypatch.setattr(batching, "forecast", wrong)
    with pytest.raises(RuntimeError, match="steps, rows computed and asked for, simulated"):
        batching.measure(options_in(tmp_path), QUIET)


def test_what_does_not_fit_the_time_is_simulated_and_said_so(
    house: Callable[..., None], tmp_path: Path
) -> None:
    house(batching, **{**SMALL, "budget_s": 0.0})
    findings = batching_findings(batching.measure(options_in(tmp_path), QUIET))
    measured = [case.name for case in findings.cases if case.measured is not None]
    assert measured == [findings.main.name, findings.control.name]
    assert findings.main.measured is not None
    assert findings.main.measured.gain.n == 1
    rows = gain_table(findings)[1]
    assert [row[7] for row in rows].count("simulated only") == 3
    assert "not measured, predicted" in batching_paragraph(findings)
    assert len(latency_table(findings)[1]) == 2
    data = gains_plot(findings)
    assert [case["gain"] is None for case in data["by_slots"]] == [False, True]
    save(data, tmp_path / "gains", draw_gains)
    assert (tmp_path / "gains.svg").exists()


def test_time_is_given_to_the_main_case_and_the_control_first() -> None:
    scale = replace(batching.FULL, budget_s=100.0, max_rounds=9)
    cases = batching.make_cases(scale, 1024, 256)
    main, control, code, conv, *sweep = (case.name for case in cases)
    costs = {main: 30.0, control: 2.0, code: 20.0, conv: 90.0, **dict.fromkeys(sweep, 15.0)}
    pace = batching.plan_pace(cases, costs, scale)
    assert conv not in pace.rounds
    assert {main, control, code} <= pace.rounds.keys()
    assert pace.rounds[control].timed >= 6
    assert pace.rounds[main].total >= 1
    total_s = sum(costs[name] * rounds.total for name, rounds in pace.rounds.items())
    assert total_s <= 100.0
    dear = batching.plan_pace(cases, {**costs, main: 500.0}, scale)
    assert set(dear.rounds) == {main, control}
    assert dear.rounds[main].total == 1
    middling = batching.plan_pace(cases, dict.fromkeys(costs, 5.0), scale).rounds
    assert [rounds.total for rounds in middling.values()] == [6, 6, 3, 1, 1, 1, 1, 1]
    cheap = batching.plan_pace(cases, dict.fromkeys(costs, 0.1), scale)
    assert {(r.dropped, r.timed) for r in cheap.rounds.values()} == {(2, 7)}


def test_the_cases_are_those_of_the_question() -> None:
    cases = batching.make_cases(batching.FULL, 1024, 256)
    assert [case.name for case in cases] == [
        "conv, prompts cut to 16, 8 slots",
        "equal lengths, 8 slots",
        "code, full prompts, 8 slots",
        "conv, full prompts, 8 slots",
        *(f"conv, prompts cut to 16, {n} slots" for n in (16, 32, 64, 128)),
    ]
    assert {len(case.workload.lengths) for case in cases} == {128}
    quick = batching.make_cases(batching.QUICK, 1024, 256)
    assert "lengths / 8" in quick[0].workload.transform


@pytest.mark.parametrize("budget, prompt", [(256, 16), (100, 12), (32, 4), (4, 1)])
def test_the_control_takes_the_same_steps_whatever_the_budget(budget: int, prompt: int) -> None:
    control = next(
        case for case in batching.make_cases(batching.FULL, 1024, budget) if case.is_control
    )
    lengths = control.workload.lengths
    assert {length.prompt for length in lengths} == {prompt}
    static, continuous = (
        simulate(scheduler_of(policy, 8, budget=max(budget, 8)), lengths) for policy in POLICIES
    )
    assert static.works == continuous.works


def test_batching_tables_name_every_transform(batching_run: Run) -> None:
    findings = batching_findings(batching_run)
    text = transforms_text(findings)
    for name in ("conv, prompts cut to 16", "conv, full prompts", "code, full prompts"):
        assert f"{name} = Azure LLM inference trace 2023" in text
    for heads, rows in (gain_table(findings), latency_table(findings)):
        assert {len(row) for row in rows} == {len(heads)}


# --- overhead and interference --------------------------------------------------------------------


def test_a_line_is_found_again() -> None:
    line = fit_line((1, 8, 64, 256), [150e-6 + 4e-6 * n for n in (1, 8, 64, 256)])
    assert line.fixed_s == pytest.approx(150e-6)
    assert line.each_s == pytest.approx(4e-6)


@pytest.fixture
def overhead_run(house: Callable[..., None], tmp_path: Path, clock: Clock) -> Run:
    clock.tick_ns = 1000
    house(
        overhead,
        running=(1, 4),
        with_model=4,
        model_steps=3,
        context=20,
        num_tokens=8,
        rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6),
    )
    return overhead.measure(options_in(tmp_path), QUIET)


def test_the_models_share_is_what_it_took_of_a_step(overhead_run: Run) -> None:
    """Reading the clock is all that takes time outside: one tick a reading, two inside a step."""
    findings = overhead_findings(overhead_run)
    assert [point.running for point in findings.points] == [1, 4]
    for point in findings.points:
        assert point.planning.median == pytest.approx(1e-6 / overhead.NUM_STEPS)
        assert point.meets_goal
    model_s = TRUE(
        StepWork(
            num_rows=4,
            num_seqs=4,
            num_logit_rows=4,
            context_tokens=4 * 24,
            attended_pairs=4 * 24,
        )
    )
    assert findings.busy.median == pytest.approx(model_s / (model_s + 2e-6), rel=1e-3)
    assert "reaches the goal of 85%" in overhead_paragraph(findings)


def test_a_token_through_generate_is_held_against_the_bare_step_of_its_mean_context(
    overhead_run: Run,
) -> None:
    """The fake's steps grow with the context by a constant: the mean step is the middle one."""
    findings = overhead_findings(overhead_run)
    rows = findings.end_to_end
    assert {(row.weights, row.sampling) for row in rows} == {
        (weights, sampling) for weights in overhead.FORMATS for sampling in overhead.SAMPLINGS
    }
    assert all(row.extra.median == pytest.approx(0, abs=0.05) for row in rows)
    assert "keeps within every goal" in overhead_paragraph(findings)
    heads, cells = end_to_end_table(findings)
    assert len(cells) == 6
    assert all(len(line) == len(heads) and line[-1] == "met" for line in cells)


def test_a_goal_that_is_missed_is_named(overhead_run: Run) -> None:
    findings = overhead_findings(overhead_run)
    slow = replace(findings.end_to_end[0], extra=describe([0.2] * 6))
    others = findings.end_to_end[1:]
    missed = replace(findings, end_to_end=(slow, *others))
    text = overhead_paragraph(missed)
    assert f"misses its goal in {slow.weights}, {slow.sampling}." in text
    assert end_to_end_table(missed)[1][0][-1] == "missed"
    assert "LLM.generate" not in overhead_paragraph(replace(findings, end_to_end=()))


def test_every_way_to_sample_is_timed_row_by_row_on_every_instruction_set(
    overhead_run: Run,
) -> None:
    """A row is two readings of the clock, one tick apart."""
    findings = overhead_findings(overhead_run)
    rows, modes = findings.sampled_rows, list(sampler.sampling_modes(100))
    assert sampler.vector_isas()
    assert [(row.isa, row.mode) for row in rows] == list(product(sampler.vector_isas(), modes))
    for row in rows:
        assert row.row.n == 6 * sampler.NUM_ROWS
        assert row.row.median == row.p95_s == pytest.approx(1e-6)
    heads, lines = sampler_table(findings)
    assert heads == ["sampling", *sampler.vector_isas()]
    assert lines == [[mode, *["1 / 1"] * len(sampler.vector_isas())] for mode in modes]
    assert "the promise is about rows of 50,257." in overhead_paragraph(findings)


def promised_rows(**medians_us: float) -> list[SampledRow]:
    """Two modes an instruction set at the size of the promise; the slower one is "all together"."""
    return [
        SampledRow(
            isa=isa,
            mode=mode,
            vocab_size=50_257,
            row=describe([share * median_us / 1e6] * 6),
            p95_s=None,
        )
        for isa, median_us in medians_us.items()
        for mode, share in (("greedy", 0.5), ("all together", 1.0))
    ]


@pytest.mark.parametrize(
    "medians_us, verdict",
    [
        ({"avx2": 62.0, "avx512": 41.5}, "is kept, with 38.0 µs to spare."),
        ({"avx2": 100.0}, "is kept, with 0.0 µs to spare."),
        ({"avx2": 103.2, "avx512": 41.5}, "is not kept: it is missed by 3.2 µs on avx2."),
        (
            {"avx2": 120.0, "avx512": 110.0},
            "is not kept: it is missed by 20.0 µs on avx2, by 10.0 µs on avx512.",
        ),
    ],
)
def test_the_promise_of_the_sampler_is_judged_by_its_slowest_mode(
    medians_us: dict[str, float], verdict: str
) -> None:
    rows = promised_rows(**medians_us)
    text = sampler_sentence(rows)
    assert text.endswith(f" The promise of at most 100 µs {verdict}")
    slowest = f"{medians_us['avx2']:.0f} µs on avx2 (all together)"
    assert f"in the slowest of 2 ways to sample and in the median, {slowest}" in text
    assert all(sampled_text(row).endswith(" / ?") for row in rows)


def test_a_record_without_the_sampler_says_nothing_of_it(overhead_run: Run) -> None:
    """One from before it was timed, or of an executor that is not native."""
    kept = [r for r in overhead_run.records if "isa" not in r.get("labels", {})]
    assert len(kept) < len(overhead_run.records)
    old = Run(header=overhead_run.header, records=tuple(kept))
    findings = overhead_findings(old)
    assert findings.sampled_rows == ()
    assert [point.running for point in findings.points] == [1, 4]
    told = report.told_runs(CHAPTERS["overhead"], [old])[0]
    text = report.run_markdown(CHAPTERS["overhead"], told)
    assert "sampler" not in text
    assert "Milliseconds a token of one request" in text


def test_only_the_native_executor_has_its_sampler_timed(
    house: Callable[..., None], tmp_path: Path, clock: Clock
) -> None:
    clock.tick_ns = 1000
    house(
        overhead,
        running=(1,),
        with_model=1,
        model_steps=1,
        context=4,
        rules=Rules(warmups=1, dropped_rounds=0, min_rounds=1, max_rounds=1),
    )
    findings = overhead_findings(overhead.measure(options_in(tmp_path, executor="eager"), QUIET))
    assert findings.sampled_rows == findings.end_to_end == ()
    captions = CHAPTERS["overhead"].filled_tables(findings)
    assert list(captions) == ["Microseconds of a step in which nothing is computed"]


def test_a_sampler_that_draws_another_token_than_the_reference_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = overhead.reference_tokens

    def wrong(*args: Any) -> list[list[TokenLogprob]]:
        found = right(*args)
        last = found[-1][-1]  # of a mode with log-probabilities an alternative
        found[-1][-1] = replace(last, token_id=last.token_id + 1)
        return found

    assert overhead.sampler_groups(64, Gate(is_exact=False))
    monkeypatch.setattr(overhead, "reference_tokens", wrong)
    with pytest.raises(VoidError, match="greedy, token 0: the native sampler emits"):
        overhead.sampler_groups(64, Gate(is_exact=False))


def test_a_core_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(isa: str) -> library.Library:
        raise library.UnavailableError(f"{isa}: the file is cut short")

    monkeypatch.setattr(library, "load", refuse)
    with pytest.raises(ValueError, match="sampler cannot be timed: avx2: the file is cut short"):
        sampler.load_core("avx2")


def test_rows_are_the_same_everywhere_and_unlike_one_another() -> None:
    logits, draws = sampler.make_rows(4000)
    again, _ = sampler.make_rows(4000)
    assert logits.tobytes() == again.tobytes()
    assert logits.std(axis=1) == pytest.approx(np.full(sampler.NUM_ROWS, sampler.SPREAD), rel=0.05)
    assert len({row.tobytes() for row in logits}) == len(set(draws.tolist())) == sampler.NUM_ROWS


def test_nothing_is_left_behind_in_an_engine_whose_executor_was_silenced() -> None:
    engine = tiny_engine(max_num_seqs=4, enable_prefix_caching=False)
    real = engine.executor
    arm = overhead.silent_arm(engine, 3, 16, whole_steps=False)
    watch = measuring.Stopwatch(lambda: None)
    arm(watch)
    assert set(watch.seconds) == {"steps"}
    assert engine.executor is real
    assert not engine.has_unfinished
    pool = engine.scheduler.pool
    assert pool.num_available == pool.num_blocks
    engine.scheduler.check_integrity()


@pytest.fixture
def interference_run(house: Callable[..., None], tmp_path: Path) -> Run:
    house(
        interference,
        budgets=(32, 16, 64),
        long_prompt=150,
        prefix=64,
        repetitions=1,
        rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6),
    )
    return interference.measure(options_in(tmp_path), QUIET)


def test_gaps_are_predicted_by_the_simulated_steps(interference_run: Run) -> None:
    findings = interference_findings(interference_run)
    assert [point.budget for point in findings.points] == [16, 32, 64]
    assert findings.automatic.budget == findings.fitted_budget == 64
    assert [point.num_chunks for point in findings.points] == [
        -(-150 // (b - 8)) for b in (16, 32, 64)
    ]
    for point in findings.points:
        assert point.ratio.median == pytest.approx(point.predicted_ratio, rel=0.03)
    ratios = [point.ratio.median for point in findings.points]
    assert ratios == sorted(ratios)
    assert ratios[0] > 1
    assert findings.largest_that_keeps == 64
    assert findings.long_prompt == 150
    assert "budgets up to 64 keep" in interference_paragraph(findings)


def test_a_shared_prefix_is_computed_once(interference_run: Run) -> None:
    findings = interference_findings(interference_run)
    first = StepWork(
        num_rows=64, num_seqs=1, num_logit_rows=0, context_tokens=64, attended_pairs=64 * 65 // 2
    )
    rest = StepWork(
        num_rows=16,
        num_seqs=1,
        num_logit_rows=1,
        context_tokens=80,
        attended_pairs=16 * 64 + 16 * 17 // 2,
    )
    cold_s, warm_s = TRUE(first) + TRUE(rest), TRUE(rest)  # the budget is 64 rows a step
    assert findings.cold.median == pytest.approx(cold_s, rel=1e-6)
    assert findings.warm.median == pytest.approx(warm_s, rel=1e-6)
    assert findings.warm_share.median == pytest.approx(warm_s / cold_s, rel=1e-6)


def test_streams_last_until_the_prompt_is_through_at_an_automatic_budget_below_all_others(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interference, "budget_by_costs", lambda *_: 16)
    house(
        interference,
        budgets=(64, 128),
        long_prompt=150,
        prefix=64,
        repetitions=1,
        rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6),
    )
    findings = interference_findings(interference.measure(options_in(tmp_path), QUIET))
    assert sorted(point.budget for point in findings.points) == [16, 64, 128]


def test_a_stream_that_is_left_out_of_a_step_is_an_error() -> None:
    """Then the gap between its tokens would be longer than the step that is reported."""
    engine = tiny_engine(max_num_seqs=16, max_num_batched_tokens=64, enable_prefix_caching=False)
    interference.start_streams(engine, Length(prompt=4, output=2))
    with pytest.raises(RuntimeError, match="were left out of a step"):
        interference.timed_steps(engine, lambda: None, lambda done, _: done == 3)


# --- the automatic token budget -------------------------------------------------------------------


@given(st.floats(1e-4, 1e-1), st.floats(1e-7, 1e-2))
def test_the_automatic_budget_is_the_largest_that_keeps_the_ratio(
    floor_s: float, row_s: float
) -> None:
    def step_time(num_decode: int, num_prompt: int) -> float:
        return floor_s + row_s * (num_decode + num_prompt)

    budget = auto_budget(step_time)
    limit_s = MAX_GAP_RATIO * step_time(NUM_STREAMS, 0)
    assert SMALLEST_BUDGET <= budget <= LARGEST_BUDGET
    assert budget % GRAIN == 0
    if budget > SMALLEST_BUDGET:
        assert step_time(NUM_STREAMS, budget - NUM_STREAMS) <= limit_s
    if budget < LARGEST_BUDGET:
        assert step_time(NUM_STREAMS, budget + GRAIN - NUM_STREAMS) > limit_s


def test_a_measured_budget_is_the_automatic_one_of_engines_like_it() -> None:
    engine = tiny_engine()
    interference.keep_budget(engine, 48)
    assert tiny_engine().scheduler.max_num_batched_tokens == 48
    assert tiny_engine(kv_layout="slots").scheduler.max_num_batched_tokens != 48
    assert tiny_engine(max_num_batched_tokens=16).scheduler.max_num_batched_tokens == 16


@pytest.mark.parametrize("kept", [0, "64", [64]])
def test_a_kept_budget_that_is_none_is_ignored_and_said(
    kept: object, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine()
    interference.keep_budget(engine, kept)  # type: ignore[arg-type]
    assert tiny_engine().scheduler.max_num_batched_tokens == DEFAULT_BATCHED_TOKENS
    assert "unreadable and ignored" in caplog.text


@pytest.mark.parametrize("limits", [{"smallest": 8}, {"smallest": 64, "largest": 32}])
def test_limits_of_the_budget_must_agree(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_streams < smallest <= largest"):
        auto_budget(lambda *_: 1.0, **limits)


CEILINGS = Ceilings(read_bytes_per_s=2e10, matmul_flops_per_s={"float32": 2e11}, dispatch_s=2e-6)


def test_a_faster_multiplier_allows_a_larger_budget() -> None:
    model = ModelConfig.from_hf(BUILT_IN_SHAPES["gpt2"])
    budgets = [
        auto_budget(
            predicted_step_time(
                replace(CEILINGS, matmul_flops_per_s={"float32": rate}), model, dtype="float32"
            )
        )
        for rate in (1e11, 2e11, 8e11)
    ]
    assert budgets == sorted(set(budgets))
    step_time = predicted_step_time(CEILINGS, model, dtype="float32")
    assert step_time(8, 0) < step_time(8, 1) < step_time(8, 256)
    assert step_time(1, 0) < step_time(8, 0)
    graphed = predicted_step_time(CEILINGS, model, dtype="float32", is_eager=False)
    assert graphed(8, 0) < step_time(8, 0)


def test_a_dtype_that_was_not_measured_has_no_step_time() -> None:
    step_time = predicted_step_time(CEILINGS, tiny_model().config, dtype="bfloat16")
    with pytest.raises(ValueError, match="no matmul rate for bfloat16"):
        step_time(1, 0)


def test_an_engine_takes_its_budget_from_the_measured_ceilings() -> None:
    before = tiny_engine().scheduler.max_num_batched_tokens
    slow = replace(CEILINGS, matmul_flops_per_s={"float32": 1e8})
    save_ceilings(slow, "cpu", None)
    config = tiny_model().config
    expected = auto_budget(predicted_step_time(slow, config, dtype="float32"))
    measured = tiny_engine().scheduler.max_num_batched_tokens
    assert measured == expected != before == DEFAULT_BATCHED_TOKENS
    assert tiny_engine(max_num_batched_tokens=77).scheduler.max_num_batched_tokens == 77
    naive = tiny_engine(kv_layout="recompute", max_num_seqs=5)
    assert naive.scheduler.max_num_batched_tokens == 5 * naive.spec.max_model_len
    other = tiny_engine(dtype="bfloat16", kv_cache_dtype="bfloat16")
    # its matmul rate was not measured
    assert other.scheduler.max_num_batched_tokens == DEFAULT_BATCHED_TOKENS


# --- screen, plots and report ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch", "batching", "interference", "overhead"])
def test_every_chapter_is_an_experiment(name: str) -> None:
    assert name in runner.EXPERIMENTS
    assert runner.EXPERIMENTS[name].question
    assert runner.EXPERIMENTS[name].show is runner.show_chapter
    assert name in CHAPTERS


def test_pictures_are_drawn_from_plain_data_alone(
    batching_run: Run, batch_run: Run, tmp_path: Path
) -> None:
    serving, scaling = batching_findings(batching_run), batch_findings(batch_run)
    for stem, data, draw in (
        ("timeline", timeline_plot(serving), draw_timeline),
        ("gains", gains_plot(serving), draw_gains),
        ("scaling", batch_scaling_plot(scaling), draw_batch_scaling),
    ):
        plain = json.loads(plot_json(data))
        assert plain == data
        svg, _ = save(plain, tmp_path / stem, draw)
        before = svg.read_bytes()
        save(plain, tmp_path / stem, draw)
        assert svg.read_bytes() == before


def test_an_unreached_knee_is_drawn_and_said(batch_run: Run, tmp_path: Path) -> None:
    findings = batch_findings(batch_run)
    curve = replace(findings.main, knee=None, predicted_knee=None)
    flat = replace(findings, curves=(curve,))
    assert "at batch beyond 16 (predicted from the ceilings: beyond 16)" in batch_paragraph(flat)
    paths = save(batch_scaling_plot(flat), tmp_path / "flat", draw_batch_scaling)
    assert all(path.exists() for path in paths)


def test_the_report_tells_every_chapter_and_is_pure(
    house: Callable[..., None], batching_run: Run, batch_run: Run, tmp_path: Path
) -> None:
    """Both fixtures recorded into the same folder; the documents go beside it."""
    results = report.load(tmp_path)
    text = report.results_markdown(results)
    assert "## 2. When does batching stop being free?" in text
    assert "## 7. Static or continuous?" in text
    assert "docs/plots/batching_timeline.svg" in text
    assert "Workloads: conv, prompts cut to 16 = " in text
    assert text == report.results_markdown(report.load(tmp_path))
    root = tmp_path / "root"
    model = batching_run.header["model"]
    root.mkdir()
    (root / "README.md").write_text(
        f"It is <!-- nanoserve:batching.{model}.gain --><!-- /nanoserve --> as fast.\n"
    )
    report.write(root, results)
    names = {path.name for path in (root / "docs" / "plots").iterdir()}
    for stem in ("batch_scaling", "batching_timeline", "continuous_batching"):
        assert {f"{stem}.json", f"{stem}.svg", f"{stem}.png"} <= names
    assert "x<!-- /nanoserve --> as fast" in (root / "README.md").read_text()
    assert report.check(root, results) == []
    (root / "RESULTS.md").write_text(text.replace("1.", "2.", 1))
    assert len(report.check(root, results)) == 1


def test_runs_of_other_models_have_plots_of_their_own_names(batching_run: Run) -> None:
    small = replace(
        batching_run, header={**batching_run.header, "model": "mini", "name": "mini-cpu"}
    )
    main = replace(
        batching_run, header={**batching_run.header, "model": "gpt2", "name": "gpt2-cpu"}
    )
    told = report.told_runs(CHAPTERS["batching"], [small, main])
    assert [entry.run.header["model"] for entry in told] == ["gpt2", "mini"]
    assert told[0].stem("timeline") == "timeline"
    assert told[1].stem("timeline").startswith("timeline-mini-cpu-")


def test_the_screen_shows_tables_paragraph_and_plots(
    house: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    house(batching, **{**SMALL, "budget_s": 0.0})
    options = options_in(tmp_path)
    runner.run(["batching"], options)
    captured = capsys.readouterr()
    assert "static or continuous batching?" in captured.out
    assert "share 4 slots" in " ".join(captured.out.split())
    assert "continuous_batching-" in captured.err
    pictures = {path.name for path in tmp_path.glob("*/*.png")}
    assert len(pictures) == 2
    assert all(name.startswith(("batching_timeline-", "continuous_batching-")) for name in pictures)


def test_greedy_requests_run_to_their_full_length() -> None:
    params = calibrating.greedy(5)
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (5, 0.0, True)
    assert params == greedy(5)
