"""What libraries reach on this machine at best: the loads that measured ceilings are made of.

Each probe prepares its buffers once and gives back a function that does the same work at every
call, so whoever times it allocates nothing. PyTorch is imported inside, because benchmarks that
run elsewhere, or only list what there is, must load without it; where it is not installed numpy's
own loads (its BLAS for matrices) stand in. `NativeProbes` are the native core's, beside either: a
ceiling is the fastest of all there are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from nanoserve.kernels.cpu import library

if TYPE_CHECKING:
    import torch

Load = Callable[[], object]

MATRIX_ROWS = 4096
TINY_OPERATIONS = 1000
"""Calls of the smallest operation in one run of the dispatch probe."""

READ_LINE_BYTES = 256
"""What a native read takes at once: it reads whole ones of these."""

logger = logging.getLogger(__name__)


class Probes(Protocol):
    """The probes of one device; `matmul` raises ValueError for a dtype that it cannot compute."""

    name: str
    product: str  # what its matmul is called

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    def synchronize(self) -> None: ...

    def read(self, values: NDArray[np.float32]) -> Mapping[str, Load]: ...

    def matmul(self, m: int, k: int, n: int, dtype: str) -> Load: ...

    def dispatch(self) -> Load: ...


def make_probes(device: str, threads: int | None = None) -> Probes:
    """PyTorch's where it is installed, else numpy's, for a CPU.

    Raises ValueError for a CUDA device that PyTorch does not see.
    """
    if find_spec("torch") is not None:
        return TorchProbes(device, threads)
    if device != "cpu":
        raise ValueError(f"--device {device} needs PyTorch: pip install 'nanoserve[torch]'")
    return NumpyProbes()


class NumpyProbes:
    """Of a CPU. How many threads a product takes is its BLAS's affair (OPENBLAS_NUM_THREADS).

    Memory is read by whoever measures, with numpy's maximum in threads and by `NativeProbes`.
    """

    name = "numpy"
    product = "numpy.matmul"
    dtypes = ("float32",)

    def synchronize(self) -> None:
        """Nothing: numpy has finished when it returns."""

    def read(self, values: NDArray[np.float32]) -> Mapping[str, Load]:
        """No kernel beside that maximum."""
        return {}

    def matmul(self, m: int, k: int, n: int, dtype: str) -> Load:
        """[m, k] @ [k, n] in fp32: 2 m k n operations."""
        if dtype not in self.dtypes:
            raise ValueError(
                f"measuring a product in {dtype} needs PyTorch (pip install 'nanoserve[torch]'); "
                "--dtype float32 does not"
            )
        rng = np.random.default_rng(0)
        left = rng.standard_normal((m, k), dtype=np.float32)
        right = rng.standard_normal((k, n), dtype=np.float32)
        product = np.empty((m, n), dtype=np.float32)
        return lambda: np.matmul(left, right, out=product)

    def dispatch(self) -> Load:
        """`TINY_OPERATIONS` in-place additions of one element: nothing but dispatch."""
        element = np.zeros(1, dtype=np.float32)

        def run() -> None:
            for _ in range(TINY_OPERATIONS):
                np.add(element, 1.0, out=element)

        return run


def make_native_probes(num_threads: int) -> NativeProbes | None:
    """The native core's probes on the CPU; None, and a line in the log, where it cannot run."""
    try:
        core = library.load()
    except library.UnavailableError as error:
        logger.info("no native probes: %s", error)
        return None
    return NativeProbes(core, num_threads)


class NativeProbe:
    """One probe of the core: threads, and at most one product. Closed when nobody holds it."""

    def __init__(self, core: library.Library, num_threads: int) -> None:
        self.core = core
        check_int32("threads", num_threads)
        self.address = core.open_probe(num_threads)
        weakref.finalize(self, core.call.ns_close_probe, self.address)

    def read(self, values: NDArray[np.float32], *, fetches: bool) -> None:
        """One pass over all whole lines of `values`. Raises ValueError for one with gaps."""
        if not values.flags.c_contiguous:
            raise ValueError("a read probe needs its values end to end")
        num_lines = values.nbytes // READ_LINE_BYTES
        self.core.call.ns_probe_read(self.address, values.ctypes.data, num_lines, fetches)

    def put_product(self, weights: int, m: int, k: int, n: int) -> None:
        """Make the operands. Raises ValueError for a size that is none, and MemoryError."""
        for name, size in {"M": m, "K": k, "N": n}.items():
            check_int32(name, size)
        self.core.check(self.core.call.ns_put_product, self.address, weights, m, k, n)

    def multiply(self) -> None:
        """The product once."""
        self.core.check(self.core.call.ns_probe_product, self.address)


