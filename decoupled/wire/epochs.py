"""A host's calls to the coordinator of its learner."""

from collections.abc import Callable
from typing import Any

import grpc

from decoupled.wire import client, credentials
from decoupled.wire import tls as tls_lib
from decoupled.wire.address import Address
from decoupled.wire.proto.decoupled.v1 import epochs_pb2 as pb
from decoupled.wire.proto.decoupled.v1 import epochs_pb2_grpc as pb_grpc

_CALL_S = 10.0
_SLACK_S = 5.0  # for the answer to a call that waits


class EpochsClient:
  """Calls to one coordinator; close it after use.

  Every call raises Refused (with a reason) and Unreachable.

  Args:
    address: of the coordinator.
    token: of the run.
    tls: whom to believe, None for plain text.
  """

  def __init__(
    self, address: Address, token: str, tls: tls_lib.ClientTls | None = None
  ):
    self._address = address
    self._metadata = credentials.metadata(token)
    self._channel = credentials.channel(
      address, token, tls.credentials if tls else None
    )
    self._stub = pb_grpc.EpochsStub(self._channel)

  def open(self, learner_id: int, epoch: int, hosts: int) -> str:
    """`host:port` of an epoch's coordination service; starts it if need be."""
    asked = pb.OpenRequest(learner_id=learner_id, epoch=epoch, hosts=hosts)
    return str(self._call(self._stub.Open, asked, _CALL_S).address)

  def gather(
    self,
    learner_id: int,
    epoch: int,
    hosts: int,
    rank: int,
    holder: str,
    limit_s: float,
  ) -> str:
    """The same, once all ranks have asked; `missing` names the others."""
    asked = pb.GatherRequest(
      epoch=pb.OpenRequest(learner_id=learner_id, epoch=epoch, hosts=hosts),
      rank=rank,
      holder=holder,
      limit_s=limit_s,
    )
    answer = self._call(self._stub.Gather, asked, limit_s + _SLACK_S)
    return str(answer.address)

  def close_epochs(self, learner_id: int, epoch: int) -> int:
    """Ends a learner's services up to an epoch; returns how many ran."""
    asked = pb.CloseRequest(learner_id=learner_id, epoch=epoch)
    return int(self._call(self._stub.Close, asked, _CALL_S).closed)

  def close(self) -> None:
    self._channel.close()

  def __enter__(self) -> "EpochsClient":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _call(
    self, method: Callable[..., Any], request: Any, limit_s: float
  ) -> Any:
    try:
      return method(request, timeout=limit_s, metadata=self._metadata)
    except grpc.RpcError as error:
      raise client.failure(
        error, self._address, limit_s, "coordinator"
      ) from None
