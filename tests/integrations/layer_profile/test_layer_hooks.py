"""What a job that measures layers changes of Megatron-LM's arguments."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from envpipe_megatron.integrations.layer_profile import hooks
from envpipe_megatron.search.layer_jobs import LayerJob


@pytest.mark.parametrize(("needs_it", "kept"), [(False, False), (True, True)])
def test_the_whole_optimizer_state_is_counted_where_megatron_allows_it(needs_it, kept):
    given = Namespace(
        use_distributed_optimizer=True,
        overlap_param_gather_with_optimizer_step=True,
        num_distributed_optimizer_instances=2,
        use_precision_aware_optimizer=needs_it,
        context_parallel_size=1,
    )
    module = SimpleNamespace(parse_args=lambda: given)
    hooks._change_arguments(module, LayerJob("", 1, 2, 1, (1,)))
    args = module.parse_args()
    assert args.context_parallel_size == 2
    assert args.use_distributed_optimizer is kept
    assert not args.overlap_param_gather_with_optimizer_step
    assert args.num_distributed_optimizer_instances == 1
