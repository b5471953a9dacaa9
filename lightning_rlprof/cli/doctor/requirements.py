"""What a configuration asks of this machine, by the key that asks, and whether it is there."""

from dataclasses import replace

from lightning_rlprof.cli.doctor.check import Check
from lightning_rlprof.cli.doctor.diagnosis import Diagnosis
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.system.subprocess_python import InterpreterError, ask

_ANSWERS_S = 180.0
# The recorders themselves say what they cannot do here, as they would in a training.
_BUILD = """
import json
from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.recorders.registry import build_recorder, recorder_names, unmet
from lightning_rlprof.recording.start import make_header
config, device = ProfilerConfig.model_validate(json.loads(sys.argv[1])), sys.argv[2]
header, refused = make_header(config, "doctor", 0, 1, device), {}
for name in recorder_names(config, device):
    try:
        build_recorder(name, config, header)
        refused[name] = ""
    except Exception as error:
        refused[name] = str(error) or type(error).__name__
answer.update(refused=refused, unmet=unmet(config, device) or "")
"""
_KEYS = {
    "device_time": "device_time",
    "memory": "integrated.profile_with_memory",
    "mstx": "integrated.mstx",
    "npu_profiler": "integrated.profile",
    "nvtx": "integrated.mstx",
    "torch_profiler": "integrated.profile_level",
}


def check_needs(config: ProfilerConfig, found: Diagnosis) -> list[Check]:
    """Return a finding per thing that a configuration needs; its name is the key that needs it.

    Builds the recorders in another interpreter, on the device that is here.

    Args:
        config: What a training here would be given.
        found: What `diagnose` found, with the save path of the same configuration.
    """
    needs = [replace(found["disk"], name="integrated.profile_save_path")]
    if found.device is None:
        return [replace(found["torch"], name="every training"), *needs]
    try:
        answer = ask(_BUILD, config.model_dump_json(), found.device, timeout_s=_ANSWERS_S)
    except InterpreterError as error:
        return [Check("recorders", "broken", f"could not be tested: {error}"), *needs]
    for name, refusal in answer["refused"].items():
        needs.append(_recorder(name, refusal, config, found))
    if answer["unmet"]:
        key = "integrated.mstx" if config.integrated.mstx else "integrated.profile"
        needs.append(Check(key, "missing", answer["unmet"], "run it on such a device"))
    if config.integrated.profile_analysis and "npu_profiler" in answer["refused"]:
        needs.append(replace(found["msprof"], name="integrated.profile_analysis"))
    return needs


def _recorder(name: str, refusal: str, config: ProfilerConfig, found: Diagnosis) -> Check:
    key = "tools" if config.tools and name in (*config.tools, "nvtx") else _KEYS[name]
    if name == "memory" and config.memory.level and not config.tools:
        key = "memory.level"
    if refusal:
        return Check(key, "missing", f"{name}: {refusal}")
    if name == "nsight" and found["nsys"].state != "ok":
        return replace(found["nsys"], name=key, message=f"nsight: nsys {found['nsys'].message}")
    return Check(key, "ok", f"{name} can record")
