"""Finding models: every place in its order, and every way of not finding one in one clear line.

What asks the hub runs in a child process against `hub_standin`, because huggingface_hub reads its
environment on import; the rest runs here, with the hub switched off.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_standin import COMMIT, Hub, Repository, running_hub
from huggingface_hub import constants
from safetensors.numpy import save

from nanoserve.model import hub as hub_module
from nanoserve.model.hub import (
    BUILT_IN_SHAPES,
    ListedModel,
    ModelNotFoundError,
    find,
    list_models,
)
from nanoserve.model.weights import load_model_config, load_weights, tensor_shapes

SIZES = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
CONFIG = json.dumps({"model_type": "gpt2", **SIZES}).encode()


def weights_file(num_layers: int = 1) -> bytes:
    config = hub_module.ModelConfig.from_hf({"model_type": "gpt2", **SIZES, "n_layer": num_layers})
    return save({k: np.ones(shape, np.float32) for k, shape in tensor_shapes(config).items()})


def small_files() -> dict[str, bytes]:
    return {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "generation_config.json": b'{"eos_token_id": 5}',
    }


def whole_model() -> dict[str, bytes]:
    return {**small_files(), "model.safetensors": weights_file()}


def sharded_model() -> dict[str, bytes]:
    """Two shards that together are `whole_model`."""
    config = hub_module.ModelConfig.from_hf({"model_type": "gpt2", **SIZES})
    names = list(tensor_shapes(config))
    parts = {
        "model-00001-of-00002.safetensors": names[:5],
        "model-00002-of-00002.safetensors": names[5:],
    }
    files = {
        file: save({name: np.ones(tensor_shapes(config)[name], np.float32) for name in part})
        for file, part in parts.items()
    }
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = json.dumps({"weight_map": weight_map}).encode()
    return {**small_files(), **files, "model.safetensors.index.json": index}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def error_of(model: str, **options: Any) -> str:
    with pytest.raises(ModelNotFoundError) as error:
        find(model, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# Embedded and local


def test_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "EMBEDDED_DIR", tmp_path)
    assert "embedded model 'mini' is missing from this installation" in error_of("mini")
    write(tmp_path / "mini", whole_model())
    write(tmp_path / "elsewhere" / "mini", small_files())
    monkeypatch.chdir(tmp_path / "elsewhere")  # a folder of that name does not stand before it
    found = find("mini")
    assert (found.kind, found.folder, found.weight_format) == (
        "embedded",
        tmp_path / "mini",
        "safetensors",
    )
    assert find("mini", load_format="dummy").kind == "dummy"
    with pytest.raises(ValueError, match="--revision v1 applies to a hub repository; mini is not"):
        find("mini", revision="v1")


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "models" / "mine", whole_model())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), "./models/mine", "models/mine", "models/mine/", "~/models/mine"):
        found = find(name)
        assert (found.name, found.kind, found.commit) == (name, "local", None)
        assert [path.resolve() for path in found.weight_files] == [folder / "model.safetensors"]
        assert found.raw_config["n_embd"] == 8
    assert load_model_config(find("models/mine")).n_inner == 32


def test_a_local_folder_stands_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "gpt2", whole_model())
    monkeypatch.chdir(tmp_path)
    assert find("gpt2").kind == "local"
    assert load_model_config(find("gpt2", load_format="dummy")).n_embd == 8
    with pytest.raises(ValueError, match="--revision main applies to a hub repository"):
        find("gpt2", revision="main")


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./gpt2", "../x", "/no/such", "~/nowhere", "a/b/c", "mine/", "a\\b"):
        assert f"there is no folder {name} (looked at /" in error_of(name)
    write(tmp_path / "empty", {})
    assert "has no config.json; it has nothing" in error_of("./empty")
    write(tmp_path / "tokenizer", {"vocab.json": b"", "merges.txt": b""})
    assert "has no config.json; it has merges.txt, vocab.json" in error_of("./tokenizer")
    write(tmp_path, {"model.gguf": b"GGUF"})
    assert "model.gguf is a file; --model takes the folder" in error_of("model.gguf")
    assert "is a file" in error_of(str(tmp_path / "model.gguf"))
    assert "model is empty" in error_of(" ")


def test_checkpoints_of_nanogpt_and_llmc_name_their_converter(tmp_path: Path) -> None:
    write(tmp_path, {"ckpt.pt": b"PK", "model.bin": (20240326).to_bytes(4, "little")})
    path = tmp_path / "ckpt.pt"
    assert f"python scripts/convert_checkpoint.py nanogpt {path} --out FOLDER" in error_of(
        str(path)
    )
    assert f"nanogpt {path} --out" in error_of(str(tmp_path))
    path.unlink()
    assert f"llmc {tmp_path / 'model.bin'} --out FOLDER" in error_of(str(tmp_path))
    write(tmp_path, {"model.bin": b"something else"})
    assert "convert" not in error_of(str(tmp_path))


def test_weight_files_that_are_not_there(tmp_path: Path) -> None:
    name = str(tmp_path)
    write(tmp_path, small_files())
    assert "no model.safetensors and no pytorch_model.bin" in error_of(name)
    write(tmp_path, {"tf_model.h5": b"", "model.onnx": b""})
    assert "model.onnx, tf_model.h5 cannot be read" in error_of(name)
    write(tmp_path, {"pytorch_model.bin": b"PK"})
    assert find(name).weight_format == "pt"
    assert "--load-format safetensors); it has pytorch_model.bin" in error_of(
        name, load_format="safetensors"
    )
    write(tmp_path, {"model.safetensors": weights_file()})
    assert find(name).weight_format == "safetensors"
    assert find(name, load_format="pt").weight_files == (tmp_path / "pytorch_model.bin",)
    assert find(name, load_format="dummy").weight_files == ()


def test_sharded_local_folder(tmp_path: Path) -> None:
    write(tmp_path, sharded_model())
    checkpoint = find(str(tmp_path))
    assert [path.name for path in checkpoint.weight_files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    config = load_model_config(checkpoint)
    assert [t.name for t in load_weights(checkpoint, config)] == list(tensor_shapes(config))
    checkpoint.weight_files[1].unlink()
    assert "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json" in error_of(
        str(tmp_path)
    )


@pytest.mark.parametrize(
    "index,words",
    [
        (b"{}", "needs a weight_map"),
        (b'{"weight_map": {}}', "needs a weight_map"),
        (b'{"weight_map": {"a": "../secret"}}', "must lie beside their index, got ../secret"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"{", "is not JSON"),
    ],
)
def test_an_index_that_is_broken(tmp_path: Path, index: bytes, words: str) -> None:
    write(tmp_path, {"config.json": CONFIG, "model.safetensors.index.json": index})
    with pytest.raises(ValueError, match=words):
        find(str(tmp_path))


@pytest.mark.parametrize(
    "content,words",
    [
        (b"", "is not JSON"),
        (b"{'single': 1}", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"null", "must hold a JSON object, got NoneType"),
    ],
)
def test_a_config_that_is_not_json(tmp_path: Path, content: bytes, words: str) -> None:
    write(tmp_path, {**whole_model(), "config.json": content})
    with pytest.raises(ValueError, match=words) as error:
        find(str(tmp_path))
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_config_with_a_byte_order_mark(tmp_path: Path) -> None:
    write(tmp_path, {**whole_model(), "config.json": b"\xef\xbb\xbf" + CONFIG})
    assert find(str(tmp_path)).raw_config["n_head"] == 2


def test_git_lfs_pointers_are_recognised(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    write(tmp_path, {**small_files(), "model.safetensors": pointer})
    assert "is a git-lfs pointer, not the weights; run `git lfs pull`" in error_of(str(tmp_path))


def test_load_format_must_be_known() -> None:
    with pytest.raises(ValueError, match="must be auto, safetensors, pt or dummy, got 'gguf'"):
        find("gpt2", load_format="gguf")  # type: ignore[arg-type]


# Dummy shapes


@pytest.mark.parametrize(
    "name,num_parameters",
    [
        ("gpt2", 124_439_808),
        ("openai-community/gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("openai-community/gpt2-xl", 1_557_611_200),
        ("distilgpt2", 81_912_576),
        ("distilbert/distilgpt2", 81_912_576),
    ],
)
def test_shapes_that_need_no_network(name: str, num_parameters: int) -> None:
    checkpoint = find(name, load_format="dummy")
    assert (checkpoint.name, checkpoint.kind, checkpoint.folder) == (name, "dummy", None)
    config = load_model_config(checkpoint)
    assert sum(int(np.prod(shape)) for shape in tensor_shapes(config).values()) == num_parameters
    assert (config.vocab_size, config.n_positions, config.activation_function) == (
        50257,
        1024,
        "gelu_new",
    )


def test_a_shape_has_no_revision() -> None:
    with pytest.raises(ValueError, match="gpt2 is not loaded from the hub"):
        find("gpt2", load_format="dummy", revision="main")


# The hub's cache


def cache(
    files: dict[str, bytes], repo: str = "o/m", commit: str = COMMIT, ref: str = "main"
) -> Path:
    """Put a copy of a repository into the cache as huggingface_hub keeps it."""
    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    write(root / "blobs", {f"{commit}-{name}": content for name, content in files.items()})
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).symlink_to(root / "blobs" / f"{commit}-{name}")
    return snapshot


def test_a_cached_copy_is_found_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard of the suite would fail this test if the hub were asked."""
    snapshot = cache(whole_model())
    found = find("o/m")
    assert (found.kind, found.folder, found.commit) == ("cache", snapshot, COMMIT)
    config = load_model_config(found)
    assert len(list(load_weights(found, config))) == len(tensor_shapes(config))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find("o/m") == found
    assert find("o/m", load_format="dummy").kind == "dummy"


