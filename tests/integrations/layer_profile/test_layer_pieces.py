"""Pieces of a model, run one by one, are the model; and what measuring them leaves."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig, transformer_block  # noqa: E402
from one_rank_job import one_rank_job  # noqa: E402

from envpipe_megatron.errors import EnvPipeError  # noqa: E402
from envpipe_megatron.integrations.layer_profile import hooks, job, measuring  # noqa: E402
from envpipe_megatron.integrations.layer_profile.gpt import FULL, GptPieces  # noqa: E402
from envpipe_megatron.integrations.layer_profile.job import measure_model  # noqa: E402
from envpipe_megatron.integrations.layer_profile.measuring import Window  # noqa: E402
from envpipe_megatron.search.layer_file import read_layers  # noqa: E402
from envpipe_megatron.search.layer_jobs import LayerJob  # noqa: E402
from envpipe_megatron.search.layer_profile import Block, Measure, Sizes  # noqa: E402

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
def alone() -> Iterator[None]:
    """A job of one rank, on the CPU, whose models get a row of each kind of layers."""
    with one_rank_job() as patch:
        block = transformer_block.TransformerBlock
        patch.setattr(block, "_build_layers", block._build_layers)  # put back at the end
        hooks._build_rows(transformer_block)
        yield


def make_model(experts: bool = False, tied: bool = False, layers: int = 3) -> Any:
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


def names(pieces: GptPieces) -> list[str]:
    return [name for block in pieces.blocks for name in block.pieces]


def test_a_few_layers_of_each_kind_are_built() -> None:
    pieces = GptPieces(make_model(), ARGS)
    assert pieces.blocks == (Block(("embedding",)), Block(("layer",), 3), Block(("loss",)))
    model = make_model(layers=6)
    assert len(model.decoder.layers) == 4
    assert GptPieces(model, ARGS).blocks[1] == Block(("layer",), 6)
    model = make_model(experts=True)
    assert model.decoder.envpipe_built == [0, 1, 1]
    assert GptPieces(model, ARGS).blocks == (
        Block(("embedding",)),
        Block(("layer1",)),
        Block(("layer2",), 2),
        Block(("loss",)),
    )


def test_a_row_is_as_long_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 16 * 18 * 10**9  # a quarter of it for all kinds: 2e9 parameters of each of two
    for name, value in (
        ("is_available", True),
        ("mem_get_info", (free - 100, free)),
        ("memory_reserved", 200),
        ("memory_allocated", 100),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(measuring, "lowest", lambda value: value)
    assert measuring.row_lengths([2, 30], [10**8, 10**9]) == [2, 2]
    assert measuring.row_lengths([1, 30], [10**8, 10**10]) == [1, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_pieces_one_after_another_are_the_model(tied: bool) -> None:
    model = make_model(tied=tied)
    pieces = GptPieces(model, ARGS)
    state = None
    for name in names(pieces):
        with pieces.running(name, 2, length=pieces.row_length(name)) as (piece, hidden):
            state = piece.forward(hidden if state is None else state)
    tokens, positions, mask = pieces._microbatch(2).inputs
    assert torch.equal(state, model(tokens, positions, mask, labels=tokens).sum())
    assert len(model.decoder.layers) == 3
    assert model.decoder.final_layernorm is not None


def test_layers_run_in_a_row_and_are_recomputed() -> None:
    model = make_model()
    pieces = GptPieces(model, ARGS)
    assert pieces.ways("layer") == ("selective", FULL)
    assert pieces.ways("loss") == ()
    calls, added = [], []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
        # Where Megatron adds a gradient to the model's own.
        layer.mlp.linear_fc1.weight.register_post_accumulate_grad_hook(lambda _: added.append(1))
    for way, runs in ((None, 1), ("selective", 1), (FULL, 2)):
        with pieces.running("layer", 1, way, length=3) as (piece, hidden):
            calls.clear()
            added.clear()
            piece.forward(hidden.detach().requires_grad_()).sum().backward()
            assert (len(calls), len(added)) == (3 * runs, 3)
    gradients = []
    for way in (None, FULL):
        with pieces.running("layer", 1, way) as (piece, hidden):
            calls.clear()
            inputs = hidden.detach().requires_grad_()
            piece.forward(inputs).sum().backward()
            gradients.append(inputs.grad)
            assert len(calls) == (1 if way is None else 2)
    assert torch.equal(*gradients)
    assert model.config.recompute_granularity is None


def test_weights_are_counted_where_a_stage_would_hold_them() -> None:
    for tied in (True, False):
        pieces = GptPieces(make_model(tied=tied), ARGS)
        counts = {}
        for name in names(pieces):
            with pieces.running(name, 1) as (piece, _):
                counts[name] = piece.parameters
        norm = 2 * 16
        assert counts["embedding"] == (32 + 8) * 16
        assert counts["loss"] == 32 * 16 + norm
        assert counts["layer"] == 12 * 16**2 + 2 * norm


def forward_step(data: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """A training script's, which takes a while for its data and for its loss."""
    batch = next(data)
    time.sleep(DATA_S)
    assert ARGS.micro_batch_size == len(batch["tokens"])
    labels = batch["labels"]
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=labels)

    def loss_of(losses: Any) -> tuple[Any, Any, dict[str, Any]]:
        time.sleep(LOSS_S)
        mask = batch["loss_mask"]
        return (losses * mask).sum(), mask.sum().int(), {}

    return losses, loss_of


