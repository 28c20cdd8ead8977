"""What a `precision` run says: memory, speed and quality of each number format, and its price.

Quality is the trained model's, speed and memory the chosen one's. A format's loss means something
only beside the noise floor: what float32 itself makes of the same text in another batch, or on
another executor. Bounds that formats promise are checked here, and said to hold or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nanoserve.bench.findings import (
    Table,
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
from nanoserve.bench.quality import Divergence, Quality
from nanoserve.bench.record import Run
from nanoserve.planner.memory import format_bytes

REFERENCE = "float32"
ANOTHER_BATCH, EAGER, EAGER_BATCH = (
    "float32, another batch",
    "float32 on eager",
    "float32 on eager, another batch",
)
FLOORS = (ANOTHER_BATCH, EAGER, EAGER_BATCH)

MOST_INCREASE = {"int8": 0.005, "int8-weight-only": 0.005, "int4": 0.05}
"""Of perplexity on held-out text, as a share."""

LEAST_AGREEMENT = {"KV int8": 0.995}
"""Share of teacher-forced positions; and every disagreement must be explained by the error."""

NEAR_TIE = 0.1
"""Nats: below it the reference itself has hardly a preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One promise of a format: what was found, in words, and whether that keeps it."""

    name: str
    found: str
    wanted: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """One format at one batch; `speedup` is float32's step over its own, by round."""

    batch: int
    step: Distribution
    speedup: Distribution
    predicted_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step.median


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpeed:
    """One format's memory, and its step at each batch, smallest first."""

    name: str
    executor: str
    weights_bytes: int
    kv_bytes_per_token: int
    points: tuple[SpeedPoint, ...]

    @property
    def single(self) -> SpeedPoint:
        """The smallest batch: one sequence."""
        return self.points[0]

    @property
    def peak(self) -> SpeedPoint:
        """The batch of most tokens per second."""
        return max(self.points, key=lambda point: point.tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFindings:
    """Everything the precision experiment concludes, by the names of formats."""

    run: Run
    qualities: Mapping[str, Quality]
    written: Mapping[str, Divergence]
    speeds: Mapping[str, FormatSpeed]
    quality_executors: Mapping[str, str]
    gaps: Mapping[str, str]

    @property
    def formats(self) -> dict[str, Quality]:
        """Those that are not float32 itself."""
        return {name: found for name, found in self.qualities.items() if name not in FLOORS}

    @property
    def bounds(self) -> list[Bound]:
        return [
            bound for name, found in self.formats.items() for bound in check_bounds(name, found)
        ]


def check_bounds(name: str, found: Quality) -> list[Bound]:
    """What a format promises, and whether it was kept; nothing of one that promises nothing."""
    bounds = []
    if (most := MOST_INCREASE.get(name)) is not None:
        bounds.append(
            Bound(
                name=name,
                found=f"perplexity {found.increase:+.2%}",
                wanted=f"at most +{most:.1%}",
                holds=found.increase <= most,
            )
        )
    if (least := LEAST_AGREEMENT.get(name)) is not None:
        bounds.append(
            Bound(
                name=name,
                found=f"{found.agreement:.2%} of positions agree",
                wanted=f"at least {least:.1%}",
                holds=found.agreement >= least,
            )
        )
        bounds.append(
            Bound(
                name=name,
                found=f"{found.num_unexplained} of {found.num_disagreeing} disagreements at a "
                "margin of twice the logits' error or more",
                wanted="none",
                holds=found.num_unexplained == 0,
            )
        )
    return bounds


def precision_findings(run: Run) -> PrecisionFindings:
    """All conclusions of one complete run of the precision experiment."""
    quality = run.header["quality"]
    return PrecisionFindings(
        run=run,
        qualities={name: Quality.from_json(values) for name, values in quality["formats"].items()},
        written={
            name: Divergence(num_tokens=values["num_tokens"], first=tuple(values["first"]))
            for name, values in quality["written"].items()
        },
        speeds={name: format_speed(run, name) for name in run.header["memory"]},
        quality_executors=quality["executors"],
        gaps={**quality["gaps"], **run.header["gaps"]},
    )


def format_speed(run: Run, name: str) -> FormatSpeed:
    """One format of the speed half."""
    memory = run.header["memory"][name]
    points = [speed_point(run, group, name) for group in run.header["predictions"]]
    return FormatSpeed(
        name=name,
        executor=run.header["arms_run"][name]["executor"],
        weights_bytes=memory["weights_bytes"],
        kv_bytes_per_token=memory["kv_bytes_per_token"],
        points=tuple(sorted(points, key=lambda point: point.batch)),
    )


def speed_point(run: Run, group: str, name: str) -> SpeedPoint:
    """One format at one batch."""
    samples = [sample for sample in run.final_samples if sample.group == group]
    return SpeedPoint(
        batch=samples[0].labels["batch"],
        step=describe(counted(samples, "step")[group, name]),
        speedup=describe(paired_ratios(samples, REFERENCE, name, "step")),
        predicted_s=run.header["predictions"][group][name]["step_s"],
    )


# --- tables ---------------------------------------------------------------------------------------


def quality_table(findings: PrecisionFindings) -> Table:
    """Every format and the noise floor, on held-out text."""
    heads = [
        "format",
        "executor",
        "perplexity",
        "against float32",
        "same next token",
        "KL, nats",
        "logit error",
        "widest disagreement",
        "texts still equal",
        "tokens until another",
    ]
    return heads, [
        [
            name,
            findings.quality_executors.get(name, "eager" if "eager" in name else "-"),
            f"{found.perplexity:.3f}",
            f"{found.increase:+.3%} ± {found.uncertainty:.3%}",
            f"{found.agreement:.2%}",
            f"{found.divergence:.1e}",
            f"{found.median_error:.1e}",
            f"{found.widest_disagreement:.3f}" if found.num_disagreeing else "none",
            *written_cells(findings.written.get(name)),
        ]
        for name, found in findings.qualities.items()
    ]


def written_cells(found: Divergence | None) -> list[str]:
    if found is None:
        return ["-", "-"]
    until = found.median_equal
    word = f"{until:,.0f}" if until < found.num_tokens else f"over {found.num_tokens:,}"
    return [f"{found.num_equal} of {len(found.first)}", word]


def margin_table(findings: PrecisionFindings) -> Table:
    """Share of positions at which a format agrees, by how sure float32 is (its top-two margin)."""
    formats = findings.formats
    bins = next(iter(formats.values())).bins
    heads = ["margin, nats", "positions", *formats]
    rows = []
    for place, found in enumerate(bins):
        above = bins[place + 1].low if place + 1 < len(bins) else None
        edge = f"{found.low:g} and more" if above is None else f"{found.low:g} to {above:g}"
        shares = [
            agreement_text(quality.bins[place].num_agreeing, found.num_positions)
            for quality in formats.values()
        ]
        rows.append([edge, f"{found.num_positions:,}", *shares])
    return heads, rows


def agreement_text(num_agreeing: int, num_positions: int) -> str:
    return f"{num_agreeing / num_positions:.1%}" if num_positions else "-"


def speed_table(findings: PrecisionFindings) -> Table:
    """Memory, and the step at each batch."""
    heads = [
        "format",
        "executor",
        "weights",
        "KV a token",
        "batch",
        "step ms",
        "predicted",
        "faster",
        "95 %",
        "tok/s",
        "",
    ]
    return heads, [
        [
            speed.name,
            speed.executor,
            format_bytes(speed.weights_bytes),
            format_bytes(speed.kv_bytes_per_token),
            str(point.batch),
            marked(point.step),
            f"{milliseconds(point.predicted_s)} ({off(point.predicted_s, point.step.median)})",
            times(point.speedup.median),
            interval_text(point.speedup),
            f"{point.tokens_per_s:,.0f}",
            "peak" if point is speed.peak else "",
        ]
        for speed in findings.speeds.values()
        for point in speed.points
    ]


# --- words ----------------------------------------------------------------------------------------


def precision_paragraph(findings: PrecisionFindings) -> str:
    """What the numbers mean on this machine: price, floor, where agreement is lost, which half."""
    quality = findings.run.header["quality"]
    parts = [
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}:",
        speed_sentence(findings),
        f"Quality is that of {quality['model']} (trained weights) on "
        f"{windows_text(quality['num_windows'], quality['length'])}.",
        price_sentence(findings),
        floor_sentence(findings),
        margin_sentence(findings),
        *half_sentence(findings),
        *bounds_sentence(findings),
        *(f"There is no arm {name}: {why}." for name, why in findings.gaps.items()),
        noise_sentence(findings.run),
    ]
    return " ".join(parts)


