"""Make the extract of the Azure LLM inference traces 2023 that the benchmarks ship.

Reads the two files `AzureLLMInferenceTrace_*.csv` of the repository Azure/AzurePublicDataset and
writes `conv.csv` and `code.csv`: the first requests that fit GPT-2's window, arrivals in seconds.
What was changed is written down in the README beside them; a test holds their checksums.

    python scripts/thin_traces.py AzurePublicDataset/data src/nanoserve/bench/data/azure-llm-2023
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from datetime import datetime
from pathlib import Path

WINDOW = 1024
NUM_REQUESTS = 1000


def thin(source: Path) -> str:
    """The extract of one upstream file as text."""
    with source.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    start = arrival(rows[0]["TIMESTAMP"])
    lines = ["arrival_s,prompt_tokens,output_tokens"]
    for row in rows:
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        if prompt + output <= WINDOW and len(lines) <= NUM_REQUESTS:
            lines.append(f"{arrival(row['TIMESTAMP']) - start:.3f},{prompt},{output}")
    return "\n".join(lines) + "\n"


def arrival(timestamp: str) -> float:
    """Seconds; upstream writes seven digits after the point, Python reads six."""
    return datetime.fromisoformat(timestamp[:26]).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("upstream", type=Path)
    parser.add_argument("extract", type=Path)
    given = parser.parse_args()
    given.extract.mkdir(parents=True, exist_ok=True)
    for name in ("conv", "code"):
        text = thin(given.upstream / f"AzureLLMInferenceTrace_{name}.csv")
        (given.extract / f"{name}.csv").write_text(text, encoding="utf-8", newline="\n")
        print(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}.csv")


if __name__ == "__main__":
    main()
