"""What megatron-core's models must not ask for is refused before they train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer import TransformerConfig

from envpipe_megatron.integrations.megatron_core import ForwardBackward, UnsupportedModelError


@pytest.mark.parametrize(
    "feature", ["variable_seq_lengths", "num_microbatches_with_partial_activation_checkpoints"]
)
def test_a_configuration_is_refused_before_the_first_iteration(feature: str) -> None:
    """Also where megatron-core's own function would run that one."""

    def train(**_: Any) -> Any:
        raise AssertionError("it trained")

    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    setattr(config, feature, 1)
    session: Any = SimpleNamespace()
    groups: Any = SimpleNamespace(pp=SimpleNamespace(size=lambda: 2))
    model: Any = SimpleNamespace(config=config)
    with pytest.raises(UnsupportedModelError, match=feature):
        ForwardBackward(session, 2, train)(
            forward_step_func=train,
            data_iterator=iter(()),
            model=model,
            num_microbatches=4,
            seq_length=8,
            micro_batch_size=1,
            p2p_communicator=object(),
            pg_collection=groups,
        )
