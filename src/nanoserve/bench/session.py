"""One benchmark session: the options it was given, what it says while it runs, where it writes.

Results go to standard output, everything else (progress, remarks) to standard error. An engine for
an arm is built here and nowhere else in the benchmarks, so that every arm is the same engine with
one part exchanged, and so that a record says what really ran.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nanoserve.bench.record import Record
from nanoserve.bench.trace_events import Recorder
from nanoserve.config import (
    Batching,
    CacheConfig,
    CacheDtype,
    Device,
    DtypeOption,
    EngineConfig,
    ExecutorName,
    Layout,
    LoadFormat,
    Quantization,
    SchedulerConfig,
)
from nanoserve.engine.engine import Engine
from nanoserve.model.hub import BUILT_IN_SHAPES, Checkpoint, list_models

PLAIN_PROGRESS_STEP = 0.2

MAX_STEP_TOKENS = 2**20
"""Token budget of a step under test: more than any shape has, so that no prefill is chunked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed. `load_format` None: the weights if they are at hand, else `dummy`.

    `quantization` None: weights in `dtype`; `kv_cache_dtype` None: keys and values in `dtype`, too.
    `recorder` watches every engine that is opened, for a trace of the run.
    """

    model: str = "gpt2"
    load_format: LoadFormat | None = None
    device: Device = "auto"
    dtype: DtypeOption = "auto"
    quantization: Quantization | None = None
    kv_cache_dtype: CacheDtype | None = None
    executor: ExecutorName = "auto"
    threads: int | None = None
    quick: bool = False
    out: Path = Path("results")
    resume: bool = False
    seed: int | None = None
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"--seed must be at least 0, got {self.seed}")


class Screen:
    """What the user sees. `quiet` says nothing, for tests."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._results = Console(quiet=quiet, highlight=False)
        self._remarks = Console(stderr=True, quiet=quiet, highlight=False)

    def show(self, result: RenderableType) -> None:
        """A result, to standard output."""
        self._results.print(result, markup=False)

    def say(self, remark: str) -> None:
        """A remark, to standard error."""
        self._remarks.print(remark, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, title: str, total: float) -> Iterator[Callable[[float], None]]:
        """A bar with the time left where standard error is a terminal, a line now and then else.

        The function it gives takes work that is done, in whatever unit `total` has.
        """
        if not self._remarks.is_terminal:
            yield self._plain_progress(title, total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        # drawn only when told to: a thread that redraws would run inside what is being timed
        with Progress(
            *columns, TimeRemainingColumn(), console=self._remarks, auto_refresh=False
        ) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.update(task, advance=done, refresh=True)

    def _plain_progress(self, title: str, total: float) -> Callable[[float], None]:
        self.say(title)
        done, said = 0.0, 0.0

        def advance(more: float) -> None:
            nonlocal done, said
            done += more
            share = min(1.0, done / total) if total else 1.0
            if share - said >= PLAIN_PROGRESS_STEP or share == 1.0 > said:
                said = share
                self.say(f"{title}: {share:.0%}")

        return advance


class TerminatedError(BaseException):
    """SIGTERM came. As KeyboardInterrupt it is nobody's to handle but the command's."""


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises TerminatedError: what was started (servers, loops) is ended on the way
    out. By default it would end this process at once, and leave a server that nobody knows of.

    Only the main thread is told of signals; in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(signum: int, frame: FrameType | None) -> None:
    raise TerminatedError


class NotHereError(ValueError):
    """What was asked for has no meaning on this device or executor: of several experiments, such a
    one is passed over.
    """


def weights_at_hand(options: Options) -> tuple[LoadFormat, str | None]:
    """The load format that needs no download, and a remark where that means random weights.

    Only the shapes that are built in have a substitute; any other model is found or it is an error.
    """
    if options.load_format is not None:
        return options.load_format, None
    short_name = options.model.rpartition("/")[2]
    if short_name not in BUILT_IN_SHAPES or Path(options.model).is_dir() or is_cached(short_name):
        return "auto", None
    return "dummy", (
        f"The weights of {options.model} are not on this machine: measuring its shape with random "
        "weights. Timings do not depend on their values; --load-format auto fetches the real ones."
    )


def is_cached(short_name: str) -> bool:
    """Whether the hub's cache holds all weights of a model of that name, whoever owns it."""
    return any(
        listed.kind == "cache" and listed.complete and listed.name.rpartition("/")[2] == short_name
        for listed in list_models()
    )


def open_engine(
    options: Options,
    load_format: LoadFormat,
    *,
    layout: Layout,
    max_num_seqs: int,
    batching: Batching = "continuous",
    batching_timeout: float | None = None,
    max_num_batched_tokens: int | None = MAX_STEP_TOKENS,
    enable_prefix_caching: bool = False,
    donor: Engine | None = None,
) -> Engine:
    """The engine of one arm. Unless asked for, no prefix is shared and no prompt cut.

    `max_num_batched_tokens` None is the engine's own choice for the machine.
    """
    config = EngineConfig(
        model=options.model,
        load_format=load_format,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        executor=options.executor,
        threads=options.threads,
        cache=CacheConfig(layout=layout, dtype=options.kv_cache_dtype),
        scheduler=SchedulerConfig(
            batching=batching,
            batching_timeout=batching_timeout,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        ),
    )
    engine = Engine(config, donor=donor)
    if options.recorder is not None:
        options.recorder.watch(engine)
    return engine


def require_native(engine: Engine, experiment: str) -> None:
    """Raise NotHereError for an engine on another executor than the native core."""
    executor = engine.executor.describe()["executor"]
    if executor != "native":
        raise NotHereError(
            f"{experiment} times the native core, and this engine runs on {executor}: "
            "use --device cpu --executor native"
        )


def describe_engine(engine: Engine) -> Record:
    """What really runs: for the header of a run, and in short for each of its records."""
    spec = engine.spec
    return {
        **engine.executor.describe(),
        "device": spec.device,
        "dtype": spec.dtype,
        "cache_dtype": spec.cache_dtype,
    }


def describe_weights(engine: Engine) -> Record:
    """Which weights: their name without a path, trained or random, and their hash."""
    checkpoint = engine.parts.checkpoint
    is_random = checkpoint.kind == "dummy"
    return {
        "model": Path(checkpoint.name).name,
        "weights": "random" if is_random else "trained",
        "weights_id": f"dummy-seed-{engine.config.dummy_seed}"
        if is_random
        else hash_weights(checkpoint),
        "config": asdict(engine.model_config),
    }


def hash_weights(checkpoint: Checkpoint) -> str:
    """sha256 over the weight files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.weight_files):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
