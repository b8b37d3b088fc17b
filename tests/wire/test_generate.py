"""The committed protocol code is what its sources say, and loads here."""

import importlib

import pytest
from google.protobuf import descriptor_pb2

from decoupled.wire import generate

NAMES = [path.stem for path in generate.sources()]


def test_all_protocol_files_are_known():
  assert NAMES == [
    "buddies",
    "common",
    "donations",
    "epochs",
    "fragments",
    "membership",
    "pool",
    "seats",
  ]


@pytest.mark.parametrize("name", NAMES)
def test_generated_code_is_current(name, tmp_path):
  """Compared by content: the text depends on the compiler's version."""
  target = tmp_path / "set"
  generate.protoc("--descriptor_set_out", target, plugins=False)
  made = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes())
  fresh = {file.name: file for file in made.file}
  module = importlib.import_module(
    f"decoupled.wire.proto.decoupled.v1.{name}_pb2"
  )
  committed = descriptor_pb2.FileDescriptorProto()
  module.DESCRIPTOR.CopyToProto(committed)
  for file in (committed, *fresh.values()):
    file.ClearField("source_code_info")
    _drop_json_names(file)
  assert committed == fresh[f"decoupled/v1/{name}.proto"], (
    "run `python -m decoupled.wire.generate`"
  )


@pytest.mark.parametrize("name", NAMES)
def test_generated_imports_are_those_of_the_package(name, tmp_path):
  generate.protoc("--python_out", tmp_path, plugins=False)
  fresh = tmp_path / generate.PACKAGE / f"{name}_pb2.py"
  text = generate.installed(fresh.read_text("utf-8"))
  committed = generate.PROTO / generate.PACKAGE / f"{name}_pb2.py"
  imports = [line for line in text.splitlines() if "import" in line]
  assert imports
  for line in imports:
    assert line in committed.read_text("utf-8")
  assert "from decoupled.v1" not in text


def _drop_json_names(file):
  for message in file.message_type:
    for field in message.field:
      field.ClearField("json_name")
