"""`python -m envpipe_megatron.cli`, for when the installed command is not on the path."""

from envpipe_megatron.cli import main

if __name__ == "__main__":
    main()
