"""What sets the ceiling on concurrency: the fit, predictions before probes, brackets, real probes.

Most runs are over a machine whose memory is known by formula, so predictions can be held to what is
true, or to what is not. Two probes are real: processes of their own with and without a limit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import tiny_engine, tiny_model

from nanoserve.bench import memory_probe, report, runner
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.conduct import VoidError
from nanoserve.bench.experiments import memory
from nanoserve.bench.findings.memory import (
    FULL,
    OK,
    MemoryFindings,
    fit_from_record,
    fit_memory,
    fit_values,
    goal_sentence,
    inside_sentence,
    memory_findings,
    memory_notes,
    memory_paragraph,
    sequences_table,
    terms_table,
)
from nanoserve.bench.memory_plots import ceilings_plot, draw_ceilings
from nanoserve.bench.memory_probe import OUT_OF_MEMORY, ProbeReport, ProbeRequest
from nanoserve.bench.plots import plot_json, save
from nanoserve.bench.record import Record, Run, read_runs
from nanoserve.bench.session import Options, Screen
from nanoserve.planner.memory import HUGE_PAGE_BYTES, mapped_bytes
from nanoserve.planner.model import kv_bytes_per_token, weight_bytes

QUIET = Screen(quiet=True)
RUNTIME, EXTRA, EACH = 70_000_000, 1_000_000, 290_000


@dataclass
class FakeMachine:
    """Memory by formula. `surprise` multiplies K and V under a limit, unseen by the fit."""

    surprise: float = 1.0
    stop_after: int | None = None
    asked: list[ProbeRequest] = field(default_factory=list)

    def run_probe(self, request: ProbeRequest) -> Record:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(request)
        config = memory.load_model_config(memory.find(request.model, load_format="dummy"))
        weights = weight_bytes(config, request.dtype)
        blocks = request.num_blocks + 1
        cache = blocks * 16 * kv_bytes_per_token(config, request.cache_dtype)
        held = cache if request.limit_bytes is None else round(cache * self.surprise)
        pieces = (weights, held, EACH * request.batch)
        peak = RUNTIME + EXTRA + sum(mapped_bytes(piece, HUGE_PAGE_BYTES) for piece in pieces)
        if request.limit_bytes is not None and peak > request.limit_bytes:
            return {"outcome": FULL, "words": "the system has no bytes left"}
        fitted = ProbeReport(
            runtime_bytes=RUNTIME,
            peak_bytes=peak,
            written_bytes=cache,
            weights_bytes=weights,
            cache_bytes=cache,
            scratch_bytes=777 + EACH * request.batch,
        )
        return {"outcome": OK, **asdict(fitted)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """A fake one in place of this one, with room for all probes."""
    made = FakeMachine()
    monkeypatch.setattr(memory, "run_probe", made.run_probe)
    monkeypatch.setattr(memory, "native_obstacle", lambda *_: None)
    monkeypatch.setattr(memory.library, "load", lambda: SimpleNamespace(isa="fake"))
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**40)
    return made


def options_in(folder: Path, **values: Any) -> Options:
    given: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "quick": True, "out": folder}
    return Options(**given | values)


def measured(folder: Path, **values: Any) -> MemoryFindings:
    return memory_findings(memory.measure(options_in(folder, **values), QUIET))


# --- the fit --------------------------------------------------------------------------------------


def probe_of(batch: int, context: int, *, page: int = 0) -> Record:
    blocks = batch * -(-context // 16) + 1
    grown = mapped_bytes(blocks * 16 * 10, page) + mapped_bytes(7 * batch, page)
    return {
        "batch": batch,
        "context": context,
        "runtime_bytes": 50,
        "peak_bytes": 50 + 1000 + grown,
        "scratch_bytes": 3 + 7 * batch,
    }


@pytest.mark.parametrize("page", [0, 64])
def test_a_fit_finds_the_terms_that_the_probes_were_made_of(page: int) -> None:
    probes = [probe_of(b, n, page=page) for b, n in [(8, 32), (40, 32), (16, 64), (24, 128)]]
    fit = fit_memory(probes, kv_bytes_per_token=10, block_size=16, huge_page_bytes=page)
    assert fit.model.runtime_bytes == 50
    assert fit.model.fixed_bytes == pytest.approx(1000)
    assert fit.model.per_sequence_bytes == pytest.approx(7)
    assert fit.worst_residual == pytest.approx(0, abs=1e-9)
    assert fit.kv_recovered == pytest.approx(1, rel=0.02 if page else 1e-9)
    assert fit_from_record(json.loads(json.dumps(fit_values(fit)))) == fit


def test_batch_alone_cannot_tell_a_sequence_from_its_cache() -> None:
    """With one context K and V grow as everything else does, so nothing is said of their size."""
    probes = [probe_of(batch, 32) for batch in (8, 16, 40)]
    fit = fit_memory(probes, kv_bytes_per_token=10, block_size=16, huge_page_bytes=0)
    assert fit.kv_recovered is None
    with pytest.raises(ValueError, match="two different batches"):
        fit_memory(probes[:1], kv_bytes_per_token=10, block_size=16, huge_page_bytes=0)


def test_a_cache_of_another_size_than_thought_shows() -> None:
    probes = [probe_of(b, n) for b, n in [(8, 32), (40, 32), (16, 64), (24, 128)]]
    fit = fit_memory(probes, kv_bytes_per_token=5, block_size=16, huge_page_bytes=0)
    assert fit.kv_recovered == pytest.approx(2)
    assert fit.worst_residual > 0.01


# --- a whole run ----------------------------------------------------------------------------------


def test_every_ceiling_is_predicted_and_then_bracketed(
    machine: FakeMachine, tmp_path: Path
) -> None:
    findings = measured(tmp_path)
    assert len(findings.ceilings) == len(memory.QUICK.arms) * len(memory.QUICK.parts)
    for ceiling in findings.ceilings:
        assert ceiling.is_inside
        assert ceiling.smallest_failure == ceiling.largest_pass + 1
        assert ceiling.is_narrow
        assert abs(ceiling.error) < 0.002
        assert ceiling.if_all_logits < ceiling.largest_pass
    for arm in findings.arms:
        assert abs(arm.weights_error) < 0.01
        assert arm.fit.kv_recovered == pytest.approx(1, abs=0.05)
    limited = [request for request in machine.asked if request.limit_bytes is not None]
    assert len(limited) == 2 * len(findings.ceilings)  # where it is right, two probes do


def test_a_prediction_is_on_disk_before_the_first_probe_of_its_ceiling(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looking(request: ProbeRequest) -> Record:
        if request.limit_bytes is not None:
            (path,) = tmp_path.glob("*/memory-gpt2-cpu-quick.jsonl")
            kept = [json.loads(line) for line in path.read_text().splitlines()]
            assert any(
                record["kind"] == "prediction"
                and record["context"] == request.context
                and record["cache_dtype"] == request.cache_dtype
                and record["num_sequences"] in (request.batch, request.batch - 1)
                for record in kept
            )
        return machine.run_probe(request)

    monkeypatch.setattr(memory, "run_probe", looking)
    assert measured(tmp_path).run.is_complete


@pytest.mark.parametrize("surprise", [1.3, 0.6])
def test_a_wrong_prediction_is_bracketed_as_well_and_said_to_be_wrong(
    surprise: float, machine: FakeMachine, tmp_path: Path
) -> None:
    machine.surprise = surprise
    findings = measured(tmp_path)
    for ceiling in findings.ceilings:
        assert not ceiling.is_inside
        assert ceiling.smallest_failure == ceiling.largest_pass + 1
        assert (ceiling.largest_pass < ceiling.predicted) == (surprise > 1)
    said = memory_paragraph(findings)
    assert "0 of 6 ceilings predicted before they were probed" in said
    assert "which misses the goal of 1%" in said
    assert all("missed" in row[3] for row in sequences_table(findings)[1])


@pytest.mark.parametrize("done", [1, 4, 8, 20])
def test_an_interrupted_run_continues_where_it_stopped(
    done: int, machine: FakeMachine, tmp_path: Path
) -> None:
    machine.stop_after = done
    with pytest.raises(KeyboardInterrupt):
        memory.measure(options_in(tmp_path), QUIET)
    (path,) = tmp_path.glob("*/memory-*.jsonl")
    with path.open("a") as file:
        file.write('{"kind":"probe","sch')  # a kill in the middle of a line
    machine.stop_after = None
    run = memory.measure(options_in(tmp_path, resume=True), QUIET)
    assert run.is_complete
    probes = [record for record in run.records if record["kind"] == "probe"]
    assert len({json.dumps(memory_labels(probe)) for probe in probes}) == len(probes)
    whole = memory.measure(options_in(tmp_path / "whole"), QUIET)
    assert strip(run) == strip(whole)
    asked = len(machine.asked)
    assert memory.measure(options_in(tmp_path, resume=True), QUIET).run_id == run.run_id
    assert len(machine.asked) == asked


def memory_labels(probe: Record) -> list[Any]:
    names = ("weights_dtype", "cache_dtype", "batch", "context", "limit_bytes")
    return [probe[name] for name in names]


def strip(run: Run) -> list[Record]:
    """What a run says, without when and under which name it did."""
    return [
        {name: value for name, value in record.items() if name not in ("run", "ended")}
        for record in run.records
    ]


def test_a_limit_under_which_nothing_fits_is_void(machine: FakeMachine, tmp_path: Path) -> None:
    machine.surprise = 1e6
    with pytest.raises(VoidError, match="not even one sequence of 512 tokens fits"):
        memory.measure(options_in(tmp_path), QUIET)
    (path,) = tmp_path.glob("*/memory-*.jsonl")
    assert not read_runs(path)[0][-1].is_complete


# --- what a probe may answer ----------------------------------------------------------------------

REQUEST = ProbeRequest(
    model="mini",
    load_format="auto",
    device="cpu",
    executor="native",
    dtype="float32",
    cache_dtype="float32",
    threads=1,
    batch=4,
    context=40,
    limit_bytes=None,
)
FITTED = ProbeReport(
    runtime_bytes=1, peak_bytes=9, written_bytes=4, weights_bytes=2, cache_bytes=4, scratch_bytes=1
)


def ended(code: int, *, out: str = "", err: str = "") -> Callable[..., Any]:
    done = subprocess.CompletedProcess(args=[], returncode=code, stdout=out, stderr=err)
    return lambda *_, **__: done


def test_the_ends_of_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", ended(0, out=json.dumps(asdict(FITTED))))
    assert memory.run_probe(REQUEST) == {"outcome": OK, **asdict(FITTED)}
    monkeypatch.setattr(subprocess, "run", ended(OUT_OF_MEMORY, err="no bytes\nleft\n"))
    assert memory.run_probe(REQUEST) == {"outcome": FULL, "words": "no bytes left"}


@pytest.mark.parametrize("code, err", [(1, "Traceback\nKeyError: 3\n"), (-9, ""), (-11, "")])
def test_a_crash_is_not_an_answer(code: int, err: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", ended(code, err=err))
    with pytest.raises(VoidError, match=f"code {code}, which is not 'out of memory'") as caught:
        memory.run_probe(REQUEST)
    assert ("KeyError: 3" if err else "it said nothing") in str(caught.value)


def test_pages_that_were_not_written_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = json.dumps(asdict(replace(FITTED, written_bytes=3)))
    monkeypatch.setattr(subprocess, "run", ended(0, out=lazy))
    with pytest.raises(VoidError, match="wrote 3 of its cache's 4 bytes"):
        memory.run_probe(REQUEST)


def test_a_probe_without_a_limit_that_finds_no_memory_is_void(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "run_probe", lambda _: {"outcome": FULL, "words": "nothing left"})
    with pytest.raises(VoidError, match="without a limit had no memory: nothing left"):
        memory.measure(options_in(tmp_path), QUIET)
    assert machine.asked == []


def test_real_probes_fit_and_do_not_fit() -> None:
    """A process whose cache is over its limit says so; the same one without a limit fits."""
    fitting = memory.run_probe(REQUEST)
    assert fitting["outcome"] == OK
    assert fitting["weights_bytes"] > 17_000_000
    assert fitting["cache_bytes"] == (4 * 3 + 1) * 16 * 8192
    held = fitting["runtime_bytes"] + fitting["weights_bytes"] + fitting["cache_bytes"]
    assert held < fitting["peak_bytes"] < held + 7 * HUGE_PAGE_BYTES
    full = memory.run_probe(replace(REQUEST, batch=400, limit_bytes=fitting["peak_bytes"]))
    assert full["outcome"] == FULL
    assert "left for the KV cache" in full["words"]


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("batch, context", [(1, 1), (3, 16), (5, 33), (20, 64)])
def test_every_page_of_a_probe_is_written(cache_dtype: str, batch: int, context: int) -> None:
    """Its blocks held NaN before; decodes over all of them are finite, or it raises."""
    request = replace(REQUEST, batch=batch, context=context)
    engine = tiny_engine(
        executor="native",
        kv_cache_dtype=cache_dtype,
        max_num_seqs=batch,
        kv_cache_memory_bytes=None,
    )
    assert engine.spec.num_blocks >= request.num_blocks
    engine.executor.poison(list(range(request.num_blocks)))
    memory_probe.write_every_page(engine.executor, request)
    rows = memory_probe.step(*decode_all(request))
    assert engine.executor.execute(rows).finite.all()


def decode_all(request: ProbeRequest) -> tuple[Any, Any, Any]:
    """Every sequence once more at its last position."""
    numpy = memory_probe.np
    blocks = numpy.arange(request.num_blocks, dtype=numpy.int32)
    last = numpy.full(request.batch, request.context - 1, dtype=numpy.int32)
    tables = blocks.reshape(request.batch, request.blocks_per_sequence)
    return tables, last, numpy.zeros((0, 2), dtype=numpy.int32)


def test_the_program_ends_with_the_code_of_what_happened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class OutOfMemoryError(RuntimeError):
        """As PyTorch's is called."""

    def probing(outcome: ProbeReport | Exception) -> int:
        def probe(_: ProbeRequest) -> ProbeReport:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(memory_probe.json, "load", lambda _: asdict(REQUEST))
        monkeypatch.setattr(memory_probe, "probe", probe)
        return memory_probe.main()

    assert probing(FITTED) == 0
    assert json.loads(capsys.readouterr().out) == asdict(FITTED)
    assert probing(MemoryError()) == probing(OutOfMemoryError("none")) == OUT_OF_MEMORY
    assert "the interpreter has no memory left" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="not finite"):
        probing(RuntimeError("not finite"))


