"""`/control` beside a node's metrics: shows what is asked of the running job, and asks it.

Both are by the job's `control.json`, which the job reads itself: there is one place where it is
written down, and a job that starts again finds it.
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
_PATH, _JSON, _MOST_BYTES = "/control", "application/json", 4096
_ELSEWHERE = "Ask on the node of rank 0, of a job with a folder (--envpipe-output, or --save)"


class _RefusedError(EnvPipeError):
    """A request that is not answered; it begins with the status."""


def with_control(metrics: _App, agent: NodeAgent) -> _App:
    """Return the app that answers `/control`, and all else as `metrics` does."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != _PATH:
            return metrics(environ, start_response)
        status, said = "200 OK", dict[str, Any]()
        try:
            said = _answer(environ, agent.control)
        except _RefusedError as refused:
            status, _, said["error"] = str(refused).partition(": ")
        except (EnvPipeError, OSError) as error:
            written = isinstance(error, EnvPipeError)
            status = "400 Bad Request" if written else "500 Internal Server Error"
            said["error"] = str(error)
        start_response(status, [("Content-Type", _JSON)])
        return [(json.dumps(said) + "\n").encode()]

    return answer


def _answer(environ: dict[str, Any], control: dict[str, Any] | None) -> dict[str, Any]:
    method = environ["REQUEST_METHOD"]
    if method not in ("GET", "PUT", "POST"):
        raise _RefusedError("405 Method Not Allowed: GET shows, PUT or POST sets")
    if control is None:
        raise _RefusedError(f"404 Not Found: {_ELSEWHERE}")
    path = Path(control["file"])
    if method == "GET":
        try:
            return parse_wishes(read_text(path), path).to_json()
        except FileNotFoundError:
            return dict(control["asked"])
    # Nobody is asked who they are: users of this node may, pages that their browsers show may not.
    peer = ip_address(environ["REMOTE_ADDR"])
    mapped = peer.ipv4_mapped if isinstance(peer, IPv6Address) else None
    if not (mapped or peer).is_loopback:
        raise _RefusedError("403 Forbidden: Ask from this node, by 127.0.0.1")
    if environ.get("CONTENT_TYPE", "").partition(";")[0].strip() != _JSON:
        raise _RefusedError(f"415 Unsupported Media Type: Send it as {_JSON}")
    length = environ.get("CONTENT_LENGTH", "")
    if not length.isdigit() or int(length) > _MOST_BYTES:
        raise _RefusedError(f"413 Content Too Large: Send {_MOST_BYTES} bytes at most")
    body = environ["wsgi.input"].read(int(length)).decode(errors="replace")
    asked = parse_wishes(body, path).to_json()
    replace_files({path: [json.dumps(asked), "\n"]})
    return asked
