"""Entry point of `python -m hyper_parallel`, which is the `hyper-parallel` command."""

from hyper_parallel.cli import main

if __name__ == "__main__":
    main()
