"""Control a SuperLink as its owner: register parties, start a run, and query its outcome."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..flower.programs import FLOWER_NODES

SILENCE = 120.0  # seconds without an answer after which a running SuperLink counts as failed
QUIET = {  # no telemetry, no update checks, and short polling intervals
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}


def command(
    certificate: Path,
    key: Path,
    authority: Path,
    port: int,
    database: Path | None = None,
    flower_nodes: bool = False,
) -> list[str]:
    """The command that starts a SuperLink on this machine, with TLS, registered parties and `access_control`.

    Args:
        certificate: The certificate of the SuperLink.
        key: The private key of the certificate.
        authority: The certificate of the authority that signed it.
        port: The port on 127.0.0.1.
        database: A file with which the SuperLink remembers the parties after a restart; without one it is faster.
        flower_nodes: Whether parties may be Flower's own SuperNodes.
    """
    return [
        *(sys.executable, "-m", "normec", "federation", "superlink"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *(() if database is None else ("--database", str(database))),
        *("--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        *((FLOWER_NODES,) if flower_nodes else ()),
    ]


class Control:
    """The control interface of a SuperLink, through Flower's own client."""

    def __init__(self, address: str, authority: Path) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        self._client = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), interceptors)
        self._address, self._answered = address, time.monotonic()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ready(self) -> bool:
        """Whether the SuperLink answers."""
        import httpx
        from flwr.proto.control_pb2 import ListNodesRequest

        try:
            self._client.ListNodes(ListNodesRequest())
        except httpx.HTTPError:
            return False
        return True

    def _ask(self, call: Callable[[Any], Any], request: Any) -> Any:
        """Make a call that must succeed; a failure is reported in one line."""
        import httpx

        try:
            return call(request)
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"the SuperLink at {self._address} refused {type(request).__name__}: {error}"
            ) from None

    def register(self, public_key: bytes) -> int:
        """Register a party by its public key, unless it is registered. Returns its node id."""
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest

        for node in self._ask(self._client.ListNodes, ListNodesRequest()).nodes_info:
            if node.public_key == public_key:
                return int(node.node_id)
        return int(self._ask(self._client.RegisterNode, RegisterNodeRequest(public_key=public_key)).node_id)

    def start(self, app: Path, config: Mapping[str, bool | int | float | str]) -> int:
        """Start a run of the app in a folder, with settings in addition to its own. Returns Flower's run id."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        bundle = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        answer = self._ask(
            self._client.StartRun,
            StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config))),
        )
        if not answer.HasField("run_id"):
            raise UsageError(f"the SuperLink did not accept the app in {app}; its log says why")
        return int(answer.run_id)

    def outcome(self, run: int) -> str | None:
        """The outcome of a run: None while it is running or unknown, "" if it completed, else Flower's description.

        Raises `TimeoutError` if the SuperLink has not answered for `SILENCE` seconds.
        """
        import httpx
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            status = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        except httpx.HTTPError as error:
            if time.monotonic() - self._answered > SILENCE:
                raise TimeoutError(f"the SuperLink has not answered for {SILENCE:g} s: {error}") from None
            return None
        self._answered = time.monotonic()
        if status.status != "finished":
            return None
        return "" if status.sub_status == "completed" else f"{status.sub_status}: {status.details}".strip(": ")

    def stop(self, run: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        self._ask(self._client.StopRun, StopRunRequest(run_id=run))
