"""What a `graphs` run says: how much of an eager step goes when one call launches all of it.

Two numbers stand beside each other and need not agree. What is *measured* is the part of the eager
step that the other executor does not need, for whatever reason. What is *predicted* is dispatch
alone: the operations counted, times the measured cost of one with nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
    aa_from_record,
    counted,
    interval_text,
    machine_name,
    marked,
    milliseconds,
    noise_sentence,
    off,
    times,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import paired_ratios
from nanoserve.bench.metrics import Distribution, describe
from nanoserve.bench.record import Record, Run
from nanoserve.planner.memory import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStep:
    """One executor at one shape; `speedup` is eager's step over its own, by round."""

    name: str
    step: Distribution
    speedup: Distribution
    predicted_s: float

    @property
    def saved_share(self) -> float:
        """Part of the eager step that this executor does not need; negative if it needs more."""
        return 1 - 1 / self.speedup.median


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsCell:
    """One batch and context: eager, what it dispatches, and the other executors, last the best."""

    batch: int
    context: int
    eager: Distribution
    eager_predicted_s: float
    num_operations: int
    dispatch_s: float
    others: tuple[ArmStep, ...]

    @property
    def main(self) -> ArmStep:
        return self.others[-1]

    @property
    def dispatch_share(self) -> float:
        """Predicted dispatch over the eager step as it was measured."""
        return self.dispatch_s / self.eager.median


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsFindings:
    """Everything the graphs experiment concludes; cells by context, then batch."""

    run: Run
    cells: tuple[GraphsCell, ...]
    captures: Mapping[str, Record]

    @property
    def smallest_effect(self) -> float:
        return aa_from_record(self.run.checks[-1]).smallest_effect or 0.0


def graphs_findings(run: Run) -> GraphsFindings:
    """All conclusions of one complete run of the graphs experiment."""
    cells = [graphs_cell(run, group) for group in run.header["predictions"]]
    return GraphsFindings(
        run=run,
        cells=tuple(sorted(cells, key=lambda cell: (cell.context, cell.batch))),
        captures=run.header["captures"],
    )


def graphs_cell(run: Run, group: str) -> GraphsCell:
    """One shape of a run."""
    samples = [sample for sample in run.final_samples if sample.group == group]
    labels, steps = samples[0].labels, counted(samples, "step")
    predicted = run.header["predictions"][group]
    eager = labels["eager"]
    return GraphsCell(
        batch=labels["batch"],
        context=labels["context"],
        eager=describe(steps[group, eager]),
        eager_predicted_s=predicted[eager]["step_s"],
        num_operations=predicted[eager]["num_operations"],
        dispatch_s=predicted[eager]["dispatch_s"],
        others=tuple(
            ArmStep(
                name=name,
                step=describe(steps[group, name]),
                speedup=describe(paired_ratios(samples, eager, name, "step")),
                predicted_s=values["step_s"],
            )
            for name, values in predicted.items()
            if name != eager
        ),
    )


def graphs_table(findings: GraphsFindings) -> Table:
    """Every shape and executor."""
    heads = [
        "batch",
        "context",
        "executor",
        "eager ms",
        "predicted",
        "its ms",
        "predicted",
        "faster",
        "95 %",
        "eager less this",
        "dispatch, predicted",
    ]
    return heads, [
        [
            str(cell.batch),
            f"{cell.context:,}",
            arm.name,
            marked(cell.eager),
            predicted_text(cell.eager_predicted_s, cell.eager),
            marked(arm.step),
            predicted_text(arm.predicted_s, arm.step),
            times(arm.speedup.median),
            interval_text(arm.speedup),
            f"{arm.saved_share:.0%}",
            f"{milliseconds(cell.dispatch_s)} ms ({cell.dispatch_share:.0%})",
        ]
        for cell in findings.cells
        for arm in cell.others
    ]


def predicted_text(predicted_s: float, measured: Distribution) -> str:
    return f"{milliseconds(predicted_s)} ({off(predicted_s, measured.median)})"


def graphs_paragraph(findings: GraphsFindings) -> str:
    """What the numbers mean on this machine: what goes, and what dispatch explains of it."""
    first, last = findings.cells[0], findings.cells[-1]
    parts = [
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}.",
        saved_sentence(findings, first),
        explained_sentence(findings, first),
    ]
    if last is not first:
        parts.append(saved_sentence(findings, last))
        parts.append(explained_sentence(findings, last))
    parts += capture_sentences(findings)
    return " ".join([*parts, noise_sentence(findings.run)])


def cell_words(cell: GraphsCell) -> str:
    sequences = "one sequence" if cell.batch == 1 else f"{cell.batch} sequences"
    return f"{sequences} at context {cell.context:,}"


def saved_sentence(findings: GraphsFindings, cell: GraphsCell) -> str:
    """What the other executor spares, if anything that can be told from noise."""
    arm = cell.main
    seconds = (
        f"A step of {cell_words(cell)} takes {milliseconds(cell.eager.median)} ms on the eager "
        f"executor and {milliseconds(arm.step.median)} ms as {arm.name}"
    )
    if abs(arm.speedup.median - 1) <= findings.smallest_effect:
        return f"{seconds}, which cannot be told apart."
    if arm.saved_share < 0:
        return f"{seconds}: eager is the faster one."
    return f"{seconds}: {arm.saved_share:.0%} of the eager step goes."


def explained_sentence(findings: GraphsFindings, cell: GraphsCell) -> str:
    """How much of that is dispatch, by the prediction."""
    if not cell.num_operations:
        return "No operations were counted there."
    each_us = cell.dispatch_s / cell.num_operations * 1e6
    said = (
        f"Dispatching its {cell.num_operations:,} operations, {each_us:.1f} us each with nothing "
        f"to do, was predicted to take {milliseconds(cell.dispatch_s)} ms, "
        f"{cell.dispatch_share:.0%} of the eager step"
    )
    spared_s = cell.eager.median - cell.main.step.median
    if cell.main.speedup.median - 1 <= findings.smallest_effect or spared_s <= 0:
        return f"{said}."
    explained = cell.dispatch_s / spared_s
    if explained >= 1:
        return f"{said}: that alone would explain all that goes."
    return (
        f"{said}: {explained:.0%} of what goes. The rest is how the operations run, each reading "
        "and writing memory for itself, and waiting for the slowest thread."
    )


def capture_sentences(findings: GraphsFindings) -> list[str]:
    """What a captured graph costs before it helps."""
    return [
        f"For {name}, {took['num_graphs']} shapes were captured in {took['capture_s']:.1f} s, with "
        f"{format_bytes(took['graph_pool_bytes'])} of memory for what they compute."
        for name, took in findings.captures.items()
    ]


def graphs_numbers(findings: GraphsFindings) -> dict[str, str]:
    """What prose may quote."""
    cell = findings.cells[0]
    return {
        "eager_ms": milliseconds(cell.eager.median),
        "other_ms": milliseconds(cell.main.step.median),
        "speedup": times(cell.main.speedup.median),
        "saved": f"{cell.main.saved_share:.0%}",
        "dispatch": f"{cell.dispatch_share:.0%}",
        "paragraph": graphs_paragraph(findings),
    }
