#!/usr/bin/env bash
# Trains a Llama under DeepSpeed on some GPUs of this machine, a stage each, and bills the energy.
#
#   launch/train_llama_deepspeed.sh --type envelope --scheduling ours --reconfig balanced --gpus 0,1,3
#   launch/train_llama_deepspeed.sh ... --gpus 0,1 -- --model llama-1b --data corpus.jsonl
#
# --help tells the options. The rest of the job is in configs/deepspeed/llama.json.
set -euo pipefail

show_help() {
    cat <<END
usage: ${0##*/} --type TYPE --scheduling SCHEDULING --reconfig RECONFIG --gpus GPUS [-- OPTION...]

  --type TYPE              baseline, uniform, envelope or optimal
  --scheduling SCHEDULING  1f1b, ours (envpipe is the same), or auto, which goes with type optimal
  --reconfig RECONFIG      default; with type envelope also greedy or balanced
  --gpus GPUS              their numbers as nvidia-smi has them, such as 0,1,3: a stage on each.
                           On a machine without GPUs, emulated:4 emulates four of the kind
                           that ENVPIPE_EMULATED_GPU names (default: a100-sxm)
  -h, --help               this text

What follows -- is for train_llama_deepspeed.py, such as
  --model llama-160m|llama-1b|tiny  --data FILE  --sequence-length N  --train-steps N
  --deepspeed_config FILE           --help for all of them

The energy bill, profile, plan and logs go to \$OUTPUT (default: a new folder in runs/).
END
}

fail() {
    echo "${0##*/}: $*" >&2
    echo "${0##*/} --help tells the options" >&2
    exit 2
}

# one_of OPTION VALUE CHOICE...
one_of() {
    local option=$1 value=$2
    shift 2
    for choice in "$@"; do
        if [[ $value == "$choice" ]]; then
            return
        fi
    done
    fail "$option is one of $*, not '$value'"
}

declare -A given=()
while (($#)); do
    case $1 in
    --type | --scheduling | --reconfig | --gpus)
        (($# > 1)) || fail "$1 needs a value"
        given[$1]=$2
        shift 2
        ;;
    -h | --help)
        show_help
        exit
        ;;
    --)
        shift
        break
        ;;
    *) fail "there is no option $1; those of the training script follow --" ;;
    esac
done

for option in --type --scheduling --reconfig --gpus; do
    [[ -n ${given[$option]-} ]] || fail "$option is missing"
done
type=${given[--type]} scheduling=${given[--scheduling]} reconfig=${given[--reconfig]}
gpus=${given[--gpus]}
one_of --type "$type" baseline uniform envelope optimal
one_of --scheduling "$scheduling" 1f1b ours envpipe auto
one_of --reconfig "$reconfig" default greedy balanced
[[ $reconfig == default || $type == envelope ]] ||
    fail "--reconfig $reconfig goes with --type envelope, not $type; others have --reconfig default"
[[ $scheduling != auto || $type == optimal ]] ||
    fail "--scheduling auto goes with --type optimal, not $type; take 1f1b or ours"

if [[ $gpus =~ ^emulated:([0-9]+)$ ]]; then
    stages=${BASH_REMATCH[1]}
    export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu
    export ENVPIPE_EMULATED_GPU="${ENVPIPE_EMULATED_GPU:-a100-sxm}"
elif [[ $gpus =~ ^[0-9]+(,[0-9]+)*$ ]]; then
    IFS=, read -ra numbers <<<"$gpus"
    stages=${#numbers[@]}
    twice=$(printf '%s\n' "${numbers[@]}" | sort | uniq --repeated)
    [[ -z $twice ]] || fail "--gpus has $twice more than once"
    # By number as nvidia-smi has them; CUDA alone would put the fastest first.
    export CUDA_VISIBLE_DEVICES=$gpus CUDA_DEVICE_ORDER=PCI_BUS_ID
else
    fail "--gpus is a list of numbers such as 0,1,3, or emulated:4, not '$gpus'"
fi
((stages > 1)) || fail "--gpus $gpus is no pipeline: give two or more"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUTPUT="${OUTPUT:-runs/llama-$type-$scheduling-$reconfig-$(date +%Y%m%d-%H%M%S)}"

exec envpipe launch --standalone --nproc-per-node "$stages" --output "$OUTPUT" \
    "$root/launch/train_llama_deepspeed.py" --deepspeed_config "$root/configs/deepspeed/llama.json" \
    --type "$type" --scheduling "$scheduling" --reconfig "$reconfig" --output "$OUTPUT" "$@"
