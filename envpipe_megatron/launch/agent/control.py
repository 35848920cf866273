"""`/control` beside a node's metrics: shows and sets what is asked of the running job.

Both by the job's own `control.json`: it is written down in one place, and survives a restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, replace_files
from envpipe_megatron.formats.wishes import parse_wishes
from envpipe_megatron.launch.agent.agent import NodeAgent

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
            status, said = "200 OK", _answer(environ, agent)
        except (EnvPipeError, OSError, ValueError) as error:
            status, said = _REFUSED.get(type(error), "400 Bad Request"), {"error": str(error)}
        start_response(status, [("Content-Type", _JSON)])
        return [(json.dumps(said) + "\n").encode()]

    return answer


def _answer(environ: dict[str, Any], agent: NodeAgent) -> dict[str, Any]:
    if agent.bill is None or agent.control is None:
        raise FileNotFoundError("Ask on the node of rank 0, of a job that has a folder")
    path, asked = Path(agent.control["file"]), agent.control["asked"]
    if environ["REQUEST_METHOD"] != "GET":
        # Nobody is asked who they are: users of this node may, pages in their browsers may not,
        # even if the pages' own names have this address by now.
        kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip()
        host = urlsplit(f"//{environ.get('HTTP_HOST', 'localhost')}").hostname
        if not (_is_here(environ["REMOTE_ADDR"]) and _is_here(host) and kind == _JSON):
            raise PermissionError(f"Ask from this node, by 127.0.0.1, with Content-Type: {_JSON}")
        length = environ.get("CONTENT_LENGTH", "")
        most = min(int(length), _MOST_BYTES) if length.isdecimal() else 0
        body = environ["wsgi.input"].read(most).decode(errors="replace")
        replace_files({path: [json.dumps(parse_wishes(body, path).to_json()), "\n"]})
    with suppress(FileNotFoundError):
        asked = parse_wishes(read_text(path), path).to_json()
    return {**asked, "file": str(path)}


def _is_here(host: str | None) -> bool:
    """Return whether a name or address can only be this node's own."""
    with suppress(ValueError):
        return ip_address((host or "").removeprefix("::ffff:")).is_loopback
    return host == "localhost"
