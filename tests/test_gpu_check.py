"""scripts/gpu_check.sh with a stand-in for Python: its arguments, its time, and what it leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"

STUB = """\
#!/usr/bin/env bash
echo "${*//$'\n'/ }" >>"$STUB_LOG"
echo "$TRITON_INTERPRET $HF_HUB_OFFLINE" >>"$STUB_LOG.env"
case "$*" in
-c*) echo 'Stub GPU, torch 0, triton 0'; exit "${STUB_GPU:-0}" ;;
*pytest*) echo '3 passed in 0.1s'; echo; sleep "${STUB_SLEEP:-0}"; exit "${STUB_TESTS:-0}" ;;
*nanoserve.bench*)
    if [ -n "${STUB_NOTHING:-}" ]; then exit 1; fi
    folder="${*: -1}/stub-gpu"
    mkdir -p "$folder"
    {
        echo '{"kind": "run"}'
        for i in 1 2 3; do echo '{"kind": "sample", "round": '$i'}'; done
        echo '{"kind": "end", "outcome": "complete"}'
    } >"$folder/kvcache-stub-cuda-quick.jsonl"
    echo '{"kind": "run"}' >"$folder/batch-stub-cuda-quick.jsonl"
    head -c "${STUB_BYTES:-10}" /dev/urandom >"$folder/noise"
    echo 'bench is done'
    exit "${STUB_BENCH:-0}"
    ;;
esac
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A python that says what it was asked, and fails where the environment says so."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(STUB)
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(path))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "asked"))
    return tmp_path


def check(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )


def test_it_is_clean() -> None:
    tool = shutil.which("shellcheck")
    assert tool, "this test needs shellcheck: apt-get install shellcheck"
    found = subprocess.run([tool, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_a_whole_run_leaves_a_table_logs_and_records(stub: Path) -> None:
    out = stub / "out"
    done = check("--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    tests, bench = (stub / "asked").read_text().splitlines()[-2:]
    assert "-m pytest" in tests
    assert tests.endswith("--noconftest -p no:cacheprovider -q -m gpu tests/test_gpu.py")
    assert bench.startswith("-m nanoserve.bench all --quick --device cuda --out ")
    assert set((stub / "asked.env").read_text().splitlines()) == {"0 1"}
    files = sorted(path.name for path in out.iterdir())
    assert files == ["bench.log", "records.tar.gz.00", "summary.txt", "tests.log"]
    summary = (out / "summary.txt").read_text()
    assert summary == done.stdout
    first, tests, bench, *records = summary.splitlines()
    assert first == "Stub GPU, torch 0, triton 0"
    assert tests.split()[:2] == ["tests", "passed"]
    assert tests.endswith("3 passed in 0.1s")
    assert bench.split()[:2] == ["bench", "passed"]
    assert [line.split() for line in records] == [
        ["stub-gpu/batch-stub-cuda-quick.jsonl", "0", "samples", "unfinished"],
        ["stub-gpu/kvcache-stub-cuda-quick.jsonl", "3", "samples", '"complete"'],
    ]
    with tarfile.open(out / "records.tar.gz.00") as records_file:
        assert "results/stub-gpu/kvcache-stub-cuda-quick.jsonl" in records_file.getnames()


@pytest.mark.parametrize(
    "fault,words",
    [
        ({"STUB_TESTS": "1"}, ["tests", "exit", "code", "1"]),
        ({"STUB_BENCH": "3"}, ["bench", "exit", "code", "3"]),
    ],
    ids=["tests", "bench"],
)
def test_what_fails_is_said_and_the_rest_still_runs(
    fault: dict[str, str], words: list[str], stub: Path
) -> None:
    done = check("--out", stub / "out", **fault)
    assert done.returncode == 1
    assert words in [line.split()[: len(words)] for line in done.stdout.splitlines()]
    assert "3 samples" in done.stdout
    assert (stub / "out" / "records.tar.gz.00").exists()


def test_a_benchmark_that_recorded_nothing_leaves_the_logs(stub: Path) -> None:
    done = check("--out", stub / "out", STUB_NOTHING="1")
    assert done.returncode == 1
    names = sorted(path.name for path in (stub / "out").iterdir())
    assert names == ["bench.log", "summary.txt", "tests.log"]


def test_large_records_come_in_parts(stub: Path) -> None:
    out = stub / "out"
    assert check("--out", out, STUB_BYTES=str(16 << 20)).returncode == 0
    parts = sorted(out.glob("records.tar.gz.*"))
    assert [part.name[-2:] for part in parts] == ["00", "01"]
    assert len(list(out.iterdir())) <= 8
    assert all(path.stat().st_size <= 16 << 20 for path in out.iterdir())
    whole = BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=whole) as records:
        assert "results/stub-gpu/noise" in records.getnames()


@pytest.mark.parametrize(
    "arguments,words",
    [
        ([], "--out DIR is missing"),
        (["--out"], "--out needs a value"),
        (["--out", "x", "--seconds", "59"], "at least 60, got '59'"),
        (["--out", "x", "--seconds", "soon"], "got 'soon'"),
        (["--fast"], "unknown argument '--fast'"),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be made"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    arguments: list[str], words: str, stub: Path
) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert not (stub / "asked").exists()


def test_a_folder_that_holds_something_is_left_alone(stub: Path) -> None:
    (stub / "note").write_text("mine")
    done = check("--out", stub)
    assert done.returncode == 2
    assert "is not empty" in done.stderr


def test_without_a_gpu_it_says_why_and_runs_nothing(stub: Path) -> None:
    done = check("--out", stub / "out", STUB_GPU="1")
    assert done.returncode == 2
    assert "cannot use a GPU here: Stub GPU" in done.stderr
    assert len((stub / "asked").read_text().splitlines()) == 1
    absent = check("--out", stub / "other", PYTHON="no-such-python")
    assert absent.returncode == 2
    assert "there is no 'no-such-python'" in absent.stderr


def test_help_says_what_it_leaves(stub: Path) -> None:
    done = check("--help")
    assert done.returncode == 0
    assert "summary.txt" in done.stdout
