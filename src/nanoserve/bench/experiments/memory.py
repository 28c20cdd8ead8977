"""What sets the ceiling on concurrency?

Peak bytes = runtime + fixed + per_sequence x batch + KV(batch, context). K and V are known exactly;
the other two are fitted to probes without a limit, context and batch both varied, since otherwise
they could not be told from K and V. The model then predicts how many sequences fit under a limit,
for each precision of K and V and at longer contexts than it was fitted to. Each prediction is on
disk before the first probe of its ceiling. Then batches are probed until one that fits and one that
does not are neighbours. Every probe is a process of its own (`memory_probe`) that writes every page
of its cache; one that ends neither well nor out of memory voids the run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nanoserve.bench import machine
from nanoserve.bench.conduct import AAArms, Trial, VoidError, begin, results_path, timestamp
from nanoserve.bench.findings.memory import FULL as OUT
from nanoserve.bench.findings.memory import OK, MemoryFit, fit_memory, fit_values
from nanoserve.bench.measure import Rules
from nanoserve.bench.memory_probe import BLOCK_SIZE, OUT_OF_MEMORY, ProbeReport, ProbeRequest
from nanoserve.bench.record import Journal, Record, Run, read_runs
from nanoserve.bench.session import Options, Screen, hash_weights, weights_at_hand
from nanoserve.config import CacheDtype, Dtype, EngineConfig, ModelConfig
from nanoserve.engine.build import available_memory_bytes, native_obstacle, resolve_device
from nanoserve.kernels.cpu import library
from nanoserve.model.hub import Checkpoint, find
from nanoserve.model.weights import load_model_config
from nanoserve.planner.memory import HUGE_PAGE_BYTES, format_bytes
from nanoserve.planner.model import kv_bytes_per_token, weight_bytes

QUESTION = "what sets the ceiling on concurrency?"

PROBE_TIMEOUT_S = 300
NUM_LANES = 2
"""Probes that run at once: memory is measured, not time."""

RUNTIME_ROOM_BYTES = 72 * 2**20
"""Left for interpreter and libraries when the limit is chosen; what they take is measured."""

MIN_WRITTEN = 0.98
"""Of a cache's bytes, the share that must have become resident: else pages were not written."""

CHILD_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The C library then gives freed memory back at once, in every probe alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to keep weights, and K and V."""

    dtype: Dtype
    cache_dtype: CacheDtype

    @property
    def labels(self) -> Record:
        return {"weights_dtype": self.dtype, "cache_dtype": self.cache_dtype}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is probed. Contexts are given as parts of the model's positions.

    `fitted` are (batch, part); `parts` the contexts whose ceilings are predicted. The limit leaves
    room for `room` full-length sequences of the widest cache; no batch may exceed the 64 rows of
    logits that are held at once, beyond which a step's buffers grow differently.
    """

    arms: tuple[Arm, ...]
    fitted: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]
    room: int


