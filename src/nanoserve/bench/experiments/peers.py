"""Why not use something else?

The same GPT-2, shape and weights, on every engine that is installed, each in its own process, its
matrices in the same precision, on the same threads. A worker times its own step and nothing else;
rounds are interleaved here, and only the engine whose turn it is may run. Before anything is timed
every engine must write what ours writes (fp32) or stay within a stated bound of our fp32 logits.
One that does not, cannot be imported or dies later is listed with its reason; the others go on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.bench import machine
from nanoserve.bench.conduct import AAArms, Trial, VoidError, conduct
from nanoserve.bench.experiments.ceilings import make_yardsticks
from nanoserve.bench.experiments.kvcache import measured_ceilings
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.measure import Arm, ArmError, Group, Rules, Stopwatch
from nanoserve.bench.peers.face import (
    DUMMY_SEED,
    PART,
    Cell,
    Floats,
    Precision,
    Setup,
)
from nanoserve.bench.peers.ours import CACHE
from nanoserve.bench.peers.process import Worker, WorkerError, one_line, worker_command
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import NotHereError, Options, Screen, hash_weights, weights_at_hand
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.config import LoadFormat, ModelConfig
from nanoserve.engine.build import resolve_device
from nanoserve.model.hub import Checkpoint, find
from nanoserve.model.weights import load_model_config
from nanoserve.planner.model import StepShape, step_bytes, step_flops
from nanoserve.planner.steptime import Ceilings, roofline_s

QUESTION = "why not use something else?"

OURS = "nanoserve"
AA = AAArms(arm=OURS, same_arm=f"{OURS} again", part=PART)
NOT_INSTALLED = "not installed: pip install 'nanoserve[peers]'"

LOAD_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One engine in one precision. `family` is the precision it is compared in, `needs` the
    libraries without which it is not started.
    """

    name: str
    engine: str
    precision: Precision
    family: str
    needs: tuple[str, ...] = ()
    variant: str = ""


def contenders_of(
    name: str,
    engine: str,
    precisions: Sequence[Precision],
    needs: tuple[str, ...] = (),
    variant: str = "",
) -> list[Contender]:
    """One engine in several precisions, each compared with its like."""
    return [
        Contender(name=name, engine=engine, precision=p, family=p, needs=needs, variant=variant)
        for p in precisions
    ]


CONTENDERS: tuple[Contender, ...] = (
    *contenders_of(OURS, "nanoserve", ("float32", "bfloat16", "int8", "int4")),
    Contender(
        name=f"{OURS}, fp32 activations",
        engine="nanoserve",
        precision="int8-weight-only",
        family="int8",
    ),
    *contenders_of(f"{OURS} eager", "nanoserve", ("float32",), ("torch",), "eager"),
    *contenders_of("OpenVINO", "openvino", ("float32", "bfloat16", "int8"), ("openvino",)),
    Contender(
        name="OpenVINO calibrated",
        engine="openvino",
        precision="int8",
        family="int8",
        needs=("openvino",),
        variant="calibrated",
    ),
    *contenders_of(
        "llama.cpp",
        "llama.cpp",
        ("float32", "bfloat16", "int8", "int4"),
        ("llama_cpp", "gguf"),
    ),
    *contenders_of("CTranslate2", "ctranslate2", ("float32", "bfloat16", "int8"), ("ctranslate2",)),
    *contenders_of(
        "transformers", "transformers", ("float32", "bfloat16"), ("torch", "transformers")
    ),
    *contenders_of(
        "transformers compiled",
        "transformers",
        ("float32", "bfloat16"),
        ("torch", "transformers"),
        "compiled",
    ),
)
"""Ours in float32 comes first: all others are held against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far logits may be from our fp32 ones: the largest difference, in standard deviations of
    those, and the share of rows that must have the same likeliest token.
    """

    error: float
    agreement: float


