"""What in a Megatron-LM job stands against which level: row by row, and in random combinations."""

from __future__ import annotations

import argparse
import enum
import random
from pathlib import Path
from typing import Any

import pytest

from envpipe_megatron.integrations.levels import FREES_WHILE_TRAINING, Level, LevelError, decide
from envpipe_megatron.integrations.megatron.limits import LIMITS

#: As Megatron-LM has it until 0.17.
Scope = enum.Enum("Scope", "full_iteration attn")

#: For each row the arguments that ask for it, where a number above 1 does.
_BY_NUMBER = {
    "mixture of experts": "num_experts",
    "expert parallelism": "expert_model_parallel_size",
    "context parallelism": "context_parallel_size",
    "multi-token prediction": "mtp_num_layers",
    "multi-latent attention": "multi_latent_attention",
    "experimental kinds of attention": "experimental_attention_variant linear_attention_freq",
    "hybrid (Mamba) models": "is_hybrid_model hybrid_override_pattern hybrid_layer_pattern",
    "heterogeneous layers": (
        "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json"
    ),
    "T5 and other models of encoder and decoder": "decoder_num_layers decoder_seq_length",
    "vision pretraining": "vision_pretraining",
    "legacy models": "use_legacy_models",
    "fine-tuning on packed sequences (--sft)": "sft",
    "documents packed by the data loader (--dataloader-inter-document-masking)": (
        "dataloader_inter_document_masking"
    ),
    "distillation and ModelOpt": "export_kd_teacher_load modelopt_enabled logits_save_dir",
    "overlapped tensor-parallel communication (--tp-comm-overlap)": "tp_comm_overlap",
    "the embedding's weight gradients put off (--defer-embedding-wgrad-compute)": (
        "defer_embedding_wgrad_compute"
    ),
    "delayed weight gradients (--delay-wgrad-compute)": "delay_wgrad_compute",
    "offloading of the optimizer": "optimizer_cpu_offload offload_optimizer_states",
    "logits by file (--logits-load-dir)": "logits_load_dir",
    "gradients in the memory of gathered parameters (--reuse-grad-buf-for-mxfp8-param-ag)": (
        "reuse_grad_buf_for_mxfp8_param_ag"
    ),
    "offloading of activations": "cpu_offloading fine_grained_activation_offloading",
    "several instances of the distributed optimizer": "num_distributed_optimizer_instances",
    "weights that ranks share out (--tensor-parallel-num-weight-shards)": "gtp_weight_remat_size",
    "--iterations-to-skip": "iterations_to_skip",
    "the fault tolerance package (--enable-ft-package)": "enable_ft_package",
    "timers inside of forwards and backwards (--timing-log-level 2)": "timing_log_level",
    "memory given back in each iteration (--empty-unused-memory-level)": (
        "empty_unused_memory_level"
    ),
    "saving activations and gradients while training (--save-dgrads-interval and the like)": (
        "save_activations_interval save_dgrads_interval save_wgrads_interval "
        "save_tokens_per_expert_interval moe_routing_trace_path"
    ),
    "overlapped expert communication (--overlap-moe-expert-parallel-comm)": (
        "overlap_moe_expert_parallel_comm"
    ),
    "FSDP": "use_megatron_fsdp use_torch_fsdp2 use_custom_fsdp",
    "hybrid or dynamic context parallelism": "hybrid_context_parallel dynamic_context_parallel",
    "--freeze-all-layers": "freeze_all_layers",
    "reinforcement learning": "perform_rl_step",
    "--skip-train": "skip_train",
}
#: For each row: arguments that ask for it.
ASKING: dict[str, tuple[dict[str, Any], ...]] = {
    feature: tuple({name: 2} for name in names.split()) for feature, names in _BY_NUMBER.items()
} | {
    "FP4, and FP8 but for plain delayed scaling": (
        {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
        {"fp8": "e4m3", "fp8_recipe": "delayed", "recompute_granularity": "full"},
        {"fp4": "e2m1"},
        {"te_precision_config_file": "recipe.yaml"},
        {"kitchen_config_file": "kitchen.yaml"},
        {"kitchen_recipe_number": 1},
    ),
    "CUDA graphs": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.attn]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
        {"enable_cuda_graph": True},
        {"external_cuda_graph": True},
        {"optimizer_cuda_graph": True},
    ),
    "--rerun-mode report_stats": (
        {"rerun_mode": "report_stats"},
        {"rerun_mode": "report_determinism_stats"},
    ),
    "other transfers in the pipeline (--pipeline-model-parallel-comm-backend ucc, "
    "--use-ring-exchange-p2p)": (
        {"pipeline_model_parallel_comm_backend": "ucc"},
        {"use_ring_exchange_p2p": True},
    ),
    "no pipeline": ({"pipeline_model_parallel_size": 1}, {"pipeline_model_parallel_size": None}),
    "CUDA graphs over the full iteration": (
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]},  # 0.16, 0.17
        {"cuda_graph_impl": "full_iteration"},  # since 0.18
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]},
        {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration,attn"},
    ),
}
DEFAULTS: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "num_experts": None,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "gtp_weight_remat_size": 1,
    "cuda_graph_impl": "none",
    "cuda_graph_scope": [],
    "cuda_graph_modules": [],
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "timing_log_level": 0,
    "rerun_mode": "validate_results",
    "pipeline_model_parallel_comm_backend": None,
    "iterations_to_skip": [],
    "empty_unused_memory_level": 0,
    "num_microbatches_with_partial_activation_checkpoints": None,
    "rampup_batch_size": None,
}


