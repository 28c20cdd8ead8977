"""Executors and number formats against one another: graphs, roofline, int8 and precision.

Engines are real, over the tiny model. Where speeds matter their executors answer without a model
and move a fake clock by what is known beforehand; where bits matter they are the real ones, under a
clock that ticks once a reading, so that nothing depends on how fast this machine is.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_bench import FakeClock, FakeYardsticks, ceiling_samples
from helpers import tiny_model

from nanoserve.bench import formats, runner, session
from nanoserve.bench import measure as measuring
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.experiments import graphs, int8, precision, roofline
from nanoserve.bench.findings.graphs import graphs_findings, graphs_paragraph, graphs_table
from nanoserve.bench.findings.int8 import (
    attention_table,
    flatness_table,
    int8_findings,
    int8_paragraph,
)
from nanoserve.bench.findings.precision import (
    margin_table,
    precision_findings,
    precision_paragraph,
    quality_table,
    speed_table,
)
from nanoserve.bench.findings.roofline import (
    roofline_findings,
    roofline_paragraph,
    roofline_table,
)
from nanoserve.bench.format_plots import spread
from nanoserve.bench.measure import Rules
from nanoserve.bench.metrics import Distribution, Interval
from nanoserve.bench.plots import plot_json, save
from nanoserve.bench.proxies import SilentExecutor
from nanoserve.bench.quality import Divergence
from nanoserve.bench.record import Run
from nanoserve.bench.session import Options, Screen
from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.engine import Engine
from nanoserve.engine.executor import Executor
from nanoserve.kernels.cpu import library
from nanoserve.kernels.dequantised import TorchAttention, dequantise, quantise

QUIET = Screen(quiet=True)
FAST = Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6)
NUM_BYTES, READ_S = 1_000_000, 1e-3
"""What the fake read probe reads, and how long that takes it: 1 GB/s."""

needs_native = pytest.mark.skipif(
    not library.available(), reason="needs the native core, which was not built here"
)

Pace = Callable[[Options, int], float]
"""Seconds of a step of an engine so opened, of so many sequences."""


class PacedExecutor(SilentExecutor):
    """No model: a step takes what `pace` says, and draws `token`."""

    def __init__(self, inner: Executor, clock: FakeClock, options: Options, pace: Pace) -> None:
        super().__init__(inner)
        self.clock, self.options, self.pace = clock, options, pace
        self.token = 0

    def execute(self, batch: StepBatch) -> StepResult:
        self.clock.sleep(self.pace(self.options, len(batch.context_lens)))
        result = super().execute(batch)
        return replace(result, token_ids=result.token_ids + self.token)

    def describe(self) -> dict[str, str]:
        name = "native" if self.options.executor == "auto" else self.options.executor
        return {"executor": name, "kernels": "fake", "threads": "1"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(measuring, "perf_counter_ns", fake)
    return fake


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Callable[..., None]:
    """A function that puts paced engines of every format into an experiment."""

    def prepare(module: Any, opener: Any, pace: Pace, **scale: Any) -> None:
        def open_engine(options: Options, *args: Any, **kwargs: Any) -> Engine:
            if options.quantization == "int4" and options.kv_cache_dtype == "int8":
                raise ValueError("no such thing in /some/where/file.so")
            plain = replace(
                options, executor="eager", dtype="float32", quantization=None, kv_cache_dtype=None
            )
            engine = session.open_engine(plain, *args, **{**kwargs, "donor": None})
            engine.executor = PacedExecutor(engine.executor, clock, options, pace)
            dtype = "float32" if options.dtype == "auto" else options.dtype
            engine.spec = replace(
                engine.spec,
                dtype=dtype,
                quantization=options.quantization,
                cache_dtype=options.kv_cache_dtype or dtype,
            )
            return engine

        monkeypatch.setattr(opener, "open_engine", open_engine)
        fake_yardsticks(module, monkeypatch, clock)
        monkeypatch.setattr(module, "FULL", replace(module.FULL, rules=FAST, **scale))

    return prepare


def fake_yardsticks(module: Any, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    monkeypatch.setattr(module, "make_yardsticks", lambda *_, **__: FakeYardsticks(clock))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "measured_ceilings", lambda *_: ceiling_samples())


def options_in(folder: Path, **values: Any) -> Options:
    return Options(out=folder, model=str(tiny_model().folder), device="cpu", seed=1, **values)


def distribution(median: float) -> Distribution:
    interval = Interval(low=median, high=median)
    return Distribution(median=median, q1=median, q3=median, n=8, interval=interval)


def draw_pictures(name: str, findings: Any, folder: Path) -> None:
    """From plain data alone, twice the same."""
    for stem, picture in CHAPTERS[name].pictures.items():
        data = picture.data(findings)
        plain = json.loads(plot_json(data))
        assert plain == data
        svg, _ = save(plain, folder / stem, picture.draw)
        before = svg.read_bytes()
        save(plain, folder / stem, picture.draw)
        assert svg.read_bytes() == before


def check_table(table: tuple[list[str], list[list[str]]], num_rows: int) -> None:
    heads, rows = table
    assert len(rows) == num_rows
    assert {len(row) for row in rows} == {len(heads)}


# --- graphs ---------------------------------------------------------------------------------------


def eager_is_slow(options: Options, num_seqs: int) -> float:
    return 4e-3 * num_seqs if options.executor == "eager" else 1e-3


@pytest.fixture
def graphs_run(house: Callable[..., None], tmp_path: Path) -> Run:
    house(graphs, graphs, eager_is_slow, batches=(1, 4), contexts=(16, 64, 900))
    return graphs.measure(options_in(tmp_path), QUIET)


def test_graphs_hold_the_eager_step_against_the_other(graphs_run: Run, tmp_path: Path) -> None:
    findings = graphs_findings(graphs_run)
    # 900 is beyond the window
    assert [(c.context, c.batch) for c in findings.cells] == [(16, 1), (16, 4), (64, 1), (64, 4)]
    one, four = findings.cells[:2]
    assert one.main.name == "native"
    assert one.main.speedup.median == pytest.approx(4.0)
    assert one.main.saved_share == pytest.approx(0.75)
    assert four.main.saved_share == pytest.approx(15 / 16)
    assert four.num_operations > one.num_operations > 100
    assert one.dispatch_s == pytest.approx(one.num_operations * 1e-6)
    assert graphs_run.header["executor"] == "eager and native"
    check_table(graphs_table(findings), 4)
    text = graphs_paragraph(findings)
    assert "takes 4.00 ms on the eager executor and 1.00 ms as native: 75% of the eager" in text
    assert "of what goes. The rest is how the operations run" in text
    draw_pictures("graphs", findings, tmp_path)


def test_graphs_say_so_where_eager_is_no_slower(graphs_run: Run) -> None:
    findings = graphs_findings(graphs_run)
    cell = findings.cells[0]

    def told(speedup: float, native_s: float, dispatch_s: float = 1e-4) -> str:
        arm = replace(cell.main, speedup=distribution(speedup), step=distribution(native_s))
        changed = replace(cell, others=(arm,), dispatch_s=dispatch_s)
        return graphs_paragraph(replace(findings, cells=(changed,)))

    assert "eager is the faster one" in told(0.5, 8e-3)
    assert "cannot be told apart" in told(1.0, 4e-3)
    assert "of what goes" not in told(0.5, 8e-3)
    assert "that alone would explain all that goes" in told(4.0, 1e-3, dispatch_s=4e-3)


def test_what_capturing_took_is_reported(graphs_run: Run) -> None:
    stats = {"weights_bytes": 1, "graph_pool_bytes": 2**20}
    executor = SimpleNamespace(
        memory_stats=lambda: stats, describe=lambda: {"capture_s": "1.500", "graphs": "3"}
    )
    found = graphs.captures({"graph": SimpleNamespace(executor=executor)})  # type: ignore[dict-item]
    assert found == {"graph": {"graph_pool_bytes": 2**20, "capture_s": 1.5, "num_graphs": 3}}
    text = graphs_paragraph(replace(graphs_findings(graphs_run), captures=found))
    assert "For graph, 3 shapes were captured in 1.5 s" in text


def test_one_window_keeps_the_widest_buckets() -> None:
    buckets = tuple(SimpleNamespace(num_seqs=n, window=w) for n in (1, 2) for w in (128, 256))
    captured = SimpleNamespace(graphs=SimpleNamespace(buckets=buckets))
    graphs.keep_widest(SimpleNamespace(executor=captured))  # type: ignore[arg-type]
    assert [(b.num_seqs, b.window) for b in captured.graphs.buckets] == [(1, 256), (2, 256)]


def test_executors_that_write_different_texts_fail_the_gate(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house(graphs, graphs, eager_is_slow, batches=(1,), contexts=(16,))
    execute = PacedExecutor.execute

    def confused(self: PacedExecutor, batch: StepBatch) -> StepResult:
        self.token = int(self.options.executor == "native")
        return execute(self, batch)

    monkeypatch.setattr(PacedExecutor, "execute", confused)
    with pytest.raises(VoidError, match="native emits 1, eager 0"):
        graphs.measure(options_in(tmp_path), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


# --- roofline -------------------------------------------------------------------------------------


def by_bytes(options: Options, num_seqs: int) -> float:
    """Less for less precise weights."""
    base = {"int8": 2e-3, "int4": 1e-3}.get(str(options.quantization), 4e-3)
    return base / 2 if options.dtype == "bfloat16" else base * num_seqs


@pytest.fixture
def roofline_run(house: Callable[..., None], tmp_path: Path) -> Run:
    names = ("float32", "bfloat16", "int8", "int4", "int4, KV int8")
    house(roofline, formats, by_bytes, formats=names, batches=(1, 8), context=16)
    return roofline.measure(options_in(tmp_path), QUIET)


def test_a_step_is_held_against_the_time_of_its_bytes(roofline_run: Run, tmp_path: Path) -> None:
    findings = roofline_findings(roofline_run)
    assert findings.read_bytes_per_s == pytest.approx(NUM_BYTES / READ_S)
    assert [point.name for point in findings.of_batch(1)] == ["float32", "bfloat16", "int8", "int4"]
    for point in findings.points:
        limit_s = point.num_bytes / (NUM_BYTES / READ_S)
        assert point.over_limit.median == pytest.approx(point.step.median / limit_s)
        assert point.bandwidth_share == pytest.approx(limit_s / point.step.median)
        assert point.flops_per_s == pytest.approx(point.flops / point.step.median)
    small, large = (findings.of_batch(batch)[0] for batch in (1, 8))
    assert large.intensity > 4 * small.intensity
    check_table(roofline_table(findings), 8)
    draw_pictures("roofline", findings, tmp_path)


def test_a_format_that_cannot_run_is_a_gap_with_its_reason(roofline_run: Run) -> None:
    assert roofline_run.header["gaps"] == {"int4, KV int8": "no such thing in file.so"}
    text = roofline_paragraph(roofline_findings(roofline_run))
    assert "There is no arm int4, KV int8: no such thing in file.so." in text


def test_goals_are_reached_or_missed(roofline_run: Run) -> None:
    findings = roofline_findings(roofline_run)

    def told(over_limit: float) -> str:
        points = tuple(
            replace(point, over_limit=distribution(over_limit)) for point in findings.points
        )
        return roofline_paragraph(replace(findings, points=points))

    assert "all reached" in told(1.1)
    assert "missed by float32, bfloat16." in told(1.2)
    assert "missed by float32, bfloat16, int8, int4." in told(9.0)
    assert "flatters" not in told(1.1)
    # steps that beat the probe show that it fell short: nothing is won by that
    first, *others = (replace(p, over_limit=distribution(1.1)) for p in findings.points)
    beaten = (replace(first, over_limit=distribution(0.8)), *others)
    text = roofline_paragraph(replace(findings, points=beaten))
    assert "1.25x as fast as the read probe, which memory cannot do" in text
    assert "missed by bfloat16, int8." in text
    single = replace(findings, points=findings.of_batch(1)[:1])  # type: ignore[arg-type]
    assert "the farthest" not in roofline_paragraph(single)


def test_a_cache_without_room_is_said(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house(roofline, formats, by_bytes, formats=("float32",), batches=(1, 4096), context=16)
    monkeypatch.setattr("nanoserve.engine.build.available_memory_bytes", lambda: 2**24)
    with pytest.raises(ValueError, match="4096 are to be measured"):
        roofline.measure(options_in(tmp_path), QUIET)


def test_float16_weights_need_the_eager_executor() -> None:
    form = formats.FORMATS["float16"]
    assert form.options(Options()).executor == "eager"
    with pytest.raises(ValueError, match="float16 weights need the eager executor, not native"):
        form.options(Options(executor="native"))


# --- int8 -----------------------------------------------------------------------------------------


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Each reading is a millisecond after the last: every part of every arm takes as long."""

    class Ticking(FakeClock):
        def __call__(self) -> int:
            self.now_ns += 1_000_000
            return self.now_ns

    fake = Ticking()
    monkeypatch.setattr(measuring, "perf_counter_ns", fake)
    return fake


