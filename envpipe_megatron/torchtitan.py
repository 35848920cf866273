"""Runs torchtitan with EnvPipe attached to its pipeline; no file of torchtitan is changed.

    torchrun --nproc-per-node 4 -m envpipe_megatron.torchtitan --envpipe-output runs/first ...

What begins with --envpipe- is EnvPipe's (docs/lookup/options.md), all else torchtitan's.
"""

if __name__ == "__main__":
    from envpipe_megatron.integrations.torch_pipelining.torchtitan import main

    main()