def windows_text(num_windows: int, length: int) -> str:
    plural = "" if num_windows == 1 else "s"
    return f"{num_windows} window{plural} of {length:,} held-out tokens"


def speed_sentence(findings: PrecisionFindings) -> str:
    """The fastest format for one sequence, and that of the most tokens per second."""
    single = max(findings.speeds.values(), key=lambda speed: speed.single.speedup.median)
    peak = max(findings.speeds.values(), key=lambda speed: speed.peak.tokens_per_s)
    reference = findings.speeds[REFERENCE]
    return (
        f"{single.name} is the fastest for one sequence, {milliseconds(single.single.step.median)} "
        f"ms a token against {milliseconds(reference.single.step.median)} in float32 "
        f"({times(single.single.speedup.median)}), with {format_bytes(single.weights_bytes)} of "
        f"weights against {format_bytes(reference.weights_bytes)}; {peak.name} writes the most, "
        f"{peak.peak.tokens_per_s:,.0f} tokens/s at batch {peak.peak.batch}, float32 "
        f"{reference.peak.tokens_per_s:,.0f} at batch {reference.peak.batch}."
    )


def price_sentence(findings: PrecisionFindings) -> str:
    """Each format's loss, and whether the text can tell it at all."""
    said = []
    for name, found in findings.formats.items():
        is_seen = abs(found.increase) > 2 * found.uncertainty
        loss = f"{found.increase:+.2%}" if is_seen else "no change that can be told"
        said.append(f"{name} {loss} ({found.agreement:.2%} of next tokens the same)")
    return f"Perplexity against float32: {'; '.join(said)}."


