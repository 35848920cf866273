"""Small random profiles of whole layers, as Megatron's stages have them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from envpipe_megatron.search.layer_file import layers_text
from envpipe_megatron.search.layer_profile import (
    Block,
    BytesPerParameter,
    Curve,
    LayerProfile,
    Links,
    Measure,
    Recomputation,
    Sizes,
)


def whole_layers(
    seed: int, layers: tuple[str, ...] = ("layer", "layer", "other", "layer"), clocks: int = 1
) -> LayerProfile:
    """An embedding, layers of two kinds, a loss; two tensor parallel and microbatch sizes."""
    random = np.random.default_rng(seed)
    slower = 1 + 0.2 * np.arange(clocks)
    power_w = 300.0 * 0.8 ** np.arange(clocks)

    def measure(name: str, sizes: Sizes) -> Measure:
        share = sizes.microbatch_size / sizes.tensor_parallel * random.uniform(0.9, 1.2)
        forward_s = 1e-3 * share * random.uniform(5, 20) * slower
        kept = share * random.uniform(20, 60)
        ways = tuple(
            Recomputation(
                way,
                forward_s * random.uniform(*part),
                forward_s * power_w * 0.5,
                kept * random.uniform(*left),
                random.uniform(0, 10),
            )
            for way, part, left in (
                ("selective", (0.1, 0.5), (0.5, 0.9)),
                ("full", (0.8, 1.0), (0.0, 0.3)),
            )
        )
        return Measure(
            forward_s,
            2 * forward_s,
            forward_s * power_w,
            2 * forward_s * power_w,
            parameters=random.uniform(1, 4) / sizes.tensor_parallel,
            input_bytes=random.uniform(1, 5),
            output_bytes=random.uniform(1, 5),
            activation_bytes=kept,
            forward_workspace_bytes=random.uniform(0, 20),
            backward_workspace_bytes=random.uniform(0, 20),
            recomputation=() if name in ("embedding", "loss") else ways,
        )

    names = ("embedding", *layers, "loss")
    return LayerProfile(
        blocks=tuple(Block((name,)) for name in names),
        frequency_mhz=1400 - 100 * np.arange(clocks),
        measures={
            sizes: {name: measure(name, sizes) for name in dict.fromkeys(names)}
            for sizes in (Sizes(1, 1), Sizes(2, 1), Sizes(1, 2))
        },
        bytes_per_parameter=BytesPerParameter(2, 4, 12),
        links=Links(Curve(np.array([1.0, 10]), np.array([1e-4, 3e-4]))),
        optimizer_s=1e-4,
        frees_outputs=True,
    )


#: {frequency_mhz: (slowdown, power_w)}: least energy at 900 MHz.
CURVE = {1200: (1.0, 400.0), 1000: (1.1, 310.0), 900: (1.2, 270.0), 600: (1.7, 250.0)}


def layers_that_take(
    times_s: Mapping[str, tuple[float, float]],
    curve: Mapping[int, tuple[float, float]] = CURVE,
    held: Mapping[str, tuple[float, float]] | None = None,
) -> LayerProfile:
    """Layers by the times of their forward and backward at full clock, and perhaps their bytes.

    Those are held in any order, and for each microbatch in flight.
    """
    slowdown, power_w = np.array(list(curve.values())).T
    measures = {}
    for name, both_s in times_s.items():
        times = [time_s * slowdown for time_s in both_s]
        memory, activation = (held or {}).get(name, (0.0, 0.0))
        measures[name] = Measure(
            *times,
            *(time_s * power_w for time_s in times),
            parameters=memory,
            activation_bytes=activation,
        )
    return LayerProfile(
        blocks=tuple(Block((name,)) for name in times_s),
        frequency_mhz=np.array(list(curve)),
        measures={Sizes(): measures},
        bytes_per_parameter=BytesPerParameter(1.0, 0.0, 0.0),
        links=Links(),
    )


def write_layers(path: Path, times_s: Mapping[str, tuple[float, float]], **more: object) -> Path:
    """Write the file of `layers_that_take`."""
    path.write_text(layers_text(layers_that_take(times_s, **more)))
    return path