BOUNDS: Mapping[str, Bound] = {
    "float32": Bound(error=0.05, agreement=0.98),
    "bfloat16": Bound(error=0.5, agreement=0.8),
    "int8": Bound(error=1.5, agreement=0.5),
    "int4": Bound(error=4.0, agreement=0.1),
}
"""Wide enough for random weights, whose likeliest tokens are all but tied; logits of another model
are off by seven standard deviations and agree nowhere.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. The gate's prompts are (tokens, new tokens)."""

    cells: tuple[Cell, ...]
    names: tuple[str, ...] | None
    rules: Rules
    gate: tuple[tuple[int, int], ...] = ((5, 12), (37, 12), (96, 12))
    gate_rows: int = 64


def decode(batch: int, num_steps: int) -> Cell:
    return Cell(kind="decode", batch=batch, context=96, num_steps=num_steps)


FULL = Scale(
    cells=(
        decode(1, 8),
        decode(8, 4),
        decode(32, 2),
        Cell(kind="prefill", batch=1, context=64),
        Cell(kind="prefill", batch=1, context=512),
        Cell(kind="prefill", batch=1, context=512, all_logits=True),
    ),
    names=None,
    rules=Rules(warmups=1, min_rounds=7, max_rounds=10, budget_s=240.0),
)
QUICK = Scale(
    cells=(decode(1, 8), Cell(kind="prefill", batch=1, context=64)),
    names=(
        f"{OURS} float32",
        f"{OURS} int8",
        f"{OURS} int4",
        "OpenVINO float32",
        "llama.cpp int4",
        "CTranslate2 int8",
        "transformers float32",
    ),
    rules=Rules(warmups=1, min_rounds=6, max_rounds=10, budget_s=6.0),
    gate=((5, 6), (37, 6)),
)
"""A few engines, so that it is soon done; the full run has them all."""


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A contender on its way to being measured, or why it is not."""

    contender: Contender
    worker: Worker | None = None
    gap: str | None = None
    about: Record = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.contender.name} {self.contender.precision}"

    def ask(self, order: Mapping[str, Any], timeout_s: float = LOAD_TIMEOUT_S) -> dict[str, Any]:
        """Raises WorkerError, also where it is out already."""
        if self.worker is None:
            raise WorkerError(self.gap or "it was not started")
        return self.worker.ask(order, timeout_s)

    def leave(self, reason: str) -> None:
        """Its process ends and its place stays empty."""
        self.gap = reason
        if self.worker is not None:
            self.worker.close()
            self.worker = None


Start = Callable[[str], Worker]


def start_worker(engine: str) -> Worker:
    return Worker(worker_command(engine))


def chosen_contenders(scale: Scale) -> list[Contender]:
    return [
        c for c in CONTENDERS if scale.names is None or f"{c.name} {c.precision}" in scale.names
    ]


@contextmanager
def entrants(
    contenders: Sequence[Contender], start: Start = start_worker
) -> Iterator[list[Entrant]]:
    """Each with a process of its own, where its libraries are installed; all ended at the end."""
    found: list[Entrant] = []
    try:
        for contender in contenders:
            absent = [name for name in contender.needs if find_spec(name) is None]
            entrant = Entrant(contender=contender, gap=NOT_INSTALLED if absent else None)
            found.append(entrant)
            if not absent:
                entrant.worker = start(contender.engine)
        yield found
    finally:
        for entrant in found:
            if entrant.worker is not None:
                entrant.worker.close()


# --- the gate -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What every contender is given before it is timed, and where logits are put."""

    setup: Mapping[str, Any]
    prompts: tuple[tuple[list[int], int], ...]
    rows: list[int]
    scratch: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What ours in fp32 says to it."""

    tokens: list[list[int]]
    logits: Floats


def material_of(
    options: Options, load_format: LoadFormat, model: ModelConfig, scale: Scale, scratch: Path
) -> Material:
    """Prompts that fit the model, each of another sequence than those that are timed."""
    fitting = [(n, new) for n, new in scale.gate if n + new <= model.n_positions]
    return Material(
        setup={
            "model": options.model,
            "load_format": load_format,
            "threads": options.threads or machine.num_usable_cores(),
            "scratch": str(scratch),
        },
        prompts=tuple((prompt_token_ids(n, model.vocab_size, 1000 + n), new) for n, new in fitting),
        rows=prompt_token_ids(min(scale.gate_rows, model.n_positions), model.vocab_size, 999),
        scratch=scratch,
    )


def load(entrant: Entrant, material: Material) -> None:
    """The model, converted by its worker."""
    contender = entrant.contender
    setup = Setup(**material.setup, precision=contender.precision, variant=contender.variant)
    answer = entrant.ask({"do": "load", "setup": {**asdict(setup), "scratch": str(setup.scratch)}})
    described = {name: one_line(str(text)) for name, text in answer["describe"].items()}
    entrant.about = {"described": described, "load_s": answer["load_s"]}


def written(entrant: Entrant, material: Material) -> list[list[int]]:
    """What it writes after each prompt."""
    tokens: list[list[int]] = []
    for prompt, num_tokens in material.prompts:
        order = {"do": "greedy", "prompts": [prompt], "num_tokens": num_tokens}
        tokens += entrant.ask(order)["tokens"]
    return tokens


def shown(entrant: Entrant, material: Material) -> Floats:
    """Its logits of the gate's rows: [N, V]."""
    name = entrant.label.replace(" ", "-").replace(",", "")
    path = material.scratch / f"logits-{name}.npy"
    entrant.ask({"do": "logits", "prompt": material.rows, "into": str(path)})
    logits: Floats = np.load(path)
    path.unlink()
    return logits


