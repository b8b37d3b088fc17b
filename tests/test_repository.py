"""What must hold of the repository as a whole, and is cheap to check."""

import importlib
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import decoupled
from decoupled import cli, config

ROOT = Path(__file__).parents[1]
_IGNORED = {"runs", "build", "dist", "node_modules"}
_TEXT = {
  *("", ".cfg", ".gin", ".json", ".jsonl", ".md", ".proto", ".py", ".pyi"),
  *(".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"),
}
# Written in pieces, so that this file does not find itself.
_KEY = re.compile("-----BEGIN " + r"[A-Z ]*(PRIVATE KEY|CERTIFICATE)-----")
_SECRET = re.compile(
  r"\b(AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}|hf_[A-Za-z0-9]{34}"
  r"|xox[abp]-[0-9A-Za-z-]{20,}|AIza[0-9A-Za-z_-]{35})"
)
_MACHINE = re.compile(
  r"(?<![\w.<>}/-])/(work|opt|root|home(?!/me\b)|Users|mnt|workspace)/[\w.]"
)


def files() -> list[Path]:
  """The text files of the checkout: tracked ones, or all without git."""
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False
  )
  if listed.returncode == 0 and listed.stdout:
    found = [ROOT / os.fsdecode(n) for n in listed.stdout.split(b"\0") if n]
  else:
    found = [p for p in ROOT.rglob("*") if not _skipped(p.relative_to(ROOT))]
  return [p for p in found if p.is_file() and p.suffix in _TEXT]


def _skipped(path: Path) -> bool:
  return any(
    part in _IGNORED or part == "__pycache__" or part.startswith(".venv")
    for part in path.parts
  )


def modules() -> list[str]:
  return [
    "decoupled",
    *(m.name for m in pkgutil.walk_packages(decoupled.__path__, "decoupled.")),
  ]


def test_every_module_imports() -> None:
  names = modules()
  assert len(names) > 80
  for name in names:
    importlib.import_module(name)