@pytest.mark.parametrize("cached_as", ["gpt2", "openai-community/gpt2"])
@pytest.mark.parametrize("asked", ["gpt2", "openai-community/gpt2"])
def test_both_names_of_gpt2_find_its_copy(cached_as: str, asked: str) -> None:
    snapshot = cache(whole_model(), cached_as)
    assert find(asked).folder == snapshot


def test_cached_revisions(offline: None) -> None:
    main, other = cache(whole_model()), cache(whole_model(), commit="d" * 40, ref="v2")
    assert find("o/m").folder == find("o/m", revision="main").folder == main
    assert find("o/m", revision="v2").folder == other
    assert find("o/m", revision="d" * 40).folder == other
    assert "model 'o/m' at revision 'v3' not found" in error_of("o/m", revision="v3")


def test_what_is_missing_offline_is_said(offline: None, hf_home: Path) -> None:
    message = error_of("o/m")
    assert message == (
        f"model 'o/m' not found: not embedded, no folder of that name, no copy in the hub cache "
        f"({hf_home / 'hub'}); HF_HUB_OFFLINE is set, so the hub was not asked. What works here: a "
        "local folder, --model mini, or --load-format dummy (random weights) with gpt2, "
        "gpt2-medium, gpt2-large, gpt2-xl, distilgpt2"
    )
    assert "'gpt2' not found" in error_of("gpt2")


