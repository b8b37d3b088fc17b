"""`status` and `stop` of a job on another machine: its syncer is asked."""

import pytest

from decoupled import cli
from decoupled.types import Phase
from decoupled.wire.client import GrpcLearnerWire
from tests.wire import fakes
from tests.wire.fakes import TOKEN, Server


@pytest.fixture
def dialled(tmp_path):
  """A running syncer, and the flags by which it is found."""
  token = tmp_path / "run.token"
  token.write_text(TOKEN)
  token.chmod(0o600)
  with Server() as server:
    yield (
      server,
      [f"--syncer_address={server.address}", f"--token_file={token}"],
    )


def test_status_says_what_the_syncer_says(dialled, capsys):
  server, flags = dialled
  wire = GrpcLearnerWire(server.address, TOKEN)
  wire.hello(fakes.hello(5, holder="node7:42"))
  wire.listen(lambda said: None, lambda why: None)
  fakes.wait_until(lambda: server.service.status().learners, "the stream")
  assert cli.main(["status", *flags]) == 0
  said = capsys.readouterr().out
  assert "run run: training" in said
  assert "learner 5 (node7:42, incarnation 1): joining" in said
  wire.close()


def test_stop_waits_until_the_run_has_ended(dialled, capsys):
  server, flags = dialled
  late = cli.main(["stop", *flags, "--limit_s=0"])
  assert late == 1
  assert "has not ended the run within 0 s" in capsys.readouterr().err
  assert server.rounds.did("drain")
  server.rounds.phase = Phase.ENDED
  server.rounds.drain = lambda *_, **__: None
  assert cli.main(["stop", *flags]) == 0
  assert "the run has ended" in capsys.readouterr().out


def test_a_syncer_that_is_not_there_is_one_line(dialled, capsys):
  _, flags = dialled
  flags[0] = "--syncer_address=127.0.0.1:9"
  assert cli.main(["status", *flags]) == 1
  said = capsys.readouterr().err
  assert said.count("\n") == 1
  assert "127.0.0.1:9" in said


@pytest.mark.parametrize("words", ["syncer", "learner/0/host/1", "learner/x"])
def test_only_whole_learners_are_drained(words, tmp_path, capsys):
  assert cli.main(["drain", words, f"--workdir={tmp_path}"]) == 2
  said = capsys.readouterr().err
  assert f"'{words}' cannot be drained: name one learner" in said
