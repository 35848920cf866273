#!/usr/bin/env bash
# Trains on all GPUs of this machine, or on as many as NPROC_PER_NODE says, and bills the energy.
#
#   launch/single_node.sh pretrain_gpt.py --pipeline-model-parallel-size 4 ... --envpipe
#
# Options of `envpipe launch` and torchrun may come before the script. Several jobs may run beside
# each other on different GPUs: each meets at a free port of its own.
set -euo pipefail

NPROC_PER_NODE="${NPROC_PER_NODE:-gpu}"

export NPROC_PER_NODE
exec envpipe launch --standalone "$@"
