"""The page is one self-contained file and escapes what it is given."""

import re
from html.parser import HTMLParser

import pytest

from decoupled.errors import DecoupledError
from decoupled.observe import page, report

VOID = {"meta", "circle", "rect", "line", "path", "polyline"}


class Tags(HTMLParser):
  """Checks that what is opened is closed, and gathers tags."""

  def __init__(self, text):
    super().__init__()
    self.open, self.seen, self.attributes, self.text = [], [], [], []
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.seen.append(tag)
    self.attributes += attrs
    if tag != "meta":
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.seen.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def test_page_is_well_formed_and_needs_nothing_else(demo_workdir):
  report.write(demo_workdir)
  text = page.write(demo_workdir).read_text()
  tags = Tags(text)
  assert not {"script", "link", "img", "iframe"} & set(tags.seen)
  assert not re.search(r"https?://|@import|url\(", text)
  names = {name for name, _ in tags.attributes}
  assert not {"src", "href", "onload", "onclick"} & names


def test_page_shows_losses_learners_failures_and_survivors(demo):
  tags = Tags(page.build(demo, report.build(demo)))
  text = " ".join(tags.text)
  assert "5.610 → 1.830" in text
  assert "learner/1 was killed at 15.0 s, back at 21.1 s" in text
  assert "down for" in text
  assert "undisturbed" in text
  # learner 1 in two pieces, the others in one
  assert tags.seen.count("polyline") == 4


def test_everything_is_escaped(demo):
  evil = "<script>alert('\"x&')</script>"
  for event in demo:
    for key in ("run_id", "target", "role", "why", "wall_time", "codec"):
      if key in event:
        event[key] = evil
    if event["kind"] == "discard":
      event["cause"] = evil
  made = report.build(demo, status=evil, exit_reason=evil)
  text = page.build(demo, made)
  assert "<script" not in text
  assert "&lt;script&gt;" in text
  assert not {"script"} & set(Tags(text).seen)


@pytest.mark.parametrize("keep", [0, 1, 4, 10, 200])
def test_page_of_a_log_cut_off(demo, keep):
  events = demo[:keep]
  Tags(page.build(events, report.build(events)))


def test_long_runs_stay_small(demo):
  many = [
    {**event, "t": event["t"] + i / 50}
    for event in demo
    if event["kind"] == "steps"
    for i in range(40)
  ]
  events = sorted([*demo, *many], key=lambda e: e["t"])
  assert len(page.build(events, report.build(events))) < 100_000


def test_no_log_is_one_line(tmp_path):
  with pytest.raises(DecoupledError, match="cannot write"):
    page.write(tmp_path)
