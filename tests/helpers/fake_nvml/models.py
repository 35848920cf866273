"""The kinds of GPU that a fake node can have, with the clock tables that NVML gives for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


def downwards(top_mhz: int, bottom_mhz: int, step_mhz: float = 15) -> tuple[int, ...]:
    count = int((top_mhz - bottom_mhz) / step_mhz) + 1
    return tuple(int(top_mhz - i * step_mhz) for i in range(count))


@dataclass(frozen=True)
class FakeModel:
    """Power is `static_w + w_per_mhz * clock`, whether or not anything runs.

    `graphics_mhz` maps each memory clock, highest first, to its SM clocks, highest first.
    """

    name: str
    graphics_mhz: Mapping[int, tuple[int, ...]]
    running_memory_mhz: int
    power_limit_w: int
    static_w: int = 50
    w_per_mhz: float = 0.125
    mig_capable: bool = False
    has_profiles: bool = False
    faults: Mapping[str, int] = field(default_factory=dict)


MODELS = {
    "a100": FakeModel(
        name="NVIDIA A100-SXM4-80GB",
        graphics_mhz={1215: downwards(1410, 210)},
        running_memory_mhz=1215,
        power_limit_w=400,
        mig_capable=True,
        # The field for instantaneous power came with later GPUs.
        faults={"no_instant_power": 1},
    ),
    "h200": FakeModel(
        name="NVIDIA H200",
        graphics_mhz={3201: downwards(1980, 345), 2201: downwards(1980, 345)},
        running_memory_mhz=3201,
        power_limit_w=700,
        mig_capable=True,
    ),
    "b200": FakeModel(
        name="NVIDIA B200",
        graphics_mhz={3996: downwards(1965, 120)},
        running_memory_mhz=3996,
        power_limit_w=1000,
        mig_capable=True,
        has_profiles=True,
    ),
    "rtx3090": FakeModel(
        name="NVIDIA GeForce RTX 3090",
        # While CUDA runs, memory is in P2 at 9501 MHz.
        graphics_mhz={
            9751: downwards(2115, 210),
            9501: downwards(2100, 210),
            405: downwards(420, 210),
        },
        running_memory_mhz=9501,
        power_limit_w=350,
    ),
    "v100": FakeModel(
        name="Tesla V100-SXM2-32GB",
        graphics_mhz={877: downwards(1530, 135, 7.5)},
        running_memory_mhz=877,
        power_limit_w=300,
        faults={"no_instant_power": 1},
    ),
}
