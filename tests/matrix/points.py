"""The points of `decoupled.faults`, by who passes them and how often."""

CHECKPOINT = (
  "checkpoint.begun",
  "checkpoint.half_written",
  "checkpoint.file",
  "checkpoint.before_commit",
  "checkpoint.committed",
)
LEARNER = (
  "link.joined",
  "link.before_report",
  "link.after_report",
  "link.extracting",
  "link.landed",
  "link.pull_received",
  "link.staged",
  "link.adopting",
  "wire.half_sent",
  "wire.half_received",
  *CHECKPOINT,
)
SYNCER = (
  "syncer.granted",
  "syncer.report_received",
  "syncer.half_received",
  "syncer.received",
  "syncer.half_sent",
  "syncer.merging",
  "syncer.merged",
  "syncer.before_broadcast",
  "syncer.renewing",
  *CHECKPOINT,
)
# passed once at each connection: a cut first, and a start after each death
ONCE = ("link.joined", "syncer.granted")
# passed for each of the 24 fragments before the first step
START = ("link.staged", "link.adopting", "wire.half_received")
TRAINING = 30
# passed when a learner comes back while others train
DONOR = ("donor.asked", "donor.donating")
JOINER = "donor.receiving"
RELAY = "syncer.relaying"
# at the end of a run each point is passed once
LEARNER_END = ("link.drained", "learner.finished")
SYNCER_END = ("syncer.draining", "syncer.ended")
