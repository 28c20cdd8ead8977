"""`python -m nanoserve.bench NAME…`: runs experiments one after another and shows what they say.

`nanoserve bench` calls the same `main`; `bench compare A B` holds two recorded results against each
other. Errors leave as one line with an exit code: 2 for a request that was wrong, 1 for a fault of
ours or of the machine, 3 for a run that is void because the machine was too unsteady (its tables
are shown and marked), 130 for Ctrl-C, 143 for SIGTERM. Of several experiments one that fails does
not lose the others: the last line says which, and the code is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from rich.table import Table as RichTable
from rich.text import Text

from nanoserve.bench import compare, load, machine, page, plots, report
from nanoserve.bench.chapters import CHAPTERS
from nanoserve.bench.conduct import VoidError, check_out, results_path
from nanoserve.bench.experiments import (
    arrivals,
    batch,
    batching,
    ceilings,
    graphs,
    int8,
    interference,
    kvcache,
    memory,
    neighbour,
    overhead,
    peers,
    precision,
    roofline,
    serving,
)
from nanoserve.bench.findings import Table, duration_text
from nanoserve.bench.findings.load import load_paragraph, load_table
from nanoserve.bench.formats import refuse_formats
from nanoserve.bench.measure import now_s
from nanoserve.bench.record import Run
from nanoserve.bench.session import (
    NotHereError,
    Options,
    Screen,
    TerminatedError,
    unwinding_on_sigterm,
)
from nanoserve.bench.trace_events import Recorder, check_trace_path
from nanoserve.config import (
    CacheDtype,
    Device,
    DtypeOption,
    ExecutorName,
    LoadFormat,
    Quantization,
)
from nanoserve.engine.engine import StepError

ALL, COMPARE = "all", "compare"
FAULT, USAGE, VOID, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

EXPECTED = (ValueError, VoidError, StepError, OSError, MemoryError, ModuleNotFoundError)
"""What an experiment may raise: one line says it all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A question, how it is measured, and how its answer is shown."""

    question: str
    measure: Callable[[Options, Screen], Run]
    show: Callable[[Run, Options, Screen], None]
    takes_formats: bool = True  # --quantization and --kv-cache-dtype; else its own, or none


def show_tables(run: Run, screen: Screen) -> None:
    chapter = CHAPTERS[run.header["experiment"]]
    findings = chapter.conclude(run)
    for table in chapter.filled_tables(findings, details=False).values():
        screen.show(rich_table(table))


def show_chapter(run: Run, options: Options, screen: Screen) -> None:
    """Tables, what they mean here, and where records and plots are."""
    chapter = CHAPTERS[run.header["experiment"]]
    findings = chapter.conclude(run)
    show_tables(run, screen)
    screen.show(chapter.paragraph(findings))
    path = results_path(options, run.header["experiment"], run.name)
    screen.say(f"Records: {path}")
    for name, picture in chapter.pictures.items():
        stem = path.with_name(f"{name}-{path.stem.partition('-')[2]}")
        try:
            pictures = plots.save(picture.data(findings), stem, picture.draw)
        except ModuleNotFoundError as error:
            screen.say(f"No plot: {error.name} is not installed (pip install 'nanoserve[bench]').")
            return
        screen.say(f"Plot: {pictures[-1]}")


def show_void(run: Run, reason: str, screen: Screen) -> None:
    """The tables of a run of which nothing may be claimed, and why not."""
    screen.show(Text(f"VOID: {reason}.", style="bold"))
    screen.show("What was measured, of which nothing may be claimed:")
    show_tables(run, screen)


EXPERIMENTS = {
    "ceilings": Experiment(
        question=ceilings.QUESTION,
        measure=ceilings.measure,
        show=show_chapter,
        takes_formats=False,
    ),
    "kvcache": Experiment(
        question=kvcache.QUESTION, measure=kvcache.measure, show=show_chapter, takes_formats=False
    ),
    "batch": Experiment(question=batch.QUESTION, measure=batch.measure, show=show_chapter),
    "batching": Experiment(question=batching.QUESTION, measure=batching.measure, show=show_chapter),
    "arrivals": Experiment(question=arrivals.QUESTION, measure=arrivals.measure, show=show_chapter),
    "graphs": Experiment(
        question=graphs.QUESTION, measure=graphs.measure, show=show_chapter, takes_formats=False
    ),
    "int8": Experiment(
        question=int8.QUESTION, measure=int8.measure, show=show_chapter, takes_formats=False
    ),
    "interference": Experiment(
        question=interference.QUESTION, measure=interference.measure, show=show_chapter
    ),
    "memory": Experiment(
        question=memory.QUESTION, measure=memory.measure, show=show_chapter, takes_formats=False
    ),
    "neighbour": Experiment(
        question=neighbour.QUESTION,
        measure=neighbour.measure,
        show=show_chapter,
        takes_formats=False,
    ),
    "overhead": Experiment(question=overhead.QUESTION, measure=overhead.measure, show=show_chapter),
    "peers": Experiment(
        question=peers.QUESTION, measure=peers.measure, show=show_chapter, takes_formats=False
    ),
    "precision": Experiment(
        question=precision.QUESTION,
        measure=precision.measure,
        show=show_chapter,
        takes_formats=False,
    ),
    "roofline": Experiment(
        question=roofline.QUESTION, measure=roofline.measure, show=show_chapter, takes_formats=False
    ),
    "serving": Experiment(
        question=serving.QUESTION, measure=serving.measure, show=show_chapter, takes_formats=False
    ),
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


def run(names: Sequence[str], options: Options, screen: Screen | None = None) -> int:
    """Measure and show each experiment; the exit code.

    Of one experiment an error is raised: ValueError for a wrong request, VoidError for a run that
    means nothing, OSError where the machine fails. Of several each has its turn. What was recorded
    until then stays.
    """
    chosen = resolve_names(names)
    check_out(options)
    screen = screen or Screen()
    if len(chosen) > 1:
        return Series(chosen, options, screen).run()
    measure_and_show(chosen[0], options, screen)
    return 0


def run_traced(names: Sequence[str], options: Options, trace: Path) -> int:
    """As `run`, and a trace of every engine of this process, however it ends."""
    check_trace_path(trace)
    recorder, screen = Recorder(), Screen()
    try:
        return run(names, replace(options, recorder=recorder), screen)
    finally:
        screen.say(f"Trace: {trace} ({recorder.write(trace):,} events; open it in ui.perfetto.dev)")


def measure_and_show(name: str, options: Options, screen: Screen) -> Run:
    """One experiment; its run. Raises what it raises, a void run shown before."""
    experiment = EXPERIMENTS[name]
    if not experiment.takes_formats:
        refuse_formats(replace(options, dtype="auto"), name)
    screen.show(Text.assemble((name, "bold"), f": {experiment.question}"))
    try:
        finished = experiment.measure(options, screen)
    except VoidError as error:
        if error.run is not None:
            show_void(error.run, str(error), screen)
        raise
    experiment.show(finished, options, screen)
    return finished


class Series:
    """Several experiments one after the other: each has its turn, whatever became of the others."""

    def __init__(self, names: Sequence[str], options: Options, screen: Screen) -> None:
        self.names, self.options, self.screen = names, options, screen
        self.finished: list[Run] = []
        self.failed: dict[str, str] = {}
        self.passed_over: dict[str, str] = {}
        self._started_s = now_s()

    def run(self) -> int:
        """All of them, and a page of those that came to their end; the exit code.

        A request of which nothing applies here is a wrong one, as it is for one experiment.
        """
        for place, name in enumerate(self.names):
            self.screen.say(f"[{place + 1} of {len(self.names)}] {name}{self.time_left(place)}")
            self.attempt(name)
        self.write_page()
        self.screen.say(
            f"{len(self.finished)} of {len(self.names)} experiments in "
            f"{duration_text(now_s() - self._started_s)}"
        )
        for name, reason in self.passed_over.items():
            self.screen.say(f"{name} does not apply here: {reason}")
        for name, reason in self.failed.items():
            complain(f"{name} failed: {reason}", FAULT)
        if self.failed:
            return FAULT
        return 0 if self.finished else complain("nothing of this applies here", USAGE)

    def time_left(self, num_done: int) -> str:
        """What has passed, and what the rest takes if it is like what was."""
        if not num_done:
            return ""
        passed_s = now_s() - self._started_s
        left_s = passed_s / num_done * (len(self.names) - num_done)
        return f", {duration_text(passed_s)} passed, about {duration_text(left_s)} left"

    def attempt(self, name: str) -> None:
        """One experiment; if it fails, why is kept and said, a fault of ours with its traceback.

        One that has no meaning on this device is no failure.
        """
        try:
            self.finished.append(measure_and_show(name, self.options, self.screen))
        except NotHereError as error:
            self.passed_over[name] = str(error)
            self.screen.say(f"{name} is passed over: {error}")
        except EXPECTED as error:
            self.fail(name, error)
        except Exception as error:
            logger.exception("%s has a fault of its own", name)
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        self.failed[name] = " ".join(str(error).split()) or type(error).__name__
        self.screen.say(f"{name} failed: {self.failed[name]}")

    def write_page(self) -> None:
        """One page for a browser with all that was measured now."""
        if not self.finished:
            return
        ending = "-quick" if self.options.quick else ""
        path = self.options.out / machine.slug() / f"report{ending}.html"
        try:
            page.write(path, report.results_of(self.finished))
        except ModuleNotFoundError as error:
            self.screen.say(
                f"No page: {error.name} is not installed (pip install 'nanoserve[bench]')."
            )
        else:
            self.screen.say(f"Page for a browser: {path}")


class OneLineParser(argparse.ArgumentParser):
    """argparse, with errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The options of `bench`, their defaults from `Options`."""
    made = OneLineParser(
        prog="nanoserve bench",
        description="Measure what a KV cache buys and what it costs.",
        epilog=f"nanoserve bench {COMPARE} A B: two folders or files of results, held together. "
        f"nanoserve bench arrivals {load.URL_OPTION} http://host:port: an open-loop load for any "
        "OpenAI-compatible server, with options of its own (--help).",
    )
    made.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*EXPERIMENTS, ALL]))
    made.add_argument("--model", default=Options().model, help="a name or a folder")
    made.add_argument(
        "--load-format", choices=get_args(LoadFormat), help="default: what is at hand, else dummy"
    )
    made.add_argument("--device", choices=get_args(Device), default=Options().device)
    made.add_argument("--dtype", choices=get_args(DtypeOption), default=Options().dtype)
    made.add_argument(
        "--quantization", choices=get_args(Quantization), help="default: weights in --dtype"
    )
    made.add_argument("--kv-cache-dtype", choices=get_args(CacheDtype), help="default: as --dtype")
    made.add_argument("--executor", choices=get_args(ExecutorName), default=Options().executor)
    made.add_argument("--threads", type=int, help="default: the executor's choice")
    made.add_argument("--quick", action="store_true", help="at most 40 s each on two cores")
    made.add_argument("--out", type=Path, default=Options().out, metavar="DIR")
    made.add_argument("--resume", action="store_true", help="continue the last, unfinished run")
    made.add_argument("--seed", type=int, help="of the order in which arms take turns")
    made.add_argument(
        "--trace", type=Path, metavar="FILE", help="steps, slots and requests, for Perfetto"
    )
    made.add_argument("--list", action="store_true", help="say what each experiment asks")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    with unwinding_on_sigterm():
        return run_command(typed)


def run_command(typed: Sequence[str]) -> int:
    """What was typed; the exit code of whatever became of it."""
    try:
        if typed[:1] == [COMPARE]:
            return compare.run(typed[1:], Screen())
        if load.is_load(typed):
            return apply_load(load.read_options(typed), Screen())
        return run_typed(vars(parser().parse_args(typed)))
    except ValueError as error:
        return complain(error, USAGE)
    except VoidError as error:
        return complain(error, FAULT if error.run is None else VOID)
    except EXPECTED as error:
        return complain(error, FAULT)
    except KeyboardInterrupt:
        return complain("interrupted; --resume continues", INTERRUPTED)
    except TerminatedError:
        return complain("terminated; --resume continues", TERMINATED)


def run_typed(given: dict[str, Any]) -> int:
    """What the parsed options ask for; the exit code."""
    names: list[str] = given.pop("names")
    trace: Path | None = given.pop("trace")
    if given.pop("list"):
        list_experiments()
        return 0
    options = Options(**given)
    return run(names, options) if trace is None else run_traced(names, options, trace)


def apply_load(options: load.LoadOptions, screen: Screen) -> int:
    """An open loop on a server; the exit code: a fault if it answered nothing."""
    findings = load.apply_load(options, screen.say)
    screen.show(rich_table(load_table(findings)))
    screen.show(load_paragraph(findings))
    screen.say(f"Records: {load.load_path(options)}")
    return 0 if findings.requests else FAULT


def list_experiments() -> None:
    for name, experiment in EXPERIMENTS.items():
        print(f"{name:13} {experiment.question}")


def complain(error: object, code: int) -> int:
    """One line on standard error; the code."""
    print(f"nanoserve bench: {' '.join(str(error).split())}", file=sys.stderr)
    return code
