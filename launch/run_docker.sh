#!/usr/bin/env bash
# Trains in a container of the image that launch/Dockerfile makes, with this folder as its own.
#
#   launch/run_docker.sh pretrain_gpt.py --pipeline-model-parallel-size 4 ... --envpipe
#   CLOCKS=yes launch/run_docker.sh pretrain_gpt.py ... --envpipe
#
# Locking a GPU's clock needs SYS_ADMIN, which makes root of the container nearly root of the machine.
# CLOCKS=yes grants it; without it, training is metered and its clocks stay as they are. What says which
# clocks are locked outlives the container then, in a folder of the machine (SECURITY.md). On several
# nodes, start it on each with the five variables of multi_node.sh. These are passed on, and those that
# `envpipe launch --hostfile` carries (ENVPIPE_, NCCL_, ...). DOCKER_OPTIONS adds to docker's.
set -euo pipefail

IMAGE="${IMAGE:-envpipe}"
CLOCKS="${CLOCKS:-no}"
DOCKER_OPTIONS="${DOCKER_OPTIONS:-}"
LEASES="${LEASES:-${ENVPIPE_LEASE_DIR:-/run/envpipe/leases}}"

options=(--rm --init --gpus all --network=host --ipc=host --ulimit memlock=-1 --ulimit stack=67108864)
options+=(--volume "$PWD:$PWD" --workdir "$PWD")
options+=(--stop-timeout 120) # for ranks that end slowly, and the bill
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE "${!ENVPIPE_@}" "${!NCCL_@}" \
    "${!GLOO_@}" "${!CUDA_@}" "${!TORCH_@}" "${!OMP_@}" "${!MKL_@}" "${!PET_@}"; do
    case $name in
        ENVPIPE_AGENT_SOCKET | ENVPIPE_LEASE_DIR | CUDA_HOME | CUDA_PATH) ;; # paths out here
        *) options+=(--env "$name") ;;
    esac
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