def check_int32(name: str, value: int) -> None:
    """Raise ValueError for a number that ctypes would cut."""
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} must be below 2**31, got {value}")


class NativeProbes:
    """Of a CPU: the threads and products of the native executor, on made-up numbers.

    `dtypes` are weight formats, quantised ones included. The portable instruction set has none: it
    is there to prove bits, and one product would take minutes.
    """

    name = "native core"
    product = "native"

    def __init__(self, core: library.Library, num_threads: int) -> None:
        self._core = core
        self._num_threads = num_threads
        self.dtypes = () if core.isa == "portable" else tuple(library.WEIGHTS)

    def read(self, values: NDArray[np.float32]) -> Mapping[str, Load]:
        """Kernels that read all of `values` (a multiple of 256 bytes) once."""
        probe = NativeProbe(self._core, self._num_threads)
        return {
            "native read": lambda: probe.read(values, fetches=False),
            "native read, fetched ahead": lambda: probe.read(values, fetches=True),
        }

    def matmul(self, m: int, k: int, n: int, dtype: str) -> Load:
        """[m, k] @ [k, n] with weights in `dtype`: 2 m k n operations. Raises MemoryError too."""
        if dtype not in library.WEIGHTS:
            raise ValueError(
                f"the native core multiplies weights in {', '.join(library.WEIGHTS)}, got {dtype}"
            )
        probe = NativeProbe(self._core, self._num_threads)
        probe.put_product(library.WEIGHTS[dtype], m, k, n)
        return probe.multiply


class TorchProbes:
    """Probes on one device. `threads` None leaves PyTorch's own number of threads.

    Raises ValueError for a CUDA device that PyTorch does not see.
    """

    name = "PyTorch"
    product = "torch.mm"

    def __init__(self, device: str, threads: int | None = None) -> None:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
        self._torch = torch
        self.device = torch.device(device)
        if threads is not None:
            torch.set_num_threads(threads)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the device multiplies at a rate of its own."""
        half = ("float16", "bfloat16") if self.device.type == "cuda" else ("bfloat16",)
        return ("float32", *half)

    def synchronize(self) -> None:
        """Return when the device has nothing left to do."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def read(self, values: NDArray[np.float32]) -> Mapping[str, Load]:
        """Kernels that read all of `values` (its length a multiple of 8,192) once.

        On the CPU the memory is shared with numpy, huge pages and all.
        """
        flat = self._torch.from_numpy(values).to(self.device)
        half = len(flat) // 2
        first, second = flat[:half], flat[half:]
        matrix = flat.view(MATRIX_ROWS, -1)
        vector = self._torch.ones(matrix.shape[1], device=self.device)
        product = self._torch.empty(MATRIX_ROWS, device=self.device)
        return {
            "torch.sum": lambda: self._torch.sum(flat),
            "torch.dot": lambda: self._torch.dot(first, second),
            "torch.mv": lambda: self._torch.mv(matrix, vector, out=product),
        }

    def matmul(self, m: int, k: int, n: int, dtype: str) -> Load:
        """[m, k] @ [k, n] in `dtype`: 2 m k n operations."""
        generator = self._torch.Generator().manual_seed(0)

        kind: torch.dtype = getattr(self._torch, dtype)

        def random_matrix(rows: int, columns: int) -> torch.Tensor:
            drawn: torch.Tensor = self._torch.randn(rows, columns, generator=generator)
            return drawn.to(device=self.device, dtype=kind)

        left, right = random_matrix(m, k), random_matrix(k, n)
        product = self._torch.empty(m, n, device=self.device, dtype=left.dtype)
        return lambda: self._torch.mm(left, right, out=product)

    def dispatch(self) -> Load:
        """`TINY_OPERATIONS` in-place additions of one element: nothing but dispatch."""
        element = self._torch.zeros(1, device=self.device)

        def run() -> None:
            for _ in range(TINY_OPERATIONS):
                element.add_(1.0)

        return run
