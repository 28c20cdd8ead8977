"""Compile every Triton kernel for a GPU that need not be here, down to its assembly (PTX).

Run in a process of its own: the interpreter must be off before Triton is imported. It prints a line
for each kernel. What the assembly computes only a GPU can say (test_gpu.py).
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoserve.kernels import triton_append, triton_attention

TARGET = GPUTarget("cuda", 80, 32)
STORED = {"bf16": "*bf16", "int8": "*i8"}


def compile_kernel(kernel: object, types: dict[str, str], constants: dict[str, object]) -> str:
    """The PTX of `kernel` for arguments of these types."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    names = kernel.arg_names  # type: ignore[attr-defined]
    source = ASTSource(
        kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    return str(triton.compile(source, target=TARGET).asm["ptx"])


def typed(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def main() -> int:
    ints = typed("num_heads block_size table_width q_stride_s q_stride_h num_splits", "i32")
    ints |= typed("x_stride_t x_stride_h", "i32")
    for stored, pointer in STORED.items():
        for head_size in (80,):
            sizes = {"D": head_size, "BLOCK_D": triton.next_power_of_2(head_size)}
            is_int8 = {"INT8": stored == "int8"}
            scales = "*fp16" if stored == "int8" else pointer
            split = typed("q_ptr mixed_ptr maxima_ptr sums_ptr", "*fp32")
            split |= typed("k_ptr v_ptr", pointer) | typed("k_scales_ptr v_scales_ptr", scales)
            split |= typed("tables_ptr lens_ptr", "*i32") | {"scale": "fp32"} | ints
            append = {"x_ptr": "*fp32", "values_ptr": pointer, "scales_ptr": scales}
            append |= {"slots_ptr": "*i64"} | ints
            reduce = typed("mixed_ptr maxima_ptr sums_ptr out_ptr", "*fp32") | ints
            for kernel, types, constants in (
                (triton_attention._split_kernel, split, sizes | is_int8 | {"TILE": 32}),
                (triton_attention._reduce_kernel, reduce, sizes | {"BLOCK_SPLITS": 4}),
                (triton_append._append_kernel, append, sizes | is_int8),
            ):
                ptx = compile_kernel(kernel, types, constants)
                approximate = "div.full" in ptx or "div.approx" in ptx
                sys.stdout.write(
                    f"{kernel.__name__} {stored} {head_size}: {len(ptx.splitlines())} lines"
                    f"{', divides approximately' if approximate else ''}\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
