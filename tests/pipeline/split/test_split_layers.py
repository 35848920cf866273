"""Layers whose backward is in two parts, one by one: gradients, what is held, and errors midway."""

import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# One worker imports megatron-core, which takes seconds, and none does to collect tests.
pytestmark = pytest.mark.xdist_group("megatron")


@pytest.fixture(scope="module")
def split() -> Any:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from envpipe_megatron.integrations.megatron import split_backward

    return split_backward


@pytest.fixture
def layers(split: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def add(inputs: Any, gradients: Any, main_grad: Any) -> None:
        main_grad.addmm_(gradients.t(), inputs)

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    monkeypatch.setattr(split.layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    monkeypatch.setattr(split.layers, name, split._Linear)
    return split.layers


class Net(torch.nn.Module):
    """Megatron's function three times, twice with one weight; an own norm between."""

    def __init__(self, layers: Any, fused: bool, marked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.function = layers.LinearWithGradAccumulationAndAsyncCommunication
        self.more = len(inspect.signature(self.function.forward).parameters) - 10
        self.fused = fused
        self.first, self.second = (torch.nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.bias = torch.nn.Parameter(torch.randn(6))
        self.norm = torch.nn.LayerNorm(6)
        for weight in (self.first, self.second):
            weight.main_grad = torch.zeros(6, 6)
            if marked:
                weight.envpipe_puts_off = True

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        rest = (self.fused, False, False, None, 0, None, *[1, None][: self.more])
        return self.function.apply(x, weight, bias, *rest)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.linear(x, self.first, self.bias))
        x = self.norm(torch.tanh(self.linear(x, self.second)))
        return self.linear(x, self.first)

    def gradients(self) -> list[Any]:
        given = [p.main_grad if self.fused and p.dim() > 1 else p.grad for p in self.parameters()]
        return [gradient.clone() for gradient in given]


def data(count: int = 3) -> list[tuple[Any, Any]]:
    made = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(4, 2, 6, generator=made).requires_grad_(),
            torch.randn(4, 2, 6, generator=made),
        )
        for _ in range(count)
    ]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_gradient_becomes_the_parameters_own_without_a_copy(split, layers):
    net, put_off, made = Net(layers, fused=False), [], []
    ((x, gradient),) = data(1)
    with split.first_part(put_off):
        torch.tanh(net.linear(x, net.second)).backward(gradient)
    compute = put_off[0].compute

    def noted() -> Any:
        gradients = compute()
        made.extend(each.data_ptr() for each in gradients)
        return gradients

    put_off[0].compute = noted
    split.second_part(put_off)
    assert net.second.grad.data_ptr() == made[0]


def test_what_a_part_needs_is_freed_as_it_goes(split, layers):
    net, put_off, alive = Net(layers, fused=False), [], []
    ((x, gradient),) = data(1)
    with split.first_part(put_off):
        net(x).backward(gradient)
    del x, gradient
    refs = [[weakref.ref(t) for t in each.compute.args[:2]] for each in put_off]

    def counted(compute: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            alive.append(sum(all(ref() is not None for ref in pair) for pair in refs))
            return compute()

        return run

    for each in put_off:
        each.compute = counted(each.compute)
    del each
    split.second_part(put_off)
    gc.collect()
    assert alive == [3, 2, 1]
    assert not any(ref() for pair in refs for ref in pair)


def test_a_stage_may_have_nothing_to_put_off(split):
    split.second_part([])


def left_whole(split: Any, net: Net) -> None:
    ((x, gradient),) = data(1)
    put_off: list[Any] = []
    with split.first_part(put_off):
        net(x).backward(gradient)
    assert not put_off
    assert net.first.grad is not None


def test_weights_of_other_layers_and_layers_beside_the_stream_stay_whole(
    split, layers, monkeypatch
):
    left_whole(split, Net(layers, fused=False, marked=False))
    streams = iter(["of units"])
    monkeypatch.setattr(split, "_stream", lambda: next(streams, "beside"))
    left_whole(split, Net(layers, fused=False))


def test_backwards_in_other_threads_are_in_the_part_too(split, layers):
    """On GPUs, autograd has threads of its own."""
    net, put_off = Net(layers, fused=False), []
    ((x, gradient),) = data(1)
    output = net(x)
    with split.first_part(put_off):
        thread = threading.Thread(target=output.backward, args=(gradient,))
        thread.start()
        thread.join()
    assert len(put_off) == 3


def test_an_error_in_a_part_leaves_nothing_behind(split, layers):
    net, put_off, outer = Net(layers, fused=False), [], []
    ((x, gradient),) = data(1)
    broken = net(x)
    broken.register_hook(lambda _: 1 / 0)
    with split.first_part(outer):
        with pytest.raises(ZeroDivisionError), split.first_part(put_off):
            broken.backward(gradient)
        assert split._Under.into is outer
    assert split._Under.into is split._Under.stream is None
    with split.first_part(put_off):
        net(x).backward(gradient)
    put_off[1].compute = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        split.second_part(put_off)
    assert not put_off
    x.grad = net.first.grad = net.second.grad = None
    net(x).backward(gradient)
    assert net.second.grad is not None


# Transformer Engine's ---------------------------------------------------------------------------


class WeightGradStore:
    """The protocol of Transformer Engine's, which never delays by itself."""

    context = None

    def delay_wgrad_compute(self) -> bool:
        return False


class _Function(torch.autograd.Function):
    """What Transformer Engine's linear layers do about weight gradients, for one or many weights.

    Not fused and delayed, grouped ones return results that are yet to be computed.
    """

    @staticmethod
    def forward(ctx: Any, module: Any, splits: list[int], x: Any, *parameters: Any) -> Any:
        count = len(splits)
        ctx.module, ctx.splits, ctx.parameters = module, splits, parameters
        ctx.store = module.wgrad_store if module.wgrad_store.delay_wgrad_compute() else None
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x)
        parts = [part @ w.t() for part, w in zip(x.split(splits), weights, strict=True)]
        if biases:
            parts = [part + b for part, b in zip(parts, biases, strict=True)]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,), count = ctx.saved_tensors, len(ctx.splits)
        weights, biases = ctx.parameters[:count], ctx.parameters[count:]
        fused = ctx.module.fuse_wgrad_accumulation
        parts = list(gradient.split(ctx.splits))
        grouped = count > 1
        out = [w.main_grad if fused else torch.full_like(w, torch.nan) for w in weights]

        def gemm(inputs: Any, gradients: Any, results: Any = out) -> Any:
            inputs, gradients = (t if grouped else [t] for t in (inputs, gradients))
            for part, own, result in zip(inputs, gradients, results, strict=True):
                result.add_(own.t() @ part) if fused else result.copy_(own.t() @ part)
            found = [own.sum(0) if biases else torch.empty(0) for own in gradients]
            return (None, found, None) if grouped else (results[0], found[0])

        given = [list(x.split(ctx.splits)), parts, out] if grouped else [x, gradient]
        delayed = ctx.store is not None and ctx.store.delay_wgrad_compute()
        if not weights[0].requires_grad:
            found = []
        elif delayed:
            ctx.store.put(given, gemm)
            found = [None] * len(biases)
        else:
            found = gemm(*given)[1]
            found = found if grouped else [found]
        returned = [None] * count if fused or (delayed and not grouped) else out
        dx = torch.cat([g @ w for g, w in zip(parts, weights, strict=True)])
        return None, None, dx, *returned, *(found if biases else ())


