"""Options for Nsight Systems: those of its command line under Ray, and what becomes of reports."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from lightning_rlprof.config.numbers import NotNegative
from lightning_rlprof.config.section import Section, near, refused

__all__ = ["NsightConfig"]

_KEY = re.compile(r"[a-z][a-z0-9-]*")
# Ray puts the values into a shell command without quotes: only what no shell interprets may pass.
_VALUE = re.compile(r"[A-Za-z0-9_.,:/@%+=-]+")
_CAPTURE_RANGE = "cudaProfilerApi"
_TRACE: dict[str, str | None] = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "cuda-graph-trace": "graph",
}
_WORKER: dict[str, str | None] = {
    **_TRACE,
    "capture-range": _CAPTURE_RANGE,
    "capture-range-end": None,
    "kill": "none",
}


def _options(value: Any, defaults: dict[str, str | None]) -> Any:
    if not isinstance(value, Mapping):
        raise refused("is no mapping of nsys options, such as {trace: 'cuda,nvtx'}", value)
    options = dict(defaults)
    for given, text in value.items():
        key = str(given).replace("_", "-")
        if not _KEY.fullmatch(key):
            raise refused(f"is no option of nsys{near(key, defaults)}", key=str(given))
        if text is not None and not isinstance(text, str):
            wanted = str(text).lower() if isinstance(text, bool) else str(text)
            raise refused(f"must be text: put it into quotes, '{wanted}'", text, key)
        if text is not None and not _VALUE.fullmatch(text):
            raise refused(
                "may hold only letters, digits and _.,:/@%+=-: a shell reads it", text, key
            )
        options[key] = text
    return options


def _controller(value: Any) -> Any:
    return _options(value, _TRACE)


def _worker(value: Any) -> Any:
    return _options(value, _WORKER)


class NsightConfig(Section):
    """How Nsight Systems records, and what becomes of its reports.

    ``controller`` and ``worker`` hold options of ``nsys profile`` by their long names, without the
    leading dashes. What is given is laid over the defaults; ``null`` leaves an option out.
    """

    controller: Annotated[dict[str, str | None], BeforeValidator(_controller)] = Field(
        default_factory=_TRACE.copy,
        description="Options for the controller (verl: `controller_nsight_options`).",
    )
    worker: Annotated[dict[str, str | None], BeforeValidator(_worker)] = Field(
        default_factory=_WORKER.copy,
        description=(
            "Options for the workers (verl: `worker_nsight_options`). `capture-range` is fixed; "
            "`capture-range-end: null` is worked out from the number of captures."
        ),
    )
    collect: bool = Field(
        default=True,
        description=(
            "Move finished reports of this process into the run directory; verl's "
            "`relocate_results`."
        ),
    )
    reports: str | None = Field(
        default=None,
        min_length=1,
        description="Directory in which reports of workers appear; unset, Ray's.",
    )
    wait_s: NotNegative = Field(
        default=30.0,
        description="Seconds to wait at the end for reports that nsys is still writing.",
    )

    @model_validator(mode="after")
    def _fixed(self) -> "NsightConfig":
        given = self.worker["capture-range"]
        if given != _CAPTURE_RANGE:
            raise refused(
                f"must stay '{_CAPTURE_RANGE}': that is how captures open and close in workers",
                given,
                "worker.capture-range",
            )
        return self
