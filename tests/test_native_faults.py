"""The native core where things go wrong: closed, interrupted, forked, out of memory, cut short.

What could end the process is run in one of its own. A fault here is a crash, a hang, a traceback
for a user's mistake, or an answer that is silently wrong.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import greedy, prompt_of, run, tiny_config, tokens_of, write_model
from safetensors.numpy import load_file, save_file

from nanoserve.config import ModelConfig
from nanoserve.engine import build
from nanoserve.engine.engine import Engine
from nanoserve.engine.native import NativeExecutor, core_config
from nanoserve.kernels.cpu import library
from nanoserve.kernels.cpu.library import UnavailableError
from nanoserve.llm import LLM
from nanoserve.planner import measured
from nanoserve.planner.hardware import memory_bytes
from nanoserve.request import FinishReason, SamplingParams

ISAS = library.available()

pytestmark = pytest.mark.skipif(not ISAS, reason="needs the native core, which was not built here")

FORMATS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int8-weight-only": {"quantization": "int8-weight-only"},
    "int4": {"quantization": "int4"},
}


def native_engine(**options: Any) -> Engine:
    return Engine(tiny_config(executor="native", **options))


def ended(code: str, *, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """A process that ran `SETUP` and `code`, and ended by itself."""
    return subprocess.run(
        [sys.executable, "-c", SETUP + code],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def in_a_process(code: str, *, seconds: float = 60) -> str:
    """What it prints; it must end by itself, and well."""
    done = ended(code, seconds=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


SETUP = """
import os, resource, sys, threading, time
from nanoserve import LLM, SamplingParams

def make(**options):
    return LLM("mini", device="cpu", executor="native", threads=2, **options)

def text_of(llm, number=1):
    params = SamplingParams(max_tokens=4, temperature=0.0)
    return llm.generate(["Once"] * number, params)[-1].outputs[0].text

def start_long_steps(llm):
    started = threading.Event()
    execute = llm.engine.executor.execute
    def noted(batch):
        started.set()
        return execute(batch)
    llm.engine.executor.execute = noted
    def work():
        try:
            llm.generate(["Once upon a time " * 60] * 8, SamplingParams(max_tokens=100))
        except Exception as error:
            print(error.__cause__)
    threading.Thread(target=work, daemon=True).start()
    assert started.wait(30)
    time.sleep(0.02)
"""


# --- Closed ---------------------------------------------------------------------------------------


def test_a_closed_executor_holds_nothing_and_refuses() -> None:
    executor = native_engine().executor
    assert isinstance(executor, NativeExecutor)
    assert min(executor.memory_stats().values()) >= 0
    executor.close()
    executor.close()
    assert set(executor.memory_stats().values()) == {0}
    executor.poison([0, 1])
    with pytest.raises(RuntimeError, match="closed"):
        executor.warm_up()
    status = executor.library.call.ns_step
    with pytest.raises(ValueError, match="this model was closed"):
        executor.library.check(status, executor.handle, library.Batch(), library.Result())


def test_closing_waits_for_the_step_that_runs() -> None:
    out = in_a_process(
        "llm = make()\n"
        "start_long_steps(llm)\n"
        "llm.engine.executor.close()\n"
        "time.sleep(0.3)\n"  # the thread says its word first: two at once may share a line
        "print(llm.engine.executor.memory_stats()['weights_bytes'])\n"
    )
    assert sorted(out.splitlines()) == ["0", "this executor was closed"]


def test_the_interpreter_may_end_while_a_thread_is_in_a_step() -> None:
    done = ended(
        "llm = make()\n"
        "start_long_steps(llm)\n"
        "print('in a step:', llm.engine.has_unfinished, flush=True)\n"
        "sys.exit(0)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "in a step: True\n", "")


# --- Forked ---------------------------------------------------------------------------------------

WAIT = """
for _ in range(400):
    done, status = os.waitpid(child, os.WNOHANG)
    if done: break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


def test_a_child_forked_amid_a_step_ends() -> None:
    code = "llm = make()\nstart_long_steps(llm)\nchild = os.fork()\nif not child: sys.exit(0)\n"
    assert in_a_process(code + WAIT).splitlines()[-1] == "0"


def test_a_child_forked_amid_a_step_shares_the_weights() -> None:
    out = in_a_process(
        "from nanoserve.engine.engine import Engine\n"
        "llm = make()\n"
        "config = llm.engine.config\n"
        "expected = text_of(llm)\n"
        "start_long_steps(llm)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    heir = make()\n"
        "    heir.engine = Engine(config, donor=llm.engine)\n"
        "    os._exit(0 if text_of(heir) == expected else 1)\n" + WAIT
    )
    assert out.splitlines()[-1] == "0"


