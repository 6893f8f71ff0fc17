import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.loading.quantized.writer import locked, remove_whole, sweep, whole_folder

WRITER = """
import sys, time
from pathlib import Path
from holdfast.loading.quantized.writer import whole_folder
with whole_folder(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("half")
    print("written", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_whole(tmp_path):
    final = tmp_path / "final"
    with whole_folder(final) as partial:
        (partial / "a").write_text("1")
        assert not final.exists()
        assert partial.parent == tmp_path
    assert names(tmp_path) == ["final"]
    assert names(final) == ["a"]
    assert final.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_empty_folder_gives_way_and_a_full_one_does_not(tmp_path):
    final = tmp_path / "final"
    final.mkdir()
    with whole_folder(final) as partial:
        (partial / "a").write_text("1")
    with pytest.raises(FileExistsError, match="another process was faster"), whole_folder(final) as partial:
        (partial / "b").write_text("2")
    assert names(final) == ["a"]
    assert names(tmp_path) == ["final"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    def write() -> None:
        with whole_folder(tmp_path / "final") as partial:
            (partial / "a").write_text("1")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == []


def test_what_a_killed_process_leaves_is_hidden_and_swept(tmp_path):
    final = tmp_path / "final [1]"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(final)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "written\n"
        assert sweep(tmp_path, final.name), "it is being written"
        assert not sweep(tmp_path, "final"), "another name is not"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    (left,) = names(tmp_path)
    assert left.startswith(".final")
    assert not sweep(tmp_path, final.name)
    assert names(tmp_path) == []


def test_two_writers_do_not_spoil_each_other(tmp_path):
    final = tmp_path / "final"
    with whole_folder(final) as first:
        (first / "a").write_text("1")
        with whole_folder(final) as second:
            assert sweep(tmp_path)
            (second / "b").write_text("2")
            assert names(first) == ["a"]
        with pytest.raises(FileExistsError), whole_folder(final) as third:
            (third / "c").write_text("3")
        os.rename(final, tmp_path / "away")
    assert names(final) == ["a"]
    assert names(tmp_path) == ["away", "final"]


def test_what_is_read_is_not_removed(tmp_path):
    folder = tmp_path / "entry"
    folder.mkdir()
    (folder / "a").write_text("1")
    readers = [locked(folder, is_shared=True), locked(folder, is_shared=True)]
    assert None not in readers
    assert not remove_whole(folder)
    assert names(folder) == ["a"]
    for reader in readers:
        assert reader is not None
        os.close(reader)
    assert remove_whole(folder)
    assert names(tmp_path) == []
    assert remove_whole(folder), "it is gone already"


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    mkdir, made = os.mkdir, []

    def swept(path) -> None:
        mkdir(path)
        made.append(path)
        if len(made) < 3:
            assert not sweep(tmp_path)

    monkeypatch.setattr(os, "mkdir", swept)
    with whole_folder(tmp_path / "final") as partial:
        (partial / "a").write_text("1")
    assert len(made) == 3
    assert names(tmp_path / "final") == ["a"]


def test_without_locks_nothing_is_swept_or_removed(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("holdfast.loading.quantized.writer.fcntl.flock", refuse)
    with whole_folder(tmp_path / "final") as partial:
        (partial / "a").write_text("1")
        assert not sweep(tmp_path)
        assert partial.exists()
    assert names(tmp_path / "final") == ["a"]
    with pytest.raises(OSError, match="No locks available"):
        remove_whole(tmp_path / "final")
    assert names(tmp_path / "final") == ["a"]
