"""What the server that ranks are forked from imports last.

Without it every rank looks through the objects of all modules again and again for garbage, and so
makes its own copy of memory that it would share.
"""

import gc

gc.collect()
gc.freeze()
