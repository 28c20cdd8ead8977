"""What can this machine do? The yardsticks that every other number is held against.

Read bandwidth is the fastest of several read kernels, all threads, over a buffer of at least eight
times the last-level cache on huge pages; the matmul rate of a dtype or weight format the fastest
of several shapes and libraries; dispatch the cost of an operation with nothing to do. One read
kernel runs twice in every round (A/A): the half-width of that ratio's interval is the smallest
effect this machine lets anyone claim. The results are kept in the user's cache folder, where
`generate --stats` and `plan` read them.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanoserve.bench import machine
from nanoserve.bench.conduct import AAArms, Trial, conduct
from nanoserve.bench.findings import ceilings_of, fastest, rates
from nanoserve.bench.measure import (
    Arm,
    Group,
    Rules,
    Sample,
    Stopwatch,
    plan_rounds,
    run_rounds,
    warm_up,
)
from nanoserve.bench.record import Run
from nanoserve.bench.session import Options, Screen
from nanoserve.engine.build import resolve_device
from nanoserve.kernels.probes import (
    TINY_OPERATIONS,
    Load,
    NativeProbes,
    Probes,
    make_native_probes,
    make_probes,
)

QUESTION = "what can this machine do?"

READ, DISPATCH = "read", "dispatch"
MATMUL_SHAPES = ((512, 2048, 2048), (1024, 768, 3072), (1024, 4096, 1024), (2048, 2048, 2048))
CACHE_MULTIPLE = 8
SMALLEST_BUFFER_BYTES = 256 * 2**20
GPU_BUFFER_BYTES = 2 * 2**30
MEMORY_FRACTION = 4
"""The buffer takes at most a fourth of the machine's memory."""

FULL = Rules()
QUICK = Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=10, budget_s=3.0)

logger = logging.getLogger(__name__)


