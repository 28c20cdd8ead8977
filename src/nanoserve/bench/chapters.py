"""Experiments as screen and report tell them: one entry says all that is shown of one experiment.

A chapter is data: how a run's conclusions are drawn, and which paragraph, tables, pictures and
quotable numbers come of them. Runner, report and page treat all chapters alike, so a new experiment
is an entry here. Titles carry no number: the report counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nanoserve.bench.arrivals_plots import (
    arrivals_plot,
    burst_plot,
    draw_arrivals,
    draw_burst,
)
from nanoserve.bench.batching_plots import (
    batch_scaling_plot,
    draw_batch_scaling,
    draw_gains,
    draw_timeline,
    gains_plot,
    timeline_plot,
)
from nanoserve.bench.findings import Table
from nanoserve.bench.findings.arrivals import (
    ArrivalsFindings,
    arrivals_findings,
    arrivals_numbers,
    arrivals_paragraph,
    goodput_table,
    notes_text,
)
from nanoserve.bench.findings.arrivals import (
    latency_table as arrival_latency_table,
)
from nanoserve.bench.findings.arrivals import (
    prediction_table as arrival_prediction_table,
)
from nanoserve.bench.findings.arrivals import (
    throughput_table as arrival_throughput_table,
)
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
from nanoserve.bench.findings.ceilings import ceilings_paragraph, ceilings_table
from nanoserve.bench.findings.graphs import (
    GraphsFindings,
    graphs_findings,
    graphs_numbers,
    graphs_paragraph,
    graphs_table,
)
from nanoserve.bench.findings.int8 import (
    Int8Findings,
    attention_table,
    flatness_table,
    int8_findings,
    int8_numbers,
    int8_paragraph,
)
from nanoserve.bench.findings.interference import (
    InterferenceFindings,
    gap_table,
    interference_findings,
    interference_paragraph,
)
from nanoserve.bench.findings.kvcache import (
    KVCacheFindings,
    kvcache_findings,
    kvcache_paragraph,
    kvcache_table,
    named_numbers,
    prediction_table,
)
from nanoserve.bench.findings.memory import (
    MemoryFindings,
    memory_findings,
    memory_notes,
    memory_numbers,
    memory_paragraph,
    sequences_table,
    terms_table,
)
from nanoserve.bench.findings.neighbour import (
    NeighbourFindings,
    mean_table,
    neighbour_findings,
    neighbour_numbers,
    neighbour_paragraph,
    tail_table,
)
from nanoserve.bench.findings.overhead import (
    OverheadFindings,
    end_to_end_table,
    overhead_findings,
    overhead_paragraph,
    overhead_table,
    sampler_table,
)
from nanoserve.bench.findings.peers import (
    PeerFindings,
    entrants_table,
    floors_table,
    goals_table,
    peer_findings,
    peers_numbers,
    peers_paragraph,
    peers_table,
    settings_table,
)
from nanoserve.bench.findings.precision import (
    PrecisionFindings,
    margin_table,
    precision_findings,
    precision_numbers,
    precision_paragraph,
    quality_table,
    speed_table,
)
from nanoserve.bench.findings.roofline import (
    RooflineFindings,
    roofline_findings,
    roofline_numbers,
    roofline_paragraph,
    roofline_table,
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
from nanoserve.bench.format_plots import (
    draw_graphs,
    draw_int8,
    draw_roofline,
    graphs_plot,
    int8_plot,
    roofline_plot,
)
from nanoserve.bench.memory_plots import ceilings_plot, draw_ceilings
from nanoserve.bench.peers_plots import draw_peers, peers_plot
from nanoserve.bench.plots import PlotData, draw_kvcache, kvcache_plot
from nanoserve.bench.precision_plots import draw_precision, precision_plot
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

    `details` are tables for the report alone, `notes` is what must be said below the tables,
    `numbers` what prose may quote by name.
    """

    title: str
    conclude: Callable[[Run], Findings]
    paragraph: Callable[[Findings], str]
    tables: Mapping[str, Callable[[Findings], Table]]
    pictures: Mapping[str, Picture[Findings]] = field(default_factory=dict)
    details: Mapping[str, Callable[[Findings], Table]] = field(default_factory=dict)
    notes: Callable[[Findings], str] | None = None
    numbers: Callable[[Findings], dict[str, str]] | None = None

    def filled_tables(self, findings: Findings, *, details: bool = True) -> dict[str, Table]:
        """By caption; a table without a row is of something that was not measured: left out."""
        wanted = {**self.tables, **(self.details if details else {})}
        made = {caption: table(findings) for caption, table in wanted.items()}
        return {caption: table for caption, table in made.items() if table[1]}


