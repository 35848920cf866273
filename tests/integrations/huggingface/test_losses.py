"""The losses that models of any integration are trained with."""

import pytest

pytest.importorskip("torch")
import torch

from envpipe_megatron.integrations.huggingface.skeleton import IGNORED_LABEL, language_model_loss


def test_the_loss_is_that_of_the_labels_that_count():
    logits = torch.randn(2, 12, 101)
    labels = torch.full((2, 12), IGNORED_LABEL)
    assert language_model_loss(logits, labels).item() == 0.0
    labels[1, 3] = 5
    expected = -logits[1, 3].log_softmax(-1)[5]
    torch.testing.assert_close(
        language_model_loss(logits.half(), labels), expected, rtol=1e-3, atol=1e-3
    )
