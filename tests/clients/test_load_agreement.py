"""Our load generator and an independent one on a server whose times are known.

Each must say what is so, and so what the other says: of the first token, of the gaps, of throughput
and of the length of prompts. The server does next to nothing, so a busy machine changes little;
how far the two agree about a server that computes, scripts/load_agreement.py measures.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from serving import ROOT

from nanoserve.bench.load import LoadOptions

sys.path.insert(0, str(ROOT / "scripts"))

import paced_server
from load_agreement import (
    GENERATORS,
    OURS,
    PACE,
    THEIRS,
    TOLERANCE,
    Seen,
    paced_truth,
    seen,
)

LOAD = LoadOptions(url="", rate=8.0, requests=20, prompt_tokens=32, output_tokens=16, seed=1)


def differences(url: str, folder: Path, truth: Seen) -> dict[str, dict[str, float]]:
    """How far each is from the truth, and ours from the other, after one load by each."""
    load = replace(LOAD, url=url, out=folder)
    found = {name: seen(by(load)) for name, by in GENERATORS.items()}
    return {
        "ours": found[OURS].differences(truth),
        "theirs": found[THEIRS].differences(truth),
        "ours against theirs": found[OURS].differences(found[THEIRS]),
    }


def agree(found: dict[str, dict[str, float]]) -> bool:
    return all(abs(value) <= TOLERANCE for each in found.values() for value in each.values())


def test_both_generators_say_what_is_so(tmp_path: Path) -> None:
    truth = paced_truth(LOAD, PACE)
    with paced_server.running(PACE) as url:
        found = differences(url, tmp_path / "first", truth)
        if not agree(found):  # the machine may have been held up; twice in a row it is not chance
            found = differences(url, tmp_path / "second", truth)
    assert agree(found), found
