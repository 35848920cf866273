"""Op profiles of Aceso and Sailor become layer profiles that count as theirs do."""

import pytest

from benchmarks.search.aceso_files import block_edges, fold_blocks, read_aceso_profile
from envpipe_megatron.search.layer_profile import Sizes

MIB = 2**20
HEADER = "op_name,forward-compute,backward-compute,input,output,weights,activations,fwd,bwd"
OPERATORS = """encoder-embedding,100,200,0.5,8,208,12,0,220
enc-1st-layernorm,40,100,8,16,0,8,0,72
enc-attention-qkv,700,1300,16,32,24,24,20,202
enc-attention-score,500,1100,32,272,0,256,256,552
enc-attention-softmax,600,800,272,272,0,256,0,768
enc-attention-dropout,900,800,272,272,0,384,0,1024
enc-attention-context,600,900,272,16,0,8,12,272
enc-post-MLP-dropout,100,80,16,8,0,12,8,68
final-layernorm,40,900,8,8,0,8,0,36
gpt-post-process,9000,10000,8,0,200,400,199,0
"""
BANDS = (17.0, 24.0, 31.0, 35.0)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "gpt_1B_mbs2_tp4_algo0.csv").write_text(f"{HEADER}\n{OPERATORS}")
    (tmp_path / "gpt_1B_mbs2_tp4_algo1.csv").write_text("is not read")
    (tmp_path / "p2p_intra_node.csv").write_text(f"1,2,4,8\n{','.join(map(str, BANDS))}\n")
    (tmp_path / "prim_gpt_1B_all_reduce_2gpus.csv").write_text("MB,ms\n16,0.4\n8,0.2\n")
    return tmp_path


def test_a_model_is_its_head_its_layers_and_its_tail(folder):
    profile = read_aceso_profile(folder, "gpt_1B", num_layers=3)
    assert list(profile.measures) == [Sizes(tensor_parallel=4, microbatch_size=2)]
    assert block_edges(profile) == (0, 1, 8, 15, 22, 24)
    softmax = _measure(folder, "enc-attention-softmax")
    dropout = _measure(folder, "enc-attention-dropout")
    assert (softmax.activation_bytes, dropout.activation_bytes) == (0.0, 1.5 * 384 * MIB)
    assert _measure(folder, "enc-attention-qkv").parameters == 12 * MIB  # of two bytes each
    assert _measure(folder, "enc-attention-qkv").backward_s == pytest.approx(1300e-6)


def test_a_folded_layer_recomputes_its_attention_or_all(folder):
    folded = fold_blocks(read_aceso_profile(folder, "gpt_1B", num_layers=3))
    assert folded.pieces == ("embedding", "layer", "layer", "layer", "loss")
    layer = folded.at(Sizes(4, 2))["layer"]
    assert layer.activation_bytes == (8 + 24 + 256 + 0 + 576 + 8 + 12) * MIB
    assert (layer.input_bytes, layer.output_bytes) == (8 * MIB, 8 * MIB)
    selective, full = layer.recomputation
    assert selective.time_s == pytest.approx(2600e-6)
    assert selective.activation_bytes == layer.activation_bytes - (256 + 576) * MIB
    assert selective.working_bytes == (256 + 576) * MIB
    assert full.time_s == pytest.approx(layer.forward_s)
    assert (full.activation_bytes, full.working_bytes) == (12 * MIB, layer.activation_bytes)
    assert not folded.at(Sizes(4, 2))["loss"].recomputation


def _measure(folder, operator):
    return read_aceso_profile(folder, "gpt_1B").at(Sizes(4, 2))[operator]
