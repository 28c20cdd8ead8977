"""Finding a model: embedded in the package, in a local folder, in the hub's cache, on the hub.

`find` turns what the user typed into a `Checkpoint`: a folder known to hold a config and a whole
set of weight files. It never substitutes: what cannot be found raises `ModelNotFoundError`, in one
line that says what was tried and what would work. Nothing here reads a weight; `weights.py` does.
The hub is asked only when the first three have no copy, and a checkpoint that is not GPT-2 is
refused by its config before its weights are downloaded. huggingface_hub is imported where it is
needed, because importing it takes longer than everything else here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from nanoserve.config import LoadFormat, ModelConfig
from nanoserve.tokenizer import SENTENCEPIECE_FILES

Kind = Literal["embedded", "local", "cache", "hub", "dummy"]
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

EMBEDDED_DIR = Path(__file__).parent.parent / "models"
EMBEDDED_MODELS = ("mini",)
"""Models that come with the package, one folder each under `EMBEDDED_DIR`."""


def _gpt2_shape(n_layer: int, n_head: int, n_embd: int) -> dict[str, object]:
    """The config.json of OpenAI's GPT-2 at this size; the rest is GPT2Config's defaults."""
    return {"model_type": "gpt2", "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}


BUILT_IN_SHAPES: Mapping[str, Mapping[str, object]] = {
    "gpt2": _gpt2_shape(12, 12, 768),
    "gpt2-medium": _gpt2_shape(24, 16, 1024),
    "gpt2-large": _gpt2_shape(36, 20, 1280),
    "gpt2-xl": _gpt2_shape(48, 25, 1600),
    "distilgpt2": _gpt2_shape(6, 12, 768),
}
"""Shapes that `--load-format dummy` knows with no network."""

_FULL_NAMES = {
    name: f"{'distilbert' if name == 'distilgpt2' else 'openai-community'}/{name}"
    for name in BUILT_IN_SHAPES
}
_SHORT_NAMES = {full: name for name, full in _FULL_NAMES.items()}

_WEIGHT_FILES: Mapping[str, tuple[str, str]] = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json"),
    "pt": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}
_OTHER_FORMATS = (".h5", ".msgpack", ".ckpt", ".gguf", ".onnx", ".pt", ".pth", ".bin")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *SENTENCEPIECE_FILES)
SMALL_FILES = (
    *_VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What is fetched beside config and weights."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LLMC_MAGIC = (20240326).to_bytes(4, "little")
_LFS_POINTER = b"version https://git-lfs"


class ModelNotFoundError(ValueError):
    """No such model where it was looked for; the message is one line and names the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model that was found: its config, and the files that hold its weights.

    `folder` is where tokenizer and generation_config.json lie; None for a built-in dummy shape.
    `weight_files` is empty for kind "dummy". `commit` is the hub's, None elsewhere.
    """

    name: str
    kind: Kind
    folder: Path | None
    raw_config: Mapping[str, object] = field(repr=False)
    weight_format: Literal["safetensors", "pt"] | None = None
    weight_files: tuple[Path, ...] = ()
    commit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """One line of `nanoserve models`. `complete` False: its weights are not all there.

    `size_bytes` counts the files in `folder`; both are None for a built-in shape.
    """

    name: str
    kind: Kind
    folder: Path | None
    size_bytes: int | None
    revision: str | None = None
    complete: bool = True


def find(
    model: str, *, revision: str | None = None, load_format: LoadFormat = "auto"
) -> Checkpoint:
    """The checkpoint that `model` names: embedded, local folder, hub cache or hub, in that order.

    `revision` is a branch, tag or commit of a hub repository. `load_format` "safetensors" and "pt"
    accept that format only, "auto" prefers safetensors, "dummy" needs a config and no weights and
    knows the five GPT-2 shapes without any file.

    Raises ModelNotFoundError (a ValueError) if it is nowhere, incomplete, gated or out of reach,
    and ValueError for a config that is not GPT-2 or an option that does not apply.
    """
    if load_format not in ("auto", "dummy", *_WEIGHT_FILES):
        raise ValueError(f"load_format must be auto, safetensors, pt or dummy, got {load_format!r}")
    if not model.strip():
        raise ModelNotFoundError("model is empty; --model takes a name or a folder")
    if model in EMBEDDED_MODELS:
        return _embedded(model, revision, load_format)
    folder = expanded(model)
    if _looks_like_a_path(model) or folder.is_file() or (folder / "config.json").is_file():
        return _local(model, folder, revision, load_format)
    if load_format == "dummy" and _short_name(model) in BUILT_IN_SHAPES:
        _refuse_revision(model, revision)
        shape = BUILT_IN_SHAPES[_short_name(model)]
        return Checkpoint(name=model, kind="dummy", folder=None, raw_config=shape)
    return _cached_or_downloaded(model, revision, load_format)


def expanded(name: str) -> Path:
    """`name` as a path, `~` and `~user` resolved. Raises ModelNotFoundError for an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{name}: {error}") from error


