"""The grammar of fault plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled.chaos import injectors
from decoupled.chaos.plan import ACTIONS, Fault, Storm, Target, parse
from decoupled.errors import ConfigError

NUMBERS = st.one_of(
  st.integers(0, 10**6).map(float),
  st.floats(0.001, 1e6, allow_nan=False),
)
SECONDS = st.one_of(st.none(), NUMBERS)
SEEDS = st.one_of(st.none(), st.integers(0, 2**32))
INDEX = st.integers(0, 99)
TARGETS = st.one_of(
  st.just(Target("syncer")),
  st.builds(Target, st.just("standby"), INDEX),
  st.builds(Target, st.just("learner"), INDEX, st.one_of(st.none(), INDEX)),
)
STORMS = st.builds(Storm, st.floats(0.01, 1e4), SECONDS, st.booleans(), SEEDS)


@st.composite
def faults(draw):
  action = draw(st.sampled_from(ACTIONS))
  unit = draw(st.sampled_from("sr"))
  at = draw(NUMBERS if unit == "s" else st.integers(1, 10**6).map(float))
  fault = Fault(action, draw(TARGETS), at, unit)
  options = {}
  if action in ("kill", "term"):
    options["restart"] = draw(st.booleans())
  else:
    options["for_s"] = draw(SECONDS)
  if action == "slow":
    options["by"] = draw(st.floats(1, 100))
  elif action in ("throttle", "corrupt", "fill"):
    options["by"] = draw(SECONDS)
  if action == "corrupt":
    options["seed"] = draw(SEEDS)
  return Fault(action, fault.target, at, unit, **options)


EVENTS = st.lists(st.one_of(faults(), STORMS), min_size=1, max_size=5)


@given(EVENTS)
def test_what_is_written_reads_the_same(events):
  assert parse("; ".join(map(str, events))) == tuple(events)


@given(EVENTS)
def test_a_file_holds_one_event_a_line(tmp_path_factory, events):
  file = tmp_path_factory.mktemp("plan") / "plan.txt"
  lines = [f"{event}  # {number}" for number, event in enumerate(events)]
  file.write_text("# a plan\n\n" + "\n".join(lines) + "\n")
  assert parse(f"@{file}") == tuple(events)


@given(st.text("kilterm/0123 ;@rsfobyn.h#", max_size=40))
def test_any_text_is_a_plan_or_one_line_with_a_column(text):
  if text.strip().startswith("@"):
    return
  message = "column"
  try:
    parse(text)
  except ConfigError as error:
    message = str(error)
  assert "column" in message
  assert "\n" not in message


@pytest.mark.parametrize(
  ("text", "event"),
  [
    ("kill learner/1 @150r", Fault("kill", Target("learner", 1), 150, "r")),
    (
      "kill learner/1@1.5s norestart",
      Fault("kill", Target("learner", 1), 1.5, restart=False),
    ),
    (
      "pause learner/0 @ 20 s for 20s",
      Fault("pause", Target("learner", 0), 20, for_s=20),
    ),
    (
      "slow learner/2 @10s by 3 for 5 s",
      Fault("slow", Target("learner", 2), 10, for_s=5, by=3),
    ),
    ("partition syncer @3r;", Fault("partition", Target("syncer"), 3, "r")),
    (
      "kill learner/1/host/0 @2s",
      Fault("kill", Target("learner", 1, 0), 2),
    ),
    ("storm 12/h seed 7", Storm(12, seed=7)),
  ],
)
def test_examples(text, event):
  assert parse(text) == (event,)


def test_an_empty_plan_has_no_events():
  assert parse("") == parse("  ") == ()


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", None),
    (
      "kil learner/1 @150r",
      "chaos plan, column 1: expected one of kill, term, pause, slow, "
      "partition, throttle, corrupt, fill or storm, found 'kil'",
    ),
    (
      "kill lerner/1 @150r",
      "chaos plan, column 6: expected a target: learner/N, learner/N/host/M, "
      "syncer, standby/N, found 'lerner/1'",
    ),
    (
      "kill learner @150r",
      "chaos plan, column 14: expected '/' and a number after learner, found "
      "'@150r'",
    ),
    (
      "kill learner/1 150r",
      "chaos plan, column 16: expected '@' and when, such as @150r or @20s, "
      "found '150r'",
    ),
    (
      "kill learner/1 @150",
      "chaos plan, column 20: expected 's' (seconds) or 'r' (round) after the "
      "number, found the end",
    ),
    (
      "kill learner/1 @1.5r",
      "chaos plan, column 17: expected a whole round from 1 on, found '1.5r'",
    ),
    (
      "kill learner/1 @5s for 3s",
      "chaos plan, column 20: expected an option that kill takes (norestart), "
      "found 'for'",
    ),
    (
      "pause learner/1 @5s for 3",
      "chaos plan, column 26: expected 's' after the number (for 20s), found "
      "the end",
    ),
    (
      "pause learner/1 @5s for 3s for 4s",
      "chaos plan, column 28: expected 'for' only once, found 'for'",
    ),
    (
      "kill learner/1 @5s; pause syncer @x",
      "chaos plan, column 35: expected a number of seconds or a round, such as "
      "20s or 150r, found 'x'",
    ),
    (
      "slow learner/1 @5s by 0.5",
      "chaos plan, column 23: expected a factor of at least 1, found '0.5'",
    ),
    (
      "slow learner/1 @5s",
      "chaos plan, column 19: expected 'by' and a factor, such as by 3 (slow), "
      "found the end",
    ),
    (
      "storm 12 seed 3",
      "chaos plan, column 10: expected '/h' after the rate, found 'seed'",
    ),
    (
      "storm 0/h",
      "chaos plan, column 7: expected a rate above 0, found '0/h'",
    ),
    (
      "kill syncer @5s kill learner/1 @5s",
      "chaos plan, column 17: expected one of for, by, norestart, seed, or ';' "
      "and the next event, found 'kill'",
    ),
  ],
)
def test_mistakes_bring_the_column_and_what_was_expected(text, message):
  if message is None:
    assert parse(text) == ()
    return
  with pytest.raises(ConfigError) as caught:
    parse(text)
  assert str(caught.value) == message


def test_a_mistake_in_a_file_brings_its_line(tmp_path):
  file = tmp_path / "plan.txt"
  file.write_text("kill learner/1 @5s\n\nkill lerner/1 @5s\n")
  with pytest.raises(ConfigError, match=rf"{file}, line 3, column 6: "):
    parse(f"@{file}")
  with pytest.raises(ConfigError, match="No such file"):
    parse(f"@{tmp_path / 'other.txt'}")


@pytest.mark.parametrize(
  "text",
  [
    "fill syncer @5s",
    "corrupt learner/0 @5s",
    "throttle learner/0 @5s by 2",
    "slow syncer @5s by 2",
  ],
)
def test_what_cannot_be_injected_yet_is_refused_by_name(text):
  with pytest.raises(ConfigError, match="not available yet") as caught:
    injectors.check(parse(text), learners=3)
  assert text.split()[0] in str(caught.value)


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("kill learner/0/host/1 @5s", "--hosts_per_learner=1"),
    ("kill standby/0 @5s", "--standbys=0"),
  ],
)
def test_hosts_and_standbys_that_are_not_there_are_refused(text, says):
  with pytest.raises(ConfigError, match=says):
    injectors.check(parse(text), learners=3)


def test_a_learner_that_does_not_exist_is_refused():
  with pytest.raises(ConfigError, match=r"learner/3 .* --learners=3"):
    injectors.check(parse("kill learner/3 @5s"), learners=3)


def test_only_partitioned_learners_go_through_a_proxy():
  plan = parse("kill learner/0 @5s; partition learner/2 @5s for 3s")
  assert injectors.partitioned(plan, learners=3) == {2}
  plan = parse("partition syncer @5s for 3s")
  assert injectors.partitioned(plan, learners=3) == {0, 1, 2}