FULL = Scale(
    arms=(
        Arm(dtype="float32", cache_dtype="float32"),
        Arm(dtype="float32", cache_dtype="float16"),
        Arm(dtype="float32", cache_dtype="int8"),
        Arm(dtype="bfloat16", cache_dtype="bfloat16"),
    ),
    fitted=((8, 16), (24, 16), (48, 16), (8, 8), (24, 8), (48, 8)),
    parts=(2, 1),
    room=8,
)
QUICK = Scale(
    arms=(
        Arm(dtype="float32", cache_dtype="float32"),
        Arm(dtype="float32", cache_dtype="int8"),
        Arm(dtype="bfloat16", cache_dtype="bfloat16"),
    ),
    fitted=((8, 16), (40, 16), (16, 8)),
    parts=(2, 1),
    room=8,
)
GPU_ARMS = (
    Arm(dtype="float32", cache_dtype="float32"),
    Arm(dtype="float16", cache_dtype="float16"),
    Arm(dtype="float16", cache_dtype="int8"),
)
"""On a GPU, where the native core's formats are not those that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What every probe has in common, and the limit of those that have one."""

    request: ProbeRequest
    config: ModelConfig
    limit_bytes: int

    def probe(self, arm: Arm, batch: int, context: int, limit_bytes: int | None) -> ProbeRequest:
        return replace(
            self.request,
            dtype=arm.dtype,
            cache_dtype=arm.cache_dtype,
            batch=batch,
            context=context,
            limit_bytes=limit_bytes,
        )

    @property
    def huge_page_bytes(self) -> int:
        return HUGE_PAGE_BYTES if self.request.device == "cpu" else 0

    def context(self, part: int) -> int:
        return max(1, self.config.n_positions // part)


def check_options(options: Options, device: str) -> None:
    """Raise ValueError for an option that means nothing here."""
    if options.dtype != "auto":
        raise ValueError(
            f"memory probes several precisions of weights and cache: leave out --dtype, got "
            f"--dtype {options.dtype}"
        )
    if device != "cpu":
        return
    if sys.platform != "linux":
        raise ValueError(f"memory limits processes as Linux does, this is {sys.platform}")
    if options.executor not in ("auto", "native"):
        raise ValueError(
            "memory probes the native executor on a CPU, whose memory is counted whole, got "
            f"--executor {options.executor}"
        )
    if (obstacle := native_obstacle(EngineConfig(), "cpu", "float32")) is not None:
        raise ValueError(f"memory probes the native executor on a CPU: {obstacle}")


def choose_limit(config: ModelConfig, scale: Scale) -> int:
    """Whole MiB for `room` full-length sequences of the widest cache beside its weights."""
    kv = scale.room * config.n_positions * kv_bytes_per_token(config, "float32")
    needed = weight_bytes(config, "float32") + kv + RUNTIME_ROOM_BYTES
    return -(-needed // 2**20) * 2**20


def check_room(limit_bytes: int) -> None:
    """Raise ValueError unless all lanes have what the limit grants, so that no probe meets less."""
    available, needed = available_memory_bytes(), NUM_LANES * limit_bytes
    if available < needed:
        raise ValueError(
            f"the probes may take {format_bytes(needed)} together, {format_bytes(available)} are "
            "free: choose a smaller --model"
        )


# --- probing --------------------------------------------------------------------------------------


def run_probe(request: ProbeRequest) -> Record:
    """The outcome of one probe, and its bytes if it fitted. Raises VoidError for any other end."""
    done = subprocess.run(
        [sys.executable, "-m", "nanoserve.bench.memory_probe"],
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        env={**os.environ, **CHILD_VARIABLES, **gpu_variables(request)},
        timeout=PROBE_TIMEOUT_S,
        check=False,
    )
    if done.returncode == OUT_OF_MEMORY:
        return {"outcome": OUT, "words": " ".join(done.stderr.split())}
    if done.returncode != 0:
        raise VoidError(
            f"a probe of {request.batch} sequences of {request.context} tokens ended with code "
            f"{done.returncode}, which is not 'out of memory': {last_line(done.stderr)}"
        )
    report = ProbeReport(**json.loads(done.stdout))
    if report.written_bytes < MIN_WRITTEN * report.cache_bytes:
        raise VoidError(
            f"a probe wrote {report.written_bytes} of its cache's {report.cache_bytes} bytes"
        )
    return {"outcome": OK, **asdict(report)}


def gpu_variables(request: ProbeRequest) -> dict[str, str]:
    """The limit as PyTorch's allocator reads it: a share of the device, known from other probes."""
    if request.device == "cpu" or request.limit_bytes is None:
        return {}
    smallest = replace(request, batch=1, context=1, limit_bytes=None)
    share = request.limit_bytes / gpu_bytes(smallest)
    return {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share:.6f}"}


@functools.cache
def gpu_bytes(request: ProbeRequest) -> int:
    """The device's memory, as a probe of a single token says."""
    return int(run_probe(request)["device_bytes"])


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def probe_all(requests: Iterable[ProbeRequest]) -> Iterator[tuple[ProbeRequest, Record]]:
    """Each with its outcome, in order, some at once."""
    wanted = list(requests)
    with ThreadPoolExecutor(max_workers=min(NUM_LANES, machine.num_usable_cores())) as lanes:
        yield from zip(wanted, lanes.map(run_probe, wanted), strict=True)


class Probing:
    """Fits, predicts and brackets one arm after another, from wherever the run stopped before."""

    def __init__(
        self, trial: Trial, subject: Subject, scale: Scale, run: Run, journal: Journal
    ) -> None:
        self.subject, self.scale = subject, scale
        self._journal = journal
        names = ("schema", "experiment", "name", "machine_id", "run", *trial.identity)
        self._identity = {name: run.header[name] for name in names}
        self._records = list(run.records)

    def answer(self, arm: Arm) -> None:
        """All of one arm: every prediction is written before any ceiling is probed."""
        fit = self.fit(arm)
        contexts = [self.subject.context(part) for part in self.scale.parts]
        predicted = {context: self.predict(arm, context, fit) for context in contexts}
        for context, num_sequences in predicted.items():
            self.bracket(arm, context, num_sequences)

    def end(self) -> None:
        self.write({"kind": "end", "status": "complete", "ended": timestamp()})

    def write(self, record: Record) -> None:
        """One whole line, on disk before this returns."""
        whole = {"kind": record["kind"], **self._identity, **record}
        self._journal.append([whole])
        self._records.append(whole)

    def fit(self, arm: Arm) -> MemoryFit:
        """The memory model of an arm, from probes without a limit."""
        subject = self.subject
        shapes = [(batch, subject.context(part)) for batch, part in self.scale.fitted]
        probes = self.probe(arm, shapes, None)
        if full := [probe for probe in probes if probe["outcome"] == OUT]:
            raise VoidError(f"a probe without a limit had no memory: {full[0]['words']}")
        return fit_memory(
            probes,
            kv_bytes_per_token=kv_bytes_per_token(subject.config, arm.cache_dtype),
            block_size=BLOCK_SIZE,
            huge_page_bytes=subject.huge_page_bytes,
        )

    def predict(self, arm: Arm, context: int, fit: MemoryFit) -> int:
        """How many sequences should fit; stored, unless an earlier part of this run stored it."""
        labels = {**arm.labels, "context": context}
        for record in self._records:
            if record["kind"] == "prediction" and labels.items() <= record.items():
                return int(record["num_sequences"])
        count = fit.model.num_sequences(self.subject.limit_bytes, context)
        peak_bytes = fit.model.peak_bytes(count, context)
        values = {"num_sequences": count, "peak_bytes": peak_bytes, "fit": fit_values(fit)}
        self.write({"kind": "prediction", **labels, **values})
        return count

    def bracket(self, arm: Arm, context: int, predicted: int) -> None:
        """Probe until a batch that fits and one that does not are neighbours.

        Raises VoidError where not even one sequence fits.
        """
        fits, fails = 0, None
        wanted, stride = [max(1, predicted), max(1, predicted) + 1], 1
        while fails is None or fails - fits > 1:
            shapes = [(batch, context) for batch in wanted]
            for probe in self.probe(arm, shapes, self.subject.limit_bytes):
                batch, is_ok = probe["batch"], probe["outcome"] == OK
                fits = max(fits, batch) if is_ok else fits
                fails = fails if is_ok else min(batch, fails or batch)
            if fails == 1:
                raise VoidError(f"not even one sequence of {context} tokens fits the limit")
            wanted, stride = [next_batch(fits, fails, stride)], 2 * stride

    def probe(
        self, arm: Arm, shapes: Sequence[tuple[int, int]], limit_bytes: int | None
    ) -> list[Record]:
        """The recorded probes of these (batch, context), made where there are none yet."""
        requests = [self.subject.probe(arm, *shape, limit_bytes) for shape in shapes]
        missing = [request for request in requests if self.recorded(request) is None]
        for request, outcome in probe_all(missing):
            self.write({"kind": "probe", **labels_of(request), **outcome})
        return [record for request in requests if (record := self.recorded(request)) is not None]

    def recorded(self, request: ProbeRequest) -> Record | None:
        wanted = labels_of(request)
        probes = (record for record in self._records if record["kind"] == "probe")
        return next((record for record in probes if wanted.items() <= record.items()), None)


def labels_of(request: ProbeRequest) -> Record:
    """What tells one probe from another."""
    return {
        "weights_dtype": request.dtype,
        "cache_dtype": request.cache_dtype,
        "batch": request.batch,
        "context": request.context,
        "limit_bytes": request.limit_bytes,
    }


def next_batch(fits: int, fails: int | None, stride: int) -> int:
    """Upwards in growing strides until one fails, downwards until one fits, then the middle."""
    if fails is None:
        return fits + stride
    if fits == 0:
        return max(1, fails - stride)
    return (fits + fails) // 2


# --- the run --------------------------------------------------------------------------------------


def make_subject(options: Options, checkpoint: Checkpoint, device: str, scale: Scale) -> Subject:
    config = load_model_config(checkpoint)
    request = ProbeRequest(
        model=options.model,
        load_format="dummy" if checkpoint.kind == "dummy" else "auto",
        device=device,
        executor="native" if device == "cpu" else options.executor,
        dtype="float32",
        cache_dtype="float32",
        threads=1,  # bytes are counted, not seconds, and a thread's stack would count too
        batch=1,
        context=1,
        limit_bytes=None,
    )
    limit_bytes = choose_limit(config, scale)
    check_room(limit_bytes)
    return Subject(request=request, config=config, limit_bytes=limit_bytes)


def make_trial(subject: Subject, checkpoint: Checkpoint, scale: Scale) -> Trial:
    """The run's names: what is probed, with what."""
    request = subject.request
    is_random = checkpoint.kind == "dummy"
    kernels = f"C++ {library.load().isa}" if request.device == "cpu" else "PyTorch"
    executor = "eager" if request.executor == "auto" else request.executor
    dtypes = " and ".join(dict.fromkeys(arm.dtype for arm in scale.arms))
    model = Path(checkpoint.name).name
    engine = {"executor": executor, "kernels": kernels, "device": request.device}
    return Trial(
        experiment="memory",
        name=f"{model}-{request.device}",
        groups=(),
        rules=Rules(),
        aa=AAArms(arm="", same_arm="", part=""),
        synchronize=lambda: None,
        identity={
            "model": model,
            "weights": "random" if is_random else "trained",
            "weights_id": "dummy-seed-0" if is_random else hash_weights(checkpoint),
            "dtype": dtypes,
            **engine,
        },
        setup={
            "engine": {**engine, "threads": str(request.threads)},
            "model_config": asdict(subject.config),
            "limit_bytes": subject.limit_bytes,
            "scale": json.loads(json.dumps(asdict(scale))),
        },
    )


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a probe that ended otherwise."""
    device = resolve_device(options.device)
    check_options(options, device)
    scale = QUICK if options.quick else FULL
    if device != "cpu":
        scale = replace(scale, arms=GPU_ARMS)
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    checkpoint = find(options.model, load_format=load_format)
    subject = make_subject(options, checkpoint, device, scale)
    trial = make_trial(subject, checkpoint, scale)
    path = results_path(options, trial.experiment, trial.name)
    with Journal(path) as journal:
        run = begin(trial, {}, options, screen, journal)
        if not run.is_complete:
            answer_all(Probing(trial, subject, scale, run, journal), screen)
    return next(r for r in reversed(read_runs(path)[0]) if r.run_id == run.run_id)


def answer_all(probing: Probing, screen: Screen) -> None:
    arms = probing.scale.arms
    limit = format_bytes(probing.subject.limit_bytes)
    with screen.progress(f"probing under {limit}", float(len(arms))) as advance:
        for arm in arms:
            probing.answer(arm)
            advance(1.0)
    probing.end()
