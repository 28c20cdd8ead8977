"""The busy neighbour: a real process that is never left behind, and findings on a fake clock.

Where speeds matter executors answer without a model and move the clock by what is known beforehand,
slower while a fake neighbour is there.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_bench import FakeClock
from helpers import tiny_model

from nanoserve.bench import formats, runner, session
from nanoserve.bench import measure as measuring
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.experiments import neighbour
from nanoserve.bench.experiments.batch import prompts_of, taken_step
from nanoserve.bench.findings.neighbour import (
    BESIDE,
    IDLE,
    STEPS,
    NeighbourFindings,
    mean_table,
    neighbour_findings,
    neighbour_numbers,
    neighbour_paragraph,
    step_name,
    tail_table,
)
from nanoserve.bench.measure import Rules, Stopwatch
from nanoserve.bench.metrics import Interval
from nanoserve.bench.proxies import SilentExecutor
from nanoserve.bench.record import Run
from nanoserve.bench.report import Results, told_runs
from nanoserve.bench.session import Options, Screen
from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.engine import Engine
from nanoserve.engine.executor import Executor
from nanoserve.kernels.cpu import library

QUIET = Screen(quiet=True)
NUM_STEPS = 64
FAST = Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6)
SCALE = neighbour.Scale(
    formats=("float32", "bfloat16", "int8"), num_steps=NUM_STEPS, context=16, rules=FAST
)
IDLE_S = {"float32": 8e-3, "bfloat16": 4e-3, "int8": 2e-3}
SLOWER, SELDOM, MUCH_SLOWER = 1.4, 32, 5.0
"""Beside the loop a step takes `SLOWER` times as long, every `SELDOM`th `MUCH_SLOWER` times."""


@dataclass
class FakeNeighbour:
    """Whether it is there. `changes_tokens`: a fault that the gate must see."""

    is_busy: bool = False
    changes_tokens: bool = False

    @contextmanager
    def busy_loop(self) -> Iterator[None]:
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False


class BesideExecutor(SilentExecutor):
    """No model: a step takes what its format does, longer while the neighbour is there."""

    def __init__(
        self, inner: Executor, clock: FakeClock, neighbour: FakeNeighbour, name: str
    ) -> None:
        super().__init__(inner)
        self.clock, self.neighbour, self.name = clock, neighbour, name
        self.num_beside = 0

    def execute(self, batch: StepBatch) -> StepResult:
        self.clock.sleep(IDLE_S[self.name] * self.slowdown())
        result = super().execute(batch)
        moved = self.neighbour.is_busy and self.neighbour.changes_tokens
        return replace(result, token_ids=result.token_ids + moved)

    def slowdown(self) -> float:
        if not self.neighbour.is_busy:
            return 1.0
        self.num_beside += 1
        return MUCH_SLOWER if self.num_beside % SELDOM == 0 else SLOWER

    def describe(self) -> dict[str, str]:
        return {"executor": "native", "kernels": "fake", "threads": "2"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNeighbour:
    """Engines of three formats on a fake clock, on two cores, and a neighbour that is a flag."""
    clock, beside = FakeClock(), FakeNeighbour()

    def open_engine(options: Options, *args: Any, **kwargs: Any) -> Engine:
        plain = replace(options, executor="eager", dtype="float32", quantization=None)
        engine = session.open_engine(plain, *args, **{**kwargs, "donor": None})
        name = options.quantization or options.dtype
        engine.executor = BesideExecutor(engine.executor, clock, beside, name)
        return engine

    monkeypatch.setattr(measuring, "perf_counter_ns", clock)
    monkeypatch.setattr(measuring, "sleep", clock.sleep)
    monkeypatch.setattr(formats, "open_engine", open_engine)
    monkeypatch.setattr(neighbour, "busy_loop", beside.busy_loop)
    monkeypatch.setattr(neighbour, "num_granted_cores", lambda: 2)
    monkeypatch.setattr(neighbour, "FULL", SCALE)
    return beside


def options_in(folder: Path, **values: Any) -> Options:
    return Options(out=folder, model=str(tiny_model().folder), device="cpu", seed=1, **values)


@pytest.fixture
def run(fake: FakeNeighbour, tmp_path: Path) -> Run:
    return neighbour.measure(options_in(tmp_path), QUIET)


# --- findings -------------------------------------------------------------------------------------


def test_means_and_tails_are_over_all_steps(run: Run) -> None:
    findings = neighbour_findings(run)
    mean = (SLOWER * (SELDOM - 1) + MUCH_SLOWER) / SELDOM
    assert [point.name for point in findings.points] == list(IDLE_S)
    assert findings.num_steps == FAST.max_rounds * NUM_STEPS
    for point in findings.points:
        assert point.idle.median == pytest.approx(IDLE_S[point.name])
        assert point.slowdown == pytest.approx(mean, rel=1e-3)
        assert point.by_round.median == pytest.approx(mean, rel=1e-3)
        assert point.tail == pytest.approx(MUCH_SLOWER, rel=1e-3)
        assert point.idle_tail == pytest.approx(1.0)
        assert (point.misses_mean, point.misses_tail) == (False, True)
    for table, verdict in ((mean_table, "1.7x: reached"), (tail_table, "4x: missed")):
        heads, rows = table(findings)
        assert {len(row) for row in rows} == {len(heads)}
        assert [row[-1] for row in rows] == [verdict] * 3
    assert neighbour_numbers(findings)["int8.p99"] == "5.00x"


def test_the_prediction_is_the_fair_share_and_stored_before(run: Run) -> None:
    assert run.header["num_cores"] == 2
    assert run.header["predictions"] == {
        name: {"num_threads": 2, "slowdown": 1.5} for name in IDLE_S
    }
    text = neighbour_paragraph(neighbour_findings(run))
    assert "A fair share of 2 cores for 2 threads and the loop" in text
    assert "would make it 1.50x (off by: float32 -1%, bfloat16 -1%, int8 -1%)" in text


@pytest.mark.parametrize(
    "threads, cores, expected",
    [(2, 2, 1.5), (1, 2, 1.0), (1, 1, 2.0), (4, 2, 1.25), (4, 8, 1.0), (8, 8, 1.125)],
)
def test_a_fair_share(threads: int, cores: int, expected: float) -> None:
    assert neighbour.fair_share(threads, cores) == pytest.approx(expected)


def test_every_step_is_a_part_of_its_record(run: Run) -> None:
    parts = {STEPS, *map(step_name, range(NUM_STEPS))}
    for sample in run.final_samples:
        assert set(sample.seconds) == parts
        assert sample.seconds[STEPS] == pytest.approx(
            sum(seconds for part, seconds in sample.seconds.items() if part != STEPS)
        )
    arms = {sample.arm for sample in run.final_samples}
    assert arms == {IDLE, neighbour.AA.same_arm, BESIDE}


def changed(findings: NeighbourFindings, **values: Any) -> NeighbourFindings:
    points = tuple(replace(point, **values) for point in findings.points)
    return replace(findings, points=points)


def test_sentences_hold_in_both_directions(run: Run) -> None:
    findings = neighbour_findings(run)
    idle = findings.points[0].idle
    good = neighbour_paragraph(
        changed(findings, idle=idle, idle_mean_s=1.0, beside_mean_s=1.7, beside_p99_s=0.03)
    )
    assert "The mean is to be at most 1.7x: reached by all." in good
    assert "The 99th percentile is to be at most 4x: reached by all." in good
    bad = neighbour_paragraph(
        changed(findings, idle=idle, idle_mean_s=1.0, beside_mean_s=1.71, beside_p99_s=0.033)
    )
    assert "The mean is to be at most 1.7x: missed by float32, bfloat16, int8." in bad
    assert "The 99th percentile is to be at most 4x: missed by float32, bfloat16, int8." in bad
    first, *others = changed(findings, idle_mean_s=1.0, beside_mean_s=1.6).points
    mixed = replace(findings, points=(first, *(replace(p, beside_mean_s=1.9) for p in others)))
    assert "missed by bfloat16, int8." in neighbour_paragraph(mixed)
    faster = neighbour_paragraph(changed(findings, idle_mean_s=1.0, beside_mean_s=0.9))
    assert "against the idle mean: float32 0.90x" in faster


def test_a_goal_inside_the_interval_is_not_decided(run: Run) -> None:
    findings = neighbour_findings(run)
    assert "to be sure of that" not in neighbour_paragraph(findings)
    first, *others = findings.points
    for interval in (Interval(low=1.6, high=1.8), None):
        unsure = replace(first, by_round=replace(first.by_round, interval=interval))
        text = neighbour_paragraph(replace(findings, points=(unsure, *others)))
        assert "Rounds differ too much here to be sure of that in float32." in text


def test_of_a_tail_nobody_saw_nothing_is_said(run: Run) -> None:
    findings = neighbour_findings(run)
    few = replace(changed(findings, idle_p99_s=None, beside_p99_s=None), num_steps=72)
    text = neighbour_paragraph(few)
    assert "nothing is said: that needs 368 steps, and there are 72." in text
    assert "99th percentile is to be" not in text
    assert [row[-4:] for row in tail_table(few)[1]] == [["-"] * 4] * 3
    assert not [name for name in neighbour_numbers(few) if name.endswith("p99")]


def test_quick_runs_see_no_tail_and_full_ones_do() -> None:
    def fewest(scale: neighbour.Scale) -> int:
        return scale.rules.min_rounds * scale.num_steps

    assert fewest(neighbour.QUICK) < 368 <= fewest(neighbour.FULL)


def test_a_format_that_cannot_run_is_a_gap_with_its_reason(run: Run) -> None:
    findings = replace(neighbour_findings(run), gaps={"int8": "no such thing"})
    assert "There are no arms for int8: no such thing." in neighbour_paragraph(findings)


def test_it_is_told_beyond_the_nine_questions(run: Run) -> None:
    assert runner.EXPERIMENTS["neighbour"].show is runner.show_chapter
    told = told_runs(CHAPTERS["neighbour"], [run])
    (section,) = Results(chapters={"neighbour": told}).sections
    assert section.title == "What does a busy neighbour cost?"


def test_other_tokens_beside_the_loop_fail_the_gate(fake: FakeNeighbour, tmp_path: Path) -> None:
    fake.changes_tokens = True
    with pytest.raises(VoidError, match="float32, token 0: idle emits 0, beside a busy loop 1"):
        neighbour.measure(options_in(tmp_path), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


# --- bad requests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, value",
    [("--quantization", "int8"), ("--kv-cache-dtype", "int8"), ("--dtype", "bfloat16")],
)
def test_a_format_is_not_its_to_be_given(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["neighbour", option, value, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"neighbour has number formats of its own: leave out {option}" in error
    assert error.count("\n") == 1


def test_another_executor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs on eager: use --device cpu --executor native"):
        neighbour.measure(options_in(tmp_path, executor="eager"), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


# --- the neighbour itself -------------------------------------------------------------------------


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "SPIN_UP_S", 0.0)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_proc
def test_the_loop_runs_inside_and_is_gone_after(no_rest: None) -> None:
    with neighbour.busy_loop() as process:
        assert is_there(process.pid)
        limit = resource.prlimit(process.pid, resource.RLIMIT_CPU)
        assert limit == (neighbour.MAX_LOOP_S, neighbour.MAX_LOOP_S)
    assert not is_there(process.pid)
    assert process.returncode == -9


@needs_proc
def test_a_lower_limit_on_processor_time_is_kept() -> None:
    """Nobody but root could raise it, and the loop would not begin."""
    limited = f"import resource as r; r.setrlimit(r.RLIMIT_CPU, (30, 30)); {neighbour.LOOP}"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", limited], stdout=subprocess.PIPE
    ) as process:
        neighbour.wait_until_busy(process)
        assert resource.prlimit(process.pid, resource.RLIMIT_CPU) == (30, 30)
        process.kill()


@needs_proc
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_loop_is_not_left_behind(error: type[BaseException], no_rest: None) -> None:
    with pytest.raises(error), neighbour.busy_loop() as process:
        raise error
    process.wait(timeout=5)
    assert not is_there(process.pid)


@needs_proc
def test_an_interrupt_while_it_spins_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def interrupted(process: Any) -> None:
        begun.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(neighbour, "wait_until_busy", interrupted)
    with pytest.raises(KeyboardInterrupt), neighbour.busy_loop():
        pass
    begun[0].wait(timeout=5)
    assert not is_there(begun[0].pid)


def test_a_loop_that_ended_by_itself_voids_the_run(no_rest: None) -> None:
    def end(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(timeout=5)

    with pytest.raises(VoidError, match="by itself"), neighbour.busy_loop() as process:
        end(process)


def test_a_loop_that_does_not_begin_voids_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "LOOP", "raise SystemExit(3)")
    with pytest.raises(VoidError, match="did not begin: exit code 3"), neighbour.busy_loop():
        pass


@pytest.mark.skipif(not library.available(), reason="needs the native core, not built here")
@pytest.mark.parametrize("around", [neighbour.quiet, neighbour.busy_loop])
def test_native_steps_are_timed_one_by_one(around: Callable[[], Any], no_rest: None) -> None:
    options = Options(model=str(tiny_model().folder), device="cpu", executor="native")
    engine = session.open_engine(options, "auto", layout="contiguous", max_num_seqs=1)
    session.require_native(engine, "neighbour")
    step, _ = taken_step(engine, prompts_of(engine, 1, 16), 0)
    watch = Stopwatch(engine.executor.synchronize)
    neighbour.timed_steps(engine, step, 5, around)(watch)
    assert list(watch.seconds) == [*map(step_name, range(5)), STEPS]
    assert all(seconds > 0 for seconds in watch.seconds.values())
