"""A small zeusd over a Unix socket, as its HTTP API is documented; remembers requests."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

GPUS = {
    "0000:01:00.0": {"id": 0},
    "0000:41:00.0": {"id": 1},
}
ALL_GROUPS = ("gpu-control", "gpu-read", "cpu-read")


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    request_queue_size = 64
    daemon: FakeZeusd


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_one_request(self):
        # A client that goes away in the middle is no failure of a test.
        with suppress(ConnectionError):
            super().handle_one_request()

    def do_GET(self):
        if self.server.daemon.raw is None:
            self.server.daemon.handle(self)
        else:
            self.wfile.write(self.server.daemon.raw)
            self.close_connection = True

    do_POST = do_GET  # noqa: N815 - http.server finds handlers by name

    def log_message(self, *arguments):
        pass

    def reply(self, status, answer=None):
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class FakeZeusd:
    """Listens from the start; its offers may be changed any time.

    Attributes:
        gpus: {pci_address: {"id": number}}; the fields are those of /discover.
        tokens: {token: scopes}, None for a daemon that wants no token.
        fault: (status, answer) given to every write, None for success.
        offer: what /discover answers instead of the truth.
        raw: bytes that are the answer to everything, as of something that is no zeusd.
        wait_for: cleared by a test that wants writes to take their time.
        changes: every write that was made, as (path, query).
        requests: every request, as "METHOD /path".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gpus = {address: dict(gpu) for address, gpu in GPUS.items()}
        self.groups = ALL_GROUPS
        self.tokens = None
        self.tokens_end_s = None
        self.fault = None
        self.offer = None
        self.raw = None
        self.wait_for = threading.Event()
        self.wait_for.set()
        self.in_write = threading.Event()
        self.changes: list[tuple[str, dict[str, str]]] = []
        self.requests: list[str] = []
        self._open: list[socket.socket] = []
        self._server: _Server | None = None
        self.start()

    def start(self):
        daemon = self

        class Server(_Server):
            address_family = socket.AF_UNIX

            def get_request(self):
                connection, address = super().get_request()
                daemon._open.append(connection)
                return connection, address

        self._server = Server(str(self.path), _Handler)
        self._server.daemon = self
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.path.unlink()
        self._end(self._server, self._open)

    def restart(self):
        """The new one listens before the old one's connections end: no client finds none."""
        server, connections = self._server, self._open
        self._open = []
        self.path.unlink()
        self.start()
        self._end(server, connections)

    def _end(self, server, connections):
        server.shutdown()
        server.server_close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connections.clear()

    def handle(self, request):
        target = urlsplit(request.path)
        self.requests.append(f"{request.command} {target.path}")
        write = target.path.startswith(("/gpu/set_", "/gpu/reset_"))
        needed = "gpu-control" if write else "gpu-read" if target.path[:5] == "/gpu/" else None
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if target.path == "/discover":
            request.reply(200, self.offer if self.offer is not None else self._discovered())
        elif needed is not None and needed not in self.groups:
            request.reply(404, {"error": f"API group '{needed}' is not enabled on this server."})
        elif self.tokens is not None and token not in self.tokens:
            request.reply(401, {"error": "Authentication required."})
        elif self.tokens is not None and needed and needed not in self.tokens[token]:
            request.reply(403, {"error": f"Token does not grant {needed}."})
        elif target.path == "/auth/whoami":
            end = {} if self.tokens_end_s is None else {"exp": self.tokens_end_s}
            request.reply(200, {"sub": "somebody", "scopes": self.tokens[token], **end})
        elif write and request.command == "POST":
            self._write(request, target.path, dict(parse_qsl(target.query)))
        else:
            request.reply(404, {"error": "No such path."})

    def _discovered(self):
        return {
            "gpus": [
                {"name": "fake", "cumulative_energy_available": True, "pci_address": address, **gpu}
                for address, gpu in self.gpus.items()
            ],
            "cpus": [],
            "enabled_api_groups": list(self.groups),
            "auth_required": self.tokens is not None,
        }

    def _write(self, request, path, query):
        self.in_write.set()
        assert self.wait_for.wait(60)
        if self.fault is not None:
            request.reply(*self.fault)
        elif query.get("gpu_ids") not in [str(gpu["id"]) for gpu in self.gpus.values()]:
            request.reply(400, {"error": "No such GPU."})
        elif query.pop("block", None) not in ("true", "false"):
            request.reply(400, {"error": "missing field block"})
        else:
            self.changes.append((path, query))
            request.reply(200)
