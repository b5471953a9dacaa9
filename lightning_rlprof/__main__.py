"""``python -m lightning_rlprof`` is ``rlprof``."""

from lightning_rlprof.cli.app import main

if __name__ == "__main__":
    main()
