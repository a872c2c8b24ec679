"""Files appear whole or not at all; digests and seeds are unambiguous."""

import errno
import stat

import pytest

from runspec.core.errors import UserError
from runspec.core.files import (
    atomic_file,
    new_directory,
    read_bounded,
    remove_leftovers,
    write_atomic,
)
from runspec.core.hashing import hash_parts
from runspec.core.keys import SigningKey, signature_is_valid


def test_write_atomic_does_not_write_into_the_file_that_was_there(tmp_path):
    path, reader = tmp_path / "file", tmp_path / "reader"
    write_atomic(path, b"old")
    reader.hardlink_to(path)
    write_atomic(path, b"new")
    assert (path.read_bytes(), reader.read_bytes()) == (b"new", b"old")


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path):
    target = tmp_path / "taken"
    target.mkdir()  # a directory cannot be replaced by a file
    with pytest.raises(UserError, match="taken"):
        write_atomic(target, b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_file_appears_only_when_its_block_succeeds(tmp_path):
    # Given a file that is written anew, piece by piece
    path = tmp_path / "rows"
    path.write_bytes(b"old")
    # When the block fails half way, then the old one stands and nothing lies beside it
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    # When the disk fails, then the message names the file and what to do
    with (
        pytest.raises(UserError, match="No space left") as failure,
        atomic_file(path, remedy="free some") as file,
    ):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (failure.value.place, failure.value.remedy) == (str(path), "free some")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    # When it succeeds, then all of it is there under its name, and only then
    with atomic_file(path, mode=0o600) as file:
        file.write(b"who")
        assert path.read_bytes() == b"old"
        file.write(b"le")
    assert path.read_bytes() == b"whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_appears_only_when_the_block_succeeds(tmp_path):
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "v1") as folder:
        (folder / "half").write_bytes(b"x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with new_directory(tmp_path / "v1") as folder:
        (folder / "whole").write_bytes(b"x")
    assert (tmp_path / "v1" / "whole").read_bytes() == b"x"
    with pytest.raises(FileExistsError), new_directory(tmp_path / "v1"):
        pass


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".tmp-1-a").write_bytes(b"")
    (tmp_path / ".tmp-2-b").mkdir()
    (tmp_path / "kept").write_bytes(b"")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_read_bounded_refuses_one_byte_too_many(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(UserError, match="4 bytes allowed"):
        read_bounded(path, 4)


def test_hash_parts_separates_its_parts():
    assert hash_parts("ab", "c") != hash_parts("a", "bc")
    assert hash_parts(1, 2) != hash_parts(2, 1)


def test_keys_survive_a_file_and_stay_private(tmp_path):
    key = SigningKey.generate()
    path = tmp_path / "worker.key"
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = SigningKey.load(path)
    assert signature_is_valid(key.public_hex, b"message", again.sign(b"message"))
    assert not signature_is_valid(key.public_hex, b"other", again.sign(b"message"))
    with pytest.raises(FileExistsError):
        SigningKey.generate().save(path)
    assert SigningKey.load(path).public_hex == key.public_hex
    assert list(tmp_path.iterdir()) == [path]
