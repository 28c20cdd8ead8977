"""Requests that come one after another: schedules, batches that wait, and the experiment on them.

Engines are real, over the tiny model's shape; their executor answers without a model and moves a
fake clock by costs that are known, and resting moves it, too. So what an engine does in real time
can be held to its simulation exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import greedy, prompt_of, tiny_engine
from hypothesis import given
from hypothesis import strategies as st
from test_bench_batching import TRUE, Clock, ClockedExecutor, options_in

from nanoserve.bench import measure as measuring
from nanoserve.bench import openloop, session
from nanoserve.bench.arrivals import (
    Schedule,
    gamma,
    make_schedule,
    poisson,
    read_schedules,
    replayed,
    trace_part,
    write_schedules,
)
from nanoserve.bench.arrivals_plots import (
    arrivals_plot,
    burst_plot,
    draw_arrivals,
    draw_burst,
    plotted_bars,
    queue_steps,
)
from nanoserve.bench.calibrate import twin_scheduler
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.experiments import arrivals
from nanoserve.bench.findings import arrivals as findings_module
from nanoserve.bench.findings.arrivals import (
    CHUNKED,
    STATIC,
    TIMEOUT,
    WAITING_ARMS,
    WHOLE,
    ArrivalsFindings,
    arrivals_findings,
    arrivals_numbers,
    arrivals_paragraph,
    carried_load,
    change_text,
    goodput_table,
    latency_table,
    notes_text,
    prediction_table,
    throughput_table,
)
from nanoserve.bench.metrics import RequestTimes, itl, ttft
from nanoserve.bench.openloop import Played, make_prompts, play
from nanoserve.bench.plots import plot_json, save
from nanoserve.bench.record import Run, read_runs
from nanoserve.bench.session import Screen
from nanoserve.bench.simulate import simulate_arrivals
from nanoserve.bench.traces import Length
from nanoserve.config import SchedulerConfig
from nanoserve.engine.engine import Engine

QUIET = Screen(quiet=True)
LENGTHS = [Length(prompt=3 + n % 5, output=1 + n % 4) for n in range(40)]


# --- schedules ------------------------------------------------------------------------------------


@given(st.floats(0.01, 1000.0), st.integers(0, 5), st.sampled_from(["poisson", "gamma"]))
def test_a_drawn_schedule_has_just_the_rate_that_was_asked_for(
    rate: float, seed: int, process: str
) -> None:
    def draw() -> Schedule:
        if process == "gamma":
            return gamma(LENGTHS, rate, cv=2.0, seed=seed, transform="t")
        return poisson(LENGTHS, rate, seed=seed, transform="t")

    schedule = draw()
    assert schedule.sha256 == draw().sha256
    times = [arrival.at_s for arrival in schedule.arrivals]
    assert times[0] == 0
    assert times == sorted(times)
    assert fmean(schedule.gaps_s) == pytest.approx(1 / rate, rel=1e-3, abs=1e-6)
    assert schedule.lengths == LENGTHS


def test_seeds_and_processes_give_other_schedules() -> None:
    made = [
        poisson(LENGTHS, 2.0, seed=1, transform=""),
        poisson(LENGTHS, 2.0, seed=2, transform=""),
        gamma(LENGTHS, 2.0, cv=1.0, seed=1, transform=""),
    ]
    assert len({schedule.sha256 for schedule in made}) == 3


def test_gamma_gaps_are_as_irregular_as_asked_for() -> None:
    many = [Length(prompt=1, output=1)] * 4000
    for cv in (0.3, 1.0, 3.0):
        assert gamma(many, 5.0, cv=cv, seed=1, transform="").gap_cv == pytest.approx(cv, rel=0.15)
    assert poisson(many, 5.0, seed=1, transform="").gap_cv == pytest.approx(1.0, rel=0.1)


def test_a_replay_keeps_the_gaps_of_the_trace_but_for_one_factor() -> None:
    part = trace_part("code", 1024, divisor=4)
    schedule = replayed(part, 60, 7.0)
    natural = [after - before for before, after in pairwise(part.times_s[:60])]
    factor = fmean(schedule.gaps_s) / fmean(natural)
    assert fmean(schedule.gaps_s) == pytest.approx(1 / 7.0, rel=1e-4)
    for gap, before in zip(schedule.gaps_s, natural, strict=True):
        assert gap == pytest.approx(factor * before, abs=2e-6)
    assert schedule.transform.startswith(
        "Azure LLM inference trace 2023, code, lengths / 4, filter"
    )
    assert f"gaps x {factor:.3g}" in schedule.transform
    assert schedule.seed is None


def test_requests_that_do_not_fit_are_left_out_of_a_trace() -> None:
    whole, part = trace_part("conv", 1024, divisor=1), trace_part("conv", 256, divisor=4)
    assert len(whole.lengths) == len(whole.times_s) == 1000
    assert max(length.total for length in part.lengths) <= 256
    assert "filtered to prompt + output <= 256" in part.transform
    with pytest.raises(ValueError, match="2000 requests were asked for, trace conv has 1000"):
        whole.first(2000)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"rate": 0.0}, "the rate must be more than 0 requests/s"),
        ({"rate": float("inf")}, "finite, got inf"),
        ({"cv": 0.0}, "--cv must be more than 0"),
        (
            {"process": "uniform"},
            "--process must be one of poisson, gamma, trace, constant, got 'uniform'",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(change: dict[str, Any], complaint: str) -> None:
    wanted: dict[str, Any] = {"process": "gamma", "rate": 1.0, "cv": 2.0} | change
    part = trace_part("conv", 256, divisor=4)
    with pytest.raises(ValueError, match=complaint):
        make_schedule(wanted["process"], part, 5, wanted["rate"], cv=wanted["cv"], seed=1)


def test_schedules_are_read_as_they_were_written(tmp_path: Path) -> None:
    part = trace_part("conv", 256, divisor=4)
    schedules = {
        process: make_schedule(process, part, 9, 3.0, cv=2.0, seed=4)  # type: ignore[arg-type]
        for process in ("poisson", "gamma", "trace", "constant")
    }
    path = tmp_path / "new" / "schedules.json"
    first = write_schedules(path, schedules)
    assert read_schedules(path) == schedules
    assert write_schedules(path, schedules) == first
    raw = json.loads(path.read_text())
    raw["poisson"]["arrivals"][3][0] += 1
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="the schedule was changed: its sha256 is"):
        read_schedules(path)
    for text in ("{", "[]", '{"a": 1}', '{"a": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"schedules.json is no file of schedules"):
            read_schedules(path)
    with pytest.raises(ValueError, match="is no file of schedules"):
        read_schedules(tmp_path / "none")


# --- a static batch that waits for company --------------------------------------------------------


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.s = 10.0

    def __call__(self) -> float:
        return self.s


def waiting_engine(now: Now, **options: Any) -> Engine:
    limits = {"max_num_seqs": 3, "batching": "static", "batching_timeout": 2.0}
    return tiny_engine(clock=now, **{**limits, **options})


def test_a_static_batch_waits_until_its_oldest_has_waited_long_enough() -> None:
    now = Now()
    engine = waiting_engine(now)
    engine.add("a", prompt_of(4), greedy(2))
    now.s = 11.0
    engine.add("b", prompt_of(5), greedy(2))
    assert engine.step() == []
    assert engine.has_unfinished
    assert engine.idle_s == pytest.approx(1.0)
    engine.scheduler.check_integrity()
    now.s = 12.0
    assert engine.idle_s == 0
    assert {delta.request_id for delta in engine.step()} == {"a", "b"}
    assert engine.idle_s == 0  # it runs: there is nothing to wait for
    engine.step()
    assert not engine.has_unfinished
    assert engine.idle_s == 0


def test_a_static_batch_that_is_full_does_not_wait() -> None:
    now = Now()
    engine = waiting_engine(now)
    for name in "abcd":
        engine.add(name, prompt_of(4), greedy(1))
    assert {delta.request_id for delta in engine.step()} == {"a", "b", "c"}
    assert engine.idle_s == 2.0  # the fourth waits for its own company
    assert engine.step() == []
    now.s += 2.0
    assert [delta.request_id for delta in engine.step()] == ["d"]


def test_the_wait_counts_from_the_arrival_and_ends_with_a_deadline() -> None:
    now = Now()
    engine = waiting_engine(now)
    engine.add("late", prompt_of(4), greedy(1), arrival_s=8.5)
    assert engine.idle_s == pytest.approx(0.5)
    engine.add("hasty", prompt_of(4), greedy(1), timeout_s=0.25)
    assert engine.idle_s == pytest.approx(0.25)
    now.s += 0.25
    (delta,) = engine.step()
    assert (delta.request_id, str(delta.finish_reason)) == ("hasty", "timeout")
    assert engine.idle_s == pytest.approx(0.25)


def test_without_a_timeout_nothing_is_held_back() -> None:
    for batching in ("static", "continuous"):
        engine = waiting_engine(Now(), batching=batching, batching_timeout=None)
        engine.add("a", prompt_of(4), greedy(1))
        assert engine.idle_s == 0
        assert len(engine.step()) == 1


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"batching_timeout": 1.0}, "--batching-timeout 1 needs --batching static, got .* contin"),
        ({"batching": "static", "batching_timeout": -1.0}, "--batching-timeout must be a finite"),
        ({"batching": "static", "batching_timeout": "1"}, "must be a number of seconds"),
        ({"batching": "static", "batching_timeout": 10**400}, "--batching-timeout must be a fin"),
    ],
)
def test_a_timeout_that_makes_no_sense_is_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SchedulerConfig(**values)


# --- the open loop --------------------------------------------------------------------------------


def put_clock(patch: pytest.MonkeyPatch) -> Clock:
    """Time that passes where somebody computes, or rests (for a moment at least)."""
    fake = Clock()
    patch.setattr(measuring, "perf_counter_ns", fake)
    patch.setattr(measuring, "sleep", lambda seconds: fake.sleep(seconds + 1e-9))
    return fake


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return put_clock(monkeypatch)


def clocked(clock: Clock, **options: Any) -> Engine:
    engine = tiny_engine(clock=clock.seconds, enable_prefix_caching=False, **options)
    engine.executor = ClockedExecutor(engine.executor, clock)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 4096},
        {"batching": "static", "max_num_batched_tokens": 4096},
        {"batching": "static", "batching_timeout": 0.02, "max_num_batched_tokens": 4096},
    ],
)
@pytest.mark.parametrize("rate", [20.0, 200.0])
def test_an_engine_serves_a_schedule_just_as_it_was_simulated(
    options: dict[str, Any], rate: float, clock: Clock
) -> None:
    part = trace_part("conv", 256, divisor=8)
    schedule = gamma(part.first(30), rate, cv=3.0, seed=3, transform="")
    engine = clocked(clock, max_num_seqs=4, **options)
    clock.sleep(5.0)  # a schedule may begin at any time
    played = play(engine, schedule, make_prompts(engine, schedule))
    simulated = simulate_arrivals(twin_scheduler(engine), schedule, TRUE)
    for real, predicted in zip(played.times(), simulated, strict=True):
        assert real.arrival_s == predicted.arrival_s
        assert real.first_scheduled_s == pytest.approx(predicted.first_scheduled_s, abs=1e-6)
        assert real.token_s == pytest.approx(predicted.token_s, abs=1e-6)
    assert [len(ids) for ids in played.token_ids] == [n.output for n in schedule.lengths]
    assert max(played.lags_s) == pytest.approx(0, abs=1e-6)
    assert len(played.lags_s) == len(schedule.arrivals)


def test_latencies_count_from_the_schedule_and_a_late_sender_is_found_out(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = gamma(LENGTHS[:8], 5.0, cv=0.1, seed=1, transform="")
    engine = clocked(clock, max_num_seqs=8)
    punctual = play(engine, schedule, make_prompts(engine, schedule))
    monkeypatch.setattr(openloop, "rest", lambda pause_s: clock.sleep(pause_s + 0.01))
    late = play(engine, schedule, make_prompts(engine, schedule))
    assert max(punctual.lags_s) < 1e-6
    assert max(late.lags_s) == pytest.approx(0.01, abs=1e-6)
    for before, after in zip(punctual.times()[1:], late.times()[1:], strict=True):
        assert ttft(after) == pytest.approx(ttft(before) + 0.01, abs=1e-6)


# --- the experiment -------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "slots": 4,
    "divisor": 8,
    "loads": (0.3, 0.5, 0.8, 1.1),
    "replays": ("code",),
    "cell_s": 0.5,
    "min_requests": 36,
    "max_requests": 40,
    "saturating_requests": 32,
    "repetitions": 1,
    "longest": 96,
}


def put_engines(
    patch: pytest.MonkeyPatch, clock: Clock, *, static_token: int = 0, **scale: Any
) -> None:
    """Clocked engines in the experiment; static ones draw `static_token`."""

    def open_engine(*args: Any, **kwargs: Any) -> Engine:
        engine = session.open_engine(*args, **kwargs)
        token = static_token if kwargs.get("batching") == "static" else 0
        engine.executor = ClockedExecutor(engine.executor, clock, token)
        engine.clock = clock.seconds
        return engine

    clock.tick_ns = 200
    patch.setattr(arrivals, "open_engine", open_engine)
    patch.setattr(arrivals, "FULL", replace(arrivals.FULL, **{**SMALL, **scale}))


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., None]:
    def prepare(**changes: Any) -> None:
        put_engines(monkeypatch, clock, **changes)

    return prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """One run for all that is concluded from it, with no machine's own measurements in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        put_engines(patch, put_clock(patch))
        return arrivals.measure(options_in(folder), QUIET)


