"""What in a Megatron-LM job rules out which level: row by row, and in random combinations."""

import argparse
import enum
import random
from pathlib import Path
from typing import Any

import pytest

from envpipe_megatron.integrations.levels import (
    FREES_WHILE_TRAINING,
    JobError,
    Level,
    decide,
    limits_of_arguments,
)
from envpipe_megatron.integrations.megatron.limits import LIMITS

#: As Megatron-LM has it until 0.17.
Scope = enum.Enum("Scope", "full_iteration attn")

#: The highest level that a job can have with an argument, where a number above 1 asks for it.
_BY_NUMBER = {
    Level.ORDER: """
        num_experts expert_model_parallel_size context_parallel_size mtp_num_layers
        multi_latent_attention experimental_attention_variant linear_attention_freq
        is_hybrid_model hybrid_override_pattern hybrid_layer_pattern
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
        vision_pretraining sft dataloader_inter_document_masking export_kd_teacher_load
        modelopt_enabled logits_save_dir tp_comm_overlap defer_embedding_wgrad_compute
        optimizer_cpu_offload offload_optimizer_states num_distributed_optimizer_instances
        gtp_weight_remat_size timing_log_level empty_unused_memory_level
        """,
    Level.UNITS: """
        decoder_num_layers decoder_seq_length use_legacy_models delay_wgrad_compute
        logits_load_dir reuse_grad_buf_for_mxfp8_param_ag cpu_offloading
        fine_grained_activation_offloading iterations_to_skip enable_ft_package
        save_activations_interval save_dgrads_interval save_wgrads_interval
        save_tokens_per_expert_interval moe_routing_trace_path
        overlap_moe_expert_parallel_comm enable_hyper_connections enable_mhc_connections
        """,
    Level.UNIFORM: """
        use_megatron_fsdp use_torch_fsdp2 use_custom_fsdp hybrid_context_parallel
        dynamic_context_parallel sequence_packing_scheduler freeze_all_layers log_straggler
        """,
    Level.OBSERVE: "perform_rl_step skip_train",
}
#: Arguments of a job, and the highest level that it can have with them.
ASKING: list[tuple[dict[str, Any], Level]] = [
    *(({name: 2}, level) for level, names in _BY_NUMBER.items() for name in names.split()),
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, Level.ORDER),
    ({"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True}, Level.ORDER),
    ({"fp8": "e4m3", "fp8_recipe": "delayed", "recompute_granularity": "full"}, Level.ORDER),
    ({"fp4": "e2m1"}, Level.ORDER),
    ({"te_precision_config_file": "recipe.yaml"}, Level.ORDER),
    ({"kitchen_config_file": "kitchen.yaml"}, Level.ORDER),
    ({"kitchen_recipe_number": 1}, Level.ORDER),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.attn]}, Level.UNITS),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, Level.UNITS),
    ({"enable_cuda_graph": True}, Level.UNITS),
    ({"external_cuda_graph": True}, Level.UNITS),
    ({"optimizer_cuda_graph": True}, Level.UNITS),
    ({"rerun_mode": "report_stats"}, Level.UNITS),
    ({"rerun_mode": "report_determinism_stats"}, Level.UNITS),
    ({"pipeline_model_parallel_comm_backend": "ucc"}, Level.UNIFORM),
    ({"use_ring_exchange_p2p": True}, Level.UNIFORM),
    ({"pipeline_model_parallel_size": 1}, Level.UNIFORM),
    ({"pipeline_model_parallel_size": None}, Level.UNIFORM),
    # 0.16 and 0.17; since 0.18
    ({"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]}, Level.UNIFORM),
    ({"cuda_graph_impl": "full_iteration"}, Level.UNIFORM),
    ({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, Level.UNIFORM),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration,attn"}, Level.UNIFORM),
]
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
    "rampup_batch_size": None,
}


def job(**asked):
    return argparse.Namespace(**{"pipeline_model_parallel_size": 4, **asked})


@pytest.fixture(autouse=True)
def no_allocator_settings(monkeypatch):
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        DEFAULTS,
        {"virtual_pipeline_model_parallel_size": 2},
        {"log_straggler": True, "disable_straggler_on_startup": True},
    ],
)
def test_what_tests_have_proven_needs_no_check(asked):
    for checks in (True, False):
        found = decide(limits_of_arguments(job(**asked), LIMITS), checks=checks)
        assert (found.level, found.to_check) == (Level.ORDER, ())


