from collections.abc import Callable, Iterator

import pytest
from put_pipeline import PutPipeline

from envpipe_megatron.runtime.channel import puts


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch) -> None:
    monkeypatch.setattr(puts, "_PROBE_BYTES", 4096)


@pytest.fixture
def pipeline(monkeypatch) -> Iterator[Callable[..., PutPipeline]]:
    """Makes pipelines; at the end, no unit has run on what was not its own."""
    made = []

    def make(*args, **options) -> PutPipeline:
        made.append(PutPipeline(monkeypatch, *args, **options))
        return made[-1]

    yield make
    for each in made:
        assert not each.wrong
