"""A training job from its first iteration to its bill."""
