"""What a job measures of a model, for later predictions."""
