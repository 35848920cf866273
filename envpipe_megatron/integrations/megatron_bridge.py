"""`EnvPipeCallback`, for `pretrain(config, forward_step, callbacks=[EnvPipeCallback()])`.

Callbacks of Megatron-Bridge see steps, but not the forward-backward function, which its training
loop asks for ahead of the first of them, nor that a checkpoint begins or training ends early. So
the callback puts functions of its own into the module of that loop; they call Bridge's.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

import torch.distributed as dist

from envpipe_megatron.integrations.hooking import between_steps, options_of, replaced
from envpipe_megatron.integrations.levels import ArgumentLimit, JobError, Level, Predicate, on
from envpipe_megatron.integrations.megatron.limits import LIMITS, NOT_PROVEN, REFUSED, check_metered
from envpipe_megatron.integrations.megatron.training import Training
from envpipe_megatron.integrations.options import read_values

logger = logging.getLogger(__name__)

BRIDGE_LIMITS = (
    *LIMITS,
    ArgumentLimit(
        "process groups of the model's own (use_decentralized_pg)",
        Level.ORDER,
        NOT_PROVEN,
        on("use_decentralized_pg"),
    ),
    ArgumentLimit(
        "tensor inspection",
        Level.UNITS,
        "it counts Megatron's calls",
        on("inspects_tensors"),
    ),
)
BRIDGE_REFUSED: Mapping[str, Predicate] = {
    **REFUSED,
    "stages of two models (dist_train)": on("of_two_models"),
}

#: Parts of a configuration that have Megatron-LM's arguments; of those of one name the last counts.
_PARTS = (
    *("logger", "rerun_state_machine", "checkpoint", "dist", "ddp", "validation", "train"),
    *("optimizer", "ft", "straggler"),
)
#: Megatron-LM's names of arguments, and what the fields of these are called here.
_RENAMED = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "padded_vocab_size": "vocab_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "heterogeneous_layers_config_path": "heterogeneous_block_specs",
    "te_precision_config_file": "quant_recipe",
    "kitchen_recipe_number": "use_kitchen",
}


def arguments_of(config: Any, world_size: int) -> argparse.Namespace:
    """Return the arguments that `limits` and `job` read, from a validated ConfigContainer.

    Most of Bridge's fields have the names of Megatron-LM's arguments; these are the others. Of
    fields of one name in several parts, the model's counts.
    """
    model = config.model
    parts = (config, *(getattr(config, name) for name in _PARTS))
    named: dict[str, Any] = {}
    for part in (*parts, getattr(model, "transformer", None), model):
        named |= {} if part is None else vars(part)
    named |= {name: named.get(field) for name, field in _RENAMED.items()}
    # What is packed in a batch is as long as its samples are.
    packs = _is_on(config.dataset, "enable_in_batch_packing")
    lengths_vary = packs or config.dataset.dataloader_type == "batch"
    named |= {
        "world_size": world_size,
        "untie_embeddings_and_output_weights": not named.get("share_embeddings_and_output_weights"),
        "lengths_vary": lengths_vary,
        "sft": lengths_vary or config.peft is not None,
        "modelopt_enabled": bool(named.get("restore_modelopt_state") or named.get("kd_config")),
        "inprocess_restart": _is_on(config.inprocess_restart, "enabled"),
        "inspects_tensors": _is_on(config.tensor_inspect, "enabled"),
        "of_two_models": _is_on(named.get("dist_train"), "use_dist_train"),
    }
    return argparse.Namespace(**named)


def _is_on(part: Any, switch: str) -> bool:
    return bool(getattr(part, switch, False))


_LOOP = "megatron.bridge.training.train"
#: What the loop's module calls by these names.
_BOUND = ("get_forward_backward_func", "checkpoint_and_decide_exit")


class EnvPipeCallback:
    """Runs EnvPipe in one training by Megatron-Bridge; every rank makes one before `pretrain`.

    Args:
        options: EnvPipe's by name, without `--envpipe-` and with underscores
            (`level="units"`, `max_slowdown=3`), as a block of a configuration has them.

    Raises:
        JobError: no such option, a value that it cannot have, or a version of Megatron-Bridge that
            EnvPipe cannot follow.

    When training begins, an EnvPipeError ends a job that cannot have what it asks for, before its
    first step.
    """

    def __init__(self, **options: object) -> None:
        read_values(options)  # refuses wrong ones early
        self._options = options
        self._training: Training | None = None
        #: Megatron's own, once the loop has asked for it.
        self._framework_function: Callable[..., Any] | None = None
        loop = _checked_loop()
        before = getattr(loop.get_forward_backward_func, "callback", None)
        if before is not None:
            before.close()
        self._put_back = ExitStack()
        self._put_into(loop)

    def on_train_start(self, context: Any) -> None:
        """Make the job: the model is built, and no step has begun.

        Bridge has an earlier event too, `on_data_init_start`, but refuses `train.num_epochs` where
        a callback has that.
        """
        from megatron.bridge.training.utils.pg_utils import get_pg_collection

        if self._framework_function is None:  # used twice, or made after another, or too late
            logger.error(
                "This training runs without EnvPipe: Megatron-Bridge's loop did not get this "
                "callback's function. Make one, and no more, before each call of `pretrain`, in "
                "the same process"
            )
            return
        args = arguments_of(context.state.cfg, dist.get_world_size())
        check_metered(args, BRIDGE_REFUSED)
        options = options_of(args, self._options)
        group = get_pg_collection(context.model).pp
        self._training = Training(args, options, BRIDGE_LIMITS, context.model, group)
        self._put_back.enter_context(closing(self._training))
        self._training.in_place_of(self._framework_function)
        self._put_back.enter_context(between_steps("Megatron-Bridge", self._training))

    def on_train_step_start(self, context: Any) -> None:
        """Begin a step."""
        if self._training is not None:
            self._training.begin_step(context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        """End a step, whose optimizer has stepped; Bridge logs after this."""
        if self._training is None:
            return
        self._training.end_step(skipped=bool(context.skipped_iter))
        state, iteration = context.state, context.state.train_state.step + 1
        interval = state.cfg.logger.log_interval
        if interval and iteration % interval == 0:
            line = self._training.log(iteration, state.tensorboard_logger, state.wandb_logger)
            self._training.say(line and f"iteration {iteration} |{line}")

    def on_train_end(self, context: Any = None) -> None:
        """End the job: training has ended, and evaluations may follow."""
        with closing(self):
            if self._training is not None:
                self._training.end()

    def close(self) -> None:
        """Give the clock back where an error has ended training and the process goes on.

        The next callback that is made does it too. The loop calls Bridge's functions again.
        """
        self._put_back.close()
        self._training = self._framework_function = None

    def _put_into(self, loop: Any) -> None:
        """Let the loop call this callback, up to `close`."""
        get_function, is_leaving = loop.get_forward_backward_func, loop.checkpoint_and_decide_exit

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            own = self._framework_function = get_function(*args, **kwargs)

            def forward_backward(**arguments: Any) -> Any:
                function = own if self._training is None else self._training.in_place_of(own)
                return function(**arguments)

            return forward_backward

        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
            leaving = is_leaving(*args, **kwargs)
            if leaving:  # by sys.exit, without another callback
                self.on_train_end()
            return leaving

        get_forward_backward_func.callback = self  # type: ignore[attr-defined]  # for the next one
        ours = (get_forward_backward_func, checkpoint_and_decide_exit)
        self._put_back.enter_context(replaced(loop, **dict(zip(_BOUND, ours, strict=True))))


def _checked_loop() -> Any:
    """Return the module of Bridge's training loop; a JobError if EnvPipe cannot use it."""
    try:
        events = importlib.import_module("megatron.bridge.training.callbacks").VALID_EVENTS
        loop = importlib.import_module(_LOOP)
    except ImportError as error:
        events, loop, missing = (), None, [str(error)]
    else:
        needed = {name for name in vars(EnvPipeCallback) if name.startswith("on_")}
        missing = sorted(needed - events) + [name for name in _BOUND if not hasattr(loop, name)]
    if missing:
        raise JobError(
            "EnvPipe needs Megatron-Bridge 0.5 or later, whose training loop calls callbacks",
            value=missing,
            remedy="Install one, or train without EnvPipeCallback.",
        )
    return loop
