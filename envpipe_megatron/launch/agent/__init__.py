"""A node's agent: bills its GPUs, keeps the node's energy log and sends it to the job's collector.

Enter at `agent.NodeAgent`, which `launch.node` makes.
"""
