from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from put_pipeline import PutPipeline


@pytest.fixture
def pipeline(monkeypatch) -> Iterator[Callable[..., PutPipeline]]:
    """Makes pipelines; at the end, no unit has run on what was not its own."""
    made = []

    def make(*args, **options) -> PutPipeline:
        made.append(PutPipeline(monkeypatch, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not each.wrong