def test_on_a_gpu_the_allocator_counts_and_the_environment_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"weights_bytes": 5, "cache_bytes": 3, "peak_bytes": 11, "device_bytes": 80}
    executor = SimpleNamespace(memory_stats=lambda: stats, synchronize=lambda: None)
    monkeypatch.setattr(memory_probe, "make_spec", lambda _: None)
    monkeypatch.setattr(memory_probe, "tensors_of", lambda *_: ())
    monkeypatch.setattr(memory_probe, "make_executor", lambda *_: executor)
    monkeypatch.setattr(memory_probe, "write_every_page", lambda *_: None)
    on_gpu = replace(REQUEST, device="cuda", executor="auto")
    found = memory_probe.probe(on_gpu)
    assert (found.peak_bytes, found.scratch_bytes, found.device_bytes) == (11, 3, 80)
    monkeypatch.setattr(memory, "gpu_bytes", lambda _: 80)
    assert memory.gpu_variables(on_gpu) == {}
    assert memory.gpu_variables(REQUEST) == {}
    limited = memory.gpu_variables(replace(on_gpu, limit_bytes=20))
    assert limited == {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.250000"}


# --- requests that are wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--dtype", "bfloat16"], "leave out --dtype, got --dtype bfloat16"),
        (["--executor", "eager"], "got --executor eager"),
        (["--model", "./nowhere"], "nowhere"),
        (["--model", "gpt2-xl"], "are free: choose a smaller --model"),
    ],
)
def test_a_wrong_request_is_one_line_and_2(
    arguments: list[str],
    expected: str,
    machine: FakeMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 4 * 2**30)
    given = ["memory", "--quick", "--device", "cpu", "--out", str(tmp_path), *arguments]
    assert runner.main(given) == 2
    (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("nanoserve bench:")]
    assert expected in line
    assert machine.asked == []


