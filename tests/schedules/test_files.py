"""Reading files of any kind, and writing them whole or not at all.

What is read is bounded, and refused in one line.
"""

import os
from pathlib import Path
from threading import Thread

import pytest

from slipstream.schedules.files import (
    READABLE_BY_OWNER,
    read_at_most,
    replace_folder,
    write_atomically,
)
from tests.patience import SECONDS


class ReadError(ValueError):
    """What is asked to be raised."""


def test_a_file_of_just_the_limit_is_read(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_at_most(tmp_path / "file", 5, ReadError) == b"12345"
    with pytest.raises(ReadError, match=r"file: more than 4 bytes; too long$"):
        read_at_most(tmp_path / "file", 4, ReadError, "; too long")


def test_what_never_ends_is_read_no_further_than_the_limit() -> None:
    with pytest.raises(ReadError, match=r"/dev/zero: more than 1000 bytes$"):
        read_at_most(Path("/dev/zero"), 1000, ReadError)


def test_a_pipe_is_read_like_a_file(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # More than a pipe holds at a time.
    writer = Thread(target=pipe.write_bytes, args=(b"x" * 100_000,), daemon=True)
    writer.start()
    assert len(read_at_most(pipe, 200_000, ReadError)) == 100_000
    writer.join(SECONDS)
    assert not writer.is_alive()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "missing: cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("a\0b", r"a\\x00b': cannot be read: embedded null byte"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, says) -> None:
    with pytest.raises(ReadError, match=says):
        read_at_most(tmp_path / name, 1000, ReadError)


def test_a_link_is_followed_and_a_pipe_written_to(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for content in (b"new", b"newer"):
        write_atomically(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink() and (
            tmp_path / "folder" / "file"
        ).read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=write_atomically, args=(tmp_path / "pipe", b"through"), daemon=True)
    writer.start()
    assert (tmp_path / "pipe").read_bytes() == b"through"
    writer.join(SECONDS)
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 3, (
        "nothing is left beside it"
    )


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path) -> None:
    folder = tmp_path / "folder"
    for content in ("first", "second"):
        with replace_folder(folder) as draft:
            (draft / content).touch()
        assert [path.name for path in folder.iterdir()] == [content]
    with pytest.raises(RuntimeError, match="in between"), replace_folder(folder) as draft:
        (draft / "third").touch()
        raise RuntimeError("in between")
    assert [path.name for path in folder.iterdir()] == ["second"]
    assert list(tmp_path.iterdir()) == [folder], "nothing is left next to it"


def test_a_link_to_a_folder_is_followed_and_a_file_is_not_replaced_by_a_folder(tmp_path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").write_text("kept")
    with replace_folder(tmp_path / "link") as draft:
        (draft / "new").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target" / "new").exists()
    with pytest.raises(NotADirectoryError), replace_folder(tmp_path / "file") as draft:
        (draft / "new").touch()
    assert (tmp_path / "file").read_text() == "kept" and len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_replaced_is_put_back(tmp_path, monkeypatch) -> None:
    folder, rename = tmp_path / "folder", Path.rename
    folder.mkdir()
    (folder / "old").touch()

    def refuse(path, target):
        if (path / "new").exists():
            raise PermissionError(13, "refused")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError), replace_folder(folder) as draft:
        (draft / "new").touch()
    assert [path.name for path in folder.iterdir()] == ["old"] and list(tmp_path.iterdir()) == [
        folder
    ]


def test_the_old_folder_is_removed_only_when_the_new_one_is_in_its_place(
    tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").touch()
    here = []
    monkeypatch.setattr(
        "shutil.rmtree", lambda *_, **__: here.append([path.name for path in folder.iterdir()])
    )
    with replace_folder(folder) as draft:
        (draft / "new").touch()
    assert here == [["old"], ["new"]], "before, and after"


@pytest.mark.parametrize(
    ("mask", "mode", "expected"),
    [(0o022, None, 0o644), (0o077, None, 0o600), (0o002, READABLE_BY_OWNER, 0o600)],
)
def test_files_have_the_permissions_that_the_umask_leaves_which_is_not_changed(
    mask, mode, expected, tmp_path, monkeypatch
) -> None:
    """Other threads create files meanwhile."""
    change, changes = os.umask, []
    before = change(mask)
    monkeypatch.setattr(os, "umask", lambda path: changes.append(path) or change(path))
    try:
        write_atomically(tmp_path / "file", b"x", *([] if mode is None else [mode]))
    finally:
        change(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == expected and not changes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
