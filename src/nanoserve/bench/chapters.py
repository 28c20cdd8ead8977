"""Experiments as screen and report tell them: one entry says all that is shown of one experiment.

A chapter is data: how a run's conclusions are drawn, and which paragraph, tables, pictures and
quotable numbers come of them. Runner and report treat all chapters alike, so a new experiment is an
entry here. (`kvcache`, the main result, has pages of its own.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nanoserve.bench.batching_plots import (
    batch_scaling_plot,
    draw_batch_scaling,
    draw_gains,
    draw_timeline,
    gains_plot,
    timeline_plot,
)
from nanoserve.bench.findings import Table
from nanoserve.bench.findings.batch import (
    BatchFindings,
    batch_findings,
    batch_numbers,
    batch_paragraph,
    batch_table,
)
from nanoserve.bench.findings.batching import (
    BatchingFindings,
    batching_findings,
    batching_numbers,
    batching_paragraph,
    gain_table,
    latency_table,
    transforms_text,
)
from nanoserve.bench.findings.interference import (
    InterferenceFindings,
    gap_table,
    interference_findings,
    interference_paragraph,
)
from nanoserve.bench.findings.overhead import (
    OverheadFindings,
    overhead_findings,
    overhead_paragraph,
    overhead_table,
)
from nanoserve.bench.findings.serving import (
    ServingFindings,
    cost_table,
    delivery_table,
    serving_findings,
    serving_numbers,
    serving_paragraph,
    throughput_table,
)
from nanoserve.bench.plots import PlotData
from nanoserve.bench.record import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Findings = TypeVar("Findings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture(Generic[Findings]):
    """A plot: its data from findings, and the drawing of them. `alt` is for who cannot see it."""

    alt: str
    data: Callable[[Findings], PlotData]
    draw: Callable[[PlotData], Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter(Generic[Findings]):
    """One experiment as it is told. `tables` go by caption, `pictures` by the name of their file.

    `notes` is what must be said below the tables, `numbers` what prose may quote by name.
    """

    title: str
    conclude: Callable[[Run], Findings]
    paragraph: Callable[[Findings], str]
    tables: Mapping[str, Callable[[Findings], Table]]
    pictures: Mapping[str, Picture[Findings]] = field(default_factory=dict)
    notes: Callable[[Findings], str] | None = None
    numbers: Callable[[Findings], dict[str, str]] | None = None


BATCH: Chapter[BatchFindings] = Chapter(
    title="2. When does batching stop being free?",
    conclude=batch_findings,
    paragraph=batch_paragraph,
    tables={"One decode step by batch, and tokens per second": batch_table},
    pictures={
        "batch_scaling": Picture(
            alt="time of a decode step and tokens per second, by batch",
            data=batch_scaling_plot,
            draw=draw_batch_scaling,
        )
    },
    numbers=batch_numbers,
)

BATCHING: Chapter[BatchingFindings] = Chapter(
    title="3. Static or continuous?",
    conclude=batching_findings,
    paragraph=batching_paragraph,
    tables={
        "Makespans; decode rows per token asked for, static / continuous": gain_table,
        "Latency and time to first token in seconds, static / continuous": latency_table,
    },
    pictures={
        "batching_timeline": Picture(
            alt="which request held which slot when, static and continuous",
            data=timeline_plot,
            draw=draw_timeline,
        ),
        "continuous_batching": Picture(
            alt="gain of continuous batching by workload and by slots",
            data=gains_plot,
            draw=draw_gains,
        ),
    },
    notes=transforms_text,
    numbers=batching_numbers,
)

INTERFERENCE: Chapter[InterferenceFindings] = Chapter(
    title="What does a long prompt cost the others?",
    conclude=interference_findings,
    paragraph=interference_paragraph,
    tables={"Gaps between two tokens of a stream, by the step's token budget": gap_table},
)

OVERHEAD: Chapter[OverheadFindings] = Chapter(
    title="What does the engine cost beside the model?",
    conclude=overhead_findings,
    paragraph=overhead_paragraph,
    tables={"Microseconds of a step in which nothing is computed": overhead_table},
)

SERVING: Chapter[ServingFindings] = Chapter(
    title="What does HTTP cost on top of the engine?",
    conclude=serving_findings,
    paragraph=serving_paragraph,
    tables={
        "Throughput through HTTP and offline": throughput_table,
        "From a token's birth to the wire": delivery_table,
        "Microseconds of processor time per streamed token": cost_table,
    },
    numbers=serving_numbers,
)

CHAPTERS: Mapping[str, Chapter[Any]] = {
    "batch": BATCH,
    "batching": BATCHING,
    "interference": INTERFERENCE,
    "overhead": OVERHEAD,
    "serving": SERVING,
}
"""By experiment, in the order of the report."""