def test_without_a_native_core_it_says_so(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "native_obstacle", lambda *_: "it was not built")
    with pytest.raises(ValueError, match="native executor on a CPU: it was not built"):
        memory.measure(options_in(tmp_path), QUIET)
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="as Linux does, this is darwin"):
        memory.measure(options_in(tmp_path), QUIET)
    assert machine.asked == []


# --- screen, plot and report ----------------------------------------------------------------------


def test_what_is_said_follows_the_numbers(machine: FakeMachine, tmp_path: Path) -> None:
    findings = measured(tmp_path)
    said = memory_paragraph(findings)
    assert "All 6 ceilings predicted before they were probed lie in their" in said
    assert "(no wider than one sequence or 1 %)" in said
    assert "which meets the goal of 1%" in said
    assert "misses" not in said
    wide = replace(findings.ceilings[0], smallest_failure=99)
    assert "some wider than 1 %" in inside_sentence(replace(findings, ceilings=(wide,)))
    assert "196.3 MiB a sequence at 1,024" in memory_notes(findings)
    assert "RLIMIT_DATA" in memory_notes(findings)
    on_gpu = replace(findings.run, header={**findings.run.header, "device": "cuda"})
    assert "PyTorch's allocator" in memory_notes(replace(findings, run=on_gpu))
    assert goal_sentence("x", 0.01, 0.01).endswith("1.00%, which meets the goal of 1%.")
    assert goal_sentence("x", 0.02, 0.01).endswith("2.00%, which misses the goal of 1%.")
    for heads, rows in (sequences_table(findings), terms_table(findings)):
        assert {len(row) for row in rows} == {len(heads)}


