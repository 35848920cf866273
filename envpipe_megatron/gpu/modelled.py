"""Joules and clocks for layer profiles that have none, by the model of a GPU preset.

Nothing here was measured on the profiled GPU: what is planned from it is modelled, and says so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.gpu.presets import ControlOverride, GpuPreset, sweep_range
from envpipe_megatron.search.layer_profile import LayerProfile, Measure

#: Clocks of the model are at least this far apart: the planner needs no more of them.
_STEP_MHZ = 45


def with_modelled_energy(profile: LayerProfile, preset: GpuPreset) -> LayerProfile:
    """Return the profile at a preset's clocks; its times at the highest one stay as they are.

    Collectives within the times are taken to follow the clock as the rest does.
    """
    clocks = modelled_clocks_mhz(preset)

    def curves(kind: Kind, time_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        at_s = np.array([preset.unit_time_s(kind.value, f, float(time_s[0])) for f in clocks])
        power_w = np.array([preset.busy_power_w(kind.value, f) for f in clocks])
        return at_s, at_s * power_w

    def modelled(measure: Measure) -> Measure:
        forward_s, forward_j = curves(Kind.FORWARD, measure.forward_s)
        backward_s, backward_j = curves(Kind.BACKWARD, measure.backward_s)
        ways = []
        for way in measure.recomputation:
            time_s, energy_j = curves(Kind.FORWARD, way.time_s)
            ways.append(replace(way, time_s=time_s, energy_j=energy_j))
        return replace(
            measure,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_j=forward_j,
            backward_j=backward_j,
            recomputation=tuple(ways),
        )

    return replace(
        profile,
        frequency_mhz=np.array(clocks),
        measures={
            sizes: {piece: modelled(measure) for piece, measure in by_piece.items()}
            for sizes, by_piece in profile.measures.items()
        },
        source=f"{profile.source} with the power model {preset.name}",
    )


def modelled_clocks_mhz(preset: GpuPreset) -> list[int]:
    """Return the preset's clocks, highest first, down to where its control stops profiling."""
    control = preset.control or ControlOverride(())
    steps = replace(control, profile_max_mhz=None, profile_step_mhz=_STEP_MHZ)
    return list(sweep_range(preset.supported_frequencies_mhz, steps))
