"""The soak of scripts/soak.py, one minute of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "soak.py"


@pytest.mark.slow
def test_half_a_minute_of_mixed_traffic_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", "0.5"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for outcome in ("streamed: whole", "leaving: left", "nonsense: 400", "burst: 48 at once"):
        assert outcome in done.stdout
    assert "PROBLEM" not in done.stdout
