"""Whole experiments: gate, A/A check, resuming, conclusions, what is rendered, the command.

Engines, machines and time are fake (`fake_bench.py`), so findings are known beforehand; one test
at the end runs the real engine.
"""

from __future__ import annotations

import errno
import json
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_bench import (
    FAKE_READ_BYTES_PER_S,
    MODEL,
    FakeBench,
    FakeClock,
    FakeEngine,
    FakeYardsticks,
    ceiling_samples,
    sample,
)
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.bench import conduct as conducting
from nanoserve.bench import findings, machine, measure, plots, record, report, runner, session
from nanoserve.bench.conduct import VoidError, conduct
from nanoserve.bench.experiments import ceilings, kvcache
from nanoserve.bench.findings import kvcache as concluding
from nanoserve.bench.measure import Rules, Sample
from nanoserve.bench.record import Run, encode, read_runs
from nanoserve.bench.session import NotHereError, Options, Screen
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.kernels import probes
from nanoserve.kernels.cpu import library
from nanoserve.kernels.probes import TorchProbes
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.planner.steptime import num_eager_operations
from nanoserve.request import TokenLogprob

QUIET = Screen(quiet=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(measure, "perf_counter_ns", fake)
    return fake


# --- the A/A check and a run from beginning to end ------------------------------------------------


def ratios_around(center: float, n: int = 20) -> list[Sample]:
    generator = random.Random(3)
    samples = []
    for number in range(n):
        samples.append(sample("a", number, 1.0))
        samples.append(sample("b", number, center * (1 + generator.uniform(-0.02, 0.02))))
    return samples


@pytest.mark.parametrize("center, is_miss", [(1.0, False), (1.1, True), (0.9, True)])
def test_an_aa_interval_must_hold_one(center: float, is_miss: bool) -> None:
    check = findings.aa_check(ratios_around(center), "a", "b", "step")
    assert check.is_miss is is_miss
    assert check.smallest_effect == pytest.approx(0.01, abs=0.01)
    assert findings.aa_from_record(json.loads(json.dumps(findings.aa_values(check)))) == check


def test_too_few_repetitions_neither_pass_nor_miss() -> None:
    check = findings.aa_check(ratios_around(1.5, n=5), "a", "b", "step")
    assert (check.interval, check.is_miss, check.smallest_effect) == (None, False, None)


def options_in(folder: Path, **values: Any) -> Options:
    return Options(out=folder, **({"seed": 1} | values))


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*/*.jsonl")
    return path


def test_a_run_is_recorded_from_header_to_end(tmp_path: Path, clock: FakeClock) -> None:
    bench = FakeBench(clock)
    run = conduct(bench.trial(), options_in(tmp_path, seed=4), QUIET)
    assert only_file(tmp_path) == tmp_path / machine.slug() / "fake-x.jsonl"
    assert run.is_complete
    assert [check["miss"] for check in run.checks] == [False]
    assert len(run.final_samples) == 2 * 9
    assert run.header["seeds"] == [4, 5]
    for entry in (run.header, *run.records):
        assert {"schema", "run", "experiment", "machine_id", "executor", "dtype"} <= entry.keys()
    assert run.header["setup"]["machine"] == json.loads(json.dumps(machine.fingerprint()))


def test_an_aa_miss_is_recorded_and_measured_once_more(tmp_path: Path, clock: FakeClock) -> None:
    run = conduct(FakeBench(clock, slower_in=[0]).trial(), options_in(tmp_path), QUIET)
    assert [check["miss"] for check in run.checks] == [True, False]
    assert run.is_complete
    first, second = (check["seed"] for check in run.checks)
    assert second == first + 1
    assert {len(run.samples(attempt)) for attempt in (0, 1)} == {18}
    assert run.final_samples == run.samples(1)


def test_two_aa_misses_void_the_run(tmp_path: Path, clock: FakeClock) -> None:
    with pytest.raises(VoidError, match="two A/A misses"):
        conduct(FakeBench(clock, slower_in=[0, 1]).trial(), options_in(tmp_path), QUIET)
    runs, _ = read_runs(only_file(tmp_path))
    assert [check["miss"] for check in runs[0].checks] == [True, True]
    assert runs[0].end is not None
    assert runs[0].end["status"] == "void"
    assert record.find_runs(tmp_path, "fake")[0] == []


@pytest.mark.parametrize("stop_after", [2, 7, 10, 19])
def test_an_interrupted_run_is_continued(tmp_path: Path, clock: FakeClock, stop_after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        conduct(FakeBench(clock, stop_after=stop_after).trial(), options_in(tmp_path), QUIET)
    before, _ = read_runs(only_file(tmp_path))
    assert not before[0].is_complete
    kept = before[0].final_samples
    assert len(kept) == (stop_after - 2) // 2 * 2
    bench = FakeBench(clock)
    run = conduct(bench.trial(), options_in(tmp_path, resume=True), QUIET)
    assert run.run_id == before[0].run_id
    assert run.is_complete
    assert bench.num_runs == 2 + 18 - len(kept)
    assert run.final_samples[: len(kept)] == kept
    assert len(run.final_samples) == 18


def test_an_interruption_after_a_miss_goes_on_with_the_second_attempt(
    tmp_path: Path, clock: FakeClock
) -> None:
    bench = FakeBench(clock, slower_in=[0], stop_after=23)
    with pytest.raises(KeyboardInterrupt):
        conduct(bench.trial(), options_in(tmp_path), QUIET)
    bench = FakeBench(clock)
    run = conduct(bench.trial(), options_in(tmp_path, resume=True), QUIET)
    assert [check["miss"] for check in run.checks] == [True, False]
    assert bench.num_runs == 2 + 16  # one round of the second attempt was there


def test_a_complete_run_is_given_back_and_not_measured_again(
    tmp_path: Path, clock: FakeClock
) -> None:
    first = conduct(FakeBench(clock).trial(), options_in(tmp_path), QUIET)
    bench = FakeBench(clock)
    again = conduct(bench.trial(), options_in(tmp_path, resume=True), QUIET)
    assert again == first
    assert bench.num_runs == 2  # its warm-up


def test_without_resume_a_run_is_added_to_the_file(tmp_path: Path, clock: FakeClock) -> None:
    ids = [conduct(FakeBench(clock).trial(), options_in(tmp_path), QUIET).run_id for _ in range(2)]
    assert [run.run_id for run in read_runs(only_file(tmp_path))[0]] == ids


@pytest.mark.parametrize(
    "changed",
    [{"identity": {"executor": "other"}}, {"setup": {"config": {"n_embd": 5}}}, {"rules": Rules()}],
)
def test_a_run_of_something_else_is_not_continued(
    tmp_path: Path, clock: FakeClock, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trial = FakeBench(clock, stop_after=6).trial(setup={"config": {"n_embd": 4}})
    with pytest.raises(KeyboardInterrupt):
        conduct(trial, options_in(tmp_path), QUIET)
    changed = {"setup": {"config": {"n_embd": 4}}} | changed
    trial = FakeBench(clock).trial(**changed)
    run = conduct(trial, options_in(tmp_path, resume=True), Screen())
    assert len(read_runs(only_file(tmp_path))[0]) == 2
    assert run.is_complete
    assert "The last run differs in" in capsys.readouterr().err


# --- kvcache, with engines whose speed is known ---------------------------------------------------

SCALE = kvcache.Scale(
    contexts=(1, 2, 4, 8, 16, 64, 128, 768),
    batched=((4, 16), (4, 64)),
    max_aa_context=64,
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=8, max_rounds=8),
    gate=((1, 4), (30, 3)),
)


@pytest.fixture
def fake_house(
    monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> Callable[..., Callable[[Path], Run]]:
    """A function that makes the experiment run on fake engines: wrong at a length, of a dtype."""

    def prepare(**engine: Any) -> Callable[[Path], Run]:
        arms = kvcache.Arms(
            naive=FakeEngine(clock, keeps=False, **engine),  # type: ignore[arg-type]
            cached=FakeEngine(clock, keeps=True, dtype=engine.get("dtype", "float32")),  # type: ignore[arg-type]
            again=FakeEngine(clock, keeps=True, dtype=engine.get("dtype", "float32")),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(kvcache, "FULL", SCALE)
        monkeypatch.setattr(kvcache, "open_arms", lambda *_: arms)
        monkeypatch.setattr(kvcache, "make_yardsticks", lambda *_, **__: FakeYardsticks(clock))
        monkeypatch.setattr(kvcache, "measured_ceilings", lambda *_: ceiling_samples())
        return lambda folder: kvcache.measure(options_in(folder, seed=1), QUIET)

    return prepare


@pytest.fixture
def recorded(
    tmp_path: Path, fake_house: Callable[..., Callable[[Path], Run]]
) -> concluding.KVCacheFindings:
    """The findings of one whole experiment on fake engines, recorded in tmp_path/results."""
    return concluding.kvcache_findings(fake_house()(tmp_path / "results"))


def test_the_models_last_position_is_measured_and_nothing_beyond() -> None:
    shapes = kvcache.cells(SCALE, 256)
    assert [c.context for c in shapes if c.batch == 1] == [1, 2, 4, 8, 16, 64, 128, 255]
    assert [(c.batch, c.context) for c in shapes if c.batch > 1] == [(4, 16), (4, 64)]
    assert [c.context for c in kvcache.cells(kvcache.FULL, 1024)][11] == 1023
    assert [c.lead for c in shapes[:3]] == [0, 1, 2]


def test_prompts_nest_and_differ_by_sequence() -> None:
    assert prompt_token_ids(100, 50257)[:40] == prompt_token_ids(40, 50257)
    assert prompt_token_ids(40, 50257, 1) != prompt_token_ids(40, 50257, 2)
    assert max(prompt_token_ids(5000, 11)) == 9  # the end-of-text id is never drawn


def test_the_experiment_measures_steps_at_exact_contexts(
    recorded: concluding.KVCacheFindings,
) -> None:
    """Fake steps cost 1 ms up to ten rows and 0.1 ms for each further row."""
    for comparison in recorded.comparisons:
        rows = comparison.batch * comparison.context
        naive_s = 1e-3 + 1e-4 * max(0, rows - 10)
        assert comparison.naive.median == pytest.approx(naive_s, rel=0.02)
        assert comparison.cached.median == pytest.approx(1e-3, rel=0.02)
        assert comparison.naive.n == comparison.cached.n == 8
        prefill_rows = comparison.batch * comparison.prefill_tokens
        if comparison.context == 1:
            assert comparison.prefill is None
        else:
            assert comparison.prefill is not None
            expected_s = 1e-3 + 1e-4 * max(0, prefill_rows - 10)
            assert comparison.prefill.median == pytest.approx(expected_s, rel=0.02)
        per_token = kv_bytes_per_token(MODEL, "float32")
        assert comparison.kv_bytes == comparison.batch * comparison.context * per_token


def test_the_conclusions_are_those_of_the_known_speeds(
    recorded: concluding.KVCacheFindings,
) -> None:
    assert recorded.longest.context == 255
    assert recorded.longest.speedup.median == pytest.approx(25.5, rel=0.03)
    assert (recorded.wins_from, recorded.loses_until) == (16, 8)
    assert recorded.flat_from.context == 64
    assert recorded.flatness == pytest.approx(1.0, rel=0.02)
    assert recorded.flatness_by_bytes > 1.1  # a tiny model: its KV bytes weigh
    assert recorded.check.smallest_effect is not None
    assert recorded.check.smallest_effect < 0.02
    step = recorded.longest.cached_predicted
    assert recorded.bandwidth_share(recorded.longest) == pytest.approx(
        step.num_bytes / 1e-3 / FAKE_READ_BYTES_PER_S, rel=0.02
    )
    whole = recorded.whole_text
    assert (whole.num_prompt, whole.num_tokens) == (16, 240)
    expected_s = sum(1e-3 + 1e-4 * (n - 10) for n in range(16, 256))
    assert whole.naive_s == pytest.approx(expected_s, rel=0.02)
    assert whole.cached_s == pytest.approx(1.6e-3 + 239e-3, rel=0.02)


def test_every_record_says_what_ran(recorded: concluding.KVCacheFindings, tmp_path: Path) -> None:
    text = only_file(tmp_path / "results").read_text()
    for line in text.splitlines():
        entry = json.loads(line)
        assert (entry["model"], entry["weights"]) == ("tiny", "random")
        assert entry["weights_id"] == "dummy-seed-0"
        assert re.fullmatch("[0-9a-f]{64}", entry["tokens_sha256"])
        assert (entry["executor"], entry["dtype"]) == ("eager", "float32")
    assert "somewhere" not in text  # the folder of the model
    assert recorded.run.header["setup"]["model_config"]["n_embd"] == 32


def test_predictions_are_stored_before_and_come_from_the_ceilings_alone(
    recorded: concluding.KVCacheFindings,
) -> None:
    predicted = recorded.longest.naive_predicted
    head = recorded.run.header
    assert head["ceilings"]["read_bytes_per_s"] == pytest.approx(1e9)
    dispatch_s = num_eager_operations(MODEL) * 1e-6
    assert predicted.step_s == pytest.approx(predicted.flops / 5e9 + dispatch_s)


@pytest.mark.parametrize("wrong_at", [3, 16, 31, 64, 255])
def test_a_failed_gate_records_nothing(
    tmp_path: Path, fake_house: Callable[..., Callable[[Path], Run]], wrong_at: int
) -> None:
    """On a prompt of its own, or at a shape that is timed."""
    with pytest.raises(VoidError, match="the gate failed, nothing is recorded"):
        fake_house(wrong_at=wrong_at)(tmp_path)
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_in_half_precision_a_near_tie_may_part(
    tmp_path: Path, fake_house: Callable[..., Callable[[Path], Run]]
) -> None:
    run = fake_house(wrong_at=16, dtype="float16")(tmp_path)
    assert run.is_complete
    assert run.header["dtype"] == "float16"


def logprobs(token_id: int, *others: tuple[int, float]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id=token_id, logprob=-1.0, top=((token_id, -1.0), *others))]


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (logprobs(1, (2, -1.2)), logprobs(2, (1, -1.05))),
        (logprobs(1, (2, -1.05)), logprobs(2, (1, -1.2))),
        (logprobs(1, (3, -1.05)), logprobs(2, (1, -1.05))),
    ],
)
def test_in_half_precision_more_than_a_tie_fails(
    ours: list[TokenLogprob], theirs: list[TokenLogprob]
) -> None:
    gate = kvcache.Gate(is_exact=False)
    with pytest.raises(VoidError, match="token 0: cached emits 1, naive 2"):
        gate.compare("here", [ours], [theirs])


def test_arms_that_write_less_than_the_others_fail_the_gate() -> None:
    gate = kvcache.Gate(is_exact=True)
    with pytest.raises(ValueError, match="zip"):
        gate.compare("here", [logprobs(1) + logprobs(2)], [logprobs(1)])


def comparison(context: int, low: float) -> Any:
    return SimpleNamespace(context=context, low_speedup=low)


@pytest.mark.parametrize(
    "lows, expected",
    [
        ((0.9, 1.0, 1.2, 5.0), (4, 2)),
        ((1.2, 1.0, 1.2, 5.0), (4, 2)),  # a win below a loss does not count
        ((1.2, 1.3, 1.4, 5.0), (1, None)),
        ((1.0, 1.0, 1.0, 1.0), (None, 8)),
        ((1.0, 1.0, 1.02, 5.0), (8, 4)),  # within the noise that A/A showed
    ],
)
def test_the_crossover(lows: tuple[float, ...], expected: tuple[int | None, int | None]) -> None:
    comparisons = [comparison(n, low) for n, low in zip((1, 2, 4, 8), lows, strict=True)]
    assert concluding.crossover(comparisons, 0.03) == expected


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True))
def test_the_cost_of_a_text_is_the_sum_over_its_positions(contexts: list[int]) -> None:
    contexts = sorted(contexts)
    values = [float(n * n) for n in contexts]
    every = np.interp(np.arange(contexts[0], contexts[-1] + 1), contexts, values).sum()
    assert concluding.sum_between(contexts, values) == pytest.approx(float(every))


# --- what is rendered -----------------------------------------------------------------------------


def test_tables_and_paragraph_come_from_the_records(
    recorded: concluding.KVCacheFindings,
) -> None:
    heads, rows = concluding.kvcache_table(recorded)
    assert heads[0] == "batch"
    assert len(rows) == 10
    assert all(len(row) == len(heads) for row in rows)
    heads, rows = concluding.prediction_table(recorded)
    assert all(len(row) == len(heads) for row in rows)
    text = concluding.kvcache_paragraph(recorded)
    for piece in (
        "tiny (random weights, float32, eager executor, cpu, 1 thread)",
        "the token at context 255",
        "The cache wins from context 16 on",
        "at 8 the two cannot be told apart",
        "Writing 240 tokens after a prompt of 16",
        "are noise here",
    ):
        assert piece in text


def test_unsteady_cells_are_marked_and_counted(recorded: concluding.KVCacheFindings) -> None:
    assert "Noisy cells" not in concluding.kvcache_paragraph(recorded)
    first, *rest = recorded.comparisons
    wild = replace(first, cached=replace(first.cached, q1=0.5e-3, q3=1.5e-3))
    unsteady = replace(recorded, comparisons=(wild, *rest))
    assert "Noisy cells: 0 of 20, invalid ones: 1;" in concluding.kvcache_paragraph(unsteady)
    assert concluding.kvcache_table(unsteady)[1][0][3].endswith(" invalid")


def test_a_cache_that_never_wins_is_said_so(recorded: concluding.KVCacheFindings) -> None:
    never = replace(recorded, wins_from=None, predicted_wins_from=None)
    assert "does not win at any context measured (predicted: nowhere)" in (
        concluding.kvcache_paragraph(never)
    )


def test_rendering_is_a_pure_function_of_the_records(
    recorded: concluding.KVCacheFindings, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(
        "The cache is <!-- nanoserve:kvcache.tiny.speedup -->old<!-- /nanoserve --> faster.\n"
        "<!-- nanoserve:kvcache.tiny.table --><!-- /nanoserve -->\n"
    )
    results = report.load(tmp_path / "results")
    assert results.skipped == []
    written = report.write(tmp_path, results)
    assert {path.relative_to(tmp_path).as_posix() for path in written} == {
        "RESULTS.md",
        "README.md",
        "docs/plots/kvcache.json",
        "docs/plots/kvcache.svg",
        "docs/plots/kvcache.png",
    }
    readme = (tmp_path / "README.md").read_text()
    assert re.search(r"speedup -->2\d\.\dx<!-- /nanoserve --> faster", readme)
    assert "\n| batch | context |" in readme
    assert "## 1. What does the cache buy" in (tmp_path / "RESULTS.md").read_text()
    before = {path: path.read_bytes() for path in written}
    assert report.check(tmp_path, report.load(tmp_path / "results")) == []
    report.write(tmp_path, report.load(tmp_path / "results"))
    after = {path: path.read_bytes() for path in written if path.suffix != ".png"}
    assert after == {path: before[path] for path in after}


def test_a_number_changed_by_hand_is_found(
    recorded: concluding.KVCacheFindings, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(
        "<!-- nanoserve:kvcache.tiny.cached_ms -->7<!-- /nanoserve -->"
    )
    results = report.load(tmp_path / "results")
    for path, text in report.render(tmp_path, results).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert report.check(tmp_path, results) == []
    for name in ("RESULTS.md", "README.md", "docs/plots/kvcache.json"):
        path = tmp_path / name
        before = path.read_text()
        complaint = [f"{name} differs from the records: run `nanoserve report`"]
        path.write_text(before.replace("1", "7"))
        assert report.check(tmp_path, results) == complaint
        path.unlink()
        assert report.check(tmp_path, results) == (complaint if name != "README.md" else [])
        path.write_text(before)


def test_records_that_were_skipped_are_said(
    recorded: concluding.KVCacheFindings, tmp_path: Path
) -> None:
    path = only_file(tmp_path / "results")
    path.write_bytes(path.read_bytes() + b'{"kind":"torn')
    results = report.load(tmp_path / "results")
    assert "it is not finished" in results.skipped[0]
    assert [told.run for told in results.chapters["kvcache"]] == [recorded.run]


def test_a_run_without_what_is_concluded_from_is_skipped_with_a_line(
    recorded: concluding.KVCacheFindings, tmp_path: Path
) -> None:
    path = only_file(tmp_path / "results")
    older = {key: value for key, value in recorded.run.header.items() if key != "predictions"}
    records = [older, *recorded.run.records]
    path.write_bytes(b"".join(encode(entry) for entry in records))
    results = report.load(tmp_path / "results")
    said = f"run {recorded.run.run_id} skipped: there is no 'predictions' in it"
    assert results.skipped[0].endswith(said)
    assert results.is_empty


def test_a_number_that_was_never_recorded_cannot_be_quoted() -> None:
    text = "<!-- nanoserve:kvcache.gpt9.speedup -->99x<!-- /nanoserve -->"
    with pytest.raises(ValueError, match=r"kvcache\.gpt9\.speedup; there are: a"):
        report.fill_blocks(text, {"a": "1"})


def test_quick_and_unfinished_runs_are_not_reported(
    tmp_path: Path, fake_house: Callable[..., Callable[[Path], Run]], monkeypatch: Any
) -> None:
    fake_house()
    monkeypatch.setattr(kvcache, "QUICK", SCALE)
    kvcache.measure(options_in(tmp_path / "results", quick=True), QUIET)
    assert only_file(tmp_path / "results").name == "kvcache-tiny-cpu-eager-quick.jsonl"
    results = report.load(tmp_path / "results")
    assert results.is_empty
    assert "Nothing has been recorded yet" in report.results_markdown(results)


def test_without_a_results_folder_there_is_nothing_to_report(tmp_path: Path) -> None:
    assert report.load(tmp_path / "none").is_empty


def test_plot_data_are_plain_and_the_picture_is_drawn_from_them_alone(
    recorded: concluding.KVCacheFindings, tmp_path: Path
) -> None:
    data = json.loads(plots.plot_json(plots.kvcache_plot(recorded)))
    assert [point["context"] for point in data["single"]] == [1, 2, 4, 8, 16, 64, 128, 255]
    assert len(data["batched"]) == 2
    svg, png = plots.save(data, tmp_path / "a" / "picture.v1", plots.draw_kvcache)
    assert svg.name == "picture.v1.svg"
    first = svg.read_bytes()
    assert b"<dc:date>" not in first
    assert png.read_bytes().startswith(b"\x89PNG")
    plots.save(data, tmp_path / "a" / "picture.v1", plots.draw_kvcache)
    assert svg.read_bytes() == first
    alone = data | {"batched": [], "wins_from": None}
    plots.save(alone, tmp_path / "b", plots.draw_kvcache)
    assert (tmp_path / "b.svg").exists()


@pytest.mark.parametrize(
    "seconds, expected",
    [(1.5304, "1,530"), (0.0412, "41.2"), (0.00987, "9.87"), (0.000_123, "0.12")],
)
def test_milliseconds_for_people(seconds: float, expected: str) -> None:
    assert findings.milliseconds(seconds) == expected


# --- ceilings -------------------------------------------------------------------------------------


@pytest.fixture
def small_yardsticks() -> ceilings.Yardsticks:
    """The real probes, on shapes that take no time."""
    return ceilings.make_yardsticks("cpu", None, num_bytes=2**20, shapes=((8, 16, 8),))


def test_ceilings_run_and_are_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_yardsticks: ceilings.Yardsticks,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ceilings, "make_yardsticks", lambda *_: small_yardsticks)
    monkeypatch.setattr(findings.AACheck, "is_miss", False)  # a busy machine must not fail a test
    options = options_in(tmp_path, quick=True, device="cpu")
    run = ceilings.measure(options, QUIET)
    kept = machine.load_cached_ceilings("cpu")
    assert kept == findings.ceilings_of(run.final_samples)
    assert {"float32", "bfloat16"} <= set(kept.matmul_flops_per_s)  # and what the core multiplies
    runner.show_chapter(run, options, Screen())
    shown = " ".join(capsys.readouterr().out.split())
    assert "reads memory at" in shown
    assert "torch.sum again" in shown
    assert "numpy.max" in shown


def test_the_yardsticks_do_what_they_say(small_yardsticks: ceilings.Yardsticks) -> None:
    read = next(group for group in small_yardsticks.groups if group.name == "read")
    assert read.labels == {"unit": "bytes", "amount": 2**20}
    libraries = {"torch.sum", "torch.sum again", "torch.dot", "torch.mv", "numpy.max"}
    assert set(read.arms) - {"native read", "native read, fetched ahead"} == libraries
    matmuls = [group for group in small_yardsticks.groups if group.name.startswith("matmul")]
    assert {group.labels["amount"] for group in matmuls} == {2 * 8 * 16 * 8}


def test_the_read_kernels_read_everything() -> None:
    values = ceilings.huge_page_buffer(2**20)
    values[:] = 2.0
    loads = TorchProbes("cpu").read(values)
    assert float(loads["torch.sum"]()) == 2.0 * 2**18  # type: ignore[arg-type]
    assert float(loads["torch.dot"]()) == 4.0 * 2**17  # type: ignore[arg-type]
    values[-1] = 9.0
    assert ceilings.threaded_max(values, 3)() == 9.0


def test_the_fastest_kernel_is_the_ceiling() -> None:
    samples = []
    for arm, seconds in (("slow", 2.0), ("fast", 1.0)):
        samples.append(
            replace(
                sample(arm, 0, 0.0, group="read"),
                seconds={"run": seconds},
                labels={"unit": "bytes", "amount": 100},
            )
        )
    found = findings.rates(samples)
    assert findings.fastest(found, unit="bytes").arm == "fast"
    assert findings.fastest(found, unit="bytes").per_s == 100.0


def test_the_buffer_exceeds_every_cache_and_leaves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cache_sizes", lambda: {"L2": 2**20, "L3": 2**26})
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2**34)
    assert ceilings.buffer_bytes("cpu") == 8 * 2**26
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2**30)
    assert ceilings.buffer_bytes("cpu") == 2**28
    monkeypatch.setattr(machine, "cache_sizes", dict)
    assert ceilings.buffer_bytes("cpu") == ceilings.SMALLEST_BUFFER_BYTES


# --- the command ----------------------------------------------------------------------------------


def expect_one_line(capsys: pytest.CaptureFixture[str], *pieces: str) -> None:
    """Standard error holds one line, with every piece in it, and no traceback."""
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1, shown
    for piece in pieces:
        assert piece in shown


def test_list_says_what_each_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "what does the cache buy, and where does it lose?" in shown
    assert "ceilings" in shown


@pytest.mark.parametrize(
    "arguments, pieces",
    [
        ([], ["name an experiment: ceilings, kvcache, batch, ", " or all"]),
        (["kvcash"], ["no experiment kvcash", "ceilings, kvcache, batch, ", " or all"]),
        (["kvcache", "--threads", "0"], ["--threads must be at least 1, got 0"]),
        (["kvcache", "--seed", "-1"], ["--seed must be at least 0, got -1"]),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], pieces: list[str]
) -> None:
    assert runner.main(arguments) == 2
    expect_one_line(capsys, *pieces)


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--what"], ["--threads", "many"]])
def test_an_unknown_option_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        runner.main(["kvcache", *arguments])
    assert raised.value.code == 2
    expect_one_line(capsys, arguments[0].lstrip("-"))


def test_an_out_that_is_a_file_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = replace(runner.EXPERIMENTS["kvcache"], measure=lambda *_: pytest.fail("measured"))
    monkeypatch.setitem(runner.EXPERIMENTS, "kvcache", fail)
    (tmp_path / "file").write_text("")
    assert runner.main(["kvcache", "--out", str(tmp_path / "file")]) == 2
    expect_one_line(capsys, "cannot be written", "--out")


@pytest.mark.parametrize(
    "error, expected",
    [
        (OSError(errno.ENOSPC, "No space left on device while writing x"), (1, "No space left")),
        (VoidError("two A/A misses: too busy"), (1, "two A/A misses")),
        (MemoryError("cannot allocate"), (1, "cannot allocate")),
        (ValueError("model 'x' not found"), (2, "not found")),
        (KeyboardInterrupt(), (130, "--resume continues")),
    ],
)
def test_errors_leave_as_one_line_with_their_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    expected: tuple[int, str],
) -> None:
    def fail(*_: object) -> Run:
        raise error

    monkeypatch.setitem(
        runner.EXPERIMENTS, "kvcache", replace(runner.EXPERIMENTS["kvcache"], measure=fail)
    )
    assert runner.main(["kvcache", "--out", str(tmp_path)]) == expected[0]
    expect_one_line(capsys, expected[1])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_all_names_every_experiment_once() -> None:
    assert runner.resolve_names(["kvcache", "all"]) == list(runner.EXPERIMENTS)
    assert runner.resolve_names(["kvcache", "kvcache"]) == ["kvcache"]


def test_a_run_ends_with_table_paragraph_and_plot(
    tmp_path: Path,
    fake_house: Callable[..., Callable[[Path], Run]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_house()
    assert runner.main(["kvcache", "--out", str(tmp_path), "--seed", "3"]) == 0
    shown = capsys.readouterr()
    text = " ".join(shown.out.split())
    assert "what does the cache buy, and where does it lose?" in text
    assert "The cache wins from context 16 on" in text
    assert "kvcache-tiny-cpu-eager.jsonl" in shown.err
    assert {path.suffix for path in (tmp_path / machine.slug()).iterdir()} == {
        ".jsonl",
        ".svg",
        ".png",
    }


def test_a_void_run_is_shown_and_marked_and_has_a_code_of_its_own(
    tmp_path: Path,
    fake_house: Callable[..., Callable[[Path], Run]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_house()
    monkeypatch.setattr(findings.AACheck, "is_miss", True)
    assert runner.main(["kvcache", "--out", str(tmp_path), "--seed", "3"]) == runner.VOID == 3
    shown = capsys.readouterr()
    text = " ".join(shown.out.split())
    assert "VOID: two A/A misses: this machine is too busy" in text
    assert "naive ms" in text
    assert "The cache wins" not in text  # nothing is claimed
    assert shown.err.splitlines()[-1].startswith("nanoserve bench: two A/A misses")
    assert {path.suffix for path in (tmp_path / machine.slug()).iterdir()} == {".jsonl"}


@pytest.fixture
def three(
    monkeypatch: pytest.MonkeyPatch, fake_house: Callable[..., Callable[[Path], Run]]
) -> Callable[[BaseException], None]:
    """A function that makes three experiments: kvcache on fakes between two that fail."""
    fake_house()
    works = runner.EXPERIMENTS["kvcache"]

    def prepare(error: BaseException) -> None:
        def fail(*_: object) -> Run:
            raise error

        broken = replace(works, measure=fail)
        experiments = {"first": broken, "kvcache": works, "last": broken}
        monkeypatch.setattr(runner, "EXPERIMENTS", experiments)

    return prepare


@pytest.mark.parametrize(
    "error",
    [
        VoidError("the gate failed"),
        ValueError("no room"),
        OSError(5, "an I/O error"),
        KeyError("x"),
    ],
)
def test_of_several_experiments_one_that_fails_does_not_lose_the_others(
    tmp_path: Path,
    three: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    three(error)
    assert runner.main(["all", "--out", str(tmp_path), "--seed", "3"]) == 1
    shown = capsys.readouterr()
    assert "The cache wins from context 16 on" in " ".join(shown.out.split())
    lines = shown.err.splitlines()
    assert [line.split(" failed: ")[0] for line in lines[-2:]] == [
        "nanoserve bench: first",
        "nanoserve bench: last",
    ]
    assert "1 of 3 experiments in " in lines[-3]
    assert any(re.match(r"\[2 of 3\] kvcache, .+ passed, about .+ left", line) for line in lines)
    page = tmp_path / machine.slug() / "report.html"
    assert f"Page for a browser: {page}" in shown.err.replace("\n", "")
    assert "1. What does the cache buy" in page.read_text()


def test_of_several_experiments_one_that_does_not_apply_is_no_failure(
    tmp_path: Path,
    three: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    three(NotHereError("it times the native core"))
    assert runner.main(["all", "--out", str(tmp_path), "--seed", "3"]) == 0
    said = capsys.readouterr().err
    assert "first is passed over: it times the native core" in said
    assert "last does not apply here: it times the native core" in said
    assert "1 of 3 experiments in " in said


def test_sigterm_unwinds_as_ctrl_c_does(
    tmp_path: Path,
    three: Callable[[BaseException], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else a benchmark that a timeout ends would leave its server behind."""
    tidied = []

    def be_terminated(*_: object) -> Run:
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        finally:
            tidied.append(True)
        pytest.fail("it went on")

    three(ValueError())
    before = signal.getsignal(signal.SIGTERM)
    broken = replace(runner.EXPERIMENTS["first"], measure=be_terminated)
    monkeypatch.setattr(runner, "EXPERIMENTS", {"first": broken, "last": broken})
    assert runner.main(["first", "last", "--out", str(tmp_path)]) == runner.TERMINATED == 143
    assert tidied == [True]
    assert "nanoserve bench: terminated; --resume continues" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_several_experiments_of_which_none_applies_are_a_wrong_request(
    tmp_path: Path,
    three: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    three(NotHereError("it times the native core"))
    assert runner.main(["first", "last", "--out", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "nanoserve bench: nothing of this applies here"
    assert lines[-2] == "last does not apply here: it times the native core"
    assert not list(tmp_path.glob("*/*.html"))


def test_ctrl_c_ends_all_of_them(
    tmp_path: Path,
    three: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    three(KeyboardInterrupt())
    assert runner.main(["all", "--out", str(tmp_path)]) == 130
    assert "--resume continues" in capsys.readouterr().err


def test_without_plotly_there_is_no_page_and_that_is_said(
    tmp_path: Path,
    three: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    three(ValueError("no room"))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert runner.main(["all", "--out", str(tmp_path)]) == 1
    assert "No page: plotly" in capsys.readouterr().err


def test_too_few_rounds_for_an_interval_are_said(recorded: concluding.KVCacheFindings) -> None:
    assert concluding.few_rounds_sentence(recorded) == []
    first, *rest = recorded.comparisons
    few = replace(first, speedup=replace(first.speedup, n=3, interval=None))
    (said,) = concluding.few_rounds_sentence(replace(recorded, comparisons=(few, *rest)))
    assert "only 3 rounds" in said
    assert "smallest ratio seen decides" in said


@pytest.mark.parametrize(
    "predicted, expected", [(1.0, "0%"), (0.999, "0%"), (1.1, "+10%"), (0.5, "-50%")]
)
def test_an_error_that_rounds_to_nothing_has_no_sign(predicted: float, expected: str) -> None:
    assert findings.off(predicted, 1.0) == expected


@pytest.mark.parametrize("ratio, expected", [(0.98, "0.98x"), (1.4, "1.4x"), (34.2, "34x")])
def test_a_loss_is_not_rounded_away(ratio: float, expected: str) -> None:
    assert plots.short_times(ratio) == expected


def test_a_bar_is_drawn_only_between_repetitions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread that redraws it would run inside the timed region."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes standard error for a terminal
    before = threading.active_count()
    with Screen().progress("measuring", 2.0) as advance:
        advance(1.0)
        assert threading.active_count() == before
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in capsys.readouterr().err


def test_plain_progress_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().progress("measuring", 10.0) as advance:
        for _ in range(20):
            advance(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "measuring"
    assert lines[-1] == "measuring: 100%"
    assert len(lines) == 6


def test_conducting_never_reads_the_clock_itself() -> None:
    """`measure` is the only module that times."""
    root = Path(conducting.__file__).parent
    for path in root.rglob("*.py"):
        if path.name != "measure.py":
            assert "perf_counter" not in path.read_text()
            assert "time.time" not in path.read_text()


# --- which weights, and the real engine -----------------------------------------------------------


def cache_gpt2(hub: Path, *names: str) -> None:
    """A snapshot of openai-community/gpt2 in the hub's cache, with the files of these names."""
    root = hub / "models--openai-community--gpt2"
    snapshot = root / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    for name in names:
        (snapshot / name).write_bytes(b"12345678")


def test_without_weights_the_shape_is_measured_and_that_is_said() -> None:
    load_format, remark = session.weights_at_hand(Options(model="openai-community/gpt2"))
    assert load_format == "dummy"
    assert remark is not None
    assert "not on this machine" in remark


def test_weights_in_the_hubs_cache_are_taken(hf_home: Path) -> None:
    cache_gpt2(hf_home / "hub", "model.safetensors")
    assert session.weights_at_hand(Options()) == ("auto", None)


def test_half_a_download_is_not_at_hand(hf_home: Path) -> None:
    cache_gpt2(hf_home / "hub")
    assert session.weights_at_hand(Options())[0] == "dummy"


@pytest.mark.parametrize("load_format", ["auto", "pt", "dummy"])
def test_a_load_format_that_was_asked_for_is_kept(load_format: Any) -> None:
    assert session.weights_at_hand(Options(load_format=load_format)) == (load_format, None)


def test_only_built_in_shapes_have_a_substitute(tmp_path: Path) -> None:
    assert session.weights_at_hand(Options(model="mini")) == ("auto", None)
    assert session.weights_at_hand(Options(model="owner/other"))[0] == "auto"
    (tmp_path / "gpt2").mkdir()
    assert session.weights_at_hand(Options(model=str(tmp_path / "gpt2")))[0] == "auto"


def test_the_hash_of_the_weights_depends_on_every_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b")]
    for path in files:
        path.write_bytes(b"x")
    hashes = set()
    for content in (b"x", b"y"):
        files[1].write_bytes(content)
        hashes.add(session.hash_weights(SimpleNamespace(weight_files=tuple(files))))  # type: ignore[arg-type]
    assert len(hashes) == 2


def test_without_torch_numpy_is_the_yardstick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same ceilings, from fewer loads: a read kernel that runs twice, and a product in fp32."""
    monkeypatch.setattr(probes, "find_spec", lambda _name: None)
    monkeypatch.setattr(ceilings, "make_native_probes", lambda _threads: None)
    yardsticks = ceilings.make_yardsticks("cpu", 1, num_bytes=2**20, shapes=((8, 16, 8),))
    assert [list(group.arms) for group in yardsticks.groups] == [
        ["numpy.max", "numpy.max again"],
        ["add"],
        ["numpy.matmul"],
    ]
    samples = ceilings.measure_quickly(yardsticks, Screen(quiet=True))
    found = findings.ceilings_of(samples)
    assert found.read_bytes_per_s > 0
    assert list(found.matmul_flops_per_s) == ["float32"]
    with pytest.raises(ValueError, match="product in bfloat16 needs PyTorch"):
        ceilings.make_yardsticks("cpu", 1, also_dtype="bfloat16", num_bytes=2**20)
    with pytest.raises(ValueError, match="--device cuda needs PyTorch"):
        ceilings.make_yardsticks("cuda", 1)


@pytest.mark.skipif(not library.available(), reason="needs the native core")
def test_the_native_core_is_a_yardstick_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyTorch too: then only it knows a rate of bf16 and of quantised weights."""
    monkeypatch.setattr(probes, "find_spec", lambda _name: None)
    yardsticks = ceilings.make_yardsticks(
        "cpu", 1, also_dtype="bfloat16", num_bytes=2**20, shapes=((8, 64, 32),)
    )
    samples = ceilings.measure_quickly(yardsticks, Screen(quiet=True))
    reads = {rate.arm for rate in findings.rates(samples) if rate.unit == "bytes"}
    assert reads >= {"native read", "native read, fetched ahead", "numpy.max"}
    assert set(findings.ceilings_of(samples).matmul_flops_per_s) == set(library.WEIGHTS)


EXECUTORS = [
    "eager",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not library.available(), reason="needs the native core"),
    ),
]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_real_engine_passes_the_gate_and_is_measured(
    executor: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(shape))
    yardsticks = ceilings.make_yardsticks("cpu", None, num_bytes=2**20, shapes=((8, 16, 8),))
    monkeypatch.setattr(kvcache, "make_yardsticks", lambda *_, **__: yardsticks)
    monkeypatch.setattr(kvcache, "FULL", replace(SCALE, gate=((1, 8), (20, 8))))
    monkeypatch.setattr(findings.AACheck, "is_miss", False)  # a busy machine must not fail a test
    arguments = ["kvcache", "--model", str(tmp_path / "tiny"), "--load-format", "dummy"]
    arguments += ["--executor", executor]
    code = runner.main([*arguments, "--device", "cpu", "--out", str(tmp_path / "results")])
    assert code == 0, capsys.readouterr().err
    (run,) = read_runs(only_file(tmp_path / "results"))[0]
    assert [c.context for c in concluding.kvcache_findings(run).single] == [1, 2, 4, 8, 16, 63]
    assert (run.header["model"], run.header["weights"]) == ("tiny", "random")
    assert run.header["executor"] == run.header["setup"]["engine"]["executor"] == executor
    assert machine.load_cached_ceilings("cpu") is not None