def test_each_row_is_asked_for_and_leaves_its_level():
    unseen = {limit.feature for limit in LIMITS} - {FREES_WHILE_TRAINING, "CUDA_LAUNCH_BLOCKING"}
    for asked, level in ASKING:
        args = job(**{**DEFAULTS, **asked})
        found, unchecked = (
            decide(limits_of_arguments(args, LIMITS), checks=checks) for checks in (True, False)
        )
        assert found.level is level, asked
        assert unchecked.level is min(level, Level.UNITS), asked
        against = unchecked if level is Level.ORDER else found
        features = {row.feature for row in against.against[Level(min(level, Level.UNITS) + 1)]}
        assert {row.feature for row in found.to_check} == (
            features if level is Level.ORDER else set()
        )
        unseen -= features
    assert not unseen


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_that_frees_while_training(monkeypatch, variable):
    monkeypatch.setenv(variable, "expandable_segments:True, garbage_collection_threshold:0.0")
    assert decide(limits_of_arguments(job(), LIMITS)).to_check == ()
    monkeypatch.setenv(variable, "expandable_segments:True, garbage_collection_threshold:0.8")
    found = decide(limits_of_arguments(job(), LIMITS))
    assert found.level is Level.ORDER
    assert [limit.feature for limit in found.to_check] == [FREES_WHILE_TRAINING]


def test_any_combination_gets_a_level_and_no_feature_raises_it():
    draw = random.Random(22)
    features = [asked for asked, _ in ASKING]
    settings = [*features, *({name: None} for asked in features for name in asked)]
    for _ in range(2000):
        asked: dict[str, Any] = {}
        for setting in draw.sample(settings, draw.randrange(12)):
            asked |= setting
        asked["pipeline_model_parallel_size"] = draw.choice((1, 2, 8))
        args, checks = job(**asked), draw.random() < 0.7
        found = decide(limits_of_arguments(args, LIMITS), checks=checks)
        assert list(found.against) == [level for level in Level if level > found.level]
        assert all(found.against.values())
        wanted = limits_of_arguments(args, LIMITS)
        # Level order with anything of the table at all has all of it checked.
        assert list(found.to_check) == (wanted if found.level is Level.ORDER else [])
        assert checks or not found.to_check
        added = {k: v for k, v in draw.choice(features).items() if k not in asked}
        assert (
            decide(limits_of_arguments(job(**asked, **added), LIMITS), checks=checks).level
            <= found.level
        )
        level = draw.choice(list(Level))
        if level <= found.level:
            lower = decide(limits_of_arguments(args, LIMITS), level, checks=checks)
            assert lower.level is level
            assert lower.to_check == (found.to_check if level is Level.ORDER else ())
            continue
        with pytest.raises(JobError) as error:
            decide(limits_of_arguments(args, LIMITS), level, checks=checks)
        for limit in wanted:  # those against this level are named, and no others
            highest = limit.highest if checks else min(limit.highest, Level.UNITS)
            assert (str(limit) in str(error.value)) == (highest < level)


def test_the_user_guide_lists_the_features_of_each_level():
    guide = (Path(__file__).parents[2] / "docs" / "lookup" / "levels.md").read_text()
    for level in Level:
        listed = guide.partition(f"Highest level `{level}`:\n\n")[2].partition("\n\n")[0]
        features = [f"- {limit.feature}" for limit in LIMITS if limit.highest is level]
        assert listed.splitlines() == features