def measure(folder: Path, *sizes: int, model: Any = None) -> LayerJob:
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
    measured = LayerJob(str(folder), 1, 1, 1, sizes)
    measure_model(model, model, optimizer, ARGS, forward_step, measured)
    return measured


def test_a_model_is_measured_into_a_file_for_each_microbatch_size(tmp_path: Path) -> None:
    model = make_model()
    of = measure(tmp_path, 1, 2, model=model)
    for size in (1, 2):
        made = read_layers(of.file(size))
        layer = made.at(Sizes(1, size))["layer"]
        assert layer.input_bytes == layer.output_bytes == 8 * size * 16 * 4
        assert layer.forward_s[0] > 0
        assert layer.forward_j is None
        assert layer.host_s is None  # there is nobody to hand over to
        assert [way.name for way in layer.recomputation] == ["selective", "full"]
        # With embedding and loss comes what the training script does beside the model.
        embedding, loss = (made.at(Sizes(1, size))[name] for name in ("embedding", "loss"))
        assert min(embedding.forward_s[0], loss.apart_s) > 0.9 * DATA_S
        assert loss.forward_s[0] > 0.9 * LOSS_S > 5 * loss.backward_s[0]
        held = made.bytes_per_parameter
        assert (held.weight, held.gradient) == (4, 4)
        assert held.optimizer == pytest.approx(8, rel=0.02)
        assert made.optimizer_s > 0
        assert made.gradients_s * sum(map(torch.numel, model.parameters())) >= 2e-3
        assert made.frequency_mhz.tolist() == [1000]


class Metered:
    """A GPU of two clocks whose power is its clock's tenth."""

    name, frequency_mhz = "a GPU", (2000, 1000)

    def __init__(self, _clocks: object) -> None:
        self.clock_mhz = 0

    def set(self, frequency_mhz: int) -> None:
        self.clock_mhz = frequency_mhz

    def energies_j(self, windows: list[Window | None]) -> list[float]:
        power_w = self.clock_mhz / 10
        return [power_w * (w.end_s - w.begin_s) / w.runs if w else math.nan for w in windows]

    def close(self) -> None:
        self.clock_mhz = 0


def test_times_and_joules_go_by_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "RankGpu", Metered)
    made = read_layers(measure(tmp_path, 1).file(1))
    assert made.frequency_mhz.tolist() == [2000, 1000]
    assert made.gpu == "a GPU"
    assert made.has_energy
    layer = made.at(Sizes())["layer"]
    assert (layer.forward_j > 0).all()
    assert layer.host_s > 0
    assert all(way.energy_j.shape == (2,) for way in layer.recomputation)


def test_what_no_piece_does_is_no_faster_after_a_rest() -> None:
    one, two = np.array([1.0, 1.5]), np.array([2.0, 3.0])
    loss = Measure(one, two, 10 * one, rested_s=np.array([2.75, 4.0]))
    found = job._with_rest(
        {"embedding": Measure(one / 2, one / 2), "loss": loss},
        {"embedding": 1, "loss": 1},
        whole_s=np.array([6.0, 8.0]),
        data_s=np.array([0.25, 0.375]),  # the clock has no part in it
    )
    last = found["loss"]
    assert (last.forward_s.tolist(), last.backward_s.tolist()) == ([2.75, 3.25], [2.0, 3.0])
    assert last.forward_j is not None
    assert last.forward_j.tolist() == [27.5, 32.5]
    assert last.rested_s is not None
    assert last.rested_s.tolist() == [4.5, 5.75]
    # The data are loaded by the first stage and by the last, by one that is both only once.
    assert (found["embedding"].forward_s.tolist(), last.apart_s) == ([0.75, 1.0], 0.25)


def test_other_models_are_refused() -> None:
    with pytest.raises(EnvPipeError, match="GPTModel"):
        GptPieces(torch.nn.Linear(1, 1), ARGS)