@pytest.fixture(scope="module")
def found(run: Run) -> ArrivalsFindings:
    return arrivals_findings(run)


def test_the_experiment_measures_every_arm_on_one_schedule(
    run: Run, found: ArrivalsFindings, folder: Path
) -> None:
    assert run.is_complete
    assert [cell.load for cell in found.swept] == list(SMALL["loads"])
    assert [cell.schedule.process for cell in found.others] == ["gamma", "trace"]
    (path,) = folder.glob("*/arrivals-*-schedules.json")
    written = read_schedules(path)
    for cell in found.cells:
        assert written[cell.name] == cell.schedule
        assert cell.schedule.rate == pytest.approx(
            cell.load * found.saturation["code" if "code" in cell.name else "conv"], rel=1e-5
        )
        assert set(cell.arms) == set(WAITING_ARMS)
    for sample in run.final_samples:
        assert (
            sample.labels["schedule_sha256"]
            == run.header["cells"][sample.group]["schedule"]["sha256"]
        )


def test_predictions_are_stored_before_and_hold_on_a_machine_without_noise(
    found: ArrivalsFindings,
) -> None:
    errors = []
    for cell in found.cells:
        for arm in cell.arms.values():
            measured = sorted(arm.ttfts)
            middle = (measured[(len(measured) - 1) // 2] + measured[len(measured) // 2]) / 2
            errors.append(abs(arm.predicted["ttft p50"] / middle - 1))
    assert sorted(errors)[len(errors) // 2] < 0.05  # near saturation a little becomes a lot
    assert "The simulation, stored before, is off by" in arrivals_paragraph(found)


def test_metrics_are_those_of_the_requests(run: Run, found: ArrivalsFindings) -> None:
    cell = found.main
    assert cell.load == 0.8
    arm = cell.arms[CHUNKED]
    good = [
        t <= found.objectives.max_ttft_s and (g or 0.0) <= found.objectives.max_tpot_s
        for t, g in zip(arm.ttfts, (findings_module.tpot(r) for r in arm.requests), strict=True)
    ]
    assert arm.goodput.share == pytest.approx(sum(good) / cell.num_requests)
    assert "itl p95" in arm.gaps
    assert len(itl(arm.requests)) == sum(n.output - 1 for n in cell.schedule.lengths)
    assert min(arm.queue_delays) >= 0


def test_more_load_is_worse_and_static_is_worst(found: ArrivalsFindings) -> None:
    first, last = found.swept[0], found.swept[-1]
    for arm in WAITING_ARMS:
        assert max(last.arms[arm].ttfts) > max(first.arms[arm].ttfts)
    assert fmean(last.arms[STATIC].ttfts) > fmean(last.arms[CHUNKED].ttfts)
    assert fmean(first.arms[TIMEOUT].queue_delays) > fmean(first.arms[STATIC].queue_delays)


def test_tables_name_every_arm_and_the_transform(found: ArrivalsFindings) -> None:
    for table in (latency_table, goodput_table, throughput_table, prediction_table):
        heads, rows = table(found)
        assert {len(row) for row in rows} == {len(heads)}
    heads, rows = latency_table(found)
    assert len(rows) == len(found.cells) * len(WAITING_ARMS)
    assert all(row[heads.index("p95")] == "-" for row in rows)  # 72 requests are needed
    assert all(row[heads.index("p90")] != "-" for row in rows)
    text = notes_text(found)
    assert "lengths / 8" in text
    assert "filtered to prompt + output <= 256" in text
    assert "code replayed, load 0.7 = Azure LLM inference trace 2023, code" in text
    assert "which does not matter" in text
    assert set(arrivals_numbers(found)) >= {"static_ttft_ms", "chunked_ttft_ms"}


def test_a_sender_that_lags_is_said_to(found: ArrivalsFindings) -> None:
    cell = found.cells[0]
    arms = {name: replace(arm, lag_mean_s=1.0) for name, arm in cell.arms.items()}
    late = replace(found, cells=(replace(cell, arms=arms), *found.cells[1:]))
    assert "too much to trust" in notes_text(late)


@pytest.mark.parametrize(
    "shares, expected", [((1.0, 0.95, 0.2), 0.5), ((0.5, 1.0, 1.0), None), ((1.0, 0.1, 1.0), 0.3)]
)
def test_a_load_is_carried_only_if_all_below_it_are(
    found: ArrivalsFindings, shares: tuple[float, ...], expected: float | None
) -> None:
    cells = []
    for cell, share in zip(found.swept, shares, strict=False):
        arm = cell.arms[WHOLE]
        changed = replace(arm, goodput=replace(arm.goodput, share=share))
        cells.append(replace(cell, arms={**cell.arms, WHOLE: changed}))
    assert carried_load(replace(found, cells=tuple(cells)), WHOLE) == expected
    assert f"{WHOLE} {'not one' if expected is None else f'up to {expected:g}'}" in (
        arrivals_paragraph(replace(found, cells=(*cells, *found.others)))
    )


@pytest.mark.parametrize(
    "after, noise, expected",
    [
        (0.05, 0.1, "falls from 100 to 50.0 ms"),
        (0.2, 0.1, "rises from 100 to 200 ms"),
        (0.105, 0.1, "goes from 100 to 105 ms, which may be noise"),
        (0.05, None, "goes from 100 to 50.0 ms, which may be noise"),
    ],
)
def test_no_direction_is_claimed_below_the_noise(
    after: float, noise: float | None, expected: str
) -> None:
    assert change_text(0.1, after, noise) == expected


def test_a_run_that_is_resumed_keeps_its_schedules(
    house: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house(loads=(0.5,), cv=None, replays=())
    real, count = arrivals.play, 0

    def interrupted(*args: Any) -> Played:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(arrivals, "play", interrupted)
    with pytest.raises(KeyboardInterrupt):
        arrivals.measure(options_in(tmp_path), QUIET)
    (path,) = tmp_path.glob("*/arrivals-*.jsonl")
    (begun,) = read_runs(path)[0]
    run = arrivals.measure(options_in(tmp_path, resume=True), QUIET)
    assert run.run_id == begun.run_id
    assert run.is_complete
    assert run.header["setup"]["saturation"] == begun.header["setup"]["saturation"]


def test_an_arm_that_writes_other_tokens_voids_the_run(
    house: Callable[..., None], tmp_path: Path
) -> None:
    house(static_token=1)
    with pytest.raises(VoidError, match=r"the gate failed, nothing is recorded: conv at once"):
        arrivals.measure(options_in(tmp_path), QUIET)
    assert not list(tmp_path.glob("*/*.jsonl"))


def test_a_timed_arm_is_held_to_the_tokens_of_the_first() -> None:
    schedule = poisson(LENGTHS[:2], 5.0, seed=1, transform="")
    cell = arrivals.Cell(name="c", load=0.5, trace="conv", schedule=schedule, is_swept=True)

    def written(*texts: list[int]) -> Any:
        return SimpleNamespace(token_ids=list(texts))

    expected = arrivals.Expected(is_exact=True)
    expected.check(cell, STATIC, written([5], [6, 7]))
    expected.check(cell, WHOLE, written([5], [6, 7]))
    with pytest.raises(VoidError, match="c: request 1 got other tokens from continuous"):
        expected.check(cell, WHOLE, written([5], [6, 8]))
    with pytest.raises(VoidError, match="c, static: request 1 got 1 tokens of 2"):
        expected.check(cell, STATIC, written([5], [6]))
    half = arrivals.Expected(is_exact=False)
    half.check(cell, STATIC, written([5], [6, 7]))
    half.check(cell, WHOLE, written([5], [6, 8]))


def test_the_cells_are_those_of_the_question() -> None:
    for scale in (arrivals.FULL, arrivals.QUICK):
        parts = {name: trace_part(name, 1024, divisor=scale.divisor) for name in ("conv", "code")}
        saturation = dict.fromkeys(parts, 8.0)
        cells = arrivals.make_cells(parts, saturation, scale, seed=1)  # type: ignore[arg-type]
        assert [cell.load for cell in cells if cell.is_swept] == list(scale.loads)
        counts = [len(cell.schedule.arrivals) for cell in cells]
        assert min(counts) >= scale.min_requests
        assert max(counts) <= scale.max_requests
    assert arrivals.FULL.loads == (0.3, 0.5, 0.7, 0.85, 0.95, 1.1)


# --- pictures -------------------------------------------------------------------------------------


def request(arrival: float, first: float, end: float) -> RequestTimes:
    return RequestTimes(arrival_s=arrival, first_scheduled_s=first, token_s=(end,))


def test_the_queue_is_who_has_come_and_has_not_begun() -> None:
    requests = [request(0.0, 0.0, 3.0), request(1.0, 3.0, 4.0), request(2.0, 3.0, 5.0)]
    assert queue_steps(requests)[-4:] == [[1.0, 1.0], [2.0, 2.0], [3.0, 1.0], [3.0, 0.0]]


def test_slots_are_taken_from_below_and_a_static_batch_keeps_its_own() -> None:
    requests = [request(0, 0, 2), request(0, 0, 5), request(1, 2, 4), request(1, 5, 6)]
    assert plotted_bars(requests, is_static=False) == [
        [0, 0, 2, 2],
        [1, 0, 5, 5],
        [0, 2, 4, 4],
        [0, 5, 6, 6],
    ]
    batches = [request(0, 0, 2), request(0, 0, 5), request(1, 5, 7), request(1, 5, 6)]
    assert plotted_bars(batches, is_static=True) == [
        [0, 0, 2, 5],
        [1, 0, 5, 5],
        [0, 5, 7, 7],
        [1, 5, 6, 7],
    ]


def test_pictures_are_drawn_from_plain_data_alone(found: ArrivalsFindings, tmp_path: Path) -> None:
    for stem, data, draw in (
        ("arrivals", arrivals_plot(found), draw_arrivals),
        ("burst", burst_plot(found), draw_burst),
    ):
        plain = json.loads(plot_json(data))
        assert plain == data
        assert all(path.stat().st_size for path in save(plain, tmp_path / stem, draw))
    data = burst_plot(found)
    first, last = data["window_s"]
    assert 0 <= first < last
    assert max(bar[0] for bars in data["timelines"].values() for bar in bars) < SMALL["slots"]