def buffer_bytes(device: str) -> int:
    """Eight times the last-level cache or more, a multiple of 64 KiB; never most of the memory."""
    if device == "cuda":
        return GPU_BUFFER_BYTES
    largest_cache = max(machine.cache_sizes().values(), default=0)
    wanted = max(SMALLEST_BUFFER_BYTES, CACHE_MULTIPLE * largest_cache)
    return min(wanted, machine.memory_bytes() // MEMORY_FRACTION) // 2**16 * 2**16


def huge_page_buffer(num_bytes: int) -> NDArray[np.float32]:
    """Touched float32 memory, on huge pages where the system has them."""
    pages = mmap.mmap(-1, num_bytes)
    if sys.platform == "linux":
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.warning("no huge pages for the read buffer: %s", error)
    values = np.frombuffer(pages, dtype=np.float32)
    values.fill(1.0)
    return values


def threaded_max(values: NDArray[np.float32], num_threads: int) -> Load:
    """numpy's maximum of one slice per thread; numpy releases the interpreter lock meanwhile."""
    pool = ThreadPoolExecutor(num_threads)
    slices = np.array_split(values, num_threads)
    return lambda: max(pool.map(np.max, slices))


def timed(load: Load) -> Arm:
    """An arm that is one call of `load`."""

    def arm(watch: Stopwatch) -> None:
        watch.time("run", load)

    return arm


def matmul_group(probes: Probes | NativeProbes, dtype: str, shape: tuple[int, int, int]) -> Group:
    """One product, whose rate is a candidate for the ceiling of `dtype`."""
    m, k, n = shape
    which = f"{probes.product} " if isinstance(probes, NativeProbes) else ""
    return Group(
        name=f"matmul {which}{dtype} {m}x{k}x{n}",
        arms={probes.product: timed(probes.matmul(m, k, n, dtype))},
        labels={"unit": "flops", "amount": 2 * m * k * n, "dtype": dtype},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardsticks:
    """The probes of one device as groups to measure."""

    device: str
    probes: Probes
    kernels: str
    aa: AAArms
    groups: list[Group]
    buffer_bytes: int

    def fastest(self, samples: Sequence[Sample], dtype: str) -> list[Group]:
        """The read kernel and the matmul of `dtype` that were fastest, to run between other arms.

        Each becomes a group of one arm, whose names do not depend on which it was: an interrupted
        run is continued though another kernel may have been a little faster this time.
        """
        found = rates(samples)
        chosen = {
            "read": fastest(found, unit="bytes"),
            "matmul": fastest(found, unit="flops", dtype=dtype),
        }
        groups = {group.name: group for group in self.groups}
        return [
            Group(
                name=f"ceiling: {kind}",
                arms={kind: groups[rate.group].arms[rate.arm]},
                labels={**groups[rate.group].labels, "load": rate.group, "kernel": rate.arm},
            )
            for kind, rate in chosen.items()
        ]


def make_yardsticks(
    device: str,
    threads: int | None,
    *,
    also_dtype: str | None = None,
    num_bytes: int | None = None,
    shapes: Sequence[tuple[int, int, int]] = MATMUL_SHAPES,
) -> Yardsticks:
    """Allocate and touch what the probes of `device` need; `num_bytes` None: `buffer_bytes`.

    Matmuls run in the device's usual dtypes, and in `also_dtype`; those of the native core in every
    weight format it has, in the first shape alone.
    """
    probes = make_probes(device, threads)
    num_threads = threads or machine.num_usable_cores()
    native = make_native_probes(num_threads) if device == "cpu" else None
    values = huge_page_buffer(buffer_bytes(device) if num_bytes is None else num_bytes)
    loads = dict(probes.read(values))
    if device == "cpu":
        loads["numpy.max"] = threaded_max(values, num_threads)
    if native is not None:
        loads.update(native.read(values))
    arm = next(iter(loads))
    aa = AAArms(arm=arm, same_arm=f"{arm} again", part="run")
    loads[aa.same_arm] = loads[arm]
    groups = [
        Group(
            name=READ,
            arms={name: timed(load) for name, load in loads.items()},
            labels={"unit": "bytes", "amount": values.nbytes},
        ),
        Group(
            name=DISPATCH,
            arms={"add": timed(probes.dispatch())},
            labels={"unit": "operations", "amount": TINY_OPERATIONS},
        ),
    ]
    native_dtypes = () if native is None else native.dtypes
    wanted = also_dtype if also_dtype not in native_dtypes else None
    groups += [
        matmul_group(probes, dtype, shape)
        for dtype in dict.fromkeys((*probes.dtypes, wanted or "float32"))
        for shape in shapes
    ]
    if native is not None:
        groups += [matmul_group(native, dtype, shapes[0]) for dtype in native_dtypes]
    return Yardsticks(
        device=device,
        probes=probes,
        kernels=", ".join((probes.name, "numpy", *([native.name] if native else []))),
        aa=aa,
        groups=groups,
        buffer_bytes=values.nbytes,
    )


def measure_quickly(yardsticks: Yardsticks, screen: Screen) -> list[Sample]:
    """Unrecorded samples of every yardstick in a few seconds, for an experiment's predictions."""
    synchronize = yardsticks.probes.synchronize
    costs_s = dict(warm_up(yardsticks.groups, QUICK, synchronize))
    rounds = plan_rounds(costs_s, QUICK)
    total_s = sum(costs_s[name] * rounds[name].total for name in costs_s)
    samples: list[Sample] = []
    with screen.progress("measuring this machine's ceilings", total_s) as advance:
        for fresh in run_rounds(yardsticks.groups, rounds, seed=0, synchronize=synchronize):
            samples += fresh
            advance(costs_s[fresh[0].group])
    return samples


def measure(options: Options, screen: Screen) -> Run:
    """Measure, record and keep for this machine; the complete run."""
    device = resolve_device(options.device)
    yardsticks = make_yardsticks(device, options.threads)
    trial = Trial(
        experiment="ceilings",
        name=device,
        groups=yardsticks.groups,
        rules=QUICK if options.quick else FULL,
        aa=yardsticks.aa,
        synchronize=yardsticks.probes.synchronize,
        identity={
            "executor": "none",
            "kernels": yardsticks.kernels,
            "device": device,
        },
        setup={"threads": options.threads, "buffer_bytes": yardsticks.buffer_bytes},
    )
    finished = conduct(trial, options, screen)
    machine.save_ceilings(ceilings_of(finished.final_samples), device, options.threads)
    return finished
