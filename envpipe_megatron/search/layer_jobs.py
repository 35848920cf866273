"""Jobs that measure a layer profile, and the one profile that they all add to.

`envpipe profile --layers` starts a job of Megatron for each way to share a microbatch among GPUs; a
job measures several microbatch sizes. Its side is `integrations/layer_profile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files
from envpipe_megatron.search.layer_file import layers_text, read_layers
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

#: Holds a `LayerJob` for the ranks of the job.
JOB_VARIABLE = "ENVPIPE_LAYER_JOB"
#: Speeds of two seconds tell GPUs apart by more than this.
_ALIKE = 1.005
_ELSEWHERE = "Give another --output, or remove that file."


@dataclass(frozen=True)
class LayerJob:
    """A job of Megatron that measures layers.

    Args:
        output: the layer profile to which rank 0 adds.
        sizes: that it measures one after another: those of several microbatches.
        clocks_mhz: the highest first; none to leave the clock as it is.
        source: the training's script and arguments, which its profile names.
    """

    output: str
    sizes: tuple[Sizes, ...]
    clocks_mhz: tuple[int, ...] = ()
    source: str = LayerProfile.source

    @property
    def num_ranks(self) -> int:
        """The least with which Megatron forms such groups: experts lie on data parallel ranks."""
        one = self.sizes[0]
        return math.lcm(one.gpus, one.tensor_parallel * one.expert_parallel)

    def gpus(self, speeds: Sequence[float]) -> range:
        """Choose the GPUs of a node that it runs on: the slowest, for which all others wait.

        They are neighbours, as Megatron's groups are. Of about equally slow ones the first counts,
        so that it mostly is the same.
        """
        limit = _ALIKE * min(speeds)
        slowest = next(gpu for gpu, speed in enumerate(speeds) if speed <= limit)
        begin = min(slowest // self.num_ranks * self.num_ranks, len(speeds) - self.num_ranks)
        return range(begin, begin + self.num_ranks)

    def to_text(self) -> str:
        """Return the text that `JOB_VARIABLE` holds."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> LayerJob:
        """Read what `to_text` made."""
        data = json.loads(text)
        sizes = tuple(Sizes(**each) for each in data["sizes"])
        return cls(**{**data, "sizes": sizes, "clocks_mhz": tuple(data["clocks_mhz"])})


def jobs_for(
    tensor: Sequence[int],
    context: Sequence[int],
    expert: Sequence[int],
    microbatches: Sequence[int],
    clocks_mhz: tuple[int, ...],
    output: Path,
    measured: Collection[Sizes],
    source: str = LayerProfile.source,
) -> list[LayerJob]:
    """Return the jobs that measure all combinations not yet measured, small groups first."""
    jobs = []
    for t, c, e in sorted(set(product(tensor, context, expert))):
        wanted = (Sizes(t, b, c, e) for b in sorted(set(microbatches)))
        if missing := tuple(sizes for sizes in wanted if sizes not in measured):
            jobs.append(LayerJob(str(output), missing, clocks_mhz, source))
    return jobs


def add_measures(output: Path, new: LayerProfile) -> None:
    """Add measures to those of a file, or make it.

    EnvPipeError if they are of two commands, GPUs or lists of layers or clocks.
    """
    if output.is_file():
        known = read_layers(output)
        check_known(known, new.source, new.frequency_mhz.tolist())
        if (known.gpu, known.blocks) != (new.gpu, new.blocks):
            raise EnvPipeError(
                "What was measured before is of other layers, or another GPU",
                value=known.gpu or "a CPU",
                remedy=_ELSEWHERE,
            )
        new = replace(known, measures={**known.measures, **new.measures})
    replace_files({output: [layers_text(new)]})


def check_known(known: LayerProfile, source: str, clocks_mhz: Sequence[int]) -> None:
    """Refuse (EnvPipeError) to go on with measures of another command, or at other clocks.

    No clocks: none will be set, so that nothing is known of them before a job has run.
    """
    if known.source != source:
        raise EnvPipeError(
            "What was measured before is of another command", value=known.source, remedy=_ELSEWHERE
        )
    before_mhz = known.frequency_mhz.tolist()
    if clocks_mhz and before_mhz != list(clocks_mhz):
        raise EnvPipeError(
            "What was measured before is at other clocks (MHz)",
            value=before_mhz,
            remedy=f"Give these clocks. {_ELSEWHERE}",
        )