def refer(entrant: Entrant, material: Material) -> Reference:
    """Ours in fp32, against which all others are held. Raises VoidError if it cannot be had."""
    try:
        load(entrant, material)
        reference = Reference(tokens=written(entrant, material), logits=shown(entrant, material))
    except WorkerError as error:
        raise VoidError(f"{entrant.label} cannot be run, nothing is recorded: {error}") from error
    entrant.about |= {"error": 0.0, "agreement": 1.0}
    return reference


def admit(entrant: Entrant, material: Material, reference: Reference) -> None:
    """Load it and hold it against the reference; whoever fails leaves, with the reason."""
    try:
        load(entrant, material)
        entrant.about |= compared(entrant, material, reference)
    except WorkerError as error:
        entrant.leave(str(error))


def compared(entrant: Entrant, material: Material, reference: Reference) -> Record:
    """How far it is from the reference. Raises WorkerError beyond the bound of its precision."""
    contender = entrant.contender
    if contender.family == "float32" and written(entrant, material) != reference.tokens:
        raise WorkerError("failed the gate: it writes other tokens than ours")
    if contender.variant == "eager":
        return {}  # tokens are all that this executor shows
    found = distance(shown(entrant, material), reference.logits)
    bound = BOUNDS[contender.family]
    if not (found["error"] <= bound.error and found["agreement"] >= bound.agreement):
        raise WorkerError(
            f"failed the gate: logits off by {found['error']:.2f} standard deviations (at most "
            f"{bound.error:g}), {found['agreement']:.0%} same next token (at least "
            f"{bound.agreement:.0%})"
        )
    return found


def distance(logits: Floats, reference: Floats) -> Record:
    """Largest difference in standard deviations of the reference, and top-1 agreement.

    Raises WorkerError for another shape, and for what is not finite.
    """
    if logits.shape != reference.shape or not np.isfinite(logits).all():
        raise WorkerError(f"failed the gate: logits of shape {logits.shape}, or not finite")
    error = np.abs(logits - reference).max() / reference.std()
    return {
        "error": float(error),
        "agreement": float((logits.argmax(-1) == reference.argmax(-1)).mean()),
    }


