"""The command line as people type it: what goes where, exit codes, bad input, interrupted batches.

Most tests run `main` in this process; what depends on signals, pipes and what is imported runs in a
process of its own. The model is tiny and random, with a vocabulary of single bytes.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from nanoserve import __version__, verify
from nanoserve.bench import machine
from nanoserve.cli import generate as cli_generate
from nanoserve.cli import main, results, terminal
from nanoserve.cli.options import EngineOptions, SamplingOptions
from nanoserve.config import EngineConfig
from nanoserve.engine.eager import EagerExecutor
from nanoserve.llm import engine_config
from nanoserve.planner.steptime import Ceilings
from nanoserve.request import SamplingParams

SRC = Path(__file__).resolve().parents[1] / "src"
END = "<|endoftext|>"
NUM_POSITIONS = 64


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Its only line on standard error."""
        (line,) = self.err.splitlines()
        return line.removeprefix("nanoserve: ")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """Runs `nanoserve ARGUMENTS` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path) -> None:
        self._capsys = capsys
        self._model = model

    def __call__(self, *arguments: str) -> Result:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert "Traceback" not in err
        return Result(ended.value.code, out, err)

    def generate(self, *arguments: str) -> Result:
        """`nanoserve generate` with the tiny model; its remark about random weights is dropped."""
        result = self("generate", "--model", str(self._model), "--load-format", "dummy", *arguments)
        spoken = [line for line in result.err.splitlines(True) if "random weights" not in line]
        return replace(result, err="".join(spoken))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a tokenizer of the 256 bytes, and no weights."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary[END] = len(vocabulary)
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "n_positions": NUM_POSITIONS,
        "vocab_size": len(vocabulary),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], model: Path) -> Command:
    return Command(capsys, model)


def child(*arguments: str, before: str = "", **options: Any) -> subprocess.Popen[bytes]:
    """`nanoserve ARGUMENTS` in a process of its own, after `before` ran there.

    Ctrl-C works in it, even if whoever runs the suite has it ignored (the background of a script).
    """
    interruptible = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{interruptible}\n{before}\nfrom nanoserve.cli import main\nmain(sys.argv[1:])"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# the program


def test_version(command: Command) -> None:
    assert command("--version") == Result(0, f"nanoserve {__version__}\n", "")


def test_without_a_command_it_says_what_there_is(command: Command) -> None:
    result = command()
    assert result == command("--help")
    assert result.code == 0
    for name in ("generate", "bench", "plan", "models", "verify", "report"):
        assert re.search(rf"^  {name} ", result.out, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("generate", "--help"), ("models",), ("plan", "--model", "gpt2")],
    ids=" ".join,
)
def test_it_loads_neither_torch_nor_an_engine_for(arguments: tuple[str, ...]) -> None:
    heavy = ["torch", "matplotlib", "transformers"]
    if arguments[-1] == "--help":
        heavy += ["numpy", "tokenizers", "huggingface_hub", "nanoserve.llm"]
    before = (
        f"import atexit; atexit.register(lambda: print('found', {set(heavy)} & set(sys.modules)))"
    )
    process = child(*arguments, before=before)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.splitlines()[-1] == b"found set()"


def test_every_option_of_generate_is_in_its_help(command: Command) -> None:
    text = command("generate", "--help").out
    for group in (EngineOptions, SamplingOptions):
        for name in (f.name for f in fields(group)):
            assert f"--{name.replace('_', '-')} " in text
    for name in (f.name for f in fields(EngineOptions)):
        assert re.search(rf"NANOSERVE_{name.upper()}\b", text)


BAD_USAGE = {
    "no such command": (["frobnicate"], "No such command 'frobnicate'"),
    "no such option": (["generate", "--modle", "x", "hi"], "--modle"),
    "no value": (["generate", "hi", "--seed"], "--seed"),
    "no prompt": (["generate"], "a prompt is missing"),
    "no integer": (["generate", "hi", "--n", "two"], "'--n': 'two' is not an integer"),
    "no number": (["generate", "hi", "--top-p", "much"], "'--top-p': 'much' is not a number"),
    "no choice": (["generate", "hi", "--device", "tpu"], "'tpu' is not one of auto, cpu, cuda"),
    "no size": (["plan", "--gpu-memory", "24G"], "--gpu-memory must be a positive size"),
    "no context": (["plan", "--context", "1.5"], "'1.5' is not an integer"),
    "no quantisation": (["plan", "--quantization", "int3"], "'int3' is not one of none, int8"),
    "no ceilings": (["plan", "--ceilings", "nowhere"], "nowhere cannot be read"),
    "no ceilings in a folder": (["plan", "--ceilings", "."], "cannot be read: Is a directory"),
    "no room": (["plan", "--gpu-memory", "1MiB"], "the weights alone take"),
    "context too long": (["plan", "--model", "gpt2", "--context", "1025"], "--context must be"),
    "no experiment": (["bench", "frobnicate"], "frobnicate"),
    "resume nothing": (["generate", "hi", "--resume"], "--resume needs --out"),
    "NaN": (["generate", "hi", "--temperature", "nan"], "--temperature must be at least 0.0, got"),
    "negative": (["generate", "hi", "--temperature", "-1"], "--temperature must be at least 0.0"),
    "infinite": (["generate", "hi", "--repetition-penalty", "inf"], "--repetition-penalty must be"),
    "negative count": (["generate", "hi", "--max-tokens", "-1"], "--max-tokens must be at least 0"),
    "no choices": (["generate", "hi", "--n", "0"], "--n must be between 1 and 128, got 0"),
    "share over one": (["generate", "hi", "--top-p", "1.5"], "--top-p must be between 0.0 and 1.0"),
    "empty stop": (["generate", "hi", "--stop", ""], "--stop must hold non-empty strings"),
    "huge seed": (["generate", "hi", "--seed", "9" * 30], "--seed must be between"),
    "no threads": (["generate", "hi", "--threads", "0"], "--threads must be at least 1, got 0"),
    "no blocks": (["generate", "hi", "--block-size", "-1"], "--block-size must be at least 1"),
    "no sequences": (["generate", "hi", "--max-num-seqs", "0"], "--max-num-seqs must be at least"),
    "no memory": (
        ["generate", "hi", "--kv-cache-memory-bytes", "0"],
        "--kv-cache-memory-bytes must be a positive size",
    ),
    "unknown model": (["generate", "hi", "--model", "./nowhere"], "there is no folder ./nowhere"),
    "a revision of a folder": (
        ["generate", "hi", "--model", ".", "--revision", "x"],
        "config.json",
    ),
    "stdin twice": (["generate", "-", "-"], "only once"),
    "prompts twice": (["generate", "hi", "--prompts-file", "f"], "not both"),
    "no prompts file": (
        ["generate", "--prompts-file", "nowhere.txt"],
        "prompts cannot be read from nowhere.txt: No such file or directory",
    ),
    "a folder of prompts": (["generate", "--prompts-file", "."], "Is a directory"),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_a_wrong_request_is_one_line_and_2(
    case: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = BAD_USAGE[case]
    result = command(*arguments)
    assert (result.code, result.out) == (2, "")
    assert expected in result.complaint


BAD_PROMPTS = {
    "empty": ([""], "the prompt is empty"),
    "over the limit": (["x" * NUM_POSITIONS], "the prompt has 64 tokens and the context holds 64"),
    "over a lower limit": (["x" * 20, "--max-model-len", "20"], "--max-model-len"),
    "above the model": (["x", "--max-model-len", "65"], "--max-model-len 65 exceeds"),
    "refused in strict": (["x", "--strict-context", "--max-tokens", "64"], "--strict-context"),
    "half a character": (["\udcff"], "surrogate"),
    "one of several": (["x", "", "y"], "prompt 2: the prompt is empty"),
    "cache too small": (["x", "--kv-cache-memory-bytes", "1KiB"], "--kv-cache-memory-bytes"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_prompt_that_cannot_be_honoured_is_one_line_and_2(case: str, command: Command) -> None:
    arguments, expected = BAD_PROMPTS[case]
    result = command.generate(*arguments)
    assert (result.code, result.out) == (2, "")
    assert expected in result.complaint


BAD_FILES = {
    "no UTF-8": ("p.txt", b"good\n\xff\n", "p.txt is not UTF-8 text: byte 5 is 0xff"),
    "nothing": ("p.txt", b"\n\r\n\n", "holds no prompt"),
    "no JSON": ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 of"),
    "no object": ("p.jsonl", b'"a"\n', 'must be an object with a "prompt"'),
    "no prompt": ("p.jsonl", b'{"text": "a"}\n', 'must be an object with a "prompt"'),
    "options": ("p.jsonl", b'{"prompt": "a", "n": 2}\n', "has n: only prompt and id are read"),
    "no text": ("p.jsonl", b'{"prompt": 7}\n', "must be a string or a list of token ids, got 7"),
    "no ids": ("p.jsonl", b'{"prompt": [1, "x"]}\n', "a token id must be an integer, got 'x'"),
    "null id": ("p.jsonl", b'{"prompt": [1, null]}\n', "a token id must be an integer, got null"),
    "negative id": ("p.jsonl", b'{"prompt": [-1]}\n', "a token id must be at least 0, got -1"),
    "id out of range": ("p.jsonl", b'\n{"prompt": [257]}\n', "line 2 of"),
    "empty ids": ("p.jsonl", b'{"prompt": []}\n', "the prompt is empty"),
    "name": ("p.jsonl", b'{"prompt": "a", "id": 1.5}\n', "id must be a string or an integer"),
    "over the limit": ("p.txt", b"a\n" + b"x" * 64 + b"\n", "line 2 of"),
    "half a character": ("p.jsonl", b'{"prompt": "\\ud800"}\n', "line 1 of"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_of_prompts_is_one_line_and_2(
    case: str, command: Command, tmp_path: Path
) -> None:
    name, content, expected = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out.jsonl"
    result = command.generate("--prompts-file", str(tmp_path / name), "--out", str(out))
    assert (result.code, result.out) == (2, "")
    assert expected in result.complaint
    assert not out.exists()


def test_truncated_weights_are_one_line_and_2(
    command: Command, model: Path, tmp_path: Path
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((1000).to_bytes(8, "little") + b'{"wte.weight"')
    result = command("generate", "hi", "--model", str(tmp_path))
    assert (result.code, result.out) == (2, "")
    assert "model.safetensors" in result.complaint


def test_a_missing_library_says_what_brings_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_torch(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli_generate, "LLM", no_torch)
    result = command("generate", "hi")
    assert (result.code, result.complaint) == (
        1,
        "torch is not installed: pip install 'nanoserve[torch]'",
    )


# options


def captured_options(
    command: Command, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[EngineOptions, SamplingOptions]:
    """The option groups that `generate` is given."""
    groups: list[Any] = []

    def capture(prompt: object, engine: object, sampling: object) -> cli_generate.Generated:
        groups.extend((engine, sampling))
        return cli_generate.Generated(engine=None, first_text_s=None, num_broken=0)

    monkeypatch.setattr(cli_generate, "generate_one", capture)
    result = command("generate", "hi", *arguments)
    assert (result.code, result.err) == (0, "")
    return groups[0], groups[1]


def test_defaults_are_those_of_the_config(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sampling = captured_options(command, monkeypatch)
    assert engine_config(**engine.values()) == EngineConfig()
    assert sampling.params({}) == SamplingParams()


def test_generate_writes_a_trace(command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = (*tiny(model)[1:], "--max-tokens", "3", "--device", "cpu", "--trace")
    result = command("generate", "hi", *options, str(path))
    assert result.code == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert {"step", "prefill llm-0"} <= {event["name"] for event in events}
    refused = command("generate", "hi", *options, str(path / "below.json"))
    assert refused.code == 2
    assert "--trace cannot be written to" in refused.complaint


ENGINE_VALUES: dict[str, tuple[str, object]] = {
    "model": ("gpt2", "gpt2"),
    "revision": ("v2", "v2"),
    "load_format": ("pt", "pt"),
    "dummy_seed": ("7", 7),
    "tokenizer": ("folder", "folder"),
    "device": ("cuda", "cuda"),
    "dtype": ("bfloat16", "bfloat16"),
    "kv_layout": ("slots", "slots"),
    "kv_cache_dtype": ("float16", "float16"),
    "quantization": ("int8-weight-only", "int8-weight-only"),
    "executor": ("eager", "eager"),
    "kernels": ("torch", "torch"),
    "max_model_len": ("100", 100),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("77", 77),
    "block_size": ("8", 8),
    "kv_cache_memory_bytes": ("1.5MiB", 3 * 2**19),
    "enable_prefix_caching": ("false", False),
    "batching": ("static", "static"),
    "batching_timeout": ("0.5", 0.5),
    "context_overflow": ("slide", "slide"),
    "slide_window": ("9", 9),
    "strict_context": ("true", True),
    "threads": ("2", 2),
    "kv_audit": ("0.25", 0.25),
}
NEEDED_BESIDE: dict[str, tuple[str, str]] = {
    "slide_window": ("context_overflow", "slide"),
    "batching_timeout": ("batching", "static"),
}
"""Options that are refused alone: what each goes with."""


def test_every_engine_option_is_tried_here() -> None:
    assert set(ENGINE_VALUES) == {f.name for f in fields(EngineOptions)}
    for name, hint in get_type_hints(EngineOptions).items():
        if name == "kv_cache_dtype":
            assert set(get_args(hint)) == {"auto", "float32", "float16", "bfloat16", "int8"}


@pytest.mark.parametrize("name", ENGINE_VALUES)
def test_an_engine_option_arrives_from_the_line_and_from_the_environment(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = ENGINE_VALUES[name]
    option = f"--{name.replace('_', '-')}"
    typed = {"false": [option.replace("--", "--no-")], "true": [option]}.get(text, [option, text])
    beside = dict([NEEDED_BESIDE[name]] if name in NEEDED_BESIDE else [])
    for needed, needed_value in beside.items():
        monkeypatch.setenv(f"NANOSERVE_{needed.upper()}", needed_value)
    engine, _ = captured_options(command, monkeypatch, *typed)
    wanted = engine_config(**{name: value}, **beside)
    assert engine_config(**engine.values()) == wanted != EngineConfig()
    monkeypatch.setenv(f"NANOSERVE_{name.upper()}", text)
    engine, _ = captured_options(command, monkeypatch)
    assert engine_config(**engine.values()) == wanted


def test_a_typed_option_wins_over_the_environment(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_BLOCK_SIZE", "8")
    engine, _ = captured_options(command, monkeypatch, "--block-size", "4")
    assert engine.block_size == 4


def test_a_bad_environment_variable_is_named(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_THREADS", "many")
    result = command("generate", "hi")
    assert result.code == 2
    assert "NANOSERVE_THREADS" in result.complaint
    assert "'many' is not an integer" in result.complaint


SAMPLING_VALUES: dict[str, tuple[list[str], object]] = {
    "max_tokens": (["9"], 9),
    "min_tokens": (["2"], 2),
    "temperature": (["0"], 0.0),
    "top_p": (["0.5"], 0.5),
    "top_k": (["5"], 5),
    "min_p": (["0.1"], 0.1),
    "repetition_penalty": (["1.2"], 1.2),
    "presence_penalty": (["-0.5"], -0.5),
    "frequency_penalty": (["0.5"], 0.5),
    "stop": (["a", "b c"], ("a", "b c")),
    "seed": (["-3"], -3),
    "logprobs": (["4"], 4),
    "n": (["2"], 2),
    "best_of": (["3"], 3),
}


def test_every_sampling_option_arrives(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*SAMPLING_VALUES, "ignore_eos"} == {f.name for f in fields(SamplingOptions)}
    typed = ["--ignore-eos"]
    for name, (texts, _) in SAMPLING_VALUES.items():
        typed += [word for text in texts for word in (f"--{name.replace('_', '-')}", text)]
    _, sampling = captured_options(command, monkeypatch, *typed)
    expected: dict[str, Any] = {name: value for name, (_, value) in SAMPLING_VALUES.items()}
    assert sampling.params({}) == SamplingParams(**expected, ignore_eos=True)


def test_a_models_own_defaults_hold_until_something_is_typed(
    command: Command, model: Path, tmp_path: Path
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 5}')
    arguments = ("generate", "hi", "--model", str(tmp_path), "--load-format", "dummy", "--json")
    (plain,) = command(*arguments).lines
    (typed,) = command(*arguments, "--max-tokens", "3").lines
    assert len(plain["outputs"][0]["token_ids"]) == 5
    assert plain["outputs"][0]["token_ids"][:3] == typed["outputs"][0]["token_ids"]  # greedy


# one prompt


def test_a_pipe_gets_exactly_the_continuation(command: Command) -> None:
    result = command.generate("hi", "--seed", "5")
    (wanted,) = command.generate("hi", "--seed", "5", "--json").lines
    assert (result.code, result.err) == (0, "")
    assert result.out == wanted["outputs"][0]["text"]
    assert len(result.out) > 4


def test_random_weights_are_called_random(command: Command, model: Path) -> None:
    result = command("generate", "hi", "--model", str(model), "--load-format", "dummy")
    assert result.code == 0
    assert "random weights" in result.complaint


def test_the_object_of_one_prompt(command: Command) -> None:
    (result,) = command.generate(
        "hi",
        "--json",
        "--n",
        "2",
        "--seed",
        "3",
        "--logprobs",
        "1",
        "--max-tokens",
        "4",
        "--ignore-eos",
    ).lines
    assert list(result) == [
        "index",
        "prompt",
        "prompt_token_ids",
        "outputs",
        "seed",
        "metrics",
        "settings",
    ]
    assert (result["index"], result["prompt"], result["seed"]) == (0, "hi", 3)
    assert len(result["prompt_token_ids"]) == 2
    assert [choice["index"] for choice in result["outputs"]] == [0, 1]
    first = result["outputs"][0]
    assert (first["finish_reason"], first["stop_reason"]) == ("length", None)
    assert [lp["token_id"] for lp in first["logprobs"]] == first["token_ids"]
    assert all(lp["logprob"] <= lp["top"][0]["logprob"] <= 0 for lp in first["logprobs"])
    assert first["cumulative_logprob"] == pytest.approx(
        sum(x["logprob"] for x in first["logprobs"])
    )
    metrics = result["metrics"]
    assert 0 <= metrics["first_scheduled_s"] < metrics["first_token_s"] < metrics["last_token_s"]
    assert result["settings"]["max_tokens"] == 4


def test_an_impossible_token_has_no_logprob_in_json() -> None:
    assert results._finite(float("-inf")) is None
    assert results._finite(-1.5) == -1.5


def test_a_terminal_sees_the_prompt_and_no_escape_sequence(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = command.generate("hi", "--seed", "5", "--max-tokens", "40", "--ignore-eos").out
    (exact,) = command.generate(
        "hi", "--seed", "5", "--max-tokens", "40", "--ignore-eos", "--json"
    ).lines
    text = exact["outputs"][0]["text"]
    assert re.search(r"[\x00-\x08\x0b-\x1f]", text)  # else nothing was proved
    assert shown == f"\x1b[1mhi\x1b[0m{terminal.printable(text)}\n"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", terminal.printable(text))


def test_choices_follow_one_another_under_labels(command: Command) -> None:
    arguments = ("hi", "--seed", "5", "--n", "3", "--max-tokens", "20")
    shown = command.generate(*arguments).out
    (exact,) = command.generate(*arguments, "--json").lines
    texts = [choice["text"] for choice in exact["outputs"]]
    assert len(set(texts)) == 3
    wanted = ""
    for number, text in enumerate(texts, start=1):
        wanted += "" if not wanted or wanted.endswith("\n") else "\n"
        wanted += f"--- choice {number} of 3\n{text}"
    assert shown == wanted


def test_standard_input_is_a_prompt_without_its_last_newline(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    (result,) = command.generate("-", "--json").lines
    assert result["prompt"] == "two\nlines"


def test_standard_input_that_is_not_utf_8(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xe9t\xe9")))
    result = command.generate("-")
    assert (result.code, result.complaint) == (
        2,
        "standard input is not UTF-8 text: byte 0 is 0xe9",
    )


def test_verbose_shows_the_start_up_line(command: Command) -> None:
    for arguments in (("-v", "generate"), ("generate", "--verbose")):
        result = command(*arguments, "hi", "--model", str(command._model), "--load-format", "dummy")
        assert "nanoserve: KV cache: paged, float32" in result.err
    assert "KV cache" not in command.generate("hi").err


def test_stats_without_measured_ceilings_say_what_measures_them(command: Command) -> None:
    result = command.generate("hi", "--stats", "--max-tokens", "5", "--ignore-eos")
    assert result.code == 0
    assert result.err.startswith("\n") == (result.out[-1:] != "\n")  # 2>&1 stays readable
    first, prefill, decode, together, cache, bandwidth = result.err.strip().splitlines()
    assert re.fullmatch(
        r"first token: [\d,]+ ms from the start, [\d,.]+ ms from the request", first
    )
    assert re.fullmatch(r"prefill: 2 tokens in [\d,.]+ ms, [\d,.]+ ms/token", prefill)
    assert re.fullmatch(r"decode: [\d,.]+ ms/token, [\d,.]+ tokens/s", decode)
    assert re.fullmatch(r"together: 5 tokens, [\d,.]+ tokens/s with the prefill", together)
    # 2 layers x 16 values x K and V x 4 bytes = 256 B a token; the fifth was never stored
    assert cache.startswith("KV cache: 1.5 KiB used by 6 tokens, ")
    assert "`nanoserve bench ceilings --device cpu`" in bandwidth


def test_stats_with_measured_ceilings_give_a_share(command: Command) -> None:
    machine.save_ceilings(
        Ceilings(read_bytes_per_s=1e9, matmul_flops_per_s={"float32": 1e9}, dispatch_s=0.0)
    )
    result = command.generate("hi", "--stats", "--max-tokens", "5", "--ignore-eos")
    assert re.search(r"^read bandwidth: \d+% of the 1.0 GB/s", result.err, re.MULTILINE)


def test_stats_of_a_naive_run(command: Command) -> None:
    result = command.generate("hi", "--stats", "--kv-layout", "recompute", "--max-tokens", "4")
    assert "KV cache: none" in result.err


def test_stats_of_nothing(command: Command) -> None:
    result = command.generate("hi", "--stats", "--max-tokens", "0")
    assert (result.code, result.out, result.err) == (0, "", "no token was generated\n")


# many prompts


PROMPTS = ["one", "two", "three", "four", "five"]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path


def test_several_prompts_are_shown_in_order(command: Command) -> None:
    arguments = ("one", "two", "--seed", "1", "--max-tokens", "6")
    result = command.generate(*arguments)
    first, second = command.generate(*arguments, "--json").lines
    assert result.out == (
        f"--- prompt 1 of 2\n{first['outputs'][0]['text']}\n"
        f"--- prompt 2 of 2\n{second['outputs'][0]['text']}\n"
    )


def test_a_batch_gives_what_each_prompt_gives_alone(command: Command, prompts_file: Path) -> None:
    many = command.generate("--prompts-file", str(prompts_file), "--json", "--seed", "4").lines
    assert [result["prompt"] for result in many] == PROMPTS
    assert [result["index"] for result in many] == [0, 1, 2, 3, 4]
    for result in many:
        (alone,) = command.generate(result["prompt"], "--json", "--seed", "4").lines
        assert alone["outputs"] == result["outputs"]


def test_json_prompts_may_be_token_ids_and_have_names(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "hi", "id": "a"}\r\n\n{"prompt": [5, 6], "id": 7}\n')
    out = tmp_path / "out.jsonl"
    result = command.generate("--prompts-file", str(path), "--out", str(out))
    assert (result.code, result.out, result.err) == (0, "", "")
    by_index = sorted(lines_of(out), key=lambda line: int(line["index"]))
    assert [line["id"] for line in by_index] == ["a", 7]
    assert [line["prompt"] for line in by_index] == ["hi", None]
    assert by_index[1]["prompt_token_ids"] == [5, 6]


def test_results_go_to_the_file_as_they_are_finished(
    command: Command, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("--prompts-file", str(prompts_file), "--seed", "4", "--out", str(out), "--json")
    result = command.generate(*arguments)
    assert result.code == 0
    assert result.lines == sorted(lines_of(out), key=lambda line: int(line["index"]))


def test_a_file_of_results_is_neither_overwritten_nor_mixed(
    command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    result = command.generate("hi", "--out", str(out))
    assert result.code == 2
    assert f"--out {out} exists" in result.complaint
    assert out.read_text() == "precious\n"


def without_metrics(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(lines, key=lambda line: int(line["index"]))
    return [{name: line[name] for name in line if name != "metrics"} for line in ordered]


def fail_after(monkeypatch: pytest.MonkeyPatch, num_steps: int, fail: Callable[[], None]) -> None:
    """Let the executor (eager from here on) compute so many steps, then call `fail` in each."""
    monkeypatch.setenv("NANOSERVE_EXECUTOR", "eager")
    execute, steps = EagerExecutor.execute, iter(range(num_steps))

    def failing(self: EagerExecutor, batch: Any) -> Any:
        if next(steps, None) is None:
            fail()
        return execute(self, batch)

    monkeypatch.setattr(EagerExecutor, "execute", failing)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def break_down() -> None:
    raise RuntimeError("the card fell out")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C counts, even where the suite itself was started in the background, deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "fail, code", [(interrupt, 130), (break_down, 1)], ids=["interrupted", "failed"]
)
def test_an_interrupted_batch_is_continued(
    fail: Callable[[], None],
    code: int,
    command: Command,
    prompts_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = (
        "--prompts-file",
        str(prompts_file),
        "--seed",
        "4",
        "--max-num-seqs",
        "2",
        "--max-tokens",
        "6",
    )
    assert command.generate(*arguments, "--out", str(whole)).code == 0
    with monkeypatch.context() as patch:
        fail_after(patch, 9, fail)
        broken = command.generate(*arguments, "--out", str(out))
    assert broken.code == code
    assert 0 < len(lines_of(out)) < len(PROMPTS)
    if fail is break_down:
        assert broken.complaint.endswith("the card fell out")
    with out.open("a") as file:
        file.write('{"index": 4, "prompt": "fi')  # as a kill leaves it
    (tmp_path / "torn.jsonl").write_bytes(out.read_bytes())
    resumed = command.generate(*arguments, "--out", str(out), "--resume")
    assert resumed.code == 0
    assert "cut 26 bytes of an unfinished line" in resumed.complaint
    assert without_metrics(lines_of(out)) == without_metrics(lines_of(whole))
    again = command.generate(*arguments, "--out", str(out), "--resume")
    assert (again.code, again.out) == (0, "")
    assert "nothing is left to do" in again.complaint


def test_resume_takes_up_prompts_that_were_added(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert command.generate("one", "--out", str(out), "--resume").code == 0
    assert command.generate("one", "two", "--out", str(out), "--resume").code == 0
    assert [line["prompt"] for line in lines_of(out)] == ["one", "two"]


FOREIGN = {
    "other prompts": (["two"], "is the result of another prompt"),
    "other parameters": (["one", "--temperature", "0.5"], "another --temperature"),
    "another engine": (["one", "--dtype", "bfloat16"], "another --dtype"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_resume_refuses_a_file_of_something_else(
    case: str, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    assert command.generate("one", "--out", str(out)).code == 0
    before = out.read_bytes()
    arguments, expected = FOREIGN[case]
    result = command.generate(*arguments, "--out", str(out), "--resume")
    assert result.code == 2
    assert expected in result.complaint
    assert out.read_bytes() == before


@pytest.mark.parametrize("content", ["a letter", "a letter\n", "[1]\n", '{"index": "x"}\n'])
def test_resume_refuses_a_file_that_is_no_result(
    content: str, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    result = command.generate("one", "--out", str(out), "--resume")
    assert result.code == 2
    assert "is no result of `nanoserve generate`" in result.complaint
    assert out.read_text() == content


@pytest.mark.parametrize(
    "path, expected",
    [("nowhere/out.jsonl", "No such file or directory"), (".", "Is a directory")],
)
def test_a_file_that_cannot_be_opened_is_2(
    path: str, expected: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command.generate("one", "--out", path)
    assert result.code == 2
    assert result.complaint == f"--out {path} cannot be written: {expected}"


def test_a_full_disk_is_1(command: Command) -> None:
    result = command.generate("one", "--out", "/dev/full")
    assert result.code == 1
    assert result.complaint.startswith("No space left on device while writing /dev/full")


def test_a_disk_that_fills_up_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with results.ResultsFile(path) as file:
        file.append("first\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            with pytest.raises(OSError, match="--resume") as error:
                file.append("a longer second line\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert path.read_text() == "first\n"


def test_logits_that_are_not_finite_are_1(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_EXECUTOR", "eager")
    execute = EagerExecutor.execute

    def broken(self: EagerExecutor, batch: Any) -> Any:
        result = execute(self, batch)
        return replace(result, finite=result.finite & False)

    monkeypatch.setattr(EagerExecutor, "execute", broken)
    for arguments in (("one",), ("one", "two")):
        result = command.generate(*arguments)
        assert result.code == 1
        assert f"{len(arguments)} of {len(arguments)} ended early" in result.complaint


# progress


def test_a_long_wait_shows_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with terminal.LateProgress("waiting", 10, delay_s=0.01) as progress:
        progress.advance(3)
        progress._timer.join()
        progress.advance(4)
        assert progress._bar is not None
        assert [task.completed for task in progress._bar.tasks] == [7]
        sys.stdout.write("a result\n")
    out, err = capsys.readouterr()
    assert out == "a result\n"
    assert "waiting" in err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_short_wait_or_a_pipe_shows_none(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    delay_s = 60.0 if is_terminal else 0.0
    with terminal.LateProgress("waiting", 10, delay_s=delay_s) as progress:
        progress.advance(10)
    if is_terminal:
        progress._timer.join(timeout=10)
    assert not progress._timer.is_alive()
    assert capsys.readouterr() == ("", "")


def test_progress_of_a_batch_ends_at_its_total(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    advanced: list[int] = []
    totals: list[int | None] = []

    class Spy(terminal.LateProgress):
        def __init__(self, title: str, total: int | None = None, **options: Any) -> None:
            super().__init__(title, total, **options)
            totals.append(total)

        def advance(self, amount: int = 1) -> None:
            advanced.append(amount)

    monkeypatch.setattr(cli_generate, "LateProgress", Spy)
    assert command.generate("one", "two", "--n", "2", "--max-tokens", "10", "--seed", "1").code == 0
    assert totals == [None, 40]
    assert sum(advanced) == 40


# other commands


def test_models_as_a_table_and_as_json(command: Command) -> None:
    table = command("models")
    listed = json.loads(command("models", "--json").out)
    assert table.code == 0
    assert {"gpt2", "gpt2-xl", "distilgpt2"} <= {model["name"] for model in listed}
    for listed_model in listed:
        assert re.search(rf"^ *{listed_model['name']} ", table.out, re.MULTILINE)


def test_models_with_odd_names_are_shown_as_they_are(command: Command, hf_home: Path) -> None:
    for name in ("a[bold]--:smile:", "esc\x1b[31m--c"):
        snapshot = hf_home / "hub" / f"models--{name}" / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
    shown = command("models")
    assert shown.code == 0
    assert "  a[bold]/:smile: " in shown.out
    assert "  esc\ufffd[31m/c " in shown.out
    assert "\x1b" not in shown.out


def test_plan_says_what_fits(command: Command, model: Path) -> None:
    arguments = ("plan", "--model", str(model), "--gpu-memory", "1MiB", "--context", "32")
    made = json.loads(command(*arguments, "--dtype", "float32", "--json").out)
    assert made["memory_bytes"] == 2**20
    assert made["kv_bytes_per_token"] == 256
    ideal = made["num_sequences_ignoring_buffers"]
    assert ideal == (2**20 - made["weight_bytes"]) // (32 * 256) > made["num_sequences"] > 0
    half = json.loads(command(*arguments, "--kv-cache-dtype", "float16", "--json").out)
    assert (half["dtype"], half["kv_bytes_per_token"]) == ("float16", 128)  # auto, for a GPU
    assert f"{made['num_sequences']:,}" in command(*arguments, "--dtype", "float32").out


def test_plan_takes_ceilings_from_a_file(command: Command, model: Path, tmp_path: Path) -> None:
    """Typed by a person, as JSON; the one matmul rate there is decides which weights are timed."""
    path = tmp_path / "ceilings.json"
    rates = {"read_bytes_per_s": 1e9, "matmul_flops_per_s": {"float16": 1e15}, "dispatch_s": 0}
    path.write_text(json.dumps(rates))
    arguments = ("plan", "--model", str(model), "--gpu-memory", "2MiB", "--ceilings", str(path))
    made = json.loads(command(*arguments, "--json").out)
    path.write_text(json.dumps(rates), encoding="utf-8-sig")  # as some editors save it
    assert json.loads(command(*arguments, "--json").out) == made
    one, many = made["steps"]
    assert (one["num_seqs"], many["num_seqs"]) == (1, made["num_sequences"])
    assert one["step_s"] == pytest.approx(one["num_seqs"] / one["tokens_per_s"])
    other = json.loads(command(*arguments, "--dtype", "float32", "--json").out)
    assert other["steps"] == []


def test_plan_takes_ceilings_from_records(command: Command, tmp_path: Path) -> None:
    recorded = Path(__file__).parents[1] / "results/amd-epyc-2c/ceilings-cpu.jsonl"
    arguments = ("plan", "--model", "gpt2", "--gpu-memory", "2GiB", "--dtype", "float32")
    made = json.loads(command(*arguments, "--ceilings", str(recorded), "--json").out)
    assert len(made["steps"]) == 2
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(recorded.read_text().splitlines(keepends=True)[:-1]))
    refused = command(*arguments, "--ceilings", str(cut))
    assert (refused.code, refused.out) == (2, "")
    assert "has no complete run of ceilings" in refused.complaint


def test_plan_refuses_json_that_is_not_ceilings(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"read_bytes_per_s": "fast"}')
    refused = command("plan", "--model", "gpt2", "--gpu-memory", "2GiB", "--ceilings", str(path))
    assert (refused.code, refused.out) == (2, "")
    assert "not a record of ceilings" in refused.complaint


def test_names_with_markup_are_shown_as_they_are(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "m[/x]:smile:[bold]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    shown = command("plan", "--model", str(folder), "--gpu-memory", "24GiB")
    assert shown.code == 0
    assert "m[/x]:smile:[bold]" in shown.out.replace("\n", "")


def test_plan_of_this_machine(command: Command, model: Path) -> None:
    made = json.loads(command("plan", "--model", str(model), "--json").out)
    assert made["memory_bytes"] > 2**20
    assert made["context"] == NUM_POSITIONS


def test_verify_proves_every_way(command: Command, model: Path) -> None:
    arguments = ("verify", "--model", str(model), "--load-format", "dummy", "--max-num-seqs", "4")
    found = json.loads(command(*arguments, "--json").out)
    assert found["ok"]
    shown = command(*arguments)
    assert (shown.code, shown.err) == (0, "")
    for way in found["ways"]:
        assert re.search(rf"^ *{way['name']} .* ok *$", shown.out, re.MULTILINE)


def test_verify_fails_where_a_way_does_not_agree(
    command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*arguments: Any) -> verify.Way:
        way = compare(*arguments)
        return replace(way, num_different=1) if way.name == "chunked" else way

    compare = verify.compare
    monkeypatch.setattr(verify, "compare", other)
    result = command("verify", "--model", str(model), "--load-format", "dummy")
    assert result.code == 1
    assert len(re.findall("FAILED", result.out)) == 1
    assert "not every way agrees" in result.complaint


def test_bench_is_the_same_command_as_the_module(command: Command) -> None:
    result = command("bench", "--list")
    assert result.code == 0
    assert "kvcache" in result.out
    assert command("bench", "--help").out.startswith("usage: nanoserve bench")


def test_report_renders_and_checks(command: Command, tmp_path: Path) -> None:
    arguments = ("report", "--root", str(tmp_path))
    missing = command(*arguments, "--check")
    assert missing.code == 1
    assert "RESULTS.md differs" in missing.complaint
    assert not (tmp_path / "RESULTS.md").exists()
    written = command(*arguments)
    paths = (tmp_path / "RESULTS.md", tmp_path / "results" / "report.html")
    assert (written.code, written.out) == (0, "".join(f"{path}\n" for path in paths))
    assert command(*arguments, "--check") == Result(0, "", "")


# processes


def tiny(model: Path) -> list[str]:
    return ["generate", "--model", str(model), "--load-format", "dummy"]


ENDLESS = ["hi", "--max-tokens", "1000000", "--ignore-eos", "--context-overflow", "slide"]


def test_ctrl_c_ends_a_stream_at_once(model: Path) -> None:
    process = child(*tiny(model), *ENDLESS)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert len(err.splitlines()) == 1  # random weights


def test_ctrl_c_ends_a_load_that_would_swallow_it(model: Path) -> None:
    before = """
import time
import nanoserve.engine.build as build
def make_executor(*arguments):
    print("loading", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
build.make_executor = make_executor
"""
    process = child(*tiny(model), "hi", before=before)
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


def test_a_reader_that_has_enough_is_no_error(model: Path) -> None:
    with child(*tiny(model), *ENDLESS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert len(err.splitlines()) == 1  # random weights


@pytest.mark.parametrize("arguments", [["models"], ["--version"]], ids=" ".join)
def test_standard_output_on_a_full_disk_is_1(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = child(*arguments, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == b"nanoserve: No space left on device\n"


def test_as_a_module() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "nanoserve", "--version"],
        cwd=SRC,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, f"nanoserve {__version__}\n")


def test_a_terminal_that_is_not_utf_8_still_gets_its_text(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert command.generate("hi", "--seed", "5", "--max-tokens", "40").code == 0
    text = written.getvalue().decode("latin-1")
    assert "\\ufffd" in text


@pytest.fixture(autouse=True)
def interrupts_are_left_alone() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert not terminal.logger.handlers
