"""The Triton kernels through Triton's interpreter, held to their PyTorch references.

The interpreter runs the kernels' own code with numpy in place of a GPU, so addresses, masks and the
order of operations are what is tested; what a compiler makes of them needs a GPU (test_gpu.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanoserve.kernels import paged
from nanoserve.kernels.paged import PagedKernels, choose_kernels, quantise

H, B = 2, 16
HEAD_SIZES = (8, 16, 64, 80, 96, 128)
GARBAGE = 77

REFERENCE_BOUND = 2e-6
"""Largest difference to the reference, as a share of the largest value: sums of up to a few hundred
fp32 products in another order."""


class Cell(NamedTuple):
    """A decode step over stores in which only what a context holds is a number."""

    q: Tensor  # [S, H, D]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    tables: Tensor  # [S, M]
    context_lens: Tensor  # [S]
    window: int


@pytest.fixture(scope="module")
def triton() -> PagedKernels:
    return choose_kernels("triton", "cpu")


def poisoned(num_blocks: int, block_size: int, head_size: int, dtype: str) -> tuple[Tensor, ...]:
    """A store in which every slot is unused: NaN, and in int8 garbage with a NaN scale."""
    shape = (num_blocks, H, block_size)
    if dtype == "int8":
        values = torch.full((*shape, head_size), GARBAGE, dtype=torch.int8)
        return values, torch.full(shape, torch.nan, dtype=torch.float16)
    return (torch.full((*shape, head_size), torch.nan, dtype=getattr(torch, dtype)),)


def append(kernels: PagedKernels, x: Tensor, store: tuple[Tensor, ...], slots: Tensor) -> None:
    if len(store) == 2:
        kernels.append_int8(x, store[0], store[1], slots)
    else:
        kernels.append(x, store[0], slots)


def attend(kernels: PagedKernels, cell: Cell, scale: float) -> Tensor:
    function = kernels.attend_int8 if len(cell.k) == 2 else kernels.attend
    step = (cell.tables, cell.context_lens, scale, cell.window)
    return function(cell.q, *cell.k, *cell.v, *step)  # type: ignore[operator]


def make_cell(
    contexts: tuple[int, ...], head_size: int, dtype: str, block_size: int = B, seed: int = 0
) -> Cell:
    """Contexts in blocks of a permuted table; the tables are wider than any context needs."""
    generator = torch.Generator().manual_seed(seed + head_size)
    width = -(-max(contexts) // block_size) + 1
    num_blocks = len(contexts) * width
    tables = torch.randperm(num_blocks, generator=generator).view(len(contexts), width).int()
    k, v = (poisoned(num_blocks, block_size, head_size, dtype) for _ in range(2))
    for table, length in zip(tables, contexts, strict=True):
        positions = torch.arange(length)
        slots = table[positions // block_size] * block_size + positions % block_size
        for store in (k, v):
            x = torch.randn(length, H, head_size, generator=generator)
            append(paged.TORCH, x, store, slots)
    q = 3 * torch.randn(len(contexts), H, head_size, generator=generator)
    lens = torch.tensor(contexts, dtype=torch.int32)
    return Cell(q, k, v, tables, lens, width * block_size)


def dense(cell: Cell, scale: float) -> Tensor:
    """Written once more, one sequence at a time, in float64."""
    rows = []
    for query, table, length in zip(cell.q, cell.tables, cell.context_lens, strict=True):
        k, v = (read(store, table, int(length)) for store in (cell.k, cell.v))
        weights = (torch.einsum("hd,nhd->hn", query.double(), k) * scale).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(rows)


def read(store: tuple[Tensor, ...], table: Tensor, length: int) -> Tensor:
    """[N, H, D] in float64."""
    block_size = store[0].shape[2]
    positions = torch.arange(length)
    blocks = table[positions // block_size].long()
    values = store[0][blocks, :, positions % block_size].double()
    if len(store) == 1:
        return values
    return values * store[1][blocks, :, positions % block_size].double()[..., None]


def assert_attends(kernels: PagedKernels, cell: Cell) -> None:
    scale = cell.q.shape[2] ** -0.5
    expected = dense(cell, scale)
    bound = REFERENCE_BOUND * float(expected.abs().max())
    for form in (paged.TORCH, kernels):
        got = attend(form, cell, scale)
        assert got.shape == cell.q.shape
        assert got.dtype == cell.q.dtype
        assert float((got - expected).abs().max()) < bound, form.name


EDGES = (1, B - 1, B, B + 1, 2 * B)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_attention_over_a_permuted_table_at_block_edges(
    triton: PagedKernels, head_size: int, dtype: str
) -> None:
    assert_attends(triton, make_cell(EDGES, head_size, dtype))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_many_blocks_are_split_and_put_together(triton: PagedKernels, dtype: str) -> None:
    """A context that fills all splits, one that leaves most of them empty."""
    from nanoserve.kernels.triton_attention import num_splits_of

    cell = make_cell((600, 3), 16, dtype)
    assert num_splits_of(2, H, cell.window) == 4
    assert_attends(triton, cell)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_blocks_of_any_size(triton: PagedKernels, block_size: int) -> None:
    """`slots` has blocks of one position, `contiguous` one block a sequence."""
    assert_attends(triton, make_cell((1, 7, 40), 8, "int8", block_size))


def test_the_window_bounds_what_is_looked_at_and_never_the_result(triton: PagedKernels) -> None:
    cell = make_cell((5, 30), 8, "float32")
    for window in (30, 31, 48):
        assert_attends(triton, cell._replace(window=window))


def test_half_precision_queries_come_back_as_they_came(triton: PagedKernels) -> None:
    cell = make_cell((20,), 16, "float16")
    cell = cell._replace(q=cell.q.half())
    got, expected = attend(triton, cell, 0.25), dense(cell, 0.25)
    assert got.dtype == torch.float16
    assert float((got - expected).abs().max()) < 2.0**-10 * float(expected.abs().max())


def test_a_value_that_is_not_finite_is_not_hidden(triton: PagedKernels) -> None:
    """Of one sequence: its mates are untouched."""
    cell = make_cell((20, 20), 8, "float32")
    cell.v[0][cell.tables[0, 0], 0, 3] = torch.nan
    for form in (paged.TORCH, triton):
        got = attend(form, cell, 0.3)
        assert bool(got[0, 0].isnan().all())
        assert bool(got[1].isfinite().all())


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("head_size", [8, 80])
def test_append_stores_the_references_bits(
    triton: PagedKernels, head_size: int, dtype: str
) -> None:
    """From a view of q, k and v side by side, into slots in no order; nothing else is touched.

    Not bfloat16, which the interpreter cuts off where compiled kernels round.
    """
    generator = torch.Generator().manual_seed(head_size)
    qkv = torch.randn(9, 3, H, head_size, generator=generator)
    qkv *= torch.logspace(-6, 4, 9)[:, None, None, None]
    qkv[3] = 0.0
    qkv[4, :, 0, 1], qkv[5, :, 1, 2] = torch.nan, torch.inf
    slots = torch.randperm(3 * B, generator=generator)[:9].int()
    stores = [poisoned(3, B, head_size, dtype) for _ in range(2)]
    for form, store in zip((paged.TORCH, triton), stores, strict=True):
        append(form, qkv[:, 1], store, slots)
    for expected, got in zip(*stores, strict=True):
        assert torch.equal(expected.isnan(), got.isnan())
        assert torch.equal(expected.nan_to_num(), got.nan_to_num())


def test_rounding_goes_to_the_nearest_and_ties_to_even(triton: PagedKernels) -> None:
    """With a largest value of 127 the scale is exactly 1."""
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.49999997]).view(1, 1, 8)
    store = (torch.zeros(1, 1, 1, 8, dtype=torch.int8), torch.zeros(1, 1, 1, dtype=torch.float16))
    for form in (paged.TORCH, triton):
        append(form, x, store, torch.zeros(1, dtype=torch.int32))
        assert store[0].flatten().tolist() == [127, 0, 2, 2, 0, -2, 126, 0]
        assert store[1].item() == 1.0
    assert quantise(x)[0].flatten().tolist() == [127, 0, 2, 2, 0, -2, 126, 0]


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """To assembly; where bits are promised, no division is approximate."""
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 2
    appended = [line for line in lines if line.startswith("_append_kernel")]
    assert len(appended) == 2
    assert not any("approximately" in line for line in appended)


def test_nothing_to_do_is_done(triton: PagedKernels) -> None:
    store = poisoned(1, B, 8, "float32")
    append(triton, torch.zeros(0, H, 8), store, torch.zeros(0, dtype=torch.int32))
    assert bool(store[0].isnan().all())
    nobody = torch.zeros(0, dtype=torch.int32)
    cell = Cell(torch.zeros(0, H, 8), store, store, nobody.view(0, 1), nobody, B)
    assert attend(triton, cell, 1.0).shape == (0, H, 8)


def test_kernels_asked_for_by_name_run_or_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels("auto", "cpu") is choose_kernels("torch", "cpu") is paged.TORCH
    assert choose_kernels("torch", "cuda") is paged.TORCH
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"--kernels triton: they need a GPU, got --device cpu"):
        choose_kernels("triton", "cpu")
    monkeypatch.setattr(paged, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--kernels triton: Triton is not installed \(pip"):
        choose_kernels("triton", "cuda")


def test_auto_without_triton_falls_back_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paged, "find_spec", lambda name: None)
    paged._fall_back.cache_clear()
    assert choose_kernels("auto", "cuda") is paged.TORCH
    assert choose_kernels("auto", "cuda") is paged.TORCH
    assert [r.getMessage() for r in caplog.records] == [
        "PyTorch's attention kernels are used; Triton's: Triton is not installed "
        "(pip install 'nanoserve[cuda]')"
    ]