def admit_all(found: Sequence[Entrant], material: Material, screen: Screen) -> None:
    """Everybody, two at a time: nothing is timed yet. Ours in fp32 comes first."""
    title = "gate: does every engine write what ours writes?"
    with screen.progress(title, float(len(found))) as advance:
        reference = refer(found[0], material)
        advance(1.0)
        others = [entrant for entrant in found[1:] if entrant.worker is not None]
        with ThreadPoolExecutor(machine.num_usable_cores()) as pool:
            for _ in pool.map(lambda e: admit(e, material, reference), others):
                advance(1.0)
        advance(float(len(found) - 1 - len(others)))


# --- the arms -------------------------------------------------------------------------------------


def asked(entrant: Entrant, cell: Cell) -> Arm:
    """A repetition in the worker, which times it. An entrant that fails leaves for good."""

    def arm(watch: Stopwatch) -> None:
        try:
            order = {"do": "repeat", "cell": cell.name, "rehearse": cell.is_rehearsed}
            answer = entrant.ask(order, STEP_TIMEOUT_S)
            watch.add(PART, float(answer["seconds"][PART]))
        except WorkerError as error:
            entrant.leave(str(error))
            raise ArmError(str(error)) from error

    return arm


def prepare(entrant: Entrant, cell: Cell) -> str | None:
    """Why it has no such cell, None if it has. One that dies over it leaves."""
    if entrant.worker is None:
        return entrant.gap
    try:
        entrant.ask({"do": "prepare", "cell": asdict(cell)})
    except WorkerError as error:
        return str(error)
    return None


def group_name(cell: Cell, family: str) -> str:
    return f"{cell.name}, {family}"


def make_groups(
    found: Sequence[Entrant], cells: Sequence[Cell], screen: Screen
) -> tuple[list[Group], dict[str, dict[str, str]]]:
    """A group for each cell and precision, and who has no such cell and why.

    Raises VoidError where nothing could be compared.
    """
    arms: dict[tuple[str, str], dict[str, Arm]] = {}
    absent: dict[str, dict[str, str]] = {}
    with screen.progress("preparing the cells", float(len(found) * len(cells))) as advance:
        for entrant in found:
            for cell in cells:
                key, name = (cell.name, entrant.contender.family), entrant.contender.name
                reason = prepare(entrant, cell)
                if reason is None:
                    arms.setdefault(key, {})[name] = asked(entrant, cell)
                    if name == OURS:
                        arms[key][AA.same_arm] = asked(entrant, cell)
                elif entrant.gap is None:
                    absent.setdefault(entrant.label, {})[cell.name] = reason
                advance(1.0)
    groups = [
        Group(name=f"{cell}, {family}", arms=found, labels={"cell": cell, "family": family})
        for (cell, family), found in sorted(arms.items())
    ]
    return groups, absent


# --- predictions and the run ----------------------------------------------------------------------


def expected(model: ModelConfig, ceilings: Ceilings, cell: Cell, precision: str) -> Record:
    """Of ours: the bytes that must move, and the time by the roofline (of bytes alone, where how
    fast a precision multiplies is no ceiling that is measured).
    """
    num_new = 1 if cell.kind == "decode" else cell.context
    shape = StepShape(num_seqs=cell.batch, context=cell.context, num_new=num_new)
    num_bytes = step_bytes(model, shape, dtype=precision, kv_dtype=CACHE[precision])
    flops = step_flops(model, shape)
    if cell.all_logits:
        flops += 2 * model.vocab_size * model.n_embd * (cell.context - 1)
        num_bytes += 4 * model.vocab_size * cell.context
    if precision not in ceilings.matmul_flops_per_s:
        return {"num_bytes": num_bytes, "step_s": num_bytes / ceilings.read_bytes_per_s}
    seconds = roofline_s(ceilings, num_bytes=num_bytes, flops=flops, dtype=precision)
    return {"num_bytes": num_bytes, "step_s": seconds}


