#!/usr/bin/env bash
# Trains on several nodes: start it on each of them, with a NODE_RANK of its own.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 launch/multi_node.sh pretrain_gpt.py ... --envpipe
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node1 launch/multi_node.sh pretrain_gpt.py ... --envpipe
#
# Each value comes from the environment or is written here. MASTER_ADDR is the node of rank 0, by a
# name or address that all nodes reach. Where ssh reaches all nodes, one command does the same:
# envpipe launch --hostfile hosts pretrain_gpt.py ...
set -euo pipefail

NNODES="${NNODES:-2}"
NODE_RANK="${NODE_RANK:?is not set: 0 on the first node, 1 on the second, and so on}"
MASTER_ADDR="${MASTER_ADDR:?is not set: the name or address of the node of rank 0}"
MASTER_PORT="${MASTER_PORT:-29500}"
NPROC_PER_NODE="${NPROC_PER_NODE:-gpu}"

export NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE
exec envpipe launch "$@"