def _embedded(model: str, revision: str | None, load_format: LoadFormat) -> Checkpoint:
    _refuse_revision(model, revision)
    folder = EMBEDDED_DIR / model
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"the embedded model {model!r} is missing from this installation ({folder}); "
            "install the package again, or give --model a local folder or a hub name"
        )
    return _checkpoint(model, "embedded", folder, load_format)


def _local(model: str, folder: Path, revision: str | None, load_format: LoadFormat) -> Checkpoint:
    if folder.is_file():
        raise ModelNotFoundError(
            f"{model} is a file; --model takes the folder that holds config.json and the weights"
            f"{_converter_hint([folder])}"
        )
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no folder {model} (looked at {folder.absolute()})")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"the folder {model} has no config.json; it has {_names(folder)}"
            f"{_converter_hint(folder.iterdir())}"
        )
    _refuse_revision(model, revision)
    return _checkpoint(model, "local", folder, load_format)


def _cached_or_downloaded(model: str, revision: str | None, load_format: LoadFormat) -> Checkpoint:
    from huggingface_hub import constants

    cached, flaws = _cached(model, revision, load_format)
    if cached and (load_format == "dummy" or has_vocabulary(cached.folder)):
        return cached
    try:
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFoundError("HF_HUB_OFFLINE is set, so the hub was not asked")
        return _downloaded(model, revision, load_format)
    except ModelNotFoundError as error:
        if cached:
            logger.warning("%s: using the cached copy without a tokenizer; %s", model, error)
            return cached
        here = "no folder of that name"
        if Path(model).is_dir():
            here = "the folder of that name has no config.json"
        in_cache = "; ".join(flaws) or f"no copy in the hub cache ({constants.HF_HUB_CACHE})"
        revision_words = f" at revision {revision!r}" if revision else ""
        raise ModelNotFoundError(
            f"model {model!r}{revision_words} not found: not embedded, {here}, "
            f"{in_cache}; {error}. What works here: a local folder, --model mini, or "
            f"--load-format dummy (random weights) with {', '.join(BUILT_IN_SHAPES)}"
        ) from error


def _checkpoint(
    name: str, kind: Kind, folder: Path, load_format: LoadFormat, commit: str | None = None
) -> Checkpoint:
    """The checkpoint in `folder`, once its config can be read and its weight files are all there.

    Raises ModelNotFoundError for missing weight files, ValueError for a config that is not JSON.
    """
    raw_config = read_json(folder / "config.json")
    if load_format == "dummy":
        return Checkpoint(
            name=name, kind="dummy", folder=folder, raw_config=raw_config, commit=commit
        )
    names = [path.name for path in folder.iterdir() if path.is_file()]
    weight_format, first = _weights_entry(str(folder), names, load_format)
    files = tuple(folder / shard for shard in _shards(folder / first))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelNotFoundError(f"{folder} lacks {', '.join(missing)}, which {first} names")
    for path in files:
        _refuse_lfs_pointer(path)
    return Checkpoint(
        name=name,
        kind=kind,
        folder=folder,
        raw_config=raw_config,
        weight_format=weight_format,
        weight_files=files,
        commit=commit,
    )


