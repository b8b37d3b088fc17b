"""`decoupled simulate`: a preset, a plan, or one scenario of one's own."""

import dataclasses
import json
import time
from typing import Any

from decoupled.config import Config
from decoupled.errors import ConfigError
from decoupled.launch.options import SimulateOptions
from decoupled.simulate import presets, tables
from decoupled.simulate.result import plain

_MOST_REPEATS = 8
_LEAST_REPEATS = 3
_ABSENCES = 400_000  # in all simulations of one scenario


def run(config: Config, options: SimulateOptions) -> int:
  """Simulates, prints, and draws where asked to.

  Raises:
    ConfigError: an unknown name, or a value out of its range.
    DecoupledError: the plot cannot be made.
  """
  if options.preset and options.plan:
    raise ConfigError("--preset and --plan exclude each other: choose one")
  if options.plot:  # before any minute is spent
    from decoupled.simulate import plots

    plots.available()
    plots.writable(options.plot)
  if options.preset:
    _preset(options)
  elif options.plan:
    _plan(config, options)
  else:
    _own(config, options)
  return 0


def _preset(options: SimulateOptions) -> None:
  presets.check(options.preset)
  given = [*options.scenario, *["set"] * bool(options.assign)]
  given += ["correlated"] * bool(options.correlated)
  given += ["maintenance"] * bool(options.maintenance)
  if given:
    raise ConfigError(
      f"--preset={options.preset} fixes its scenarios: drop --{given[0]}, or "
      "drop --preset to simulate one of your own"
    )
  result = presets.run(
    options.preset,
    repeats=options.repeats,
    seed=options.seed,
    quick=options.quick,
  )
  if options.plot:
    from decoupled.simulate import plots

    plots.preset(result, options.plot)
  tables.write(_json(result) if options.json else tables.preset(result))


def _plan(config: Config, options: SimulateOptions) -> None:
  from decoupled.simulate import plan, planner

  for name in ("policy", "learners", "quorum", "standbys"):
    if name in options.scenario:
      raise ConfigError(
        f"--{name}={options.scenario[name]}: --plan chooses policy, learners, "
        f"quorum and standbys; drop --{name}, or drop --plan"
      )
  found = planner.plan(
    _scenario(config, options),
    options.link_gbps,
    repeats=options.repeats,
    seed=options.seed,
    quick=options.quick,
  )
  if options.plot:
    plan.plot(found, options.plot)
  tables.write(_json(found) if options.json else plan.text(found))


def _own(config: Config, options: SimulateOptions) -> None:
  scenario = _scenario(config, options)
  if options.plot:
    raise ConfigError("--plot draws presets and plans: add --preset or --plan")
  if options.quick and "days" not in options.scenario:
    scenario = dataclasses.replace(scenario, days=1.0)
  from decoupled.simulate import engine

  started = time.perf_counter()
  repeats = options.repeats or _enough(scenario, options.quick)
  summary = engine.repeat(scenario, repeats, options.seed)
  wall_s = time.perf_counter() - started
  if options.json:
    table = {
      "scenario": scenario,
      "summary": summary,
      "repeats": repeats,
      "seed": options.seed,
      "wall_s": wall_s,
    }
    tables.write(_json(table))
  else:
    tables.write(tables.summary(scenario, summary, wall_s))


def _enough(scenario: Any, quick: bool) -> int:
  """Simulations whose mean has a narrow interval.

  Simulations of many failures differ little, and take long.
  """
  if quick:
    return 2
  each = max(1.0, scenario.expected_absences)
  return int(min(_MOST_REPEATS, max(_LEAST_REPEATS, _ABSENCES / each)))


def _scenario(config: Config, options: SimulateOptions) -> Any:
  from decoupled.simulate import own

  return own.scenario(
    config.exchange,
    float(config.transformer.parameters),
    options.scenario,
    options.assign,
    options.correlated,
    options.maintenance,
  )


def _json(table: Any) -> str:
  return json.dumps(plain(table), indent=1) + "\n"
