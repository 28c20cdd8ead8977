"""What this machine is, without saying whose it is.

A fingerprint holds what a timing depends on (processor, caches, cores, threads, library versions,
commit) and neither a host name, a user name nor a path. What of it the planner needs too, and the
ceilings that are kept by it, live in `planner.hardware` and `planner.measured`; they are named here
as well, so that the benchmarks have one place to ask. Neither torch nor an engine is imported.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import nanoserve
from nanoserve.planner.hardware import (
    LIBRARIES,
    cache_sizes,
    cpu_info,
    hardware,
    installed_version,
    machine_id,
    memory_bytes,
    num_usable_cores,
    thread_variables,
)
from nanoserve.planner.measured import ceilings_path, load_cached_ceilings, save_ceilings

__all__ = [
    "cache_sizes",
    "ceilings_path",
    "fingerprint",
    "load_cached_ceilings",
    "machine_id",
    "memory_bytes",
    "num_usable_cores",
    "save_ceilings",
    "slug",
    "slug_of",
]

GIT_TIMEOUT_S = 10


def fingerprint() -> dict[str, Any]:
    """Everything of this machine and installation that a timing depends on."""
    return {**hardware(), "software": software(), "thread_variables": thread_variables()}


def software() -> dict[str, Any]:
    """Versions of what computes, and the commit of what measures."""
    return {
        "nanoserve": nanoserve.__version__,
        **source_state(),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in LIBRARIES},
    }


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


def slug() -> str:
    """This machine's name as a folder: processor and usable cores, nothing personal."""
    return slug_of(cpu_info()["model"], num_usable_cores())


def slug_of(cpu: str, cores: int) -> str:
    """The folder name of a machine with this processor and so many usable cores."""
    words = re.sub(r"\(r\)|\(tm\)|@.*|\bcpu\b|\bprocessor\b", " ", cpu.lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{cores}c"])
