"""Which text is read, and how it is cut into splits."""

import dataclasses

import pytest

from decoupled.data import corpus
from decoupled.data.settings import Batch, Corpus
from decoupled.errors import ConfigError


def write(folder, files):
  """Creates files whose every line names the file and the line."""
  for name, lines in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}:{i}\n" for i in range(lines)))
  return folder


def many(folder, count=200):
  return write(folder, {f"part{i % 7}/file{i}.txt": 20 for i in range(count)})


def names_in(data) -> set[str]:
  return {line.split(":")[0] for line in bytes(data).decode().splitlines()}


def test_files_are_split_whole_and_every_file_is_in_one_split(tmp_path):
  text = corpus.load(Corpus(str(many(tmp_path)), context=8))
  splits = [names_in(s) for s in (text.train, text.heldout, text.validation)]
  assert sum(map(len, splits)) == 200 == len(set.union(*splits))
  assert 3 <= len(splits[1]) <= 25
  assert text.files == 200


def test_the_split_follows_names_not_places_or_company(tmp_path):
  here = corpus.load(Corpus(str(many(tmp_path / "a")), context=8))
  more = many(tmp_path / "b")
  write(more, {f"new{i}.txt": 20 for i in range(50)})
  there = corpus.load(Corpus(str(more), context=8))
  assert names_in(here.heldout) <= names_in(there.heldout)
  assert names_in(here.train) <= names_in(there.train)


def test_the_digest_knows_names_and_contents_but_not_places(tmp_path):
  digests = []
  for name in ("a", "b", "c", "d"):
    folder = many(tmp_path / name)
    if name == "c":
      (folder / "part0/file0.txt").write_text("changed")
    if name == "d":
      (folder / "part0/file0.txt").rename(folder / "part0/renamed.txt")
    digests.append(corpus.load(Corpus(str(folder), context=8)).digest)
  assert digests[0] == digests[1]
  assert len(set(digests)) == 3


def test_few_files_are_split_by_blocks(tmp_path):
  write(tmp_path, {"book.txt": 20_000})
  text = corpus.load(Corpus(str(tmp_path / "book.txt"), context=8))
  size = (tmp_path / "book.txt").stat().st_size
  assert len(text.train) + len(text.heldout) + len(text.validation) == size
  assert 0.01 * size < len(text.heldout) < 0.2 * size


def test_path_takes_files_folders_and_globs(tmp_path):
  write(
    tmp_path,
    {
      "one.txt": 1,
      "two.log": 1,
      "deep/er/three.md": 1,
      "deep/skip.bin": 1,
      "deep/.hidden/four.md": 1,
      "g/five.text": 1,
      "g/six.text": 1,
    },
  )
  path = f"{tmp_path}/two.log,{tmp_path}/deep {tmp_path}/g/*.text"
  found = [s.name for s in corpus.find(Corpus(path))]
  assert found == ["er/three.md", "five.text", "six.text", "two.log"]


def test_a_recursive_glob_and_the_folder_find_one_file_once(tmp_path):
  write(tmp_path, {"a/b/c.md": 1})
  path = f"{tmp_path}/**/*.md {tmp_path}"
  assert [s.name for s in corpus.find(Corpus(path))] == ["a/b/c.md"]


def test_max_bytes_thins_out_whole_files_the_same_way(tmp_path):
  folder = many(tmp_path, 400)
  config = Corpus(str(folder), context=8, max_bytes=40_000)
  text, again = corpus.load(config), corpus.load(config)
  kept = len(text.train) + len(text.heldout) + len(text.validation)
  assert kept == 40_000
  assert text.digest == again.digest
  assert 64 < text.files < 150
  assert len(text.heldout) < 0.15 * kept  # thinned out evenly
  folders = {n.split("/")[0] for n in names_in(text.train)}
  # a sample of all, not the first files
  assert folders >= {f"part{i}" for i in range(7)}


def test_the_default_is_the_standard_library_without_its_tests():
  names = [s.name for s in corpus.find(Corpus())]
  assert "dataclasses.py" in names
  assert "asyncio/events.py" in names
  assert not [n for n in names if "site-packages" in n or "/test" in n]


@pytest.mark.parametrize("path", ["", "{}", "{}/*.nothing"])
def test_an_empty_corpus_names_path_and_patterns(tmp_path, path):
  path = path.format(tmp_path)
  with pytest.raises(ConfigError) as error:
    corpus.load(Corpus(path, patterns="*.nothing *.none"))
  assert (path or "standard library") in str(error.value)
  assert "*.nothing *.none" in str(error.value)


def test_a_missing_path_is_named(tmp_path):
  with pytest.raises(ConfigError, match="no file or folder"):
    corpus.load(Corpus(f"{tmp_path}/absent"))


def test_a_split_too_short_for_a_sequence_is_named(tmp_path):
  write(tmp_path, {"a.txt": 3})
  with pytest.raises(ConfigError, match=r"Corpus.context = 64 needs at least"):
    corpus.load(Corpus(str(tmp_path)))


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"context": 0}, "Corpus.context = 0"),
    ({"heldout_share": 0.0}, "Corpus.heldout_share = 0.0"),
    ({"validation_share": -0.1}, "Corpus.validation_share = -0.1"),
    ({"heldout_share": 0.6, "validation_share": 0.4}, "0.6"),
    ({"tokenizer": "words"}, "'words'"),
    ({"patterns": " "}, "Corpus.patterns"),
    ({"max_bytes": 0}, "Corpus.max_bytes = 0"),
    ({"unit_windows": 0}, "Corpus.unit_windows = 0"),
  ],
)
def test_impossible_settings_are_refused_by_name(changes, says):
  with pytest.raises(ConfigError) as error:
    dataclasses.replace(Corpus(), **changes)
  assert says in str(error.value)


def test_a_batch_has_sequences():
  with pytest.raises(ConfigError, match=r"Batch.sequences = 0"):
    Batch(0)
