"""Jobs that measure a layer profile, and one profile of what they leave.

`envpipe profile --layers` starts a job of Megatron for each way to share a microbatch among GPUs;
a job measures several microbatch sizes and leaves a profile of each. The job's side is
`integrations/layer_profile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
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
        folder: where rank 0 leaves a layer profile of each microbatch size.
        clocks_mhz: the highest first; none to leave the clock as it is.
        source: the training's script and arguments, which its profile names.
    """

    folder: str
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    microbatch_sizes: tuple[int, ...]
    clocks_mhz: tuple[int, ...] = ()
    source: str = LayerProfile.source

    def sizes(self, microbatch_size: int) -> Sizes:
        """Return sizes of one of its measurements."""
        return Sizes(
            self.tensor_parallel, microbatch_size, self.context_parallel, self.expert_parallel
        )

    @property
    def num_ranks(self) -> int:
        """The least with which Megatron forms such groups: experts lie on data parallel ranks."""
        shared = self.tensor_parallel * self.context_parallel
        return math.lcm(shared, self.tensor_parallel * self.expert_parallel)

    def gpus(self, speeds: Sequence[float]) -> range:
        """Choose the GPUs of a node that it runs on: the slowest, for which all others wait.

        They are neighbours, as Megatron's groups are. Of about equally slow ones the first counts,
        so that it mostly is the same.
        """
        limit = _ALIKE * min(speeds)
        slowest = next(gpu for gpu, speed in enumerate(speeds) if speed <= limit)
        begin = min(slowest // self.num_ranks * self.num_ranks, len(speeds) - self.num_ranks)
        return range(begin, begin + self.num_ranks)

    def file(self, microbatch_size: int) -> Path:
        """Return where the profile of a microbatch size is left."""
        return Path(self.folder) / f"{microbatch_size}.json"

    def to_text(self) -> str:
        """Return the text that `JOB_VARIABLE` holds."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> LayerJob:
        """Read what `to_text` made."""
        data = json.loads(text)
        lists = {name: tuple(data[name]) for name in ("microbatch_sizes", "clocks_mhz")}
        return cls(**{**data, **lists})


def jobs_for(
    tensor: Sequence[int],
    context: Sequence[int],
    expert: Sequence[int],
    microbatches: Sequence[int],
    clocks_mhz: tuple[int, ...],
    folder: Path,
    measured: Collection[Sizes],
    source: str = LayerProfile.source,
) -> list[LayerJob]:
    """Return the jobs that measure all combinations not yet measured, small groups first."""
    jobs = []
    for t, c, e in sorted(set(product(tensor, context, expert))):
        missing = (b for b in sorted(set(microbatches)) if Sizes(t, b, c, e) not in measured)
        job = LayerJob(str(folder / f"t{t}c{c}e{e}"), t, c, e, tuple(missing), clocks_mhz, source)
        if job.microbatch_sizes:
            jobs.append(job)
    return jobs


def merged(known: LayerProfile | None, new: LayerProfile) -> LayerProfile:
    """Return a profile with the measures of both.

    EnvPipeError if they are of two commands, GPUs or lists of layers or clocks.
    """
    if known is None:
        return new
    check_known(known, new.source, new.frequency_mhz.tolist())
    if _identity(known) != _identity(new):
        raise EnvPipeError(
            "What was measured before is of other layers, or another GPU",
            value=known.gpu or "a CPU",
            remedy=_ELSEWHERE,
        )
    return replace(known, measures={**known.measures, **new.measures})


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


def _identity(profile: LayerProfile) -> tuple[object, ...]:
    return profile.gpu, profile.blocks
