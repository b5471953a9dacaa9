"""Say what a file is that rlprof does not read, by its first bytes or its name, and what to do."""

import re
import shlex
from pathlib import Path

from lightning_rlprof.errors import TraceError

_HEAD_BYTES = 4_096
_NO_UNPICKLING = "rlprof never loads a pickle, because that runs the code in it"
_CONTENTS = {
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it (7z x FILE) and pass the directory",
    rb"Rar!\x1a\x07": "a RAR archive: unpack it (unrar x FILE) and pass the directory",
    rb"\xfd7zXZ\x00": "compressed with xz: decompress it first (xz -d FILE)",
    rb"BZh\d1AY&SY": "compressed with bzip2: decompress it first (bzip2 -d FILE)",
    rb"version https://git-lfs": "a pointer of Git LFS: fetch the file itself (git lfs pull)",
    rb"\s*<(?i:!doctype|html)": "a web page: download the file itself",
    rb"\x80[\x02-\x05](?s:.){,80}segments": (
        "a snapshot of CUDA memory: open it at https://pytorch.org/memory_viz. " + _NO_UNPICKLING
    ),
    rb"\x80[\x02-\x05]": f"a Python pickle: {_NO_UNPICKLING}",
}
_PERFETTO = (
    "a trace of Perfetto: convert it (traceconv json FILE trace.json) or open it at "
    "https://ui.perfetto.dev"
)
_XPLANE = "a profile of XLA: open it with XProf. rlprof reads traces of torch.profiler"
_COMPUTE = (
    "a report of Nsight Compute, which measures single kernels: open it with ncu-ui. For the times "
    "of a step, record with nsys profile"
)
_NAMES = {
    ".xplane.pb": _XPLANE,
    ".pftrace": _PERFETTO,
    ".perfetto-trace": _PERFETTO,
    ".ncu-rep": _COMPUTE,
    ".qdstrm": (
        "a raw recording of Nsight Systems: make a report of it with QdstrmImporter, which comes "
        "with nsys"
    ),
}

# Both formats are messages of protobuf that begin with their first field. Planes of XLA have names.
_MESSAGE, _PLANE = re.compile(rb"\x0a[^\x09\x0a\x0d\x20-\x7e]"), re.compile(rb"/(?:host|device):")


def foreign(path: Path) -> str | None:
    """Return what a file is that rlprof cannot read, and what to do; None if nothing shows it.

    Example::

        >>> foreign(Path("kernels.ncu-rep"))  # doctest: +SKIP
        'a report of Nsight Compute, which measures single kernels: …'

    Raises:
        TraceError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    if not head:
        return "the file is empty"
    named = (text for ending, text in _NAMES.items() if path.name.endswith(ending))
    shown = (text for pattern, text in _CONTENTS.items() if re.match(pattern, head))
    found = next(named, None) or next(shown, None)
    if found is None and _MESSAGE.match(head):
        found = _XPLANE if _PLANE.search(head) else _PERFETTO
    return None if found is None else found.replace("FILE", shlex.quote(str(path)))


def refuse_foreign(path: Path) -> None:
    """Raise TraceError if a file is of another program, or empty."""
    if what := foreign(path):
        raise TraceError(f"{path}: {what}")
