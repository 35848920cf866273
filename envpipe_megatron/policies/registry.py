"""Functions by name: our own, and those that installed packages add.

A package adds one by an entry point in its `pyproject.toml`, after which commands and the options
of a job take its name:

    [project.entry-points."envpipe_megatron.schedules"]
    mine = "my_package.orders:mine"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from envpipe_megatron.errors import EnvPipeError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Functions by name; those of other packages (entry points of `group`) are imported when used.

    No other package can replace one of our `own`.
    """

    def __init__(self, group: str, own: Mapping[str, T]) -> None:
        self._group, self._own = group, own

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        found = entry_points(group=self._group)
        return {entry.name: entry for entry in found if entry.name not in self._own}

    def __getitem__(self, name: str) -> T:
        if name in self._own:
            return self._own[name]
        entry = self._added[name]
        try:
            loaded: T = entry.load()
        except Exception as error:
            raise EnvPipeError(
                f"'{name}' of {self._group} cannot be imported: {error}",
                value=entry.value,
                remedy="Fix or remove the package that adds it.",
            ) from error
        return loaded

    def __iter__(self) -> Iterator[str]:
        return iter((*self._own, *self._added))

    def __len__(self) -> int:
        return len(self._own) + len(self._added)
