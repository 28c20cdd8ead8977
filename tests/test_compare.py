"""`bench compare`: which cells are paired, what counts as a difference, and what is left out."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from nanoserve.bench import compare, machine, runner
from nanoserve.bench.measure import Sample
from nanoserve.bench.record import SCHEMA, Run, encode, sample_record

MACHINE = {
    "cpu": "Some CPU",
    "cores": 2,
    "software": {"commit": "0123456789ab"},
}


def recorded(
    arms: dict[str, float], *, experiment: str = "kvcache", n: int = 12, **header: Any
) -> Run:
    """A run whose arms take these seconds, each within 1 % of it; A/A says 2 %."""
    identity = {"schema": SCHEMA, "run": "r1", "experiment": experiment}
    head = {
        "kind": "run",
        **identity,
        "name": "gpt2-cpu",
        "executor": "native",
        "device": "cpu",
        "setup": {"machine": MACHINE, "quick": False},
        **header,
    }
    draws = random.Random(7)
    records = [
        sample_record(
            Sample(
                group="g",
                arm=arm,
                round=number,
                position=0,
                dropped=number < 2,
                seconds={"step": seconds * draws.uniform(0.99, 1.01), "end 3": seconds},
            ),
            identity,
            0,
        )
        for number in range(n)
        for arm, seconds in arms.items()
    ]
    aa = {"kind": "aa", **identity, "n": 10, "median": 1.0, "interval": [0.98, 1.02]}
    end = {"kind": "end", **identity, "status": "complete", "ended": "now"}
    return Run(header=head, records=(*records, aa, end))


def saved(run: Run, folder: Path) -> Path:
    path = folder / f"{run.header['experiment']}-{run.name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encode(entry) for entry in (run.header, *run.records)))
    return path


def test_only_differences_beyond_the_noise_are_shown() -> None:
    a = recorded({"same": 1.0, "slower": 1.0, "a little": 1.0, "gone": 1.0})
    b = recorded({"same": 1.0, "slower": 1.5, "a little": 1.03, "new": 1.0})
    pair = compare.compare("kvcache gpt2-cpu", a, b)
    (found,) = pair.differences
    assert found.cell == ("g", "slower", "step")
    assert found.ratio == pytest.approx(1.5, rel=0.01)
    assert found.interval.low < found.ratio < found.interval.high
    assert pair.noise == pytest.approx(0.02)
    assert pair.left_out == {
        "in one of the two alone": 2,
        "too few rounds for an interval": 0,
        "unsteady (marked invalid)": 0,
        "within the noise": 2,
    }
    assert compare.compare("turned", b, a).differences[0].ratio == pytest.approx(1 / 1.5, rel=0.01)


def test_a_run_against_itself_shows_nothing() -> None:
    run = recorded({"one": 1.0, "two": 2.0})
    assert compare.compare("same", run, run).differences == ()


def test_too_few_rounds_and_unsteady_cells_are_left_out_and_counted() -> None:
    few = compare.compare("few", recorded({"x": 1.0}, n=6), recorded({"x": 9.0}, n=6))
    assert few.left_out["too few rounds for an interval"] == 1
    wild = recorded({"x": 1.0})
    for place, entry in enumerate(wild.records):
        if entry["kind"] == "sample":
            entry["seconds"]["step"] = 1.0 + place % 2
    unsteady = compare.compare("unsteady", wild, recorded({"x": 9.0}))
    assert unsteady.left_out["unsteady (marked invalid)"] == 1
    assert unsteady.differences == ()


def test_folders_of_two_machines_are_paired_by_experiment_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(recorded({"cached": 1.0}), tmp_path / "a" / "one-2c")
    saved(recorded({"x": 1.0}, experiment="batch"), tmp_path / "a" / "one-2c")
    saved(recorded({"cached": 2.0}, dtype="bfloat16"), tmp_path / "b" / "two-8c")
    assert runner.main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "two-8c")]) == 0
    shown = capsys.readouterr()
    text = " ".join(shown.out.split())
    assert "kvcache gpt2-cpu: differences beyond 2.0%" in text
    assert "they differ in dtype" in text
    assert re.search(r"g cached step [\d,]+ [\d,]+ 2\.00x 1\.9\dx?-2\.0\dx", text)
    assert "only in A: batch gpt2-cpu" in text
    assert shown.err == ""


def test_two_files_of_one_experiment_are_partners_whatever_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = saved(recorded({"cached": 1.0}), tmp_path)
    theirs = saved(recorded({"cached": 3.0}, executor="eager"), tmp_path)
    assert ours != theirs
    assert runner.main(["compare", str(ours), str(theirs)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "kvcache gpt2-cpu / gpt2-cpu-eager" in text
    assert "they differ in executor" in text


def test_runs_without_an_aa_arm_are_left_out_and_the_others_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, slower in (("a", 1.0), ("b", 1.5)):
        saved(recorded({"x": slower}), tmp_path / side)
        memory = recorded({"x": slower}, experiment="memory")
        without = tuple(entry for entry in memory.records if entry["kind"] != "aa")
        saved(Run(header=memory.header, records=without), tmp_path / side)
    assert runner.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "memory gpt2-cpu: left out, since without an A/A arm nothing is known" in shown
    assert "1.50x" in shown


def test_no_difference_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(recorded({"cached": 1.0}), tmp_path)
    assert runner.main(["compare", str(path), str(path)]) == 0
    shown = capsys.readouterr().out
    assert "no difference that is certain" in shown
    assert "left out: 1 within the noise" in shown


def test_records_of_another_schema_are_skipped_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(recorded({"cached": 1.0}), tmp_path / "a")
    old = [json.loads(line) | {"schema": 0} for line in path.read_text().splitlines()]
    other = saved(recorded({"cached": 1.0}), tmp_path / "b")
    lines = "".join(json.dumps(entry) + "\n" for entry in old)
    other.write_text(lines + other.read_text() + '{"torn')
    assert runner.main(["compare", str(path), str(other)]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        f"{other.name}, lines 1 and {len(old) - 1} more skipped: it has schema 0"
    )
    assert "it is not finished" in second


@pytest.mark.parametrize(
    "arguments, pieces",
    [
        ([], ["usage: nanoserve bench compare A B"]),
        (["a"], ["usage: nanoserve bench compare A B"]),
        (["a", "b", "c"], ["usage: nanoserve bench compare A B"]),
        (["a", "--quick"], ["usage: nanoserve bench compare A B"]),
        (["a", "missing"], ["missing does not exist"]),
        (["a", "empty"], ["empty holds no complete run"]),
        (["a", "other"], ["nothing in common: A has kvcache gpt2-cpu; B has batch gpt2-cpu"]),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    pieces: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(recorded({"cached": 1.0}), tmp_path / "a" / machine.slug())
    saved(recorded({"x": 1.0}, experiment="batch"), tmp_path / "other")
    (tmp_path / "empty").mkdir()
    assert runner.main(["compare", *arguments]) == 2
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    for piece in pieces:
        assert piece in shown
