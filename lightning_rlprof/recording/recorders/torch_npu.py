"""Import torch_npu; a failure says what is missing and changes nothing for child processes."""

import os
from importlib import import_module
from typing import Any

from lightning_rlprof.errors import RecorderError

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def npu_module(name: str) -> Any:
    """Return the module ``torch_npu.<name>``.

    Raises:
        RecorderError: torch_npu or CANN is missing or broken.
    """
    before = os.environ.get(_AUTOLOAD)
    try:
        return import_module(f"torch_npu.{name}")
    except Exception as error:  # without CANN: ImportError, RuntimeError, and a bare Exception, too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RecorderError(
            f"torch_npu on a machine with CANN is required ({reason[0]}): "
            'pip install "lightning-rlprof[npu]", and source set_env.sh of CANN'
        ) from error
    finally:
        # A failed import leaves this at 0, and child processes would inherit that.
        if before is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = before