def _weights_entry(
    where: str, names: Iterable[str], load_format: LoadFormat
) -> tuple[Literal["safetensors", "pt"], str]:
    """(format, file) to start from among `names`: the weights, or the index of their shards.

    A single file goes before an index and safetensors before `.bin`, as in transformers.
    """
    present = set(names)
    formats: tuple[Literal["safetensors", "pt"], ...] = ("safetensors", "pt")
    for weight_format in formats:
        if load_format in ("auto", weight_format):
            for name in _WEIGHT_FILES[weight_format]:
                if name in present:
                    return weight_format, name
    others = [name for pair in _WEIGHT_FILES.values() for name in pair if name in present]
    if others:
        raise ModelNotFoundError(
            f"{where} has no weights in the format asked for (--load-format {load_format}); it has "
            f"{', '.join(others)}"
        )
    unread = sorted(name for name in present if name.endswith(_OTHER_FORMATS))
    found = f"; {', '.join(unread)} cannot be read" if unread else ""
    raise ModelNotFoundError(
        f"{where} has no model.safetensors and no pytorch_model.bin (nor their .index.json){found}"
        f"{_converter_hint(Path(where) / name for name in unread)}"
    )


def _shards(entry: Path) -> list[str]:
    """File names of the weights that start at `entry`: itself, or what the index names."""
    if entry.suffix != ".json":
        return [entry.name]
    weight_map = read_json(entry).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{entry}: an index needs a weight_map from tensor to file")
    shards = sorted({str(shard) for shard in weight_map.values()})
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ValueError(f"{entry}: shards must lie beside their index, got {', '.join(outside)}")
    return shards


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in `path`. Raises ValueError, naming the file, if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _looks_like_a_path(model: str) -> bool:
    """Whether `model` cannot be a hub name (owner/name): then it must be here."""
    return (
        model.startswith((".", "/", "~"))
        or model.endswith("/")
        or "\\" in model
        or model.count("/") > 1
    )


def _short_name(model: str) -> str:
    return _SHORT_NAMES.get(model, model)


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(
            f"--revision {revision} applies to a hub repository; {model} is not loaded from the hub"
        )


def _refuse_lfs_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelNotFoundError(
                f"{path} is a git-lfs pointer, not the weights; run `git lfs pull` there"
            )


def has_vocabulary(folder: Path | None) -> bool:
    """Whether `folder` holds a tokenizer."""
    return folder is not None and any((folder / name).is_file() for name in _VOCABULARIES)


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:8]) or "nothing"
    return f"{shown}, ..." if len(names) > 8 else shown


def _converter_hint(paths: Iterable[Path]) -> str:
    """The command that converts a checkpoint of nanoGPT or llm.c, where `paths` may hold one."""
    for path in sorted(paths):
        source = "nanogpt" if path.suffix == ".pt" else "llmc" if _is_llmc(path) else None
        if source:
            return (
                f"; if {path.name} is a checkpoint of nanoGPT or llm.c, convert it: "
                f"python scripts/convert_checkpoint.py {source} {path} --out FOLDER"
            )
    return ""


def _is_llmc(path: Path) -> bool:
    if path.suffix != ".bin" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _LLMC_MAGIC


# The hub's cache: models--owner--name/{refs/<branch>, snapshots/<commit>/<file>}; a file in a
# snapshot is a link to a blob that was moved in whole, so one that is there is complete.


def _cached(
    model: str, revision: str | None, load_format: LoadFormat
) -> tuple[Checkpoint | None, list[str]]:
    """The cached copy of `model`, or None and what is wrong with the copies there are."""
    from huggingface_hub import constants

    flaws = []
    short = _short_name(model)
    for repo in dict.fromkeys((_FULL_NAMES.get(short, model), short, model)):
        root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
        commit = _cached_commit(root, revision)
        folder = root / "snapshots" / (commit or "none")
        if commit is None or not (folder / "config.json").is_file():
            continue
        try:
            return _checkpoint(model, "cache", folder, load_format, commit), []
        except ModelNotFoundError as error:
            flaws.append(f"the cached copy does not serve: {error}")
    return None, flaws


def _cached_commit(root: Path, revision: str | None) -> str | None:
    if revision and _COMMIT.fullmatch(revision):
        return revision
    ref = root / "refs" / (revision or "main")
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None