# --- Out of memory, and beyond every size ---------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_recompute_without_memory_for_more_contexts_fails_that_step_alone() -> None:
    out = in_a_process(
        "llm = make(kv_layout='recompute', max_num_seqs=64)\n"
        "expected = text_of(llm)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))\n"
        "for number in (60, 1, 60):\n"
        "    try:\n"
        "        print(text_of(llm, number) == expected)\n"
        "    except Exception as error:\n"
        "        print(type(error.__cause__).__name__, 'KV cache' in str(error.__cause__))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "print(text_of(llm, 60) == expected)\n"
    )
    assert out.splitlines() == ["MemoryError True", "True", "MemoryError True", "True"]


@pytest.mark.parametrize("executor", ["native", "eager"])
@pytest.mark.parametrize("num_bytes", [memory_bytes() + 1, 10**14, 10**18, 2**64 + 2**40])
def test_a_cache_larger_than_the_machine_is_refused(num_bytes: int, executor: str) -> None:
    with pytest.raises(ValueError, match="more than this machine's memory"):
        Engine(tiny_config(executor=executor, kv_cache_memory_bytes=num_bytes))


@pytest.mark.parametrize("block_size", [2**31, 3 * 10**9, 2**32 + 16])
def test_more_positions_than_int32_counts_are_refused(
    block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "memory_bytes", lambda: 2**60)
    with pytest.raises(ValueError, match="--block-size"):
        native_engine(block_size=block_size, kv_cache_memory_bytes=2**50)


def test_a_size_that_ctypes_would_cut_is_refused() -> None:
    spec = native_engine().spec
    model = replace(spec.model, vocab_size=2**32 + 5)
    with pytest.raises(ValueError, match="vocab_size must be below"):
        core_config(replace(spec, model=model), 1)


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"n_embd": 2**30, "n_head": 1}, "must be at most 16777216"),
        ({"n_inner": 2**25}, "must be at most 16777216"),
    ],
    ids=str,
)
def test_a_width_that_would_overflow_is_refused(changes: dict[str, int], expected: str) -> None:
    spec = native_engine().spec
    model: ModelConfig = replace(spec.model, **changes)
    with pytest.raises(ValueError, match=expected):
        NativeExecutor(replace(spec, model=model), ())


def test_weights_that_do_not_fit_are_a_memory_error() -> None:
    spec = native_engine().spec
    model = replace(spec.model, n_embd=2**22, n_head=1, n_inner=2**22)
    with pytest.raises(MemoryError, match="bytes left for the weights"):
        NativeExecutor(replace(spec, model=model), ())


@pytest.mark.parametrize("threads", [1025, 100_000, 2**31, 2**32 + 1])
def test_too_many_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        native_engine(threads=threads)


# --- Objects that cannot be loaded ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the strongest object, which is all there is."""
    shutil.copy(library.path_of(ISAS[-1]), tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    library._load.cache_clear()
    build.fall_back.cache_clear()
    yield tmp_path
    library._load.cache_clear()


@pytest.mark.parametrize("num_bytes", [0, 10, 100, 5_000, 300_000])
def test_an_object_that_was_cut_short_is_refused_and_auto_is_eager(
    num_bytes: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = library.path_of(ISAS[-1])
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(UnavailableError, match="cannot be loaded"):
        library.load()
    with pytest.raises(ValueError, match=r"--executor native: the native core .* cannot be loaded"):
        native_engine()
    with caplog.at_level(logging.WARNING):
        assert Engine(tiny_config(executor="auto")).describe()["executor"] == "eager"
    assert "cannot be loaded" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "text", "foreign"])
def test_what_is_no_object_of_ours_is_refused(kind: str, folder: Path) -> None:
    path = library.path_of(ISAS[-1])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("not an object\n" * 100)
    else:
        import _ctypes

        shutil.copy(_ctypes.__file__, path)
    with pytest.raises(UnavailableError):
        library.load()
    assert Engine(tiny_config(executor="auto")).describe()["executor"] == "eager"


def test_eager_by_name_never_loads_the_core(folder: Path) -> None:
    library.path_of(ISAS[-1]).write_bytes(b"")
    assert Engine(tiny_config(executor="eager")).describe()["executor"] == "eager"


def test_the_portable_path_is_taken_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "portable")
    assert Engine(tiny_config(executor="auto")).describe()["kernels"] == "C++ portable"


# --- Values at the limit, sizes of one ------------------------------------------------------------


