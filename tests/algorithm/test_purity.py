"""The algorithm is pure, and light where light processes need it."""

import ast
import pathlib
import subprocess
import sys

import pytest

import decoupled.algorithm

FOLDER = pathlib.Path(decoupled.algorithm.__file__).parent
MODULES = sorted(FOLDER.glob("*.py"))
FORBIDDEN = {
  "absl",
  "asyncio",
  "concurrent",
  "datetime",
  "gin",
  "grpc",
  "logging",
  "multiprocessing",
  "os",
  "queue",
  "random",
  "socket",
  "subprocess",
  "threading",
  "time",
}
OURS = ("decoupled.types", "decoupled.errors", "decoupled.algorithm")


def imported(path):
  names = []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path.name} imports relatively"
      names.append(node.module)
  return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_no_threads_sockets_clocks_or_other_parts_of_the_project(path):
  for name in imported(path):
    assert name.partition(".")[0] not in FORBIDDEN, f"{path.name}: {name}"
    if name.startswith("decoupled"):
      assert name.startswith(OURS), f"{path.name} imports {name}"


def test_only_the_outer_step_needs_jax():
  light = [p.stem for p in MODULES if p.stem not in ("__init__", "outer")]
  assert len(light) >= 8
  code = (
    "import sys\n"
    + "".join(f"import decoupled.algorithm.{name}\n" for name in light)
    + "heavy = {'jax', 'optax', 'flax', 'absl', 'grpc', 'gin'}\n"
    + "print(sorted(heavy & set(sys.modules)))"
  )
  found = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  assert found.stdout.strip() == "[]"
