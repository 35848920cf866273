"""Measures the layers of a model in a job of Megatron-LM, for `envpipe profile --layers`.

    torchrun -m envpipe_megatron.integrations.layer_profile.hooks pretrain_gpt.py ...

The script runs as it is, patched or not. Once it has built model and optimizer, of which a few
layers of each kind are built, pieces of the model are measured in place of training (`hooks`), and
the job ends. What is measured is in the variable `search.layer_jobs.JOB_VARIABLE`.
"""
