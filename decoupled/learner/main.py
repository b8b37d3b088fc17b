"""The process of a learner: prepare, then take part.

The order is the point: everything that takes long (imports, compilation, the
corpus) is done before the id is claimed.
"""

import logging
import os
import sys
from typing import NoReturn

from decoupled import faults
from decoupled.config import Config
from decoupled.errors import DecoupledError
from decoupled.launch import folders
from decoupled.launch.options import LearnerOptions
from decoupled.launch.termination import Termination
from decoupled.learner import joining, program, taking_part
from decoupled.learner.phases import Phases
from decoupled.types import RunContract
from decoupled.wire import client

_LOG = logging.getLogger("decoupled.learner")


def run(config: Config, options: LearnerOptions) -> int:
  """Runs one learner to the end of the run; returns the exit status.

  Raises:
    DecoupledError: with the line that the user reads.
  """
  faults.arm(options.role(options.learner_id))
  folders.prepare(options.workdir)
  named = options.role(options.learner_id) if options.learner_id >= 0 else ""
  end = Termination(named or "learner", config.limits.grace_s)
  end.events = taking_part.log_of(options)
  try:
    return _run(config, options, end)
  except Exception as error:
    if options.num_processes == 1:
      raise
    _leave_the_job(error, options)
  finally:
    end.close()


def _leave_the_job(error: Exception, options: LearnerOptions) -> NoReturn:
  """Ends this process at once: its learner's other hosts may be gone.

  To go in order would mean to wait for them.
  """
  if not isinstance(error, DecoupledError):
    _LOG.error("the step of several hosts failed", exc_info=error)
  first = (str(error).splitlines() or [type(error).__name__])[0]
  print(
    f"decoupled learner: host {options.process_id} of learner "
    f"{options.learner_id} leaves: {first}",
    file=sys.stderr,
    flush=True,
  )
  logging.shutdown()
  os._exit(1)


def _run(config: Config, options: LearnerOptions, end: Termination) -> int:
  phases = Phases()
  wire: client.GrpcLearnerWire | None = None
  asked: RunContract | None = None
  if not joining.complete(config, options):
    wire = joining.dial(config, options)
    asked = wire.contract(joining.holder())
    config, options = joining.adopt(config, options, asked)
    _LOG.info("the contract of run %s is taken over", asked.run_id)
  prepared = program.prepare(config, options, asked)
  state = prepared.initial()
  phases.mark("compiled")
  wire = wire or joining.dial(config, options)
  end.goodbye = wire.leave
  part = taking_part.assemble(prepared, wire, state, end)
  welcome = taking_part.claim(part, options.learner_id)
  return taking_part.take_part(part, welcome, phases)
