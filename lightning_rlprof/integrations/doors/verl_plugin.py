"""What verl imports: by the entry point ``verl.plugins``, or by ``VERL_USE_EXTERNAL_MODULES``."""

from lightning_rlprof.integrations.doors.registry import open_doors

open_doors()
