"""The same files give the same bytes; what is not text is left out; what is no text is refused."""

import os
import pathlib

import numpy as np
import pytest

from stagewright.trainer.corpus import read_corpus


def text(corpus) -> bytes:
    return corpus.training.tobytes() + corpus.heldout.tobytes()


def test_the_standard_library_is_there_by_default() -> None:
    corpus = read_corpus(max_bytes=200_000)
    assert corpus.training.size + corpus.heldout.size == 200_000
    assert b"def " in corpus.training.tobytes()
    np.testing.assert_array_equal(read_corpus(max_bytes=200_000).training, corpus.training)


def test_one_file_is_read_as_it_is(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789")
    corpus = read_corpus(file, heldout_fraction=0.2)
    assert (corpus.training.tobytes(), corpus.heldout.tobytes()) == (b"01234567", b"89")


def test_a_folder_is_read_whole_in_an_order_of_its_own(tmp_path: pathlib.Path) -> None:
    for name in ("b/one.md", "a/two", "three.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    first = text(read_corpus(tmp_path))
    os.rename(tmp_path / "a" / "two", tmp_path / "later")
    os.rename(tmp_path / "later", tmp_path / "a" / "two")
    assert text(read_corpus(tmp_path)) == first
    assert sorted(first.split(b"\n")) == [b"a/two", b"b/one.md", b"three.txt"]


def test_what_is_not_text_is_left_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "good").write_text("good", encoding="utf-8")
    (tmp_path / "latin").write_bytes("schön".encode("latin-1"))
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / ".hidden").write_text("hidden")
    assert text(read_corpus(tmp_path)) == b"good"


def test_a_character_at_the_limit_is_no_reason_to_leave_the_file_out(tmp_path) -> None:
    (tmp_path / "a").write_text("ab\u00f6", encoding="utf-8")
    assert text(read_corpus(tmp_path, max_bytes=3)) == b"ab"


def test_refusals_name_the_path(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no text in .*" + tmp_path.name):
        read_corpus(tmp_path)
    with pytest.raises(ValueError, match="heldout_fraction"):
        read_corpus(tmp_path, heldout_fraction=1.0)
