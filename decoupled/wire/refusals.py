"""A refusal on its way from a server to `client.failure`, which reads it."""

from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from decoupled.errors import Refused

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


async def refuse(context: Context, error: Refused) -> NoReturn:
  """Ends a call with a refusal that the client can read back."""
  details = f"{error.reason}: {error}"
  await context.abort(grpc.StatusCode.FAILED_PRECONDITION, details)