def test_light_modules_start_no_jax() -> None:
  """The command line answers before anything heavy is loaded."""
  code = (
    "import sys, decoupled.cli, decoupled.config, decoupled.link\n"
    "heavy = {'jax', 'flax', 'optax', 'orbax', 'grain', 'grpc'}\n"
    "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, f"loaded: {done.stderr}"


def test_the_door_of_the_library_opens() -> None:
  from decoupled.link import Link, connect
  from decoupled.link import link as module

  assert connect is module.connect
  assert Link is module.Link


def test_no_keys_and_no_secrets() -> None:
  found = files()
  assert len(found) > 100
  for path in found:
    text = path.read_text("utf-8")
    assert not _KEY.search(text), f"a key block in {path}"
    assert not _SECRET.search(text), f"a credential in {path}"


def test_nothing_about_one_machine() -> None:
  for path in files():
    if path.name == "LICENSE":
      continue
    hits = [
      line
      for line in path.read_text("utf-8").splitlines()
      if _MACHINE.search(line)
    ]
    assert not hits, f"{path} names a path of some machine: {hits[0].strip()}"


@pytest.mark.parametrize(
  "path", sorted((ROOT / "configs").glob("*.gin")), ids=lambda p: p.name
)
def test_every_shipped_config_is_possible(path: Path) -> None:
  resolved = config.resolve([path])
  config.validate(resolved, learners=4, devices=2)
  first = path.read_text("utf-8").splitlines()[0]
  assert first.startswith("# "), f"{path.name} does not say what it is"


def test_the_default_config_is_the_default() -> None:
  shipped = config.resolve([ROOT / "configs" / "stdlib_tiny.gin"])
  assert shipped == config.resolve()


# ---- documents ---------------------------------------------------------------


def _documents() -> list[Path]:
  return [
    *(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
  ]


def _code(text: str) -> str:
  """Fenced blocks and code spans, a line each; `\\` continues a line."""
  blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
  rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
  spans = re.findall(r"`([^`]+)`", rest)
  return re.sub(r"\\\n\s*", "", "\n".join([*blocks, *spans]))


@pytest.mark.parametrize("path", _documents(), ids=lambda p: p.name)
def test_make_targets_of_the_documents_exist(path: Path) -> None:
  makefile = (ROOT / "Makefile").read_text("utf-8")
  targets = set(re.findall(r"^([a-z-]+%?):", makefile, re.MULTILINE))
  benchmarks = {p.stem for p in (ROOT / "benchmarks").glob("*.py")}
  for target in re.findall(
    r"^make ([\w-]+)", _code(path.read_text("utf-8")), re.M
  ):
    if target.startswith("bench-"):
      assert target.removeprefix("bench-") in benchmarks
    else:
      assert target in targets, f"{path.name} wants `make {target}`"


@pytest.mark.parametrize("path", _documents(), ids=lambda p: p.name)
def test_commands_of_the_documents_parse(path: Path) -> None:
  lines = _code(path.read_text("utf-8")).splitlines()
  for line in lines:
    words = _words(line)
    if (
      words[:1] != ["decoupled"] or len(words) < 2 or "<" in line or "…" in line
    ):
      continue
    name, *rest = words[1:]
    if name == "help":
      continue
    assert name in cli.COMMANDS, f"{path.name}: {line}"
    _, gin_files, bindings = cli.parse(name, rest)
    if gin_files != ["CONFIG.gin"]:  # stands for one of the reader's own
      config.resolve([ROOT / f for f in gin_files], bindings)


def _words(line: str) -> list[str]:
  return [w for w in shlex.split(line, comments=True) if w != "&"]


@pytest.mark.parametrize("path", _documents(), ids=lambda p: p.name)
def test_links_of_the_documents_lead_somewhere(path: Path) -> None:
  text = path.read_text("utf-8")
  for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
    if not re.match(r"[a-z]+:", link):
      assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_files_that_the_readme_names_exist() -> None:
  text = (ROOT / "README.md").read_text("utf-8")
  named = re.findall(
    r"`((?:decoupled|configs|docs|examples|benchmarks|tests|tools)/[\w./-]+)`",
    text,
  )
  assert named
  for name in named:
    assert (ROOT / name).exists(), f"README.md names {name}"


def test_commands_that_are_not_there_yet_are_called_planned() -> None:
  readme = (ROOT / "README.md").read_text("utf-8")
  planned = [n for n, c in cli.COMMANDS.items() if c.options is None]
  section = readme.partition("## Promises and non-goals")[2]
  for name in planned:
    assert f"`{name}`" in section, f"README.md does not say {name} is planned"


def test_generated_pages_are_current() -> None:
  done = subprocess.run(
    [sys.executable, "tools/reference.py", "--check"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def test_the_ci_runs_the_readme_test_command() -> None:
  assert "run make test\n" in (ROOT / ".ci" / "run").read_text("utf-8")
  assert "make test" in (ROOT / "README.md").read_text("utf-8")


def test_set_up_names_what_is_missing(tmp_path: Path) -> None:
  """A machine without Python gets one line with the command to type."""
  tools = tmp_path / "bin"
  tools.mkdir()
  for name in ("sh", "dirname", "cksum", "cat", "pwd"):
    (tools / name).symlink_to(_which(name))
  for present, expected in (
    ((), "git is missing: sudo apt-get install git"),
    (("git",), "make is missing: sudo apt-get install make"),
    (("git", "make"), "sudo apt-get install python3.11 python3.11-venv"),
  ):
    for name in present:
      if not (tools / name).exists():
        (tools / name).symlink_to("/bin/true")
    done = subprocess.run(
      [str(tools / "sh"), str(ROOT / "tools/setup.sh"), str(tmp_path / "venv")],
      env={"PATH": str(tools)},
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith(expected)
    assert len(done.stderr.strip().splitlines()) == 1


def test_set_up_names_a_missing_venv(tmp_path: Path) -> None:
  """Debian packs venv apart from Python: that one is named."""
  tools = tmp_path / "bin"
  tools.mkdir()
  for name in ("sh", "dirname", "cksum", "cat", "pwd"):
    (tools / name).symlink_to(_which(name))
  for name in ("git", "make"):
    (tools / name).symlink_to("/bin/true")
  python = tools / "python3.11"
  python.write_text(
    "#!/bin/sh\n"
    'case "$*" in *venv) exit 1 ;; esac\n'
    f'exec {sys.executable} "$@"\n'
  )
  python.chmod(0o755)
  done = subprocess.run(
    [str(tools / "sh"), str(ROOT / "tools/setup.sh"), str(tmp_path / "venv")],
    env={"PATH": str(tools)},
    capture_output=True,
    text=True,
    check=False,
  )
  version = f"{sys.version_info.major}.{sys.version_info.minor}"
  assert done.returncode == 1
  assert done.stderr == (
    "set-up: python3.11 has no venv: sudo apt-get install "
    f"python{version}-venv\n"
  )


def _which(name: str) -> str:
  found = shutil.which(name)
  assert found is not None, name
  return found