@pytest.fixture
def int8_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticking: FakeClock) -> Run:
    scale = int8.Scale(batches=(1, 3), contexts=(17, 100, 999), flat=(9, 1000), rules=FAST)
    monkeypatch.setattr(int8, "FULL", scale)
    fake_yardsticks(int8, monkeypatch, ticking)
    return int8.measure(options_in(tmp_path), QUIET)


@needs_native
def test_every_cache_gives_what_it_should(int8_run: Run, tmp_path: Path) -> None:
    findings = int8_findings(int8_run)
    shapes = [(cell.batch, cell.context) for cell in findings.cells]
    assert shapes == [(1, 17), (1, 100), (3, 17), (3, 100)]
    assert findings.flat_contexts == (9, 255)  # the window's last
    for cell in findings.cells:
        assert 0 < cell.errors["int8"]["against_read_back"] < int8.MOST_READ_BACK_ERROR
        errors = {name: found["against_float32"] for name, found in cell.errors.items()}
        assert errors["float32"] < errors["float16"] < errors["bfloat16"] < errors["int8"]
        assert cell.int8_ratio.median == pytest.approx(1.0)
    check_table(attention_table(findings), 4 * (4 + 2 * (not findings.gaps)))
    check_table(flatness_table(findings), 3)
    draw_pictures("int8", findings, tmp_path)


