"""Split backwards beside what else models and reducers have."""

import pytest
from jobs import ALIGNED, ALL, OVERLAP, Job
from on_request import each_of
from test_bit_equality import by_plan, ours, stock, trained_alike
from test_split_backward import searched

from envpipe_megatron.core.orders.builders import zero_bubble

pytestmark = pytest.mark.xdist_group("pipeline")
__all__ = ["ours", "stock"]

PLAIN = ()
SELECTIVE = (("recompute_granularity", "selective"),)
EXPERTS = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_aux_loss_coeff", 0.01),
    ("moe_router_load_balancing_type", "aux_loss"),
    ("moe_token_dispatcher_type", "allgather"),
    ("add_bias_linear", False),
)

SHARED = (*EXPERTS, ("moe_shared_expert_intermediate_size", 16))
DEFERRED = (("defer_embedding_wgrad_compute", True),)
LATENT = (
    *(("q_lora_rank", 16), ("kv_lora_rank", 16), ("qk_head_dim", 8), ("qk_pos_emb_head_dim", 8)),
    *(("v_head_dim", 8), ("rope_type", "rope"), ("normalization", "RMSNorm")),
)

JOBS = {
    "dropout, not deallocated": Job(2, 8, dropout=0.1, deallocate=False),
    "recomputation and dropout": Job(4, 8, recompute=True, dropout=0.1, layers=8),
    "per-token loss": Job(2, 8, per_token_loss=True, reducer=OVERLAP),
    "evaluation, tied": Job(4, 8, evaluate_after=1, tied=True),
    "fused, distributed, overlapped": Job(2, 8, fused=True, reducer=ALL),
    "fused, tied": Job(4, 8, fused=True, reducer=PLAIN, tied=True),
    "fused, two chunks": Job(2, 8, chunks=2, fused=True, reducer=ALIGNED, deallocate=False),
    "bf16, overlapped, distributed": Job(2, 8, half="bf16", reducer=ALL),
    "bf16, fused, tied": Job(2, 8, half="bf16", fused=True, reducer=OVERLAP, tied=True),
    "bf16, recomputed": Job(4, 8, half="bf16", recompute=True, dropout=0.1, reducer=PLAIN),
    "fp16, fused": Job(2, 8, half="fp16", fused=True, reducer=OVERLAP),
    "sequence parallel, fused": Job(2, 8, tensor=2, fused=True, reducer=PLAIN),
    "sequence parallel, bf16, overlapped": Job(2, 8, tensor=2, half="bf16", reducer=OVERLAP),
    "sequence parallel, recomputed": Job(2, 8, tensor=2, recompute=True, reducer=PLAIN),
    "tensor parallel": Job(2, 8, tensor=2, reducer=PLAIN, options=(("sequence_parallel", False),)),
    "selective, of activations": Job(
        2,
        8,
        dropout=0.1,
        options=(
            *SELECTIVE,
            ("recompute_modules", ("core_attn", "mlp", "layernorm")),
            ("add_bias_linear", False),  # 0.16.1 recurses without end with a bias
        ),
    ),
    "gated": Job(2, 8, options=(("gated_linear_unit", True), ("normalization", "RMSNorm"))),
    "experts, overlapped": Job(2, 8, reducer=OVERLAP, options=EXPERTS),
    "fp16, skipped steps, selective recomputation": Job(
        2, 8, half="fp16", reducer=OVERLAP, loss_scale=24, steps=6, options=SELECTIVE
    ),
    "experts, shared, multi-token prediction, fused, tied": Job(
        2, 8, reducer=PLAIN, fused=True, tied=True, options=(*SHARED, ("mtp_num_layers", 1))
    ),
    "deferred embedding": Job(2, 8, fused=True, reducer=PLAIN, options=DEFERRED),
    "deferred embedding, some, tied": Job(
        2, 8, fused=True, tied=True, reducer=PLAIN, options=(*DEFERRED, ("wgrad_deferral_limit", 3))
    ),
    "latent attention": Job(2, 8, reducer=OVERLAP, latent=True, options=LATENT),
    "latent attention, fused": Job(2, 8, reducer=ALL, fused=True, latent=True, options=LATENT),
    "multi-token prediction": Job(2, 8, reducer=PLAIN, options=(("mtp_num_layers", 1),)),
}


#: Run each time; the others on request.
ALWAYS = [
    "recomputation and dropout",
    "fp16, skipped steps, selective recomputation",
    "sequence parallel, recomputed",
    "experts, shared, multi-token prediction, fused, tied",
    "deferred embedding, some, tied",
]


@pytest.mark.parametrize("name", each_of(JOBS, ALWAYS))
def test_features(stock, ours, tmp_path, name):
    job = JOBS[name]
    if job.chunks == 1:
        schedule = zero_bubble(job.stages, job.microbatches, 2 * job.stages - 1)
    else:
        schedule = searched(job.stages, job.microbatches, job.chunks)
    results = trained_alike(stock, ours, job, by_plan(tmp_path, schedule), schedule)
    assert all(result.put_off and min(result.put_off) >= 4 for result in results)
    if "skipped" in name:
        skipped = [result.skipped for result in stock(job)]
        assert all(0 < count < job.steps for count in skipped)
        assert [result.skipped for result in results] == skipped
