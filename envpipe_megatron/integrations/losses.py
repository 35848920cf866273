"""The losses that models of any integration are trained with."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  # as all of torch's documentation has it
from torch import Tensor

#: A label that is not predicted.
IGNORED_LABEL = -100


def language_model_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the labels that are not `IGNORED_LABEL`; 0 if all are.

    Logits are [samples, length, vocabulary], labels [samples, length]: the next tokens, or for BERT
    those that were masked. The loss is in fp32, whatever the logits' data type.
    """
    total = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def image_class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [samples, classes] and labels [samples], in fp32."""
    return F.cross_entropy(logits.float(), labels)
