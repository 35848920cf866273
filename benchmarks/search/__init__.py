"""How parallel configurations are searched: against Aceso, against measured runs, on GPUs."""