def predict(model: ModelConfig, ceilings: Ceilings, cells: Sequence[Cell]) -> Record:
    """Of each group, ours."""
    families = [c.precision for c in CONTENDERS if c.name == OURS]
    return {
        "ceilings": ceilings.to_json(),
        "predictions": {
            group_name(cell, family): expected(model, ceilings, cell, family)
            for cell in cells
            for family in families
        },
    }


def check_options(options: Options) -> None:
    """Raise ValueError for what has no meaning here."""
    if resolve_device(options.device) != "cpu":
        raise NotHereError(f"peers are compared on a CPU, got --device {options.device}")
    for name in ("dtype", "executor"):
        if (value := getattr(options, name)) != "auto":
            raise ValueError(
                f"--{name} {value} does not apply: peers measures every precision and executor"
            )


def fitting_cells(scale: Scale, model: ModelConfig) -> list[Cell]:
    """Those of `scale` that fit the model's positions. Raises ValueError if none does."""
    cells = [cell for cell in scale.cells if cell.context <= model.n_positions]
    if not cells:
        raise ValueError(f"the model has {model.n_positions} positions, too few for any cell")
    return cells


def measure(options: Options, screen: Screen, start: Start = start_worker) -> Run:
    """The whole experiment; its complete run. Raises VoidError if ours cannot run, or for A/A."""
    check_options(options)
    scale = QUICK if options.quick else FULL
    load_format, remark = weights_at_hand(options)
    checkpoint = find(options.model, load_format=load_format)
    model = load_model_config(checkpoint)
    cells = fitting_cells(scale, model)
    if remark:
        screen.say(remark)
    yardsticks = make_yardsticks("cpu", options.threads, also_dtype="float32")
    samples = measured_ceilings(yardsticks, options, screen)
    header = predict(model, ceilings_of(samples), cells)
    with (
        tempfile.TemporaryDirectory(prefix="nanoserve-peers-") as folder,
        entrants(chosen_contenders(scale), start) as found,
    ):
        material = material_of(options, load_format, model, scale, Path(folder))
        admit_all(found, material, screen)
        groups, absent = make_groups(found, cells, screen)
        say_gaps(found, screen)
        groups += yardsticks.fastest(samples, "float32")[:1]
        header |= {"entrants": entrant_records(found), "absent": absent}
        trial = make_trial(checkpoint, model, groups, scale, material, header)
        return conduct(trial, options, screen)


def say_gaps(found: Sequence[Entrant], screen: Screen) -> None:
    for entrant in found:
        if entrant.gap is not None:
            screen.say(f"{entrant.label}: {entrant.gap}")


def entrant_records(found: Sequence[Entrant]) -> list[Record]:
    """Who came, with what, and who did not and why."""
    return [
        {
            "name": e.contender.name,
            "precision": e.contender.precision,
            "family": e.contender.family,
            "gap": e.gap,
            **e.about,
        }
        for e in found
    ]


def make_trial(
    checkpoint: Checkpoint,
    model: ModelConfig,
    groups: Sequence[Group],
    scale: Scale,
    material: Material,
    header: Record,
) -> Trial:
    """The measurement with the names of what really runs."""
    is_random = checkpoint.kind == "dummy"
    name = Path(checkpoint.name).name
    ours = header["entrants"][0]["described"]
    engine = {**ours, "device": "cpu", "threads": str(material.setup["threads"])}
    return Trial(
        experiment="peers",
        name=f"{name}-cpu",
        groups=groups,
        rules=scale.rules,
        aa=AA,
        synchronize=lambda: None,
        identity={
            "model": name,
            "weights": "random" if is_random else "trained",
            "weights_id": f"dummy-seed-{DUMMY_SEED}" if is_random else hash_weights(checkpoint),
            "executor": ours["executor"],
            "kernels": ours["kernels"],
            "device": "cpu",
            "dtype": "several precisions",
        },
        setup={
            "engine": engine,
            "model_config": asdict(model),
            "cells": [asdict(cell) for cell in fitting_cells(scale, model)],
        },
        header=header,
    )
