"""A script that a user starts on each of two nodes by torchrun: one rank a node, a plain pipeline.

Args: the folder of this node, where its emulated GPU and its bill are. The job's output folder,
beside it, is one that nodes share.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import plain_stages
import torch.distributed as dist

from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.runtime.job import folder
from envpipe_megatron.runtime.job.session import SessionConfig

node = Path(sys.argv[1])
# Both are on this machine, whose name they would write.
folder.socket.gethostname = lambda: node.name
dist.init_process_group("gloo")
rank = dist.get_rank()
config = SessionConfig(
    PlanRequest(4), warmup_iterations=1, output_dir=node.parent / "output", guarded=True
)
session, gpu = plain_stages.session(rank, config, node, fast=False)
begin_j = gpu.committed_energy_j()
try:
    for _ in range(12):
        session.run_iteration(
            4, plain_stages.SPECS, lambda schedule: plain_stages.PlainWork(schedule, rank)
        )
finally:
    session.close()
assert session._rank_clock._hold is not None
bill = {
    "counter_j": gpu.committed_energy_j() - begin_j,
    "logged_j": [total.energy_j for total in session.energy_log.totals.values()],
    "guard_pid": session._rank_clock._hold.guard_pid,
    "job": session._rank_clock._hold.job,
    "locked": gpu.requested_frequency_mhz,
    "run": os.environ["TORCHELASTIC_RUN_ID"],
}
(node / "bill.json").write_text(json.dumps(bill))
dist.destroy_process_group()
