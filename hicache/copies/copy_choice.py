"""The choices of `--hicache-copy`; on its own, so that the command line need not load what copies."""

from typing import Literal

CopyChoice = Literal["auto", "batch", "kernel"]
"""How rows travel to and from a GPU: one batched driver call, one kernel, or what suits their runs."""
