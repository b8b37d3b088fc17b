"""Snapshots are there in full or not at all."""

import os
from pathlib import Path

import pytest

from decoupled.checkpoint import commit
from decoupled.errors import DecoupledError


def _writer(text: str):
  def write(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "a").write_text(text)
    (folder / "b").write_text(text * 100)

  return write


def _read(folder) -> str:
  return (folder / "sub" / "a").read_text()


def _save(group: Path, *numbers: int, **options) -> list[Path]:
  return [
    Path(commit.save(group, n, _writer(f"snapshot {n}"), **options))
    for n in numbers
  ]


def test_newest_number_wins(tmp_path):
  _save(tmp_path, 3, 12, 7)
  found = commit.restore(tmp_path, _read)
  assert (found.value, found.number, found.skipped) == ("snapshot 12", 12, ())


def test_nothing_saved_is_none_not_an_error(tmp_path):
  assert commit.restore(tmp_path / "absent", _read) is None
  assert commit.restore(tmp_path, _read) is None


def _truncate(folder: Path) -> str:
  os.truncate(folder / "b", 10)
  return "b has other bytes"


def _flip(folder: Path) -> str:
  path = folder / "sub" / "a"
  data = bytearray(path.read_bytes())
  data[0] ^= 1
  path.write_bytes(data)
  return "sub/a has other bytes"


def _remove_file(folder: Path) -> str:
  (folder / "b").unlink()
  return "b is missing"


def _remove_marker(folder: Path) -> str:
  (folder / commit.MARKER).unlink()
  return "was not finished"


def _change_marker(folder: Path) -> str:
  marker = folder / commit.MARKER
  marker.write_text(marker.read_text().replace('"number": 9', '"number": 8'))
  return "is not what was written"


def _tear_marker(folder: Path) -> str:
  os.truncate(folder / commit.MARKER, 20)
  return "is not what was written"


@pytest.mark.parametrize(
  "spoil",
  [
    _truncate,
    _flip,
    _remove_file,
    _remove_marker,
    _change_marker,
    _tear_marker,
  ],
)
def test_a_bad_one_is_named_and_the_previous_used(tmp_path, spoil, caplog):
  _, newest = _save(tmp_path, 5, 9)
  says = spoil(newest)
  found = commit.restore(tmp_path, _read)
  assert (found.value, found.number) == ("snapshot 5", 5)
  assert len(found.skipped) == 1
  assert str(newest) in found.skipped[0]
  assert says in found.skipped[0]
  assert str(newest) in caplog.text


def test_later_saves_go_on_after_a_bad_one(tmp_path):
  _, newest = _save(tmp_path, 5, 9)
  _remove_marker(newest)
  _save(tmp_path, 9)
  found = commit.restore(tmp_path, _read)
  assert (found.number, found.skipped) == (9, ())
  assert not newest.exists()  # the unfinished one was cleared away


def test_all_damaged_is_an_error_that_names_each(tmp_path):
  for folder in _save(tmp_path, 1, 2):
    _flip(folder)
  with pytest.raises(DecoupledError) as error:
    commit.restore(tmp_path, _read)
  assert "000000000001-" in str(error.value)
  assert "000000000002-" in str(error.value)


def test_only_unfinished_ones_are_as_if_nothing_was_saved(tmp_path):
  for folder in _save(tmp_path, 1):
    _remove_marker(folder)
  assert commit.restore(tmp_path, _read) is None


def test_one_that_cannot_be_read_is_passed_over(tmp_path):
  _save(tmp_path, 1, 2)

  def read(folder):
    if folder.name.startswith("000000000002"):
      raise ValueError("other structure")
    return _read(folder)

  found = commit.restore(tmp_path, read)
  assert found.number == 1
  assert "other structure" in found.skipped[0]


def test_the_newest_stay_and_those_kept_always(tmp_path):
  for number in range(6):
    _save(tmp_path, number, keep=2, keep_always=(0,))
  assert sorted(int(p.name.split("-")[0]) for p in tmp_path.iterdir()) == [
    0,
    4,
    5,
  ]


def test_saving_one_number_twice_keeps_the_good_one_until_the_end(tmp_path):
  (first,) = _save(tmp_path, 4)

  def fails(folder):
    assert first.exists()
    raise OSError(28, "No space left on device")

  with pytest.raises(DecoupledError, match="No space left on device"):
    commit.save(tmp_path, 4, fails)
  assert commit.restore(tmp_path, _read).path == str(first)
  assert list(tmp_path.iterdir()) == [first]  # nothing half-done is left
  second = commit.save(tmp_path, 4, _writer("again"))
  assert commit.restore(tmp_path, _read).path == second


def test_the_marker_is_written_last(tmp_path):
  """A process that dies while it writes leaves no snapshot."""

  class Died(BaseException):
    pass

  def dies(folder):
    _writer("half")(folder)
    raise Died

  _save(tmp_path, 1)
  with pytest.raises(Died):
    commit.save(tmp_path, 2, dies)
  found = commit.restore(tmp_path, _read)
  assert found.number == 1
  assert "was not finished" in found.skipped[0]


def test_a_store_that_is_no_folder_is_one_line(tmp_path):
  blocked = tmp_path / "file"
  blocked.write_text("")
  with pytest.raises(DecoupledError) as error:
    commit.save(blocked / "global", 1, _writer("x"))
  assert "\n" not in str(error.value)
  assert str(blocked) in str(error.value)


def test_dying_while_an_old_one_is_dropped_leaves_it_unfinished(
  tmp_path, monkeypatch
):
  old, _ = _save(tmp_path, 1, 2)
  removed = []

  def die(folder, *_, **__):
    removed.append(folder)
    raise KeyboardInterrupt  # whatever ends a process

  monkeypatch.setattr(type(commit.epath.Path(old)), "rmtree", die)
  with pytest.raises(KeyboardInterrupt):
    _save(tmp_path, 3, keep=2)
  assert [Path(folder) for folder in removed] == [old]
  with pytest.raises(commit.Unfinished):
    commit.verify(old)
