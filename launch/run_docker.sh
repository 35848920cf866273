#!/usr/bin/env bash
# Trains in a container of the image that launch/Dockerfile makes, with this folder as its own.
#
#   launch/run_docker.sh pretrain_gpt.py --pipeline-model-parallel-size 4 ... --envpipe
#   CLOCKS=yes launch/run_docker.sh pretrain_gpt.py ... --envpipe
#
# Locking a GPU's clock needs SYS_ADMIN, which makes root of the container nearly root of the machine.
# CLOCKS=yes grants it; without it, training is metered and its clocks stay as they are. What says which
# clocks are locked outlives the container then, in a folder of the machine (SECURITY.md). On several
# nodes, start it on each with the five variables of multi_node.sh. DOCKER_OPTIONS adds to docker's.
set -euo pipefail

IMAGE="${IMAGE:-envpipe}"
CLOCKS="${CLOCKS:-no}"
DOCKER_OPTIONS="${DOCKER_OPTIONS:-}"
LEASES="${LEASES:-/run/envpipe/leases}"

options=(--rm --init --gpus all --network=host --ipc=host --ulimit memlock=-1 --ulimit stack=67108864)
options+=(--volume "$PWD:$PWD" --workdir "$PWD")
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE; do
    options+=(--env "$name")
done
if [[ $CLOCKS == yes ]]; then
    if [[ ! -d $LEASES ]]; then
        echo "There is no folder $LEASES: make it by sudo install -d -m 1777 $LEASES" >&2
        exit 2
    fi
    options+=(--cap-add SYS_ADMIN --volume "$LEASES:/run/envpipe/leases")
fi
read -ra more <<<"$DOCKER_OPTIONS"

exec docker run "${options[@]}" "${more[@]}" "$IMAGE" envpipe launch "$@"
