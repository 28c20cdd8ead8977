"""Triton twins of `paged.append_reference` and `append_int8_reference`: scatter keys or values.

One program a token and head. int8 values and their scales are bit for bit the reference's: both
divisions round to nearest, and so does the rounding to integers, ties to even.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _append_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    slots_ptr,
    x_stride_t,
    x_stride_h,
    num_heads,
    block_size,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT8: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + token * x_stride_t + head * x_stride_h + d, mask=d < D, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row = (slot // block_size * num_heads + head) * block_size + slot % block_size
    if INT8:
        x = x.to(tl.float32)
        # A maximum need not hand a NaN on, a sum does.
        unfinite = tl.where(tl.abs(x) < float("inf"), 0.0, float("nan"))
        magnitude = tl.max(tl.abs(x), 0) + tl.sum(unfinite, 0)
        stored_scale = tl.div_rn(magnitude, 127.0).to(tl.float16)
        scale = stored_scale.to(tl.float32)
        is_positive = scale > 0.0
        steps = tl.div_rn(x, tl.where(is_positive, scale, 1.0))
        steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
        # Adding 1.5 * 2**23 leaves no bit for a fraction: rounds to nearest, ties to even.
        steps = tl.where(is_positive, (steps + 12582912.0) - 12582912.0, 0.0)
        tl.store(values_ptr + row * D + d, steps.to(tl.int8), mask=d < D)
        tl.store(scales_ptr + row, stored_scale)
    else:
        tl.store(values_ptr + row * D + d, x.to(values_ptr.dtype.element_ty), mask=d < D)


def append(x: Tensor, values: Tensor, slots: Tensor) -> None:
    """See `paged.append_reference`."""
    _launch(x, values, values, slots, is_int8=False)


def append_int8(x: Tensor, values: Tensor, scales: Tensor, slots: Tensor) -> None:
    """See `paged.append_int8_reference`."""
    _launch(x, values, scales, slots, is_int8=True)


def _launch(x: Tensor, values: Tensor, scales: Tensor, slots: Tensor, *, is_int8: bool) -> None:
    num_tokens, num_heads, head_size = x.shape
    for tensor in (values, scales):
        assert tensor.is_contiguous(), "rows are addressed by number"
    assert x.stride(2) == 1, "a head's values lie side by side"
    if num_tokens == 0:
        return
    _append_kernel[(num_tokens, num_heads)](
        x,
        values,
        scales,
        slots,
        x.stride(0),
        x.stride(1),
        num_heads,
        values.shape[2],
        D=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        INT8=is_int8,
    )
