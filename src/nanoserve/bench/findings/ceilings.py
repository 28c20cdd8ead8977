"""What a `ceilings` run says about its machine."""

from __future__ import annotations

from nanoserve.bench.findings import Rate, Table, ceilings_of, machine_name, noise_sentence, rates
from nanoserve.bench.record import Run


def ceilings_table(run: Run) -> Table:
    """Every load of a `ceilings` run, the fastest of each kind marked."""
    found = rates(run.final_samples)
    best = {
        (kind, rate.dtype): max(r.per_s for r in found if (r.unit, r.dtype) == (kind, rate.dtype))
        for rate in found
        for kind in [rate.unit]
    }
    rows = [
        [
            rate.group,
            rate.arm,
            format_rate(rate),
            f"{rate.seconds.spread:.1%}" + (f" {rate.seconds.mark}" if rate.seconds.mark else ""),
            str(rate.seconds.n),
            "ceiling" if rate.per_s == best[rate.unit, rate.dtype] else "",
        ]
        for rate in sorted(found, key=lambda rate: (rate.unit, rate.group, rate.arm))
    ]
    return ["load", "kernel", "median", "IQR", "n", ""], rows


def format_rate(rate: Rate) -> str:
    """In the unit people use for it."""
    if rate.unit == "bytes":
        return f"{rate.per_s / 1e9:,.1f} GB/s"
    if rate.unit == "flops":
        return f"{rate.per_s / 1e9:,.0f} GFLOP/s"
    return f"{1e6 / rate.per_s:.2f} µs each"


def ceilings_paragraph(run: Run) -> str:
    """What the ceilings mean, in words."""
    ceilings = ceilings_of(run.final_samples)
    matmul = ", ".join(
        f"{rate / 1e9:,.0f} GFLOP/s in {dtype}"
        for dtype, rate in ceilings.matmul_flops_per_s.items()
    )
    floats_moved = ceilings.matmul_flops_per_s["float32"] / ceilings.read_bytes_per_s
    return (
        f"{machine_name(run)} reads memory at {ceilings.read_bytes_per_s / 1e9:.1f} GB/s and "
        f"multiplies matrices at {matmul}. Dispatching an operation with nothing to do takes "
        f"{ceilings.dispatch_s * 1e6:.1f} µs. In fp32 a step is bound by memory until it does "
        f"about {floats_moved:.1f} operations per byte it reads. {noise_sentence(run)}"
    )
