"""The int8 cache of the eager executor beside the native one: one definition, two stores."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import greedy, prompt_of, run, tiny_config, tiny_engine, tokens_of

from nanoserve.kernels.cpu import library
from nanoserve.kernels.paged import quantise
from nanoserve.request import RequestOutput
from nanoserve.verify import verify

NATIVE = Path(__file__).parent / "native"
LOGPROB_BOUND = 5e-3
"""Nats. Native attention rounds queries and weights to 16 bits, and a value between two steps may
fall either way."""

needs_native = pytest.mark.skipif(not library.available(), reason="needs the native core")


@needs_native
def test_eager_and_native_int8_agree_over_the_whole_context() -> None:
    """Tokens, and the log-probabilities of a prompt of 200 tokens."""
    prompts = [prompt_of(200), prompt_of(31)]
    params = greedy(24, logprobs=3, prompt_logprobs=3)
    ours, theirs = (
        run(tiny_engine(executor=name, kv_cache_dtype="int8"), prompts, params)
        for name in ("eager", "native")
    )
    full = run(tiny_engine(), prompts, params)
    assert [tokens_of(o) for o in ours] == [tokens_of(o) for o in theirs]
    assert 0 < largest_difference(ours, theirs) < LOGPROB_BOUND
    assert largest_difference(ours, full) > 1e-4, "int8 changed nothing"


def largest_difference(ours: list[RequestOutput], theirs: list[RequestOutput]) -> float:
    """Over the log-probabilities of prompts and outputs."""
    pairs: list[tuple[Any, Any]] = []
    for mine, yours in zip(ours, theirs, strict=True):
        pairs += zip(mine.outputs[0].logprobs or (), yours.outputs[0].logprobs or (), strict=True)
        pairs += zip(
            (mine.prompt_logprobs or ())[1:], (yours.prompt_logprobs or ())[1:], strict=True
        )
    assert len(pairs) > 200
    return max(abs(a.logprob - b.logprob) for a, b in pairs if a.token_id == b.token_id)


def test_the_eager_executor_proves_itself_in_int8() -> None:
    """`nanoserve verify`: every way took place, and stays within the bound of its precision."""
    report = verify(tiny_config(kv_cache_dtype="int8"), num_tokens=6)
    assert report.ok
    assert not report.exact_tokens
    assert report.bound == 0.15
    assert max(way.max_error for way in report.ways) < 0.02


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The program that prints what is stored, for the weakest and the strongest instructions."""
    recipe, found = load("recipe"), load("library")
    flags = recipe.isa_flags()
    here = [isa for isa in flags if found.CPU_FLAGS[isa] <= found.cpu_flags()]
    folder = tmp_path_factory.mktemp("stored")
    programs = []
    for isa in (here[0], here[-1]):
        programs.append(folder / isa)
        command = [*recipe.compiler(), *recipe.FLAGS, *flags[isa], f"-I{library.FOLDER}"]
        command += ["-o", str(programs[-1]), str(NATIVE / "dump_stored.cpp")]
        subprocess.run(command, check=True, timeout=120)
    return programs


def load(name: str) -> ModuleType:
    """A module of kernels/cpu under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"_{name}", library.FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [16, 64, 80])
def test_stored_values_and_scales_are_the_native_cores_bytes(
    head_size: int, dump: list[Path]
) -> None:
    """Over ten orders of magnitude, with zeros, ties, subnormal scales and what is not finite."""
    generator = torch.Generator().manual_seed(head_size)
    x = torch.randn(64, head_size, generator=generator)
    x *= torch.logspace(-6, 4, 64)[:, None]
    x[1] = 0.0
    x[2, 3], x[3, 3] = torch.nan, torch.inf
    x[4] = torch.arange(head_size) / 2.0
    x[4, 0] = 127.0
    header = np.array([head_size, len(x)], np.int32).tobytes()
    values, scales = quantise(x)
    for program in dump:
        done = subprocess.run(
            [program], input=header + x.numpy().tobytes(), capture_output=True, check=True
        )
        for part in np.split(np.frombuffer(done.stdout, np.int8), 2):  # keys, then values
            stored = part[: x.numel()].reshape(x.shape)
            np.testing.assert_array_equal(stored, values.numpy())
            halves = part[x.numel() :].view(np.float16)
            np.testing.assert_array_equal(halves, scales.numpy())  # NaN equals NaN here
            assert np.isnan(halves[[2, 3]]).all()
