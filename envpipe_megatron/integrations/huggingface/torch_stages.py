"""Makes stages of a split model for torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.huggingface.layers import MASK
from envpipe_megatron.integrations.huggingface.split import Layer, SplitModel


class Stage(nn.Module):
    """Layers of a split model, one after the other.

    Args:
        model: what `split_model` gave.
        parts: what its `parts` gave.
        index: the stage.
    """

    def __init__(self, model: SplitModel, parts: Sequence[int], index: int) -> None:
        super().__init__()
        layers = [Layer(model, each) for each in range(parts[index], parts[index + 1])]
        self.layers = nn.ModuleList(layers)
        self._extras = model.extras(0)
        #: True if the model's head has the weights of its embedding, on this stage or not.
        self.of_tied_model = model.is_tied(0)
        #: Layers with weights that another stage has, too: no second name for them, and new ones
        #: where FSDP shards them.
        self._tied: tuple[Layer, ...] = ()
        tied = [layer for layer in layers if model.is_tied(layer.index)]
        for layer in tied:
            layer.embedding = tied[0].embedding  # one module where one stage has both
        if len(tied) == 1:
            self._tied = (tied[0],)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """Return the weights that another stage has, too; None without."""
        if not self._tied:
            return None
        return self._tied[0].get_parameter("embedding.weight")

    def forward(self, hidden: Tensor, **extras: Tensor | None) -> Tensor:
        """Take what the stage before gave, or the model's inputs.

        Args:
            hidden: hidden states; on the first stage token numbers [samples, length] or images.
            extras: of BERT `token_type_ids` and `attention_mask`, [samples, length], the same on
                every stage: arguments of `schedule.step` by name, on each rank.

        Raises EnvPipeError for a mask that the model's layers do not take.
        """
        unknown = [name for name, value in extras.items() if value is not None]
        unknown = [name for name in unknown if name not in self._extras]
        if unknown:
            raise EnvPipeError(
                "This model is split without these inputs",
                value=unknown,
                remedy="Sequences are of full length. Pad at the end, where no token before it "
                "looks, with labels of -100, and leave the mask out."
                if MASK in unknown
                else "Leave them out.",
            )
        for layer in self.layers:
            hidden = layer(hidden, **extras)
        return hidden


def pipeline_stage(
    model: SplitModel,
    parts: Sequence[int],
    index: int,
    microbatch: Tensor,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> PipelineStage:
    """Make a stage of torch's, with its layers on a device; every rank makes its own.

    Messages' shapes are found on the device `meta`. Torch would find them by a forward, which
    draws random numbers and, in ResNet, changes the running means.

    Args:
        model: what `split_model` gave.
        parts: what its `parts` gave.
        index: the stage.
        microbatch: the model's first input, of one microbatch, on any device.
        device: where the stage's layers are.
        group: of the pipeline; None for all ranks.
    """
    messages = [torch.empty_like(microbatch, device="meta")]
    for layer in model.bare[: parts[index + 1]]:
        messages.append(layer(messages[-1]))
    return PipelineStage(
        Stage(model, parts, index).to(device),
        index,
        len(parts) - 1,
        device,
        input_args=(messages[parts[index]],),
        output_args=(messages[-1],),
        group=group,
    )


def reduce_tied_gradients(
    stages: Sequence[nn.Module], group: dist.ProcessGroup | None = None
) -> None:
    """Add the gradients of weights that the first stage shares with the head's.

    Every rank of the pipeline calls it in each step: after `schedule.step`, and before gradients
    are clipped and the optimizer steps. Weights begin equal, and so they stay. Without shared
    weights, or where they are frozen, it does nothing; a side without a gradient in this step adds
    none and gets the other's.

    Args:
        stages: this rank's `Stage`s, or what has been wrapped around them.
        group: of the pipeline; None for all ranks.

    Raises EnvPipeError without a `Stage`; and, on both ranks, where neither side of weights that
    are trained has a gradient, or only one side is frozen.
    """
    ours = [each for stage in stages for each in stage.modules() if isinstance(each, Stage)]
    if not ours:
        raise EnvPipeError(
            "There is no stage of a split model among these",
            value=[type(stage).__name__ for stage in stages],
            remedy="Hand over the submod of what pipeline_stage gave, wrapped or not.",
        )
    if not ours[0].of_tied_model:
        return
    weights = [weight for stage in ours if (weight := stage.tied_weight) is not None]
    rank = dist.get_rank(group)
    known = (
        sum(weight.requires_grad for weight in weights),
        sum(weight.grad is not None for weight in weights),
        len(weights) * rank,
    )
    sums = torch.tensor(known, device=next(ours[0].parameters()).device)
    dist.all_reduce(sums, group=group)
    if not weights:  # without a wait for the device
        return
    trained, given, ranks = sums.tolist()
    if not trained:
        return
    if trained == 1 or not given:
        raise EnvPipeError(
            "Shared weights have no gradient, or are frozen on one of their two stages only",
            remedy="Call reduce_tied_gradients after schedule.step, before gradients are cleared, "
            "and set requires_grad alike on both stages.",
        )
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    gradients = [_local(weight.grad) for weight in weights if weight.grad is not None]
    if len(gradients) == 2:
        total = gradients[0] + gradients[1]
        for gradient in gradients:
            gradient.copy_(total)
    else:  # a + b is b + a: both ranks have the same bits
        gradients[0].add_(_exchanged(gradients[0].contiguous(), ranks - rank, group))


def _exchanged(mine: Tensor, peer: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the other rank's tensor of the same shape, for this one's."""
    theirs = torch.empty_like(mine)
    exchange = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensor in ((dist.isend, mine), (dist.irecv, theirs))
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return theirs


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's part, where FSDP shards the weights: as many on each stage."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
