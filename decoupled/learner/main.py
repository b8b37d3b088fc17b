"""The process of a learner: prepare, then take part.

The order is the point: everything that takes long (imports, compilation, the
corpus) is done before the id is claimed.
"""

import logging

from decoupled import faults
from decoupled.config import Config
from decoupled.errors import ConfigError
from decoupled.launch import folders
from decoupled.launch.options import LearnerOptions
from decoupled.launch.termination import Termination
from decoupled.learner import (
  epochs,
  joining,
  program,
  reforming,
  taking_part,
)
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
    reforming.leave(error, options.role(options.learner_id))
  finally:
    end.close()


def _run(config: Config, options: LearnerOptions, end: Termination) -> int:
  phases = Phases()
  wire: client.GrpcLearnerWire | None = None
  asked: RunContract | None = None
  if not joining.complete(config, options):
    wire = joining.dial(config, options)
    asked = wire.contract(joining.holder())
    config, options = joining.adopt(config, options, asked)
    _LOG.info("the contract of run %s is taken over", asked.run_id)
  if options.num_processes > 1:
    return _host(config, options, end, wire, asked)
  prepared = program.prepare(config, options, asked)
  state = prepared.initial()
  phases.mark("compiled")
  wire = wire or joining.dial(config, options)
  end.goodbye = wire.leave
  part = taking_part.assemble(prepared, wire, state, end)
  welcome = taking_part.claim(part, options.learner_id)
  return taking_part.take_part(part, welcome, phases)


def _host(
  config: Config,
  options: LearnerOptions,
  end: Termination,
  wire: client.GrpcLearnerWire | None,
  asked: RunContract | None,
) -> int:
  """One host of a learner of several."""
  if options.learner_id < 0:
    raise ConfigError(
      f"--num_processes={options.num_processes} needs --learner_id=N, the same "
      "for all hosts of the learner"
    )
  program.simulate(options.devices_per_host)
  epochs.prepare(reforming.limits_of(config))
  outline = program.outline(config, options, asked)
  wire = wire or joining.dial(config, options)
  end.goodbye = wire.leave
  rank = options.process_id
  return reforming.Host(outline, wire, end, options.learner_id, rank).run()
