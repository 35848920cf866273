"""Shows and writes the job's bill on the node of rank 0, as it grows and at the end."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.energy import append_line
from envpipe_megatron.launch.agent.node_log import log_path
from envpipe_megatron.launch.bill.bill import Bill
from envpipe_megatron.launch.bill.tables import Tariff, bill_csv, bill_facts, show_bill
from envpipe_megatron.launch.saying import say

logger = logging.getLogger(__name__)


class BillReport:
    """The job's bill on the node of rank 0: `bill.jsonl` as it grows, `bill.json` and `bill.csv`.

    Args:
        folder: for the files.
        tariff: for lines of cost and CO2.
    """

    def __init__(self, folder: Path, tariff: Tariff) -> None:
        self._folder = folder
        self._tariff = tariff
        self._writer = ThreadPoolExecutor(1, "envpipe-bill")
        self._writing: Future[None] | None = None

    def tell(self, line: str, bill: Bill) -> None:
        """Show a line and append the bill to `bill.jsonl`. Returns at once.

        A terminal that is stopped, or a disk that hangs, holds up a thread that nobody waits for
        before the end; lines are left out meanwhile.
        """
        if self._writing is None or self._writing.done():
            self._writing = self._writer.submit(self._write, line, bill.snapshot())

    def _write(self, line: str, bill: Bill) -> None:
        try:
            say(line)
            facts = bill_facts(bill, self._tariff, over=False)
            append_line(self._folder / "bill.jsonl", facts)
        except OSError as error:  # a full disk or a closed terminal: the sums go on
            logger.error("The bill is not told of: %s", error)

    def end(self, bill: Bill) -> None:
        """The job is over. What cannot be written or shown keeps nothing else from being so."""
        facts = bill_facts(bill, self._tariff)
        as_json = json.dumps(facts, indent=1) + "\n"
        self._try("bill.json", lambda path: replace_files({path: [as_json]}))
        self._try("bill.csv", lambda path: replace_files({path: [bill_csv(bill)]}))
        self._writer.shutdown()
        self._try("bill.jsonl", lambda path: append_line(path, facts))
        if bill.unreadable:
            logger.warning("%d torn or foreign lines of energy logs passed over", bill.unreadable)
        for log in self._logs_without(bill):
            logger.warning("%s is not in this bill; `envpipe energy sum` adds it", log)
        with contextlib.suppress(OSError, SystemExit):  # by rich, where nobody reads any more
            show_bill(bill, self._tariff, Console())
        say(f"the bill is in {self._folder}: bill.json, bill.csv, and as it grew bill.jsonl")

    def _try(self, name: str, write: Callable[[Path], object]) -> None:
        try:
            write(self._folder / name)
        except OSError as error:
            logger.error("%s is not written: %s", name, error)

    def _logs_without(self, bill: Bill) -> list[Path]:
        """Logs in the folder of nodes that have not sent theirs: of an earlier start, say."""
        known = {log_path(self._folder, node) for node in bill.nodes}
        return sorted(set(self._folder.glob("energy-*.jsonl")) - known)
