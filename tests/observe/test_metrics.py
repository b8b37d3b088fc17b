"""Scalars reach TensorBoard's files and never hold up the caller."""

import threading

import pytest
from observe_logs import round_event
from tensorboardX.proto import event_pb2

from decoupled.observe import metrics
from decoupled.observe.metrics import Metrics, RoundMetrics


def _scalars(folder):
  """Reads the event files: records of length, crc, data, crc."""
  found = {}
  for path in folder.iterdir():
    data, at = path.read_bytes(), 0
    while at < len(data):
      size = int.from_bytes(data[at : at + 8], "little")
      event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      at += 16 + size
      for value in event.summary.value:
        found[(value.tag, event.step)] = value.simple_value
  return found


def test_a_learners_scalars(tmp_path):
  writer = Metrics(tmp_path / "learner-0")
  writer.step(3, loss=2.5, tokens_per_second=100.0, learning_rate=0.1)
  writer.step(
    4,
    loss=float("nan"),
    tokens_per_second=101.0,
    learning_rate=0.1,
    model_flop_utilisation=0.5,
  )
  writer.close()
  found = _scalars(tmp_path / "learner-0")
  assert found[("loss", 3)] == 2.5
  assert found[("tokens_per_second", 4)] == 101.0
  assert found[("learning_rate", 3)] == pytest.approx(0.1)
  assert found[("model_flop_utilisation", 4)] == 0.5
  assert ("loss", 4) not in found  # NaN
  assert ("model_flop_utilisation", 3) not in found  # unknown
  assert writer.dropped == 0


def test_rounds_become_scalars_and_the_drain_does_not(tmp_path):
  writer = Metrics(tmp_path / "syncer")
  sink = RoundMetrics(writer)
  sink.emit(**round_event(7, 1.0, 1.5, [0], [0, 1]))
  sink.emit(**round_event(8, 2.0, 2.5, [0], [0, 1], counted=False))
  sink.emit("phase", phase="draining", why="")
  writer.close()
  found = _scalars(tmp_path / "syncer")
  assert found[("participation", 7)] == 0.5
  assert found[("round_s", 7)] == 0.5
  assert not [key for key in found if key[1] == 8]


def test_a_slow_disk_drops_and_counts(tmp_path, monkeypatch):
  go, reached = threading.Event(), threading.Event()

  class Slow:
    def add_scalar(self, *args):
      reached.set()
      assert go.wait(30)

    def flush(self): ...

    def close(self): ...

  monkeypatch.setattr(metrics, "_writer", lambda folder: Slow())
  writer = Metrics(tmp_path, capacity=4)
  writer.scalar("x", 1.0, 0)
  assert reached.wait(30)
  for step in range(10):
    writer.scalar("x", 1.0, step)
  assert writer.dropped == 6
  go.set()
  writer.close()


def test_a_failing_disk_is_said_once(tmp_path, caplog):
  blocked = tmp_path / "file"
  blocked.write_text("")
  writer = Metrics(blocked / "metrics")
  for step in range(3):
    writer.scalar("x", 1.0, step)
  writer.close()
  assert writer.dropped == 3
  assert len([r for r in caplog.records if "cannot write" in r.message]) == 1


@pytest.mark.parametrize(
  ("kind", "peak"),
  [
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v6 lite", 918e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA A100-SXM4-40GB", 312e12),
    ("cpu", None),
  ],
)
def test_peaks(kind, peak):
  assert metrics.peak_flops(kind) == peak


def test_utilisation():
  assert metrics.flop_utilisation(1e12, 0.01, "TPU v4", 4) == pytest.approx(
    1e14 / (4 * 275e12)
  )
  assert metrics.flop_utilisation(1e12, 0.01, "cpu", 4) is None
