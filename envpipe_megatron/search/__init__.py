"""Search of the parallel configuration: stages, sizes, microbatch and recomputation."""