class _Layer(torch.nn.Module):
    names = ("weight",)

    def __init__(self, fused: bool, bias: bool) -> None:
        super().__init__()
        self.wgrad_store: Any = WeightGradStore()
        self.fuse_wgrad_accumulation, self.use_bias = fused, bias
        self.weight_names = list(self.names)
        for name in self.names:
            weight = torch.nn.Parameter(torch.randn(6, 6) * 0.5)
            weight.main_grad = torch.zeros(6, 6)
            setattr(self, name, weight)
            if bias:
                setattr(self, name.replace("weight", "bias"), torch.nn.Parameter(torch.randn(6)))

    def apply_to(self, x: Any, names: tuple[str, ...], splits: list[int]) -> Any:
        biases = [name.replace("weight", "bias") for name in names if self.use_bias]
        return _Function.apply(self, splits, x, *(getattr(self, n) for n in (*names, *biases)))

    def forward(self, x: Any) -> Any:
        return self.apply_to(x, self.names, [len(x)])


class Linear(_Layer):
    pass


class LayerNormLinear(_Layer):
    def forward(self, x: Any) -> Any:
        return super().forward(torch.nn.functional.layer_norm(x, [6]))


class LayerNormMLP(_Layer):
    """Here two nodes, of which nothing else's comes between."""

    names = ("fc1_weight", "fc2_weight")

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.apply_to(x, self.names[:1], [len(x)]))
        return self.apply_to(x, self.names[1:], [len(x)])


class GroupedLinear(_Layer):
    names = ("weight0", "weight1")
    num_gemms = 2

    def forward(self, x: Any) -> Any:
        return self.apply_to(x, self.names, [3, len(x) - 3])


KINDS = (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear)


def of_transformer_engine(fused: bool, bias: bool) -> Any:
    torch.manual_seed(9)
    return torch.nn.Sequential(*(kind(fused, bias) for kind in (*KINDS, Linear)))


