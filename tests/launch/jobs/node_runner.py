"""Runs one node as `envpipe launch` does.

Arg: JSON with torchrun's `arguments`, the fields of `NodeSettings` as `settings`, and, where a test
cannot wait as long as a user would, `others_end_s` for how long the bill waits for other nodes.
"""

import json
import logging
import sys
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch import node


def main() -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    given = json.loads(sys.argv[1])
    settings = given["settings"]
    if "others_end_s" in given:
        node._OTHERS_END_S = given["others_end_s"]
    try:
        return node.run_node(
            given["arguments"],
            node.NodeSettings(**{**settings, "output_dir": Path(settings["output_dir"])}),
        )
    except EnvPipeError as error:  # as the command prints it
        print(f"Error: {error}", file=sys.stderr)
        return 1


sys.exit(main())