@pytest.mark.parametrize("weight", [7e5, -1e6, 1e20, 3e38])
@pytest.mark.parametrize("name", ["h.0.attn.c_attn.weight", "h.1.mlp.c_proj.weight", "wte.weight"])
def test_a_weight_that_int4_cannot_express_is_no_silent_zero(
    name: str, weight: float, tmp_path: Path
) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    prompt = prompt_of(9)
    state[name][prompt[4], 7] = weight  # of wte a row that is read; elsewhere any
    save_file(state, path)
    llm = LLM(str(tmp_path), device="cpu", executor="native", quantization="int4")
    (output,) = llm.generate(prompt, greedy(3))
    assert output.outputs[0].finish_reason is FinishReason.ERROR


SHAPES = [
    {"n_embd": 1, "n_head": 1, "n_inner": 1, "n_layer": 1},
    {"n_embd": 257, "n_head": 1, "n_inner": 1, "n_layer": 1},
    {"n_embd": 40, "n_head": 40, "n_inner": 3},
    {"n_embd": 8, "n_head": 2, "n_inner": 31},
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_agree_in_every_layout(shape: dict[str, int], name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, **shape)
    params = greedy(6, logprobs=64, prompt_logprobs=64)
    answers = [
        LLM(
            str(model.folder),
            device="cpu",
            executor="native",
            kv_layout=layout,
            threads=threads,
            max_num_seqs=4,
            **FORMATS[name],
        ).generate([prompt_of(n) for n in (1, 5, 17, 50)], params)
        for layout, threads in (("recompute", 1), ("contiguous", 2), ("slots", 64), ("paged", 3))
    ]
    seen = [
        [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in answer]
        for answer in answers
    ]
    assert all(one == seen[0] for one in seen[1:])
    assert {o.outputs[0].finish_reason for o in answers[0]} == {FinishReason.LENGTH}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("vocab_size", [1, 2, 17])
def test_a_vocabulary_smaller_than_everything_asked_of_it(
    vocab_size: int, name: str, tmp_path: Path
) -> None:
    write_model(tmp_path, vocab_size=vocab_size)
    llm = LLM(str(tmp_path), device="cpu", executor="native", **FORMATS[name])
    last = vocab_size - 1
    params = SamplingParams(
        max_tokens=5,
        top_k=1000,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        logprobs=64,
        prompt_logprobs=64,
        logit_bias={last: 100.0},
        seed=1,
        ignore_eos=True,
    )
    (output,) = llm.generate([last] * 9, params)
    choice = output.outputs[0]
    assert list(choice.token_ids) == [last] * 5
    assert choice.logprobs is not None
    assert {len(token.top) for token in choice.logprobs} == {vocab_size}
    assert output.prompt_logprobs is not None
    assert [len(t.top) for t in output.prompt_logprobs if t] == [vocab_size] * 8
    banned = replace(params, logit_bias=dict.fromkeys(range(vocab_size), -100.0))
    (output,) = llm.generate([0] * 9, banned)
    assert len(output.outputs[0].token_ids) == 5


def test_a_step_without_rows_and_one_of_513() -> None:
    engine = native_engine(num_positions=1024, max_num_batched_tokens=513)
    (long,) = run(engine, [prompt_of(700)], greedy(3))
    small = native_engine(num_positions=1024, max_num_batched_tokens=40)
    (again,) = run(small, [prompt_of(700)], greedy(3))
    assert tokens_of(long) == tokens_of(again)


# --- What was measured, damaged -------------------------------------------------------------------


@pytest.mark.parametrize("budget", [True, 0, -1, 10**12, 1e9, "64", [64], None, {"a": 1}])
def test_a_damaged_token_budget_is_ignored(budget: object) -> None:
    spec = native_engine().spec
    measured.keep("budgets", build.spec_budget_key(spec), budget)
    engine = native_engine()
    assert engine.scheduler.max_num_batched_tokens == build.DEFAULT_BATCHED_TOKENS


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000, '{"a": 1e999}'])
def test_a_damaged_file_of_budgets_is_ignored_and_replaced(text: str) -> None:
    path = measured.kept_path("budgets")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    engine = native_engine()
    assert engine.scheduler.max_num_batched_tokens == build.DEFAULT_BATCHED_TOKENS
    key = build.spec_budget_key(engine.spec)
    measured.save_budget(key, 48)
    assert measured.load_budget(key) == 48
    assert native_engine().scheduler.max_num_batched_tokens == 48


def test_a_user_without_a_home_has_an_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    measured.save_budget("key", 64)
    assert measured.load_budget("key") is None
    assert native_engine().describe()["executor"] == "native"
    assert "not kept for later: Could not determine home" in caplog.text
