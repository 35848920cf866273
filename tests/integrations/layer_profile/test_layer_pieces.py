"""Pieces of a model, run one by one, are the model; and what measuring them leaves."""

import os
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig, transformer_block  # noqa: E402
from one_rank_job import one_rank_job  # noqa: E402

import envpipe_megatron  # noqa: E402
from envpipe_megatron.errors import EnvPipeError  # noqa: E402
from envpipe_megatron.integrations.layer_profile import hooks, job  # noqa: E402
from envpipe_megatron.integrations.layer_profile import model as layers  # noqa: E402
from envpipe_megatron.integrations.layer_profile.job import measure_model  # noqa: E402
from envpipe_megatron.integrations.layer_profile.model import GptPieces, Microbatches  # noqa: E402
from envpipe_megatron.integrations.layer_profile.rank_gpu import Looks  # noqa: E402
from envpipe_megatron.search.layer_file import read_layers  # noqa: E402
from envpipe_megatron.search.layer_jobs import JOB_VARIABLE, LayerJob  # noqa: E402
from envpipe_megatron.search.layer_profile import FULL, Block, Sizes  # noqa: E402

ARGS = Namespace(
    seq_length=8,
    context_parallel_size=1,
    padded_vocab_size=32,
    micro_batch_size=1,
    create_attention_mask_in_dataloader=True,
    check_for_nan_in_loss_and_grad=True,
)
DENSE_THEN_EXPERTS = (0, 1, 1)
#: That a training script takes for each microbatch.
DATA_S, LOSS_S = 0.02, 0.03


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A job of one rank, on the CPU, whose models get a row of each kind of layers."""
    with one_rank_job() as patch:
        block = transformer_block.TransformerBlock
        patch.setattr(block, "_build_layers", block._build_layers)  # put back at the end
        layers.build_rows(transformer_block)
        yield


def make_model(experts=False, tied=False, layers=3):
    more: dict[str, Any] = {}
    if experts:
        more = {
            "num_moe_experts": 2,
            "moe_layer_freq": list(DENSE_THEN_EXPERTS),
            "moe_token_dispatcher_type": "alltoall",
        }
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **more,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(config, spec, 32, 8, share_embeddings_and_output_weights=tied)


def test_a_few_layers_of_each_kind_are_built():
    pieces = GptPieces(make_model())
    assert pieces.blocks == (Block(("embedding",)), Block(("layer",), 3), Block(("loss",)))
    model = make_model(layers=6)
    assert len(model.decoder.layers) == 4
    assert GptPieces(model).blocks[1] == Block(("layer",), 6)
    model = make_model(experts=True)
    assert model.decoder.envpipe_built == [0, 1, 1]
    assert GptPieces(model).blocks == (
        Block(("embedding",)),
        Block(("layer1",)),
        Block(("layer2",), 2),
        Block(("loss",)),
    )


def test_a_row_is_as_long_as_memory_allows(monkeypatch):
    free = 16 * 18 * 10**9  # a quarter of it for all kinds: 2e9 parameters of each of two
    monkeypatch.setattr(layers, "free_bytes", lambda: free)
    assert layers.row_lengths([2, 30], [10**8, 10**9]) == [2, 2]
    assert layers.row_lengths([1, 30], [10**8, 10**10]) == [1, 1]


@pytest.mark.parametrize(("way", "runs"), [(None, 1), ("selective", 1), (FULL, 2)])
def test_edges_are_met_in_order_however_layers_are_recomputed(way, runs):
    model = make_model()
    pieces = GptPieces(model)
    assert pieces.ways("layer") == ("selective", FULL)
    assert pieces.ways("loss") == ()
    calls, seen = [], []
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    for name, part in (("model", model), ("norm", model.decoder.final_layernorm)):
        part.register_forward_hook(lambda *_, name=name: seen.append((name, len(calls))))
    with closing(Microbatches(model, model, ARGS, forward_step)) as microbatches:
        with pieces.recomputing(way):
            gaps, window = microbatches.measure(2, 2, Looks())
        assert gaps.shape == (1 + 2 * 5, 4)
        assert window.runs == 3
        assert microbatches.message_bytes == 8 * 2 * 16 * 4
        assert len(calls) == 3 * 3 * runs
        assert gaps[0, 0] > 0.9 * DATA_S > 2 * gaps[1, 0]
        assert gaps[5, 0] > 0.9 * LOSS_S
        with pieces.rows(2):
            assert pieces.slots == ["embedding", "layer", "layer", "loss"]
            assert len(microbatches.measure(1, 1, Looks())[0]) == 1 + 2 * 4
    assert model.config.recompute_granularity is None
    assert not model._forward_pre_hooks


def test_weights_are_counted_where_a_stage_would_hold_them():
    for tied in (True, False):
        pieces = GptPieces(make_model(tied=tied))
        counts = {name: pieces.parameters(name) for name in pieces.names}
        norm = 2 * 16
        assert counts == {
            "embedding": (32 + 8) * 16,
            "layer": 12 * 16**2 + 2 * norm,
            "loss": 32 * 16 + norm,
        }


def forward_step(data, model):
    """A training script's, which takes a while for its data and for its loss."""
    batch = next(data)
    time.sleep(DATA_S)
    assert ARGS.micro_batch_size == len(batch["tokens"])
    labels = batch["labels"]
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels)

    def loss_of(losses):
        time.sleep(LOSS_S)
        mask = batch["loss_mask"]
        return (losses * mask).sum(), mask.sum().int(), {}

    return losses, loss_of