def test_half_a_cached_copy_is_not_taken(offline: None) -> None:
    files = sharded_model()
    snapshot = cache(files)
    (snapshot / "model-00002-of-00002.safetensors").resolve().unlink()  # leaves a dangling link
    message = error_of("o/m")
    assert "the cached copy does not serve" in message
    assert "lacks model-00002-of-00002.safetensors" in message
    cache(small_files(), "o/no-weights")
    assert "no model.safetensors" in error_of("o/no-weights")
    assert find("o/no-weights", load_format="dummy").commit == COMMIT


def test_a_cached_copy_without_tokenizer_serves_offline(
    offline: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache({"config.json": CONFIG, "model.safetensors": weights_file()})
    assert find("o/m").kind == "cache"
    assert "using the cached copy without a tokenizer; HF_HUB_OFFLINE is set" in caplog.text


def test_a_folder_without_config_does_not_hide_a_name(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "gpt2", {"notes.txt": b""})
    monkeypatch.chdir(tmp_path)
    assert "the folder of that name has no config.json, no copy in the hub" in error_of("gpt2")
    assert find("gpt2", load_format="dummy").folder is None


def test_list_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "EMBEDDED_DIR", tmp_path)
    write(tmp_path / "mini", whole_model())
    whole, half = cache(whole_model(), "o/whole"), cache(small_files(), "o/half")
    old = cache(sharded_model(), "o/whole", commit="d" * 40, ref="v2/old".replace("/", "-"))
    cache({"config.json": b'{"model_type": "bert"}'}, "o/bert")
    cache({"config.json": b"{"}, "o/broken")
    cache({"config.json": b"[" * 200_000}, "o/deep")
    listed = list_models()
    assert (
        ListedModel(
            name="o/whole",
            kind="cache",
            folder=whole,
            size_bytes=sum(map(len, whole_model().values())),
            revision="main",
        )
        in listed
    )
    by_key = {(m.name, m.revision): m for m in listed}
    assert by_key["o/whole", "v2-old"].folder == old
    assert (by_key["o/half", "main"].folder, by_key["o/half", "main"].complete) == (half, False)
    assert not {"o/bert", "o/broken", "o/deep"} & {m.name for m in listed}
    assert (listed[0].name, listed[0].kind) == ("mini", "embedded")
    assert listed[0].size_bytes == sum(map(len, whole_model().values()))
    assert [m.name for m in listed if m.kind == "dummy"] == list(BUILT_IN_SHAPES)