@needs_native
def test_int8_sentences_hold_in_both_directions(int8_run: Run) -> None:
    findings = int8_findings(int8_run)

    def told(direct: float, back: float | None, growth: float) -> str:
        cell = replace(
            findings.largest,
            against_float32={**findings.largest.against_float32, "int8": distribution(direct)},
            reading_back=None if back is None else distribution(back),
        )
        flat = tuple(replace(f, growth=distribution(growth)) for f in findings.flatness)
        gaps = {"int8, read back": "PyTorch is not installed"} if back is None else {}
        return int8_paragraph(replace(findings, cells=(cell,), flatness=flat, gaps=gaps))

    good = told(0.4, 2.0, 1.2)
    assert "at most half" in good
    assert "there int8 saves memory and costs time; directly it saves both" in good
    assert "at most 1.35 in all" in good
    bad = told(1.1, 2.0, 1.5)
    assert "not the half of it or less" in bad
    assert "directly it saves no time here" in bad
    assert "more than 1.35 in float32; bfloat16" in bad
    assert "both ways save time" in told(0.4, 0.9, 1.2)
    assert "was not measured: PyTorch is not installed" in told(0.4, None, 1.2)


@needs_native
def test_attention_that_is_off_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticking: FakeClock
) -> None:
    scale = int8.Scale(batches=(1,), contexts=(17,), flat=(9, 20), rules=FAST)
    monkeypatch.setattr(int8, "FULL", scale)
    fake_yardsticks(int8, monkeypatch, ticking)
    monkeypatch.setattr(int8, "MOST_READ_BACK_ERROR", 1e-12)
    with pytest.raises(VoidError, match="over a int8 cache, batch 1, context 17"):
        int8.measure(options_in(tmp_path), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


def test_int8_needs_the_native_core(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--executor native"):
        int8.measure(options_in(tmp_path, executor="eager"), QUIET)


@needs_native
def test_attention_alone_refuses_what_does_not_fit() -> None:
    engine = session.open_engine(
        Options(model=str(tiny_model().folder), device="cpu", executor="native"),
        "auto",
        layout="contiguous",
        max_num_seqs=1,
    )
    executor = int8.native(engine)
    width = engine.model_config.n_embd
    rows = np.zeros((1, width), np.float32)
    with pytest.raises(ValueError, match="must be"):
        executor.attend(int8.decode_batch(256, 1, 4, 0), rows, rows, rows, rows[:, 1:])
    with pytest.raises(ValueError, match="neither logits nor copies"):
        executor.attend(int8.decode_batch(256, 1, 4, 1), rows, rows, rows, rows.copy())
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.attend(int8.decode_batch(256, 1, 4, 0), rows, rows, rows, rows.copy())


def test_reading_back_gives_what_the_integers_stand_for() -> None:
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((2, 3, 40, 16), dtype=np.float32) for _ in range(2))
    k[0, 0, 0] = 0
    q = rng.standard_normal((2, 3, 16), dtype=np.float32)
    attention = TorchAttention(q, k, v, num_layers=2, scale=0.25)
    for context in (1, 40):
        given = k[:1, :, :context], v[:1, :, :context]
        plain = int8.softmax_attention(q[:1], *given, 0.25)
        assert attention.over_float32(1, context) == pytest.approx(plain, abs=1e-5)
        steps = [dequantise(*quantise(values)) for values in given]
        wanted = int8.softmax_attention(q[:1], *steps, 0.25)
        assert attention.over_int8(1, context) == pytest.approx(wanted, abs=1e-5)
        assert np.abs(steps[0] - given[0]).max() <= np.abs(given[0]).max() / 127 * 0.51


# --- precision ------------------------------------------------------------------------------------

STUDY: dict[str, Any] = {
    "quality_formats": ("KV float16", "float16"),
    "num_windows": 2,
    "length": 40,
    "num_texts": 2,
    "num_written": 6,
    "formats": ("float32", "bfloat16", "int8", "int4, KV int8"),
    "batches": (1, 8),
    "context": 16,
}


@pytest.fixture
def precision_run(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Quality by real engines of the trained model, before the paced ones are put in."""
    scale = replace(precision.FULL, **STUDY)
    options = options_in(tmp_path)
    study = precision.study(options, scale, QUIET)
    monkeypatch.setattr(precision, "study", lambda *_: study)
    house(precision, formats, by_bytes, **STUDY)
    return precision.measure(options, QUIET)


def test_precision_holds_every_format_against_float32(precision_run: Run, tmp_path: Path) -> None:
    findings = precision_findings(precision_run)
    assert {"KV float16", "float16"} == set(findings.formats)
    assert all(found.num_positions == 78 for found in findings.qualities.values())
    assert all(found.num_unexplained == 0 for found in findings.qualities.values())
    if findings.quality_executors["float32"] == "native":
        assert findings.qualities["float32, another batch"].is_identical
        assert findings.written["float32, another batch"].num_equal == 2
    assert set(findings.speeds) == {"float32", "bfloat16", "int8"}
    half = findings.speeds["bfloat16"]
    assert half.single.speedup.median == pytest.approx(2.0)
    assert half.peak.batch == 8
    assert half.peak.tokens_per_s == pytest.approx(4000)
    assert findings.gaps == {"int4, KV int8": "no such thing in file.so"}
    assert half.kv_bytes_per_token == findings.speeds["float32"].kv_bytes_per_token / 2
    check_table(quality_table(findings), len(findings.qualities))
    check_table(margin_table(findings), 7)
    check_table(speed_table(findings), 6)
    draw_pictures("precision", findings, tmp_path)


def test_precision_sentences_hold_in_both_directions(precision_run: Run) -> None:
    findings = precision_findings(precision_run)
    fp16 = findings.qualities["float16"]
    bf16 = replace(fp16, median_error=8 * fp16.median_error)

    def told(**qualities: Any) -> str:
        changed = {**findings.qualities, **qualities}
        return precision_paragraph(replace(findings, qualities=changed))

    assert "float16 keeps logits 8 times nearer than bfloat16, which has" in told(bfloat16=bf16)
    swapped = told(bfloat16=fp16, float16=bf16)
    assert "bfloat16 keeps logits 8 times nearer than float16, though it has" in swapped
    assert "how fast float16 is was not measured" in swapped
    bad = {"int4": replace(fp16, increase=0.06)}
    assert "int4: perplexity +6.00% (at most +5.0%: not kept)" in told(**bad)
    same = replace(fp16, num_disagreeing=0)
    assert "No format chooses another next token" in told(**dict.fromkeys(findings.formats, same))
    bins = fp16.bins

    def losing(place: int) -> dict[str, Any]:
        changed = [replace(part, num_agreeing=part.num_positions) for part in bins]
        changed[place] = replace(changed[place], num_agreeing=changed[place].num_positions - 2)
        lost = replace(fp16, num_disagreeing=2, bins=tuple(changed), widest_disagreement=0.7)
        return dict.fromkeys(findings.formats, lost)

    assert "Agreement is lost where float32 itself is undecided: 100%" in told(**losing(0))
    assert "Agreement is lost beyond near ties: 100%" in told(**losing(4))
    seen = replace(fp16, increase=0.01, uncertainty=0.001)
    assert "float16 +1.00%" in told(float16=seen)
    assert "float16 no change that can be told" in told(float16=replace(seen, uncertainty=0.02))


def test_texts_that_never_part_are_said_to_last() -> None:
    long = Divergence(num_tokens=50, first=(None, None, 3))
    short = Divergence(num_tokens=50, first=(1, 5, 3))
    assert long.median_equal == 50
    assert short.median_equal == 3


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graphs", "int8", "precision", "roofline"])
def test_they_are_experiments_and_chapters(name: str) -> None:
    assert runner.EXPERIMENTS[name].question
    assert runner.EXPERIMENTS[name].show is runner.show_chapter
    assert CHAPTERS[name].pictures


@pytest.mark.parametrize("name", ["graphs", "int8", "precision", "roofline"])
@pytest.mark.parametrize(
    "option, value", [("--quantization", "int8"), ("--kv-cache-dtype", "int8"), ("--dtype", "auto")]
)
def test_a_format_is_not_theirs_to_be_given(
    name: str, option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "bfloat16" if option == "--dtype" else value
    folder = str(tmp_path)
    assert runner.main([name, option, value, "--out", folder, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert f"{name} has number formats of its own: leave out {option}" in error
    assert error.count("\n") == 1


def test_a_format_has_a_file_of_its_own() -> None:
    def suffix(quantization: str | None, cache: str | None) -> str:
        config = SimpleNamespace(quantization=quantization, cache=SimpleNamespace(dtype=cache))
        return formats.format_suffix(SimpleNamespace(config=config))  # type: ignore[arg-type]

    assert [suffix(None, None), suffix("int8", None)] == ["", "-int8"]
    assert [suffix(None, "int8"), suffix("int4", "int8")] == ["-kv-int8", "-int4-kv-int8"]


def test_ceilings_measure_no_model_and_take_no_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["ceilings", "--quantization", "int8", "--out", str(tmp_path)]) == 2
    assert "leave out --quantization" in capsys.readouterr().err


def test_graphs_compare_executors_and_take_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["graphs", "--executor", "native", "--device", "cpu", "--out", str(tmp_path)]
    assert runner.main(given) == 2
    assert "leave out --executor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values, gap, expected",
    [
        ([1.0, 5.0, 9.0], 1.0, [1.0, 5.0, 9.0]),
        ([5.0, 5.0], 1.0, [4.5, 5.5]),
        ([2.0, 1.9, 8.0], 1.0, [2.45, 1.45, 8.0]),
        ([], 1.0, []),
    ],
)
def test_labels_are_pushed_apart(values: list[float], gap: float, expected: list[float]) -> None:
    assert spread(values, gap) == pytest.approx(expected)


def test_crowds_that_grow_into_others_are_joined() -> None:
    found = spread([0.0, 0.1, 0.9, 1.0, 5.0], 0.5)
    ordered = sorted(found)
    assert ordered == found
    assert all(b - a >= 0.5 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert found[-1] == 5.0