def results(model: Any, fused: bool) -> Iterator[Any]:
    for parameter in model.parameters():
        yield parameter.main_grad if fused and parameter.dim() > 1 else parameter.grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_layers_with_transformer_engines_store(split, layers, fused, bias):
    whole, parts = of_transformer_engine(fused, bias), of_transformer_engine(fused, bias)
    split.put_off_in([parts])
    stores = [layer.wgrad_store for layer in parts]
    split.put_off_in([parts])
    assert stores == [layer.wgrad_store for layer in parts]
    kinds = [type(layer) for layer in parts if isinstance(layer.wgrad_store, split._Store)]
    unknown = {LayerNormMLP} if bias else set()
    unknown |= set() if fused else {GroupedLinear}
    assert kinds == [kind for kind in (*KINDS, Linear) if kind not in unknown]
    xs = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for x in xs:
        whole(x).tanh().sum().backward()
    waiting: list[list[Any]] = [[] for _ in xs]
    for x, put_off in zip(xs, waiting, strict=True):
        with split.first_part(put_off):
            output = parts(x)
        with split.first_part(put_off):
            output.tanh().sum().backward()
        assert len(put_off) == len(kinds) + (LayerNormMLP in kinds)
    for put_off in waiting:
        split.second_part(put_off)
    assert equal(list(results(whole, fused)), list(results(parts, fused)))
    with torch.no_grad():
        for parameter in (*whole.parameters(), *parts.parameters()):
            parameter.grad = None
    for model in (whole, parts):  # of the same layers, whole ones
        model(xs[0]).tanh().sum().backward()
    assert equal(list(results(whole, fused)), list(results(parts, fused)))


@pytest.mark.parametrize("frozen", LayerNormMLP.names)
def test_of_a_layer_with_two_weights_one_may_be_frozen(split, layers, frozen):
    model = LayerNormMLP(fused=False, bias=False)
    getattr(model, frozen).requires_grad_(False)
    (trained,) = (weight for weight in model.parameters() if weight.requires_grad)
    x = torch.randn(8, 6)
    model(x).sum().backward()
    whole, trained.grad = trained.grad, None
    split.put_off_in([model])
    put_off: list[Any] = []
    with split.first_part(put_off):
        model(x).sum().backward()
    split.second_part(put_off)
    assert equal([whole], [trained.grad])


# Why whole --------------------------------------------------------------------------------------


def test_why_backwards_stay_whole(split, layers):
    model, config = of_transformer_engine(fused=True, bias=False), SimpleNamespace()
    assert split.why_whole([model], config) is None
    for flag in ("tp_comm_overlap", "delay_wgrad_compute", "enable_autocast"):
        said = split.why_whole([model], SimpleNamespace(**{flag: True}))
        assert said == f"weight gradients cannot be put off with {flag}"
    said = split.why_whole([model], SimpleNamespace(gtp_weight_remat_size=2))
    assert "gtp_weight_remat_size" in said
    sharded = type("FullyShardedDataParallel", (torch.nn.Sequential,), {})(model)
    assert "FullyShardedDataParallel" in split.why_whole([sharded], config)


def test_a_model_whose_weights_are_mostly_unknown_stays_whole(split, layers):
    known, unknown = Linear(True, False), torch.nn.Linear(6, 8, bias=False)
    embedding = torch.nn.Embedding(100, 6)
    assert split.why_whole([torch.nn.Sequential(known, embedding)], None) is None
    for model in (torch.nn.Sequential(known, unknown, embedding), torch.nn.Sequential(unknown)):
        said = split.why_whole([model], None)
        assert said.endswith("layers that cannot put theirs off (Linear)")
    assert split.why_whole([embedding], None) is None  # others of the model's stages may split
    known.weight.requires_grad_(False)  # with small adapters
    adapted = torch.nn.Sequential(known, torch.nn.Linear(6, 2))
    assert split.why_whole([adapted], None) is not None
    known.weight.requires_grad_(True)
    known.ub_bulk_wgrad = True
    assert split.why_whole([known], None) is not None
    known.ub_bulk_wgrad, known.wgrad_store = False, None  # Transformer Engine before 2.3
    assert split.why_whole([known], None) is not None


def test_another_layer_of_such_a_name_is_unknown(split, layers):
    """Transformer Engine has one with a store among its operations to be fused."""
    layer = GroupedLinear(fused=True, bias=False)
    del layer.fuse_wgrad_accumulation
    assert split.why_whole([layer], None) is not None


def test_megatrons_function_of_another_version_is_unknown(split, layers, monkeypatch):
    def forward(ctx: Any, input: Any, weight: Any, what_is_new: Any) -> Any:
        raise NotImplementedError

    assert split._knows_function()
    monkeypatch.setattr(split._WHOLE, "forward", staticmethod(forward))
    assert not split._knows_function()