# The hub itself

CHILD = """
import json, sys, time
if len(sys.argv) < 4:
    time.sleep = lambda seconds: None  # the waits between huggingface_hub's retries
from nanoserve.model.hub import find
try:
    found = find(sys.argv[1], **json.loads(sys.argv[2]))
    answer = {
        "kind": found.kind,
        "commit": found.commit,
        "files": [path.name for path in found.weight_files],
        "beside": sorted(path.name for path in found.folder.iterdir()),
    }
except ValueError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(answer))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def child_find(model: str, *, waits: bool = False, **options: object) -> dict[str, Any]:
    """`find` in a process of its own; retries are at once, unless it `waits` as users would."""
    result = subprocess.run(
        [sys.executable, "-c", CHILD, model, json.dumps(options), *(["waits"] if waits else [])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120 if not waits else 20,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    assert "\n" not in answer.get("message", "")
    return answer


def refusal(model: str, **options: object) -> str:
    answer = child_find(model, **options)
    assert answer["error"] == "ModelNotFoundError"
    message: str = answer["message"]
    assert "What works here: a local folder, --model mini, or --load-format dummy" in message
    return message


def test_download_then_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {
        "README.md": b"",
        "tf_model.h5": b"",
        "pytorch_model.bin": b"",
        "onnx/model.onnx": b"",
    }
    hub.repositories["o/m"] = Repository(files={**others, **whole_model()})
    fresh = child_find("o/m")
    assert fresh == {
        "kind": "hub",
        "commit": COMMIT,
        "files": ["model.safetensors"],
        "beside": sorted(whole_model()),
    }
    assert sorted(hub.transferred()) == sorted(whole_model())
    assert hub.transferred()[-1] == "model.safetensors"
    num_requests = len(hub.requests)
    assert child_find("o/m") == {**fresh, "kind": "cache"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert child_find("o/m") == {**fresh, "kind": "cache"}
    assert len(hub.requests) == num_requests


def test_download_sharded_and_bin(hub: Hub) -> None:
    hub.repositories["o/shards"] = Repository(files=sharded_model())
    assert child_find("o/shards")["files"] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    hub.repositories["o/bin"] = Repository(files={**small_files(), "pytorch_model.bin": b"PK"})
    assert child_find("o/bin")["files"] == ["pytorch_model.bin"]
    assert "it has pytorch_model.bin" in refusal("o/bin", load_format="safetensors")


def test_download_of_both_formats_takes_the_one_asked_for(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files={**whole_model(), "pytorch_model.bin": b"PK"})
    assert child_find("o/m", load_format="pt")["files"] == ["pytorch_model.bin"]
    assert "model.safetensors" not in hub.transferred()


def test_download_for_dummy_takes_no_weights(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model())
    answer = child_find("o/m", load_format="dummy")
    assert (answer["kind"], answer["files"]) == ("dummy", [])
    assert sorted(hub.transferred()) == sorted(small_files())


def test_download_by_short_name_and_revision(hub: Hub) -> None:
    hub.repositories["openai-community/gpt2"] = Repository(files=whole_model())
    assert child_find("gpt2", revision="v1")["kind"] == "hub"
    assert child_find("openai-community/gpt2", revision=COMMIT)["kind"] == "cache"


def test_a_cached_copy_without_tokenizer_is_completed(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model())
    cache({"config.json": CONFIG, "model.safetensors": weights_file()})
    answer = child_find("o/m")
    assert answer["kind"] == "hub"
    assert "tokenizer.json" in answer["beside"]
    assert "model.safetensors" not in hub.transferred()


def test_other_families_are_refused_before_their_weights(hub: Hub) -> None:
    files = {**whole_model(), "config.json": b'{"model_type": "gptj"}'}
    hub.repositories["o/j"] = Repository(files=files)
    answer = child_find("o/j")
    assert answer["error"] == "ValueError"
    assert "'gptj' is not GPT-2: it has rotary positions" in answer["message"]
    assert hub.transferred() == ["config.json"]


@pytest.mark.parametrize("status", [401, 404])
def test_unknown_repository(hub: Hub, status: int) -> None:
    hub.answers_unknown_with = status
    assert "the hub has no such repository, or not for this HF_TOKEN" in refusal("o/nobody")


def test_gated_repository(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model(), gated=True)
    assert "it is gated: accept its terms there and set HF_TOKEN" in refusal("o/m")


def test_unknown_revision(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model())
    message = refusal("o/m", revision="v9")
    assert "model 'o/m' at revision 'v9' not found" in message
    assert "the hub has no revision 'v9' of it" in message


def test_a_push_between_listing_and_files_is_noticed(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model(), listed_commit="e" * 40)
    assert "it changed on the hub while it was fetched; try again" in refusal("o/m")
    assert "model.safetensors" not in hub.transferred()


def test_repositories_that_hold_no_model(hub: Hub) -> None:
    hub.repositories["o/data"] = Repository(files={"README.md": b""})
    assert "has no config.json, so it is no model folder" in refusal("o/data")
    hub.repositories["o/tf"] = Repository(files={**small_files(), "tf_model.h5": b""})
    assert "o/tf has no model.safetensors" in refusal("o/tf")
    assert "it is not a name that the hub can have" in refusal("o/not a name")


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")  # nobody listens there now
    assert "the hub could not be reached" in refusal("o/m", waits=True)
    cache({"config.json": CONFIG, "model.safetensors": weights_file()})
    assert child_find("o/m")["kind"] == "cache"


def test_offline_does_not_ask(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set, so the hub was not asked" in refusal("o/m")
    assert not hub.requests


def test_a_connection_that_breaks_leaves_nothing_that_looks_whole(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(files=whole_model(), breaks_at={"model.safetensors": 700})
    hub.repositories["o/m"] = repository
    assert "the hub could not be reached, or broke off (" in refusal("o/m")
    assert hub.transferred().count("model.safetensors") > 1  # huggingface_hub tried again
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = refusal("o/m")
    assert "the cached copy does not serve" in message
    monkeypatch.delenv("HF_HUB_OFFLINE")
    repository.breaks_at.clear()
    assert child_find("o/m")["kind"] == "hub"
    assert child_find("o/m")["kind"] == "cache"
    snapshot = Path(os.environ["HF_HOME"]) / "hub" / "models--o--m" / "snapshots" / COMMIT
    assert (snapshot / "model.safetensors").read_bytes() == whole_model()["model.safetensors"]


def test_a_cache_that_cannot_be_written_is_not_the_models_fault(hub: Hub) -> None:
    hub.repositories["o/m"] = Repository(files=whole_model())
    home = Path(os.environ["HF_HOME"])
    home.mkdir()
    (home / "hub").write_text("a file where a folder should be")
    result = subprocess.run(
        [sys.executable, "-c", CHILD, "o/m", "{}"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "NotADirectoryError" in result.stderr or "FileExistsError" in result.stderr


def test_a_home_folder_of_nobody_is_one_clear_line() -> None:
    with pytest.raises(ModelNotFoundError, match="~nobody-of-that-name/x"):
        find("~nobody-of-that-name/x")
