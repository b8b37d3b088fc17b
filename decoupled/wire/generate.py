"""Makes the Python code of the protocol: `python -m decoupled.wire.generate`.

The generated files are committed, so that neither users nor the installed
package need a compiler. Needs the `dev` extra (grpcio-tools, mypy-protobuf).
"""

import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

PROTO = pathlib.Path(__file__).parent / "proto"
PACKAGE = pathlib.Path("decoupled", "v1")
# protoc names modules after the .proto's own package; here they live deeper.
_IMPORT = re.compile(r"^(from|import) decoupled\.v1", re.MULTILINE)
_INSTALLED = r"\1 decoupled.wire.proto.decoupled.v1"


def sources() -> list[pathlib.Path]:
  """The `.proto` files, in order."""
  return sorted((PROTO / PACKAGE).glob("*.proto"))


def generate(destination: pathlib.Path) -> list[pathlib.Path]:
  """Compiles every `.proto` file.

  Args:
    destination: folder that is to hold `decoupled/v1/*_pb2*.py[i]`.

  Returns:
    The files written.

  Raises:
    subprocess.CalledProcessError: the compiler found a fault.
  """
  written = []
  with tempfile.TemporaryDirectory() as name:
    fresh = pathlib.Path(name)
    protoc("--python_out", fresh, "--mypy_out", fresh)
    protoc("--grpc_python_out", fresh, "--mypy_grpc_out", fresh)
    for path in sorted((fresh / PACKAGE).iterdir()):
      text = path.read_text("utf-8")
      if "_grpc" in path.name and "_to_server" not in text:
        continue  # a file of messages only
      target = destination / PACKAGE / path.name
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_text(installed(text), "utf-8")
      written.append(target)
  return written


def installed(text: str) -> str:
  """Generated code with the imports that work where it is installed."""
  return _IMPORT.sub(_INSTALLED, text)


def protoc(*options: str | pathlib.Path, plugins: bool = True) -> None:
  """Runs the compiler on all sources.

  Args:
    *options: in pairs, an option and the path it writes to.
    plugins: whether the options need those of mypy-protobuf.
  """
  scripts = pathlib.Path(sysconfig.get_path("scripts"))
  pairs = zip(options[::2], options[1::2], strict=True)
  command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
  command += [f"{option}={folder}" for option, folder in pairs]
  for plugin in ("mypy", "mypy_grpc") if plugins else ():
    path = scripts / f"protoc-gen-{plugin}"
    command.append(f"--plugin=protoc-gen-{plugin}={path}")
  command += [str(path) for path in sources()]
  subprocess.run(command, check=True)


def main() -> None:
  for path in generate(PROTO):
    print(path)


if __name__ == "__main__":
  main()