def measure(folder, *sizes, model=None):
    model = model or make_model()
    for weight in model.parameters():
        weight.main_grad = torch.zeros_like(weight)
        weight.grad = torch.zeros_like(weight)
    model.zero_grad_buffer = model.finish_grad_sync = lambda: time.sleep(1e-3)
    model.scale_gradients = lambda factor: None
    inner = torch.optim.Adam(model.parameters())
    optimizer = SimpleNamespace(
        optimizer=inner, step=inner.step, zero_grad=lambda: inner.zero_grad(set_to_none=False)
    )
    path = folder / "layers.json"
    job = LayerJob(str(path), tuple(Sizes(1, size) for size in sizes))
    measure_model(model, model, optimizer, ARGS, forward_step, job)
    return read_layers(path)


def test_a_model_is_measured_at_each_microbatch_size(tmp_path):
    model = make_model()
    made = measure(tmp_path, 1, 2, model=model)
    for size in (1, 2):
        layer = made.at(Sizes(1, size))["layer"]
        assert layer.input_bytes == layer.output_bytes == 8 * size * 16 * 4
        assert layer.forward_s[0] > 0
        assert layer.forward_j is None
        assert layer.host_s is None  # there is nobody to hand over to
        assert [way.name for way in layer.recomputation] == ["selective", "full"]
        # With embedding and loss comes what the training script does beside the model.
        embedding, loss = (made.at(Sizes(1, size))[name] for name in ("embedding", "loss"))
        assert embedding.forward_s[0] > 0.9 * DATA_S
        assert loss.forward_s[0] > 0.9 * (LOSS_S + DATA_S)
        assert 5 * loss.backward_s[0] < LOSS_S
        held = made.bytes_per_parameter
        assert (held.weight, held.gradient) == (4, 4)
        assert held.optimizer == pytest.approx(8, rel=0.02)
        assert made.optimizer_s > 0
        assert made.gradients_s * sum(map(torch.numel, model.parameters())) >= 2e-3
        assert made.frequency_mhz.tolist() == [1000]


class Metered:
    """A GPU of two clocks whose power is its clock's tenth."""

    name, frequency_mhz = "a GPU", (2000, 1000)

    def __init__(self, _clocks):
        self.clock_mhz = 0

    def set(self, frequency_mhz):
        self.clock_mhz = frequency_mhz

    def energies_j(self, windows):
        power_w = self.clock_mhz / 10
        return [power_w * (w.end_s - w.begin_s) / w.runs for w in windows]

    def close(self):
        self.clock_mhz = 0


def test_times_and_joules_go_by_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "RankGpu", Metered)
    made = measure(tmp_path, 1)
    assert made.frequency_mhz.tolist() == [2000, 1000]
    assert made.gpu == "a GPU"
    assert made.has_energy
    layer = made.at(Sizes())["layer"]
    assert (layer.forward_j > 0).all()
    assert layer.host_s > 0
    assert all(way.energy_j.shape == (2,) for way in layer.recomputation)


def test_other_models_are_refused():
    with pytest.raises(EnvPipeError, match="GPTModel"):
        GptPieces(torch.nn.Linear(1, 1))


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
    hooks._change_arguments(module, LayerJob("", (Sizes(context_parallel=2),)))
    args = module.parse_args()
    assert args.context_parallel_size == 2
    assert args.use_distributed_optimizer is kept
    assert not args.overlap_param_gather_with_optimizer_step
    assert args.num_distributed_optimizer_instances == 1


@pytest.mark.parametrize("safe", ["", "1"])
def test_a_script_finds_its_folder_and_what_python_finds_without_one(safe, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(*sys.path[:2], sep='\\n')")
    root = Path(envpipe_megatron.__file__).parents[1]
    environment = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": f"{root}:/elsewhere"}
    environment[JOB_VARIABLE] = LayerJob("", (Sizes(),)).to_text()
    module = ["-m", hooks.__name__, str(tmp_path / "script.py")]
    ran = subprocess.run(
        [sys.executable, *module], env=environment, capture_output=True, text=True, check=False
    )
    first = [str(root), "/elsewhere"] if safe else [str(tmp_path), str(root)]
    assert ran.stdout.splitlines() == first
    assert "before it set up a model" in ran.stderr
