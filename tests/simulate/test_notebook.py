"""The notebook runs from top to bottom, and is committed without outputs."""

import json
import pathlib
import sys
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

PATH = pathlib.Path(__file__).parents[2] / "notebooks" / "goodput.ipynb"
LIMIT_S = 120


@pytest.fixture
def notebook() -> Any:
  return nbformat.read(PATH, as_version=4)


@pytest.fixture
def kernel(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncKernelManager:
  """A kernel of this interpreter, whatever is installed on the machine."""
  spec = tmp_path / "kernels" / "here"
  spec.mkdir(parents=True)
  launch = [sys.executable, "-m", "ipykernel_launcher"]
  (spec / "kernel.json").write_text(
    json.dumps(
      {
        "argv": [*launch, "-f", "{connection_file}"],
        "display_name": "here",
        "language": "python",
      }
    )
  )
  for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
    monkeypatch.setenv(name, str(tmp_path / name.lower()))
  specs = KernelSpecManager(kernel_dirs=[str(spec.parent)])
  return AsyncKernelManager(kernel_name="here", kernel_spec_manager=specs)


def test_it_runs_on_a_reduced_size(
  notebook: Any, kernel: AsyncKernelManager, tmp_path: pathlib.Path
) -> None:
  (parameters,) = [
    cell
    for cell in notebook.cells
    if "parameters" in cell.metadata.get("tags", ())
  ]
  quick = parameters.source.replace("QUICK = False", "QUICK = True")
  assert quick != parameters.source
  parameters.source = quick
  client = NotebookClient(
    notebook,
    km=kernel,
    timeout=LIMIT_S,
    resources={"metadata": {"path": str(tmp_path)}},
  )
  client.execute(cwd=str(tmp_path))
  outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
  pictures = [o for o in outputs if "image/png" in o.get("data", {})]
  assert len(pictures) == 1
  text = "".join(o.get("text", "") for o in outputs)
  assert "published" in text
  assert "decoupled cells (predicted):" in text
  assert "2 standbys: goodput" in text


def test_its_outputs_are_stripped(notebook: Any) -> None:
  nbformat.validate(notebook)
  for cell in notebook.cells:
    if cell.cell_type == "code":
      assert cell.outputs == []
      assert cell.execution_count is None
  allowed = {"kernelspec", "language_info"}
  assert set(notebook.metadata) <= allowed


def test_its_lines_fit_and_name_no_machine(notebook: Any) -> None:
  for cell in notebook.cells:
    assert max(map(len, cell.source.splitlines())) <= 80
  assert set(notebook.metadata.kernelspec) == {
    "display_name",
    "language",
    "name",
  }