def _downloaded(model: str, revision: str | None, load_format: LoadFormat) -> Checkpoint:
    """Fetch the config, check it, then fetch what else is needed: small files first.

    All is of one commit, so that a push in between cannot mix two versions; and the weights come
    last, so that a cached copy with weights has the rest.
    """
    from huggingface_hub import HfApi, hf_hub_download

    repo = _FULL_NAMES.get(model, model)

    def fetch(filename: str, at: str | None) -> Path:
        return Path(_asked(lambda: hf_hub_download(repo, filename, revision=at), revision))

    # The listing goes first: without a network it fails at once, where a file is tried for minutes.
    info = _asked(lambda: HfApi().model_info(repo, revision=revision, timeout=10), revision)
    names = [sibling.rfilename for sibling in info.siblings or []]
    if "config.json" not in names:
        raise ModelNotFoundError("the hub's copy has no config.json, so it is no model folder")
    folder = fetch("config.json", revision).parent  # by its branch, so that the cache records that
    if folder.name != info.sha:
        raise ModelNotFoundError("it changed on the hub while it was fetched; try again")
    ModelConfig.from_hf(read_json(folder / "config.json"))
    entry = None if load_format == "dummy" else _weights_entry(repo, names, load_format)[1]
    for name in (*(n for n in SMALL_FILES if n in names), *([entry] if entry else [])):
        fetch(name, info.sha)
    for name in _shards(folder / entry) if entry else []:
        fetch(name, info.sha)
    return _checkpoint(model, "hub", folder, load_format, info.sha)


def _asked(call: Callable[[], Result], revision: str | None) -> Result:
    """Call huggingface_hub; what it raises becomes a ModelNotFoundError that says what to do.

    The HTTP library beneath differs between its versions and its errors share no base class, so
    every Exception is translated, and chained; errors of this machine's files (a full disk, a
    cache that cannot be written) are not the model's fault and pass.
    """
    try:
        return call()
    except Exception as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            raise
        raise ModelNotFoundError(_explained(error, revision)) from error


def _explained(error: Exception, revision: str | None) -> str:
    """One clause on what went wrong between us and the hub; subclasses stand before their base."""
    from huggingface_hub import errors

    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reasons: tuple[tuple[type[Exception], str], ...] = (
        (
            errors.GatedRepoError,
            "the hub says it is gated: accept its terms there and set HF_TOKEN",
        ),
        (
            errors.RepositoryNotFoundError,
            "the hub has no such repository, or not for this HF_TOKEN",
        ),
        (errors.RevisionNotFoundError, f"the hub has no revision {revision or 'main'!r} of it"),
        (errors.LocalEntryNotFoundError, "the hub could not be reached"),
        (errors.EntryNotFoundError, f"a file is missing there: {first_line}"),
        (errors.HFValidationError, "it is not a name that the hub can have (owner/name)"),
        (errors.HfHubHTTPError, f"the hub refused: {first_line}"),
    )
    for kind, reason in reasons:
        if isinstance(error, kind):
            return reason
    return f"the hub could not be reached, or broke off ({type(error).__name__}: {first_line})"


def list_models() -> list[ListedModel]:
    """What can be named without a network: embedded, GPT-2s in the hub's cache, dummy shapes."""
    embedded = [
        ListedModel(name=name, kind="embedded", folder=folder, size_bytes=_size_bytes(folder))
        for name in EMBEDDED_MODELS
        if (folder := EMBEDDED_DIR / name).is_dir()
    ]
    shapes = [
        ListedModel(name=name, kind="dummy", folder=None, size_bytes=None)
        for name in BUILT_IN_SHAPES
    ]
    return [*embedded, *_list_cache(), *shapes]


def _list_cache() -> list[ListedModel]:
    from huggingface_hub import constants

    listed = []
    for snapshot in sorted(Path(constants.HF_HUB_CACHE).glob("models--*/snapshots/*")):
        try:
            if read_json(snapshot / "config.json").get("model_type") == "gpt2":
                listed.append(_listed_snapshot(snapshot))
        except (OSError, ValueError) as error:
            logger.debug("left out of the list: %s: %s", snapshot, error)
    return listed


def _listed_snapshot(snapshot: Path) -> ListedModel:
    root = snapshot.parent.parent
    name = root.name.removeprefix("models--").replace("--", "/")
    refs = sorted(
        str(ref.relative_to(root / "refs"))
        for ref in (root / "refs").rglob("*")
        if ref.is_file() and ref.read_text(encoding="utf-8").strip() == snapshot.name
    )
    try:
        _checkpoint(name, "cache", snapshot, "auto")
        complete = True
    except ModelNotFoundError:
        complete = False
    return ListedModel(
        name=name,
        kind="cache",
        folder=snapshot,
        size_bytes=_size_bytes(snapshot),
        revision="main" if "main" in refs else (refs or [snapshot.name])[0],
        complete=complete,
    )


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