KVCACHE: Chapter[KVCacheFindings] = Chapter(
    title="What does the cache buy, and where does it lose?",
    conclude=kvcache_findings,
    paragraph=kvcache_paragraph,
    tables={"One step without and with the cache": kvcache_table},
    details={
        "Step times against what the measured ceilings predicted; prefill with its number of "
        "tokens": prediction_table
    },
    pictures={
        "kvcache": Picture(
            alt="time of a step without and with the cache, by context, and the gain",
            data=kvcache_plot,
            draw=draw_kvcache,
        )
    },
    numbers=named_numbers,
)

BATCH: Chapter[BatchFindings] = Chapter(
    title="When does batching stop being free?",
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
    title="Static or continuous?",
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

ARRIVALS: Chapter[ArrivalsFindings] = Chapter(
    title="What if requests do not come all at once?",
    conclude=arrivals_findings,
    paragraph=arrivals_paragraph,
    tables={
        "Requests that met both objectives, of all offered, and their number a second": (
            goodput_table
        ),
        "Output tokens a second, from the first arrival to the last token": (
            arrival_throughput_table
        ),
        "Milliseconds, counted from the scheduled arrival": arrival_latency_table,
    },
    details={
        "Milliseconds to the first token, as simulated before and as measured": (
            arrival_prediction_table
        )
    },
    pictures={
        "arrivals": Picture(
            alt="goodput and time to first token by load, and two distributions, for four arms",
            data=arrivals_plot,
            draw=draw_arrivals,
        ),
        "arrivals_burst": Picture(
            alt="who waits and who holds which slot in one burst, static and continuous",
            data=burst_plot,
            draw=draw_burst,
        ),
    },
    notes=notes_text,
    numbers=arrivals_numbers,
)

GRAPHS: Chapter[GraphsFindings] = Chapter(
    title="How much of decode is dispatch?",
    conclude=graphs_findings,
    paragraph=graphs_paragraph,
    tables={"One decode step on each executor, and what dispatching it should take": graphs_table},
    pictures={
        "graphs": Picture(
            alt="each executor's step as a share of the eager one, and the dispatch in that",
            data=graphs_plot,
            draw=draw_graphs,
        )
    },
    numbers=graphs_numbers,
)

INT8: Chapter[Int8Findings] = Chapter(
    title="Is the dequantise-on-read cost gone?",
    conclude=int8_findings,
    paragraph=int8_paragraph,
    tables={
        "Attention of all layers, and the whole step, by what the cache is kept in": (
            attention_table
        ),
        "A step of one sequence at a short and at a long context": flatness_table,
    },
    pictures={
        "int8_attention": Picture(
            alt="time of attention by context and cache, and int8 over float32 by shape",
            data=int8_plot,
            draw=draw_int8,
        )
    },
    numbers=int8_numbers,
)

INTERFERENCE: Chapter[InterferenceFindings] = Chapter(
    title="What does a long prompt cost the others?",
    conclude=interference_findings,
    paragraph=interference_paragraph,
    tables={"Gaps between two tokens of a stream, by the step's token budget": gap_table},
)

MEMORY: Chapter[MemoryFindings] = Chapter(
    title="What sets the ceiling on concurrency?",
    conclude=memory_findings,
    paragraph=memory_paragraph,
    tables={
        "Sequences that fit, predicted before they were probed": sequences_table,
        "Terms in MiB, from probes without a limit": terms_table,
    },
    pictures={
        "memory_ceilings": Picture(
            alt="bytes at the peak by sequences, up to the limit, and what they are made of",
            data=ceilings_plot,
            draw=draw_ceilings,
        )
    },
    notes=memory_notes,
    numbers=memory_numbers,
)

NEIGHBOUR: Chapter[NeighbourFindings] = Chapter(
    title="What does a busy neighbour cost?",
    conclude=neighbour_findings,
    paragraph=neighbour_paragraph,
    tables={
        "The mean decode step of one sequence, alone and beside one busy loop; the interval is of "
        "the ratios inside rounds": mean_table,
        "The slowest single step in a hundred, over the median of idle ones": tail_table,
    },
    numbers=neighbour_numbers,
)

OVERHEAD: Chapter[OverheadFindings] = Chapter(
    title="What does the engine cost beside the model?",
    conclude=overhead_findings,
    paragraph=overhead_paragraph,
    tables={
        "Microseconds of a step in which nothing is computed": overhead_table,
        "Milliseconds a token of one request takes, bare and through LLM.generate": (
            end_to_end_table
        ),
        "Microseconds of a row of logits in the native sampler on one thread: median / 95th "
        "percentile of single rows": sampler_table,
    },
)

PEERS: Chapter[PeerFindings] = Chapter(
    title="Why not use something else?",
    conclude=peer_findings,
    paragraph=peers_paragraph,
    tables={
        "Milliseconds of a step on every engine; in brackets: times as long as ours": peers_table,
        "Goals against other engines": goals_table,
        "One sequence against what its bytes take at the bandwidth of the same minute": (
            floors_table
        ),
        "Who ran, and how close their logits are to ours in fp32": entrants_table,
    },
    details={"Settings of each engine": settings_table},
    pictures={
        "peers": Picture(
            alt="time of each engine as a multiple of ours, by precision and cell",
            data=peers_plot,
            draw=draw_peers,
        )
    },
    numbers=peers_numbers,
)

PRECISION: Chapter[PrecisionFindings] = Chapter(
    title="fp32, fp16, bf16, int8 weights, int8 KV: what is the price?",
    conclude=precision_findings,
    paragraph=precision_paragraph,
    tables={
        "Quality on held-out text, against float32": quality_table,
        "Memory, and the decode step by batch": speed_table,
        "Positions at which the next token is float32's, by its top-two margin": margin_table,
    },
    pictures={
        "precision": Picture(
            alt="divergence and speed of each format, and agreement by float32's margin",
            data=precision_plot,
            draw=draw_precision,
        )
    },
    numbers=precision_numbers,
)

ROOFLINE: Chapter[RooflineFindings] = Chapter(
    title="How far from the limit?",
    conclude=roofline_findings,
    paragraph=roofline_paragraph,
    tables={"A decode step against the time of its bytes, by format and batch": roofline_table},
    pictures={
        "roofline": Picture(
            alt="operations per second by intensity under the machine's roofs, by format and batch",
            data=roofline_plot,
            draw=draw_roofline,
        )
    },
    numbers=roofline_numbers,
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

CEILINGS: Chapter[Run] = Chapter(
    title="Yardsticks: what can these machines do?",
    conclude=lambda run: run,
    paragraph=ceilings_paragraph,
    tables={"Every load, and which of its kind is the ceiling": ceilings_table},
)

CHAPTERS: Mapping[str, Chapter[Any]] = {
    "kvcache": KVCACHE,
    "batch": BATCH,
    "batching": BATCHING,
    "arrivals": ARRIVALS,
    "graphs": GRAPHS,
    "int8": INT8,
    "interference": INTERFERENCE,
    "memory": MEMORY,
    "neighbour": NEIGHBOUR,
    "overhead": OVERHEAD,
    "peers": PEERS,
    "precision": PRECISION,
    "roofline": ROOFLINE,
    "serving": SERVING,
    "ceilings": CEILINGS,
}
"""By experiment; those that `report` has no place for are told in this order."""
