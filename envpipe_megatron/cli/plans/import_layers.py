"""`envpipe import-layers`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import OUTPUT_FILE, check_outputs
from envpipe_megatron.console import say
from envpipe_megatron.files import replace_files
from envpipe_megatron.search.aceso_files import read_aceso_profile
from envpipe_megatron.search.folding import fold_blocks
from envpipe_megatron.search.layer_file import layers_text


@click.command("import-layers")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("model")
@click.option(
    "--num-layers", type=click.IntRange(min=1), default=1, show_default=True,
    help="Of the model, in encoder and decoder each; those of a ResNet are all in the files.",
)  # fmt: skip
@click.option("--output", type=OUTPUT_FILE, required=True, help="Layer profile JSON.")
def import_layers(folder: Path, model: str, num_layers: int, output: Path) -> None:
    """Turn op profiles of Aceso or Sailor into a layer profile for `envpipe search`.

    FOLDER holds the files, MODEL is how their names begin. Operators become whole layers, with
    what recomputing attention or all of a layer takes.

    Example:

      envpipe import-layers profiled-time-eurosys gpt_2_6B --num-layers 32 --output layers.json
    """
    check_outputs([output], [])
    profile = fold_blocks(read_aceso_profile(folder, model, num_layers))
    replace_files({output: [layers_text(profile)]})
    sizes = len(profile.measures)
    say(Console(), f"{output}: {len(profile.pieces)} layers at {sizes} sizes.")
