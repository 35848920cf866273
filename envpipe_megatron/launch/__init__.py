"""Many nodes: torchrun with an agent on each node, and one energy bill of the job."""
