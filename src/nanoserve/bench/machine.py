"""What this machine is, without saying whose it is; and the ceilings once measured on it.

A fingerprint holds what a timing depends on (processor, caches, cores, threads, library versions,
commit) and neither a host name, a user name nor a path. Measured ceilings are kept in the user's
cache folder under the part of the fingerprint that they depend on, so that reading them costs
milliseconds: neither torch nor an engine is imported here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import nanoserve
from nanoserve.planner.steptime import Ceilings

LIBRARIES = ("torch", "numpy", "tokenizers", "safetensors")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY")
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve")
GIT_TIMEOUT_S = 10

logger = logging.getLogger(__name__)


def fingerprint() -> dict[str, Any]:
    """Everything of this machine and installation that a timing depends on."""
    return {**hardware(), "software": software(), "thread_variables": thread_variables()}


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


def software() -> dict[str, Any]:
    """Versions of what computes, and the commit of what measures."""
    return {
        "nanoserve": nanoserve.__version__,
        **source_state(),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in LIBRARIES},
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


def source_state() -> dict[str, Any]:
    """The commit this code was checked out from, and whether it was edited since.

    Both None for an installed package: then the version says what ran.
    """
    package = Path(nanoserve.__file__).resolve().parent
    root = git(package, "rev-parse", "--show-toplevel")
    if root is None or Path(root) / "src" / "nanoserve" != package:
        return {"commit": None, "edited": None}
    edited = git(package, "status", "--porcelain", "--", str(package))
    return {"commit": git(package, "rev-parse", "--short=12", "HEAD"), "edited": bool(edited)}


def git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None where there is no git, no repository or no answer."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine_id(value: dict[str, Any]) -> str:
    """Twelve hex digits that stand for a fingerprint in every record of its run."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def slug() -> str:
    """This machine's name as a folder: processor and usable cores, nothing personal."""
    return slug_of(cpu_info()["model"], num_usable_cores())


def slug_of(cpu: str, cores: int) -> str:
    """The folder name of a machine with this processor and so many usable cores."""
    words = re.sub(r"\(r\)|\(tm\)|@.*|\bcpu\b|\bprocessor\b", " ", cpu.lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{cores}c"])


def ceilings_path() -> Path:
    """`ceilings.json` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nanoserve" / "ceilings.json"


def ceilings_key(device: str, threads: int | None) -> str:
    """What measured ceilings depend on: the machine, the libraries, the device, the threads."""
    libraries = {name: installed_version(name) for name in LIBRARIES}
    parts = {"libraries": libraries, "device": device, "threads": threads, **hardware()}
    return machine_id({**parts, "thread_variables": thread_variables()})


def load_cached_ceilings(device: str = "cpu", threads: int | None = None) -> Ceilings | None:
    """The ceilings measured on this machine by `nanoserve bench ceilings`, or None.

    A cache file that cannot be read is as good as none; that is logged.
    """
    return read_ceilings_file().get(ceilings_key(device, threads))


def read_ceilings_file() -> dict[str, Ceilings]:
    path = ceilings_path()
    try:
        entries = json.loads(path.read_bytes())
        return {key: Ceilings.from_json(value) for key, value in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("cached ceilings are unreadable and ignored: %s", error)
        return {}


def save_ceilings(ceilings: Ceilings, device: str = "cpu", threads: int | None = None) -> None:
    """Keep `ceilings` for this machine; the file is replaced at once, so never half-written.

    They are a convenience: a cache folder that cannot be written is logged and nothing else.
    """
    entries = {**read_ceilings_file(), ceilings_key(device, threads): ceilings}
    text = json.dumps({key: value.to_json() for key, value in entries.items()}, indent=1)
    path = ceilings_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("the measured ceilings are not kept for later: %s", error)