def floor_sentence(findings: PrecisionFindings) -> str:
    """What float32 makes of the same text when only the way of computing it differs."""
    said = [
        f"{name}, the same bits"
        if found.is_identical
        else f"{name}, logits off by {found.median_error:.1e} and "
        f"{found.agreement:.2%} of next tokens the same"
        for name, found in findings.qualities.items()
        if name in FLOORS
    ]
    executor = findings.quality_executors[REFERENCE]
    defined = (
        " (on the native executor that floor is zero by definition: a row's bits do not depend on "
        "its batch)"
        if executor == "native"
        else ""
    )
    return f"The noise floor: {'; '.join(said)}{defined}."


def margin_sentence(findings: PrecisionFindings) -> str:
    """Where agreement is lost: near ties, or elsewhere too."""
    formats = findings.formats
    lost = sum(found.num_disagreeing for found in formats.values())
    if not lost:
        return "No format chooses another next token anywhere."
    near = sum(count_lost(found, lambda low: low < NEAR_TIE) for found in formats.values())
    bins = next(iter(formats.values())).bins
    ties = sum(found.num_positions for found in bins if found.low < NEAR_TIE)
    total = sum(found.num_positions for found in bins)
    widest = max(formats, key=lambda name: formats[name].widest_disagreement)
    return (
        f"Agreement is lost where float32 itself is undecided: {near / lost:.0%} of all "
        f"disagreements lie at the {ties / total:.0%} of positions whose best two tokens are less "
        f"than {NEAR_TIE:g} nats apart; the widest margin that was overturned is "
        f"{formats[widest].widest_disagreement:.2f} nats, in {widest}."
        if near * 2 > lost
        else f"Agreement is lost beyond near ties: {1 - near / lost:.0%} of all disagreements lie "
        f"where float32's best two tokens are {NEAR_TIE:g} nats apart or more; the widest margin "
        f"that was overturned is {formats[widest].widest_disagreement:.2f} nats, in {widest}."
    )


def count_lost(found: Quality, wanted: Callable[[float], bool]) -> int:
    """Disagreements in the bins whose lower edge is `wanted`."""
    return sum(b.num_positions - b.num_agreeing for b in found.bins if wanted(b.low))


def half_sentence(findings: PrecisionFindings) -> list[str]:
    """float16 or bfloat16: which is nearer to float32, and which is faster here."""
    fp16, bf16 = findings.formats.get("float16"), findings.formats.get("bfloat16")
    if fp16 is None or bf16 is None:
        return []
    if fp16.median_error <= bf16.median_error:
        ratio = bf16.median_error / max(fp16.median_error, 1e-12)
        quality = f"float16 keeps logits {ratio:.0f} times nearer than bfloat16, which has"
    else:
        ratio = fp16.median_error / max(bf16.median_error, 1e-12)
        quality = f"bfloat16 keeps logits {ratio:.0f} times nearer than float16, though it has"
    return [
        f"Of the two halves, {quality} three bits less for the value and three more for the "
        f"range: {half_speed(findings)}."
    ]


def half_speed(findings: PrecisionFindings) -> str:
    """Which of the halves is faster here, where both were timed."""
    fp16, bf16 = findings.speeds.get("float16"), findings.speeds.get("bfloat16")
    if fp16 is None or bf16 is None:
        return "how fast float16 is was not measured here"
    slow, fast = sorted((fp16, bf16), key=lambda speed: -speed.single.step.median)
    return (
        f"a step of one sequence takes {milliseconds(fast.single.step.median)} ms in {fast.name} "
        f"({fast.executor} executor) and {milliseconds(slow.single.step.median)} in {slow.name} "
        f"({slow.executor}), so {fast.name} is the one to take on this machine unless its error "
        "counts"
    )


def bounds_sentence(findings: PrecisionFindings) -> list[str]:
    """Every promise, and whether it was kept."""
    said = [
        f"{bound.name}: {bound.found} ({bound.wanted}: {'kept' if bound.holds else 'not kept'})"
        for bound in findings.bounds
    ]
    return [f"Promises: {'; '.join(said)}."] if said else []


def precision_numbers(findings: PrecisionFindings) -> dict[str, str]:
    """What prose may quote."""
    return {
        **{f"{name}.increase": f"{q.increase:+.2%}" for name, q in findings.formats.items()},
        **{f"{name}.agreement": f"{q.agreement:.2%}" for name, q in findings.formats.items()},
        **{
            f"{name}.speedup": times(speed.single.speedup.median)
            for name, speed in findings.speeds.items()
        },
        "paragraph": precision_paragraph(findings),
    }
