"""The library door: `from decoupled.link import connect`; see docs/library.md.

Names are looked up when they are asked for, so that the light modules of this
package can be imported without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from decoupled.link.link import Link, connect

__all__ = ["Link", "connect"]


def __getattr__(name: str) -> Any:
  if name in __all__:
    return getattr(importlib.import_module("decoupled.link.link"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
