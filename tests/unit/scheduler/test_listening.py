"""Addresses that gRPC cannot listen on: it says that, and not why."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from scheduler_service import listening
from scheduler_service.errors import ConfigurationError


class _Server:
    """Refuses every address, as gRPC does."""

    def add_insecure_port(self, address: str) -> int:
        raise RuntimeError(f"Failed to bind to address {address}")


def _said(address: str) -> str:
    server: Any = _Server()
    with pytest.raises(ConfigurationError) as caught:
        listening.bind(server, address)
    return str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_that_is_taken_is_said_to_be(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((host.strip("[]"), 0))
        except OSError as error:
            pytest.skip(f"no such address on this machine: {error}")
        address = f"{host}:{taken.getsockname()[1]}"
        words = f"[server] the address must be free, got {address}: Address already in use"
        assert _said(address) == words


async def test_the_port_that_the_system_chose_is_told() -> None:
    server = grpc.aio.server()
    address = listening.bind(server, "127.0.0.1:0")
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    await server.stop(None)


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "s.sock"
    path.write_text("precious")
    assert _said(f"unix:{path}").endswith(f"got unix:{path}: Address already in use")
    assert path.read_text() == "precious"


def test_an_unknown_reason_leaves_no_socket_behind(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "s.sock"
    assert _said(f"unix:{path}") == f"[server] the address must be free, got unix:{path}"
    assert not path.exists()
