"""`/control` beside a node's metrics: shows what is asked of the running job, and asks it.

Both by the job's own `control.json`: what is asked is written down in one place, and a job that
starts again finds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, TypeAlias

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, replace_files
from envpipe_megatron.launch.agent.agent import NodeAgent
from envpipe_megatron.tuning.wishes import parse_wishes

_App: TypeAlias = Callable[..., Iterable[bytes]]
_JSON, _MOST_BYTES = "application/json", 4096
_REFUSED: dict[type[Exception], str] = {
    FileNotFoundError: "404 Not Found",
    PermissionError: "403 Forbidden",
}


def with_control(metrics: _App, agent: NodeAgent) -> _App:
    """Return the app that answers `/control`, and all else as `metrics` does."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/control":
            return metrics(environ, start_response)
        try:
            control = agent.control if agent.bill is not None else None
            if control is None:
                raise FileNotFoundError("Ask on the node of rank 0, of a job that has a folder")
            status, said = "200 OK", _answer(environ, control) | {"file": control["file"]}
        except (EnvPipeError, OSError) as error:
            status, said = _REFUSED.get(type(error), "400 Bad Request"), {"error": str(error)}
        start_response(status, [("Content-Type", _JSON)])
        return [(json.dumps(said) + "\n").encode()]

    return answer


def _answer(environ: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
    path = Path(control["file"])
    if environ["REQUEST_METHOD"] == "GET":
        try:
            return parse_wishes(read_text(path), path).to_json()
        except FileNotFoundError:
            return dict(control["asked"])
    # Nobody is asked who they are: users of this node may, pages that their browsers show may not.
    peer = ip_address(environ["REMOTE_ADDR"])
    mapped = peer.ipv4_mapped if isinstance(peer, IPv6Address) else None
    kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip()
    if not (mapped or peer).is_loopback or kind != _JSON:
        raise PermissionError(f"Ask from this node, by 127.0.0.1, with Content-Type: {_JSON}")
    length = min(int(environ.get("CONTENT_LENGTH") or 0), _MOST_BYTES)
    body = environ["wsgi.input"].read(length).decode(errors="replace")
    asked = parse_wishes(body, path).to_json()
    replace_files({path: [json.dumps(asked), "\n"]})
    return asked