def test_the_picture_is_drawn_from_plain_data_alone(machine: FakeMachine, tmp_path: Path) -> None:
    data = ceilings_plot(measured(tmp_path))
    plain = json.loads(plot_json(data))
    assert plain == data
    assert [len(arm["failed"]) for arm in data["arms"]] == [1, 1, 1]
    svg, _ = save(plain, tmp_path / "ceilings", draw_ceilings)
    before = svg.read_bytes()
    save(plain, tmp_path / "ceilings", draw_ceilings)
    assert svg.read_bytes() == before


def test_screen_and_report_tell_it(
    machine: FakeMachine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.run(["memory"], options_in(tmp_path, quick=False))
    captured = capsys.readouterr()
    assert "what sets the ceiling on concurrency?" in captured.out
    assert "memory_ceilings-gpt2-cpu" in captured.err
    text = report.results_markdown(report.load(tmp_path))
    assert "What sets the ceiling on concurrency?" in text
    assert "docs/plots/memory_ceilings.svg" in text
    quoted = report.quotable(report.load(tmp_path))
    assert quoted["memory.gpt2.inside"] == quoted["memory.gpt2.ceilings"] == "8"
    assert CHAPTERS["memory"].title in text
    assert machine.asked


def test_weights_of_a_folder_are_named_by_their_hash(machine: FakeMachine, tmp_path: Path) -> None:
    """And the folder itself is in no record."""
    folder = tiny_model().folder
    checkpoint = memory.find(str(folder), load_format="auto")
    options = options_in(tmp_path, model=str(folder), load_format="auto")
    subject = memory.make_subject(options, checkpoint, "cpu", memory.QUICK)
    trial = memory.make_trial(subject, checkpoint, memory.QUICK)
    assert trial.identity["weights"] == "trained"
    assert len(trial.identity["weights_id"]) == 64
    assert str(folder) not in json.dumps([trial.identity, trial.setup])
    assert machine.asked == []
