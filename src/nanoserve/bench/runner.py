"""`python -m nanoserve.bench NAME…`: runs experiments one after another and shows what they say.

`nanoserve bench` calls the same `run`. Errors leave as one line with an exit code: 2 for a request
that was wrong, 1 for a fault of ours or of the machine, 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.table import Table as RichTable
from rich.text import Text

from nanoserve.bench import plots
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.conduct import VoidError, check_out, results_path
from nanoserve.bench.experiments import (
    batch,
    batching,
    ceilings,
    interference,
    kvcache,
    overhead,
    serving,
)
from nanoserve.bench.findings import Table
from nanoserve.bench.findings.ceilings import ceilings_paragraph, ceilings_table
from nanoserve.bench.findings.kvcache import (
    kvcache_findings,
    kvcache_paragraph,
    kvcache_table,
)
from nanoserve.bench.record import Run
from nanoserve.bench.session import Options, Screen
from nanoserve.config import Device, DtypeOption, ExecutorName, LoadFormat
from nanoserve.engine.engine import StepError

ALL = "all"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A question, how it is measured, and how its answer is shown."""

    question: str
    measure: Callable[[Options, Screen], Run]
    show: Callable[[Run, Options, Screen], None]


def show_ceilings(run: Run, _: Options, screen: Screen) -> None:
    """Every load's rate and what they mean."""
    screen.show(rich_table(ceilings_table(run)))
    screen.show(ceilings_paragraph(run))


def show_kvcache(run: Run, options: Options, screen: Screen) -> None:
    """The comparison, what it means here, and where records and plot are."""
    findings = kvcache_findings(run)
    screen.show(rich_table(kvcache_table(findings)))
    screen.show(kvcache_paragraph(findings))
    path = results_path(options, run.header["experiment"], run.header["name"])
    try:
        pictures = plots.save(plots.kvcache_plot(findings), path.with_suffix(""))
    except ModuleNotFoundError as error:
        screen.say(f"No plot: {error.name} is not installed (pip install 'nanoserve[bench]').")
    else:
        screen.say(f"Records: {path}\nPlot: {pictures[-1]}")


def show_chapter(run: Run, options: Options, screen: Screen) -> None:
    """Tables, what they mean here, and where records and plots are."""
    chapter = CHAPTERS[run.header["experiment"]]
    findings = chapter.conclude(run)
    for table in chapter.tables.values():
        screen.show(rich_table(table(findings)))
    screen.show(chapter.paragraph(findings))
    path = results_path(options, run.header["experiment"], run.header["name"])
    screen.say(f"Records: {path}")
    for name, picture in chapter.pictures.items():
        stem = path.with_name(f"{name}-{path.stem.partition('-')[2]}")
        try:
            pictures = plots.save(picture.data(findings), stem, picture.draw)
        except ModuleNotFoundError as error:
            screen.say(f"No plot: {error.name} is not installed (pip install 'nanoserve[bench]').")
            return
        screen.say(f"Plot: {pictures[-1]}")


EXPERIMENTS = {
    "ceilings": Experiment(
        question=ceilings.QUESTION, measure=ceilings.measure, show=show_ceilings
    ),
    "kvcache": Experiment(question=kvcache.QUESTION, measure=kvcache.measure, show=show_kvcache),
    "batch": Experiment(question=batch.QUESTION, measure=batch.measure, show=show_chapter),
    "batching": Experiment(question=batching.QUESTION, measure=batching.measure, show=show_chapter),
    "interference": Experiment(
        question=interference.QUESTION, measure=interference.measure, show=show_chapter
    ),
    "overhead": Experiment(question=overhead.QUESTION, measure=overhead.measure, show=show_chapter),
    "serving": Experiment(question=serving.QUESTION, measure=serving.measure, show=show_chapter),
}


def rich_table(table: Table) -> RichTable:
    """A table for a terminal of 80 columns, everything to the right."""
    heads, rows = table
    made = RichTable(box=None, padding=(0, 1, 0, 0))
    for head in heads:
        made.add_column(head, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def resolve_names(names: Sequence[str]) -> list[str]:
    """Experiments in the order asked for, each once. Raises ValueError for a name there is not."""
    if unknown := [name for name in names if name not in EXPERIMENTS and name != ALL]:
        raise ValueError(
            f"there is no experiment {', '.join(unknown)}: choose from "
            f"{', '.join(EXPERIMENTS)} or {ALL} (--list says what each asks)"
        )
    if not names:
        raise ValueError(f"name an experiment: {', '.join(EXPERIMENTS)} or {ALL}")
    return list(EXPERIMENTS) if ALL in names else list(dict.fromkeys(names))


def run(names: Sequence[str], options: Options, screen: Screen | None = None) -> None:
    """Measure and show each experiment.

    Raises ValueError for a wrong request, VoidError for a run that means nothing, OSError where the
    machine fails; what was recorded until then stays.
    """
    chosen = resolve_names(names)
    check_out(options)
    screen = screen or Screen()
    for name in chosen:
        experiment = EXPERIMENTS[name]
        screen.show(Text.assemble((name, "bold"), f": {experiment.question}"))
        experiment.show(experiment.measure(options, screen), options, screen)


class OneLineParser(argparse.ArgumentParser):
    """argparse, with errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The options of `bench`, their defaults from `Options`."""
    made = OneLineParser(
        prog="nanoserve bench", description="Measure what a KV cache buys and what it costs."
    )
    made.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*EXPERIMENTS, ALL]))
    made.add_argument("--model", default=Options().model, help="a name or a folder")
    made.add_argument(
        "--load-format", choices=get_args(LoadFormat), help="default: what is at hand, else dummy"
    )
    made.add_argument("--device", choices=get_args(Device), default=Options().device)
    made.add_argument("--dtype", choices=get_args(DtypeOption), default=Options().dtype)
    made.add_argument("--executor", choices=get_args(ExecutorName), default=Options().executor)
    made.add_argument("--threads", type=int, help="default: the executor's choice")
    made.add_argument("--quick", action="store_true", help="at most 40 s each on two cores")
    made.add_argument("--out", type=Path, default=Options().out, metavar="DIR")
    made.add_argument("--resume", action="store_true", help="continue the last, unfinished run")
    made.add_argument("--seed", type=int, help="of the order in which arms take turns")
    made.add_argument("--list", action="store_true", help="say what each experiment asks")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    given: dict[str, Any] = vars(parser().parse_args(arguments))
    names: list[str] = given.pop("names")
    if given.pop("list"):
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:13} {experiment.question}")
        return 0
    try:
        run(names, Options(**given))
    except ValueError as error:
        return complain(error, 2)
    except (VoidError, StepError, OSError, MemoryError, ModuleNotFoundError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted; --resume continues", INTERRUPTED)
    return 0


def complain(error: object, code: int) -> int:
    """One line on standard error; the code."""
    print(f"nanoserve bench: {' '.join(str(error).split())}", file=sys.stderr)
    return code
