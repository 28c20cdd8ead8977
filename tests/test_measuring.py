"""What every number rests on: statistics, the protocol of timing, records, the fingerprint.

Time is a fake clock, so nothing here depends on how fast anything really is.
"""

from __future__ import annotations

import errno
import gc
import getpass
import json
import math
import os
import platform
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_bench import FakeClock, nothing, sample
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.bench import machine, measure, metrics, record
from nanoserve.bench.measure import Group, Rounds, Rules, Sample, Stopwatch
from nanoserve.bench.metrics import Interval, RequestTimes
from nanoserve.bench.record import Journal, read_runs
from nanoserve.planner import hardware
from nanoserve.planner.measured import kept_key
from nanoserve.planner.steptime import Ceilings

DEV_FULL = Path("/dev/full")
CEILINGS = Ceilings(read_bytes_per_s=10e9, matmul_flops_per_s={"float32": 1e11}, dispatch_s=1e-6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(measure, "perf_counter_ns", fake)
    return fake


# --- statistics -----------------------------------------------------------------------------------


def binomial_tail(n: int, rank: int) -> float:
    """P(X <= rank) for X ~ Binomial(n, 1/2)."""
    return sum(math.comb(n, k) for k in range(rank + 1)) / 2**n


@pytest.mark.parametrize("n, low, high", [(6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_the_interval_of_the_median_has_the_published_ranks(n: int, low: int, high: int) -> None:
    interval = metrics.median_interval([float(k) for k in range(1, n + 1)])
    assert interval == Interval(low=low, high=high)


@pytest.mark.parametrize("n", range(6, 60))
def test_the_interval_is_the_narrowest_that_covers(n: int) -> None:
    interval = metrics.median_interval([float(k) for k in range(1, n + 1)])
    assert interval is not None
    rank = int(interval.low)
    assert interval.high == n + 1 - rank
    assert 1 - 2 * binomial_tail(n, rank - 1) >= 0.95
    assert 1 - 2 * binomial_tail(n, rank) < 0.95


@pytest.mark.parametrize("n", range(1, 6))
def test_too_few_samples_have_no_interval(n: int) -> None:
    assert metrics.median_interval([1.0] * n) is None


@pytest.mark.parametrize("draw", ["lognormvariate", "gauss", "uniform"])
def test_the_interval_covers_whatever_the_distribution(draw: str) -> None:
    generator = random.Random(7)
    center = {"lognormvariate": 1.0, "gauss": 0.0, "uniform": 0.5}[draw]
    arguments = {"lognormvariate": (0.0, 1.5), "gauss": (0.0, 1.0), "uniform": (0.0, 1.0)}[draw]
    covered = 0
    for _ in range(1000):
        samples = [getattr(generator, draw)(*arguments) for _ in range(15)]
        interval = metrics.median_interval(samples)
        covered += interval is not None and center in interval
    assert 0.945 <= covered / 1000 <= 0.985  # exactly 0.9648 for n = 15


@pytest.mark.parametrize(
    "share, expected", [(0.5, 6), (0.9, 36), (0.95, 72), (0.99, 368), (0.1, 36)]
)
def test_percentiles_need_enough_samples(share: float, expected: int) -> None:
    assert metrics.min_samples(share) == expected
    assert metrics.supported_percentile([1.0] * (expected - 1), share) is None
    assert metrics.supported_percentile([1.0] * expected, share) == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_are_numpys(samples: list[float], share: float) -> None:
    expected = float(np.percentile(samples, share * 100))
    assert metrics.percentile(samples, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="of nothing"):
        metrics.percentile([], 0.5)


@pytest.mark.parametrize("width, mark", [(0.0, ""), (0.15, ""), (0.25, "noisy"), (0.6, "invalid")])
def test_spread_marks_a_cell(width: float, mark: str) -> None:
    """Five evenly spread samples: the quartiles are half the range apart."""
    samples = [1 + width * (k - 2) / 4 for k in range(5)]
    described = metrics.describe(samples)
    assert described.spread == pytest.approx(width / 2)
    assert described.mark == mark


FAST = RequestTimes(arrival_s=1.0, first_scheduled_s=1.5, token_s=(2.0, 2.5, 3.5))
SLOW = RequestTimes(arrival_s=0.0, first_scheduled_s=3.0, token_s=(5.0,))


def test_metrics_of_a_request() -> None:
    assert metrics.queue_delay(FAST) == 0.5
    assert metrics.ttft(FAST) == 1.0
    assert metrics.tpot(FAST) == 0.75
    assert metrics.e2e(FAST) == 2.5
    assert metrics.tpot(SLOW) is None


def test_metrics_of_many_requests() -> None:
    assert metrics.itl([FAST, SLOW]) == [0.5, 1.0]
    assert metrics.throughput_out([FAST, SLOW]) == 4 / 5
    good = metrics.goodput([FAST, SLOW], num_offered=4, max_ttft_s=1.0, max_tpot_s=1.0)
    assert (good.requests_per_s, good.share) == (1 / 5, 1 / 4)
    assert metrics.goodput([], num_offered=3, max_ttft_s=1.0, max_tpot_s=1.0).share == 0.0
    with pytest.raises(ValueError, match="at least the 2 served: 1"):
        metrics.goodput([FAST, SLOW], num_offered=1, max_ttft_s=1.0, max_tpot_s=1.0)


def test_rates_against_ceilings() -> None:
    assert metrics.mbu(10e9, step_s=1.0, read_bytes_per_s=20e9) == 0.5
    assert metrics.computed_over_asked(12, 8) == 1.5


def test_a_request_without_tokens_has_no_latency() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        RequestTimes(arrival_s=0.0, first_scheduled_s=0.0, token_s=())


# --- measuring ------------------------------------------------------------------------------------


def test_the_stopwatch_synchronises_before_each_reading(clock: FakeClock) -> None:
    """Work still queued before the start is not counted, work queued inside is."""
    queued = [5.0]

    def synchronize() -> None:
        while queued:
            clock.sleep(queued.pop())

    watch = Stopwatch(synchronize)
    assert watch.time("step", lambda: queued.append(2.0) or "result") == "result"
    watch.time("step", lambda: queued.append(1.0))
    assert watch.seconds == {"step": 3.0}


def arms_that_log(log: list[str], *names: str) -> dict[str, measure.Arm]:
    def arm(name: str) -> measure.Arm:
        def run(watch: Stopwatch) -> None:
            log.append(name)
            watch.time("step", nothing)

        return run

    return {name: arm(name) for name in names}


def two_groups(log: list[str]) -> list[Group]:
    return [
        Group(name="g", arms=arms_that_log(log, "ga", "gb", "gc"), labels={"context": 3}),
        Group(name="h", arms=arms_that_log(log, "ha", "hb")),
    ]


ROUNDS = {"g": Rounds(dropped=2, timed=4), "h": Rounds(dropped=0, timed=3)}


def measured(log: list[str], seed: int, **options: Any) -> list[Sample]:
    groups = measure.run_rounds(two_groups(log), ROUNDS, seed=seed, synchronize=nothing, **options)
    return [sample for group in groups for sample in group]


def test_every_arm_runs_once_a_round_and_only_the_first_rounds_are_dropped() -> None:
    samples = measured([], seed=1)
    for arm, rounds in (("ga", 6), ("gb", 6), ("gc", 6), ("ha", 3), ("hb", 3)):
        assert sorted(s.round for s in samples if s.arm == arm) == list(range(rounds))
    assert {s.round for s in samples if s.dropped} == {0, 1}
    assert {s.group for s in samples if s.dropped} == {"g"}
    assert all(s.labels == ({"context": 3} if s.group == "g" else {}) for s in samples)
    for number in range(6):
        positions = [s.position for s in samples if (s.group, s.round) == ("g", number)]
        assert positions == [0, 1, 2]


def test_the_order_depends_on_the_seed_alone_and_does_change() -> None:
    logs: list[list[str]] = [[], [], []]
    for log, seed in zip(logs, (1, 1, 2), strict=True):
        measured(log, seed=seed)
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]
    starts = [logs[0][i : i + 3] for i in range(0, 15, 5)]
    assert len({tuple(sorted(start)) for start in starts} | {tuple(s) for s in starts}) > 1


def test_what_was_done_before_is_skipped_and_the_rest_keeps_its_order() -> None:
    whole = measured([], seed=5)
    done = {(s.round, s.group) for s in whole[:9]}
    rest = measured([], seed=5, done=done)
    expected = [(s.round, s.arm) for s in whole if (s.round, s.group) not in done]
    assert [(s.round, s.arm) for s in rest] == expected


def test_no_garbage_is_collected_while_measuring_and_it_is_again_afterwards() -> None:
    states: list[bool] = []
    group = Group(name="g", arms={"a": lambda watch: states.append(gc.isenabled())})
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    list(
        measure.run_rounds([group], {"g": Rounds(dropped=0, timed=3)}, seed=0, synchronize=nothing)
    )
    assert states == [False] * 3
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def slow_arm(clock: FakeClock, seconds: float) -> measure.Arm:
    return lambda watch: watch.time("step", lambda: clock.sleep(seconds))


def test_every_arm_is_warmed_up_by_rule(clock: FakeClock) -> None:
    log: list[str] = []
    costs = dict(measure.warm_up(two_groups(log), Rules(warmups=3), nothing))
    assert sorted(log) == sorted(["ga", "gb", "gc", "ha", "hb"] * 3)
    assert costs == {"g": 0.0, "h": 0.0}


def test_under_a_budget_a_dear_arm_is_warmed_up_once(clock: FakeClock) -> None:
    runs = {"cheap": 0, "dear": 0}

    def arm(name: str, seconds: float) -> measure.Arm:
        def run(watch: Stopwatch) -> None:
            runs[name] += 1
            clock.sleep(seconds)

        return run

    groups = [Group(name=n, arms={n: arm(n, s)}) for n, s in (("cheap", 0.01), ("dear", 2.0))]
    costs = dict(measure.warm_up(groups, Rules(warmups=3, budget_s=10.0), nothing))
    assert runs == {"cheap": 3, "dear": 1}
    assert costs == pytest.approx({"cheap": 0.01, "dear": 2.0})


def test_without_a_budget_every_group_gets_all_rounds() -> None:
    plan = measure.plan_rounds({"a": 1e-3, "b": 60.0}, Rules())
    assert plan == dict.fromkeys("ab", Rounds(dropped=2, timed=20))


def test_a_budget_is_shared_and_dear_groups_get_fewer_rounds() -> None:
    rules = Rules(min_rounds=3, max_rounds=12, budget_s=20.0)
    plan = measure.plan_rounds({"dear": 3.0, "cheap": 0.01, "middle": 0.5}, rules)
    assert list(plan) == ["dear", "cheap", "middle"]
    assert plan["cheap"] == Rounds(dropped=2, timed=12)
    assert plan["cheap"].timed >= plan["middle"].timed >= plan["dear"].timed >= 3
    assert plan["dear"].dropped == 0


@given(
    st.lists(st.floats(1e-4, 20), min_size=1, max_size=12),
    st.floats(0.1, 100),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_a_budget_is_kept_unless_the_least_rounds_exceed_it(
    costs: list[float], budget_s: float, least: int, more: int
) -> None:
    rules = Rules(min_rounds=least, max_rounds=least + more, budget_s=budget_s)
    named = {str(i): cost for i, cost in enumerate(costs)}
    plan = measure.plan_rounds(named, rules)
    total_s = sum(plan[name].total * cost for name, cost in named.items())
    assert total_s <= max(budget_s, least * sum(costs)) + 1e-6
    assert all(least <= p.timed <= least + more for p in plan.values())


def test_ratios_are_taken_inside_a_round() -> None:
    """A machine that slows down tenfold between rounds changes no paired ratio."""
    samples = []
    for number, pace in enumerate((1.0, 10.0, 0.1)):
        samples += [sample("slow", number, 3 * pace), sample("fast", number, pace)]
    samples += [sample("slow", 7, 1.0), sample("fast", 8, 1.0)]  # no partner in their rounds
    samples += [sample("slow", 9, 9.0, dropped=True), sample("fast", 9, 1.0, dropped=True)]
    assert measure.paired_ratios(samples, "slow", "fast", "step") == pytest.approx([3.0] * 3)


# --- records --------------------------------------------------------------------------------------


def header(run: str = "r1", **values: Any) -> record.Record:
    where = {"cpu": "Some CPU", "cores": 2, "software": {}}
    setup = {"quick": False, "machine": where}
    about = {"schema": 1, "run": run, "experiment": "e", "name": "n", "setup": setup}
    return {"kind": "run", **about, **values}


def end(run: str = "r1", status: str = "complete") -> record.Record:
    return {"kind": "end", "schema": 1, "run": run, "experiment": "e", "status": status}


def recorded_sample(number: int, seconds: float, run: str = "r1") -> record.Record:
    identity = {"schema": 1, "run": run, "experiment": "e"}
    return record.sample_record(sample("a", number, seconds), identity, attempt=0)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.jsonl"
    with Journal(path) as journal:
        journal.append([header(note="é")])
        journal.append([recorded_sample(0, 1.5), recorded_sample(1, 2.5), end()])
    runs, skipped = read_runs(path)
    assert skipped == []
    assert runs[0].is_complete
    assert runs[0].header["note"] == "é"
    assert runs[0].final_samples == [sample("a", 0, 1.5), sample("a", 1, 2.5)]


def test_a_torn_last_line_is_cut_before_the_next_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    with Journal(path) as journal:
        journal.append([header(), recorded_sample(0, 1.0)])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"sample","x":"' + b"y" * 200_000)
    _, skipped = read_runs(path)
    assert skipped == ["file.jsonl, line 3 skipped: it is not finished"]
    with Journal(path) as journal:
        assert path.read_bytes() == whole
        journal.append([end()])
    runs, skipped = read_runs(path)
    assert (runs[0].is_complete, skipped) == (True, [])


def test_a_file_of_nothing_but_a_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"{" * 100_000)
    Journal(path).close()
    assert path.read_bytes() == b""


def changed(record: record.Record, path: str, value: Any) -> record.Record:
    """A copy in which what a dotted path leads to is another value, or is gone (`...`)."""
    first, _, rest = path.partition(".")
    whole = dict(record)
    if rest:
        whole[first] = changed(whole[first], rest, value)
    elif value is ...:
        del whole[first]
    else:
        whole[first] = value
    return whole


AA = {"n": 10, "median": 1.0, "interval": [0.98, 1.02]}
WHOLE = {
    "run": header(),
    "sample": recorded_sample(0, 1.0),
    "aa": {"kind": "aa", "schema": 1, "run": "r1", "experiment": "e", **AA},
    "end": end(),
}


@pytest.mark.parametrize("value", [..., [1], None])
@pytest.mark.parametrize(
    "kind, name",
    [
        (kind, name)
        for kind, fields in record.FIELDS.items()
        for name in (*record.COMMON_FIELDS, *fields)
    ],
)
def test_a_record_without_what_readers_rely_on_is_skipped(kind: str, name: str, value: Any) -> None:
    """Whoever wrote it: no reader of any experiment may stumble over it."""
    assert record.decode(record.encode(WHOLE[kind])) == WHOLE[kind]
    if name == "interval" and value is not ...:
        return  # it may be either
    with pytest.raises(ValueError, match=f"it lacks {name}, or has them in another form"):
        record.decode(record.encode(changed(WHOLE[kind], name, value)))


@pytest.mark.parametrize(
    "line, why",
    [
        (b"[" * 100_000, "not JSON"),
        (record.encode(recorded_sample(0, 7.5)).replace(b"7.5", b"NaN"), "not JSON"),
        (record.encode(recorded_sample(0, 7.5)).replace(b"7.5", b'"7"'), "not numbers"),
    ],
)
def test_a_line_that_python_alone_would_read_is_skipped(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        record.decode(line.rstrip() + b"\n")


def test_lines_that_cannot_be_used_are_skipped_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    lines = [
        json.dumps(header()),
        "not json",
        "[1, 2]",
        json.dumps(header("r0") | {"schema": 0}),
        json.dumps({"kind": "sample", "schema": 1, "run": "r1", "experiment": "e"}),
        json.dumps(recorded_sample(0, 1.0, run="of another file")),
        json.dumps(recorded_sample(0, 1.0)),
    ]
    path.write_text("".join(line + "\n" for line in lines))
    runs, skipped = read_runs(path)
    assert [len(run.records) for run in runs] == [1]
    assert "line 2 skipped: it is not JSON" in skipped[0]
    assert "line 3 skipped: it is not a record of nanoserve" in skipped[1]
    assert "line 4 skipped: it has schema 0, this version reads 1" in skipped[2]
    assert "line 5 skipped: it lacks arm, attempt, dropped" in skipped[3]
    assert "1 records skipped: their run has no header" in skipped[4]


def test_a_repetition_measured_twice_counts_as_measured_last(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    with Journal(path) as journal:
        journal.append([header(), recorded_sample(0, 1.0), recorded_sample(0, 2.0)])
    assert read_runs(path)[0][0].final_samples == [sample("a", 0, 2.0)]


def test_only_the_last_complete_run_of_a_file_is_found(tmp_path: Path) -> None:
    for name, statuses in (("one", ["complete", "complete", None]), ("two", ["void", None])):
        with Journal(tmp_path / name / "e-x.jsonl") as journal:
            for number, status in enumerate(statuses):
                run = f"{name}{number}"
                journal.append([header(run), *([end(run, status)] if status else [])])
    runs, _ = record.find_runs(tmp_path, "e")
    assert [run.run_id for run in runs] == ["one1"]


@pytest.mark.parametrize(
    "value",
    [
        "/root",
        "/home/someone/model",
        "at /usr/lib",
        "path=/tmp/x",
        r"C:\models",
        "~/models",
        {"deep": ["a", {"/etc/passwd": 1}]},
    ],
)
def test_a_record_with_an_absolute_path_is_refused(tmp_path: Path, value: Any) -> None:
    with (
        Journal(tmp_path / "file.jsonl") as journal,
        pytest.raises(ValueError, match="must not hold an absolute path"),
    ):
        journal.append([header(value=value)])
    assert (tmp_path / "file.jsonl").read_bytes() == b""


@pytest.mark.parametrize("value", ["owner/model", "GB/s", "n/a", "8x16", "and/or", "a / b"])
def test_a_slash_is_not_a_path(value: str) -> None:
    assert json.loads(record.encode(header(value=value)))["value"] == value


def test_nan_is_never_recorded() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.encode(header(value=math.nan))


@pytest.mark.skipif(not DEV_FULL.exists(), reason="needs the device that is always full")
def test_a_full_disk_is_one_clear_error() -> None:
    with Journal(DEV_FULL) as journal, pytest.raises(OSError, match=r"full; .*--resume") as raised:
        journal.append([header()])
    assert raised.value.errno == errno.ENOSPC


def test_a_disk_that_fills_up_half_way_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.jsonl"
    with Journal(path) as journal:
        journal.append([header()])
        whole = path.read_bytes()
        really_write, calls = os.write, []

        def write_some_then_fail(file: int, data: bytes) -> int:
            calls.append(len(data))
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return really_write(file, data[:10])

        monkeypatch.setattr(record.os, "write", write_some_then_fail)
        with pytest.raises(OSError, match="complete lines are kept"):
            journal.append([recorded_sample(0, 1.0)])
        assert len(calls) == 2
        assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_one_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written .*another folder with --out"):
        Journal(tmp_path / "file" / "results.jsonl")
    with pytest.raises(ValueError, match="--out"):
        Journal(tmp_path)


# --- the machine ----------------------------------------------------------------------------------


def test_the_fingerprint_is_complete_and_anonymous() -> None:
    fingerprint = machine.fingerprint()
    text = json.dumps(fingerprint)
    assert fingerprint["cores"] >= 1
    assert fingerprint["memory_bytes"] > 2**28
    assert {"nanoserve", "commit", "edited", "python", "torch", "numpy"} <= fingerprint[
        "software"
    ].keys()
    record.encode(header(machine=fingerprint))  # no absolute path
    words = set(re.findall(r"[\w.-]+", text))
    assert platform.node() not in words
    assert getpass.getuser() not in words
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    "cpu, expected",
    [
        ("AMD EPYC", "amd-epyc-2c"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c-2c"),
        ("Apple M2 Pro", "apple-m2-pro-2c"),
    ],
)
def test_a_machine_is_a_folder_name(cpu: str, expected: str) -> None:
    assert machine.slug_of(cpu, 2) == expected


def test_ceilings_are_kept_by_device_and_threads() -> None:
    assert machine.load_cached_ceilings() is None
    machine.save_ceilings(CEILINGS, "cpu", None)
    machine.save_ceilings(replace(CEILINGS, dispatch_s=2e-6), "cpu", 1)
    assert machine.load_cached_ceilings() == CEILINGS
    assert machine.load_cached_ceilings("cpu", 1) != CEILINGS
    assert machine.load_cached_ceilings("cuda") is None
    assert [path.name for path in machine.ceilings_path().parent.iterdir()] == ["ceilings.json"]


def test_ceilings_of_another_machine_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.save_ceilings(CEILINGS)
    other = {"model": "another processor", "vector": []}
    monkeypatch.setattr(hardware, "cpu_info", lambda: other)
    assert machine.load_cached_ceilings() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"KEY": 3}', '{"KEY": {"dispatch_s": 1}}'])
def test_a_broken_cache_is_ignored_and_said(content: str, caplog: pytest.LogCaptureFixture) -> None:
    machine.ceilings_path().parent.mkdir(parents=True)
    machine.ceilings_path().write_text(content.replace("KEY", kept_key("cpu", None)))
    assert machine.load_cached_ceilings() is None
    assert "unreadable and ignored" in caplog.text
    machine.save_ceilings(CEILINGS)
    assert machine.load_cached_ceilings() == CEILINGS
