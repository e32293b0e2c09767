"""Text on disk, as bytes: from a file or a folder to one training text and one held-out text.

In: a path, or none for the source of Python's own standard library, which every machine that runs
this has.  Out: two arrays of bytes.  The same files give the same arrays, whatever the file system
says first: files are ordered by a hash of their relative paths, so that the held-out tail is a mix
of all of them.  Cutting into examples is `data.py`'s work.
"""

import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text in two parts.

    Attributes:
      training: the bytes to learn from.
      heldout: the bytes to evaluate on; the end of the text.
      source: where it came from, for people.
    """

    training: UInt8[np.ndarray, " training_bytes"]
    heldout: UInt8[np.ndarray, " heldout_bytes"]
    source: str


def read_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    max_bytes: int = 16_000_000,
    heldout_fraction: float = 0.02,
) -> Corpus:
    """Read text.

    Args:
      path: a file, or a folder that is searched through; None for the `.py` files of the standard
        library.  Files that are empty, hidden or not UTF-8 are left out.
      max_bytes: stop after so many bytes.
      heldout_fraction: share of the bytes, at the end, that is held out; 0 to 1.

    Raises:
      FileNotFoundError: if there is no such path.
      ValueError: if no text is found, or a number is out of range.
    """
    if not (0 <= heldout_fraction < 1 and max_bytes > 0):
        raise ValueError(
            f"heldout_fraction must be 0 to 1 and max_bytes positive, got {heldout_fraction} and "
            f"{max_bytes}"
        )
    root = pathlib.Path(sysconfig.get_path("stdlib") if path is None else path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"there is no file or folder {root.absolute()} to read text from")
    parts = list(_read(_files(root, only_python=path is None), max_bytes))
    text = np.frombuffer(b"\n".join(parts)[:max_bytes], dtype=np.uint8)
    if not text.size:
        raise ValueError(f"found no text in {root.absolute()}: no file there is non-empty UTF-8")
    end = text.size - int(text.size * heldout_fraction)
    source = f"{root} ({len(parts)} file{'s'[: len(parts) > 1]}, {_size(text.size)})"
    return Corpus(training=text[:end], heldout=text[end:], source=source)


def _files(root: pathlib.Path, *, only_python: bool) -> list[pathlib.Path]:
    if root.is_file():
        return [root]
    found = []
    for folder, subfolders, names in os.walk(root):
        hidden = {name for name in subfolders if name.startswith(".")}
        left_out = hidden | (_SKIPPED_FOLDERS if only_python else set())
        subfolders[:] = [name for name in subfolders if name not in left_out]
        found += [pathlib.Path(folder, name) for name in names if not name.startswith(".")]
    wanted = [file for file in found if not only_python or file.suffix == ".py"]
    return sorted(wanted, key=lambda file: _place(file.relative_to(root)))


def _place(relative: pathlib.Path) -> bytes:
    return hashlib.sha256(relative.as_posix().encode(errors="surrogateescape")).digest()


def _read(files: list[pathlib.Path], max_bytes: int) -> Iterator[bytes]:
    left = max_bytes
    for file in files:
        if left <= 0:
            return
        if content := _text(file, left):
            left -= len(content) + 1
            yield content


def _text(file: pathlib.Path, max_bytes: int) -> bytes:
    """The start of a file if it is text, else nothing."""
    try:
        with file.open("rb") as stream:
            content = stream.read(max_bytes)
        content.decode()
    except UnicodeDecodeError as error:
        # Reading may have stopped in the middle of the last character.
        return content[: error.start] if error.end >= len(content) == max_bytes else b""
    except OSError:
        return b""
    return b"" if b"\0" in content else content


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"
