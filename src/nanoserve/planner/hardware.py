"""Which machine this is, as far as a timing depends on it: processor, cores, caches, libraries.

Neither a host name, a user name nor a path is ever read. Standard library only and quick, so that
an engine can ask at its start.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY")
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")


def hardware() -> dict[str, Any]:
    """Processor, usable cores, caches and memory."""
    cpu = cpu_info()
    return {
        "cpu": cpu["model"],
        "vector": cpu["vector"],
        "cores": num_usable_cores(),
        "cores_online": os.cpu_count(),
        "quota_cores": quota_cores(),
        "caches_bytes": cache_sizes(),
        "memory_bytes": memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def thread_variables() -> dict[str, str]:
    """The environment variables that set thread counts, where they are set."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def num_usable_cores() -> int:
    """Cores this process may run on: its affinity, where the system has one."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_granted_cores() -> int:
    """Cores that this process may keep busy: its affinity, and no more than the group's quota."""
    quota = quota_cores()
    usable = num_usable_cores()
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cpu_info() -> dict[str, Any]:
    """The processor's name and the vector extensions that decide how fast it can be."""
    text = read_text(Path("/proc/cpuinfo"))
    name = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    model = name[1].strip() if name else platform.processor() or platform.machine()
    return {"model": model, "vector": [flag for flag in VECTOR_FLAGS if flag in present]}


def cache_sizes() -> dict[str, int]:
    """Bytes of the data caches that the first core sees, by level ("L1", "L2", "L3")."""
    sizes: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KM]?)", read_text(index / "size"))
        if size and read_text(index / "type") != "Instruction":
            factor = {"": 1, "K": 2**10, "M": 2**20}[size[2]]
            sizes[f"L{read_text(index / 'level')}"] = int(size[1]) * factor
    return sizes


def quota_cores() -> float | None:
    """Cores that the control group grants, None where it sets no limit."""
    quota, _, period = read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_text(path: Path) -> str:
    """A small system file, or nothing where this system has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def machine_id(value: dict[str, Any]) -> str:
    """Twelve hex digits that stand for a fingerprint in every record of its run."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