def job(**asked: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"pipeline_model_parallel_size": 4, **asked})


@pytest.fixture(autouse=True)
def no_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        DEFAULTS,
        {"virtual_pipeline_model_parallel_size": 2},
        {"num_microbatches_with_partial_activation_checkpoints": 0},
    ],
)
def test_what_tests_have_proven_needs_no_check(asked: dict[str, Any]) -> None:
    for checks in (True, False):
        found = decide(job(**asked), LIMITS, checks=checks)
        assert (found.level, found.to_check) == (Level.ORDER, ())


def test_each_row_is_asked_for_and_leaves_its_level() -> None:
    of_the_environment = FREES_WHILE_TRAINING, "CUDA_LAUNCH_BLOCKING"
    rows = {limit.feature: limit for limit in LIMITS if limit.feature not in of_the_environment}
    assert rows.keys() == ASKING.keys()
    for feature, several in ASKING.items():
        for asked in several:
            row, args = rows[feature], job(**{**DEFAULTS, **asked})
            found, unchecked = (decide(args, LIMITS, checks=checks) for checks in (True, False))
            assert found.level is row.highest, asked
            assert unchecked.level is min(row.highest, Level.UNITS), asked
            if found.level is Level.ORDER:
                assert row in found.to_check
                against = unchecked.against[Level.ORDER]
                assert feature in [limit.feature for limit in against]
            else:
                assert found.to_check == ()
                assert row in found.against[Level(found.level + 1)]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_that_frees_while_training(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True, garbage_collection_threshold:0.0")
    assert decide(job(), LIMITS).to_check == ()
    monkeypatch.setenv(variable, "expandable_segments:True, garbage_collection_threshold:0.8")
    found = decide(job(), LIMITS)
    assert found.level is Level.ORDER
    assert [limit.feature for limit in found.to_check] == [FREES_WHILE_TRAINING]


def test_any_combination_gets_a_level_and_no_feature_raises_it() -> None:
    draw = random.Random(22)
    features = [asked for several in ASKING.values() for asked in several]
    settings = [*features, *({name: None} for asked in features for name in asked)]
    for _ in range(2000):
        asked: dict[str, Any] = {}
        for setting in draw.sample(settings, draw.randrange(12)):
            asked |= setting
        asked["pipeline_model_parallel_size"] = draw.choice((1, 2, 8))
        args, checks = job(**asked), draw.random() < 0.7
        found = decide(args, LIMITS, checks=checks)
        assert list(found.against) == [level for level in Level if level > found.level]
        assert all(found.against.values())
        wanted = [limit for limit in LIMITS if limit.asks(args)]
        # Level order with anything of the table at all has all of it checked.
        assert list(found.to_check) == (wanted if found.level is Level.ORDER else [])
        assert checks or not found.to_check
        added = {k: v for k, v in draw.choice(features).items() if k not in asked}
        assert decide(job(**asked, **added), LIMITS, checks=checks).level <= found.level
        level = draw.choice(list(Level))
        if level <= found.level:
            lower = decide(args, LIMITS, level, checks=checks)
            assert lower.level is level
            assert lower.to_check == (found.to_check if level is Level.ORDER else ())
            continue
        with pytest.raises(LevelError) as error:
            decide(args, LIMITS, level, checks=checks)
        for limit in wanted:  # those against this level are named, and no others
            highest = limit.highest if checks else min(limit.highest, Level.UNITS)
            assert (str(limit) in str(error.value)) == (highest < level)


def test_the_user_guide_has_the_table() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "megatron_lm.md").read_text()
    table = guide.partition("| feature | highest level |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == [
        f"| {limit.feature} | `{limit.highest}` | {limit.reason} |" for limit in LIMITS
    ]
