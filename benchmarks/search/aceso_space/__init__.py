"""Division of a model into stages that may differ in size, as Aceso's runtime runs them."""
