"""Draw every plot from the recorded measurements: results/ in, docs/plots/ out.

Measures nothing and types no number; `nanoserve report` does the same and renews the texts too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nanoserve.bench import plots, report

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Draw; 1 if nothing was recorded yet."""
    results = report.load(ROOT / report.RESULTS_FOLDER)
    for line in results.skipped:
        print(line, file=sys.stderr)
    for name, data in report.plot_data(results).items():
        path = ROOT / report.PLOTS_FOLDER / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plots.plot_json(data), encoding="utf-8")
    paths = report.draw(ROOT, results)
    for path in paths:
        print(path.relative_to(ROOT))
    if not paths:
        print("nothing is recorded yet: python -m nanoserve.bench kvcache", file=sys.stderr)
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())
