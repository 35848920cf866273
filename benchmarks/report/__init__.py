"""How reports of large jobs scale, and Perfetto's own reading of a trace."""
