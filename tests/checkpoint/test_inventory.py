"""What lies in a store is listed, and damage is named by file and step."""

import json
from pathlib import Path

import pytest

from decoupled import cli
from decoupled.checkpoint import commit, inventory


def saved(store: Path, group: str, number: int, **said) -> Path:
  def write(folder):
    name = "state.json" if group == "global" else "meta.json"
    (folder / name).write_text(json.dumps({"run_id": "run-1", **said}))
    (folder / "arrays").mkdir()
    (folder / "arrays" / "data").write_bytes(bytes(2048))

  return Path(commit.save(store / group, number, write))


@pytest.fixture
def store(tmp_path):
  for number, term in ((0, 1), (40, 1), (30, 2)):
    saved(tmp_path / "checkpoints", "global", number, term=term)
  saved(tmp_path / "checkpoints", "learner_0", 44)
  return tmp_path / "checkpoints"


def verify(capsys, *arguments):
  status = cli.main(["checkpoints", *map(str, arguments)])
  said = capsys.readouterr()
  return status, said.out, said.err


def test_list_shows_every_snapshot_newest_first(store, capsys):
  status, out, err = verify(capsys, "list", f"--workdir={store.parent}")
  assert (status, err) == (0, "")
  head, *rows = out.splitlines()
  assert head.split() == [
    *("group", "number", "term", "state", "size", "written", "run", "path"),
  ]
  # of the highest term first: that is the one that would be restored
  assert [row.split()[:3] for row in rows[:3]] == [
    ["global", "30", "2"],
    ["global", "40", "1"],
    ["global", "0", "1"],
  ]
  assert rows[3].split()[:3] == ["learner_0", "44", "committed"]
  assert "2.0 KiB" in rows[0]
  assert "run-1" in rows[0]


@pytest.mark.parametrize("part", ["", "global", "global/snapshot"])
def test_a_store_a_group_or_one_snapshot_may_be_named(store, capsys, part):
  where = store / part
  if part.endswith("snapshot"):
    where = Path(commit.folders(store / "global")[0])
  status, out, _ = verify(capsys, "verify", where, "--json")
  assert status == 0
  entries = json.loads(out)
  assert len(entries) == {"": 4, "global": 3}.get(part, 1)
  assert {e["state"] for e in entries} == {"good"}
  assert entries[0]["group"] == "global"
  assert entries[0]["bytes"] > 2048


def test_damage_is_named_with_file_and_step_and_is_no_success(store, capsys):
  folder = Path(commit.folders(store / "global")[0])  # round 40
  data = folder / "arrays" / "data"
  data.write_bytes(b"x" + data.read_bytes()[1:])
  unfinished = Path(commit.folders(store / "learner_0")[0])
  (unfinished / commit.MARKER).unlink()
  status, out, err = verify(capsys, "verify", f"--store={store}")
  assert status == 1
  damaged, torn = err.splitlines()
  assert damaged.startswith("damaged: global 40: ")
  assert "arrays/data has other bytes than saved" in damaged
  assert str(folder) in damaged
  assert torn.startswith("unfinished: learner_0 44: ")
  states = [row.split() for row in out.splitlines()]
  assert sum("damaged" in row for row in states) == 1
  # `list` does not read the files, and says no more than it knows
  status, _, err = verify(capsys, "list", f"--store={store}")
  assert status == 0
  assert err.startswith("unfinished: learner_0 44")


def test_an_unfinished_one_alone_is_no_damage(store, capsys):
  (Path(commit.folders(store / "global")[0]) / commit.MARKER).unlink()
  status, _, err = verify(capsys, "verify", f"--store={store}")
  assert status == 0
  assert "unfinished: global 40" in err


@pytest.mark.parametrize(
  ("words", "says"),
  [
    ((), "'nothing'"),
    (("look",), "'look'"),
    (("list", "a", "b"), "'list a b'"),
  ],
)
def test_other_words_are_refused(capsys, words, says):
  status, _, err = verify(capsys, *words)
  assert status == 2
  assert says in err
  assert "verify" in err


def test_nothing_there_is_said(tmp_path, capsys):
  status, _, err = verify(capsys, "verify", tmp_path / "absent")
  assert status == 1
  assert f"no snapshot lies under {tmp_path / 'absent'}" in err


def test_one_that_is_dropped_meanwhile_is_not_missed(store, monkeypatch):
  import shutil

  check = commit.verify

  def drop(folder):
    if folder.name.startswith("000000000040"):
      shutil.rmtree(folder)
    check(folder)

  monkeypatch.setattr(commit, "verify", drop)
  entries = inventory.inventory(store, verify=True)
  assert [(e.number, e.state) for e in entries] == [
    (30, "good"),
    (0, "good"),
    (44, "good"),
  ]
