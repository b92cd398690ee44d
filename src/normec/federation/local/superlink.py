"""A SuperLink as its owner talks to it: register parties, start a run, ask how it goes."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError

SILENCE = 120.0  # seconds without an answer after which a SuperLink that still runs is given up
QUIET = {  # nothing leaves for Flower's servers, nothing is installed in the middle of a federation
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}


def command(certificate: Path, key: Path, authority: Path, port: int, database: Path | None = None) -> list[str]:
    """The command that starts a SuperLink on this machine: TLS on, only registered parties, a `gate` before it.

    With a `database` it knows them again after a restart; without one it is quicker.
    """
    return [
        *(sys.executable, "-m", "normec", "federation", "superlink"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *(() if database is None else ("--database", str(database))),
        *("--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


class Control:
    """The control side of a SuperLink, by Flower's own client."""

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
        """One call that must succeed; what goes wrong is said in one line."""
        import httpx

        try:
            return call(request)
        except httpx.HTTPError as error:
            raise ConnectionError(
                f"the SuperLink at {self._address} refused {type(request).__name__}: {error}"
            ) from None

    def register(self, public_key: bytes) -> int:
        """Let a party in by its public key; returns its node id. A key that is in already stays as it is."""
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest

        for node in self._ask(self._client.ListNodes, ListNodesRequest()).nodes_info:
            if node.public_key == public_key:
                return int(node.node_id)
        return int(self._ask(self._client.RegisterNode, RegisterNodeRequest(public_key=public_key)).node_id)

    def start(self, app: Path, config: Mapping[str, bool | int | float | str]) -> int:
        """Start a run of the app in a folder with settings on top of its own; returns Flower's run id."""
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
            raise UsageError(f"the SuperLink did not take the app in {app}")
        return int(answer.run_id)

    def outcome(self, run: int) -> str | None:
        """None while a run goes on, or nothing is known; then "" if it completed, else what Flower says of its end.

        Raises `TimeoutError` once the SuperLink has not answered for `SILENCE` seconds.
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
