"""Short names and classes of kernels, against tables that people wrote."""

import csv
from pathlib import Path

import pytest

from lightning_rlprof import load
from lightning_rlprof.analysis.device.kernel_names import (
    CLASSES,
    KernelName,
    kernel_name,
    kernel_names,
)
from lightning_rlprof.analysis.device.work import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    device_work,
    work_kind,
)
from lightning_rlprof.analysis.kernels import kernels
from tests.places import SHARED_DATA

HERE = Path(__file__).parent
TRACES = (
    *("kineto/alexnet.json.gz", "kineto/h100_qwen1.5-0.5b.json.gz", "kineto/nccl.json.gz"),
    *("kineto/mi300_bert-small.json.gz", "kineto/sglang_qwen3-8b_decode.json.gz"),
    *("kineto/ns_resolution_rank-0.json.gz", "kineto/two_ranks"),
    *("kineto/vllm_prefill_decode_graph.json.gz", "nsys/h100_2gpu_1s.sqlite"),
    *("nsys/t4_power_iteration.sqlite", "ascend/text_level1_rank0", "ascend/db_level1_rank0"),
)


def table(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", table("kernel_short_names.csv"), ids=lambda row: row["short"])
def test_a_name_reads_as_a_person_would_write_it(row: dict[str, str]) -> None:
    assert kernel_name(row["name"]) == KernelName(row["short"], row["class"])


def test_classes_agree_with_a_table_by_hand() -> None:
    """People labelled these by what each kernel does, before the rules were run on them."""
    rows = table("kernel_classes.csv")
    wrong = [row["name"] for row in rows if kernel_name(row["name"]).kind != row["class"]]
    assert len(rows) > 200
    assert {row["class"] for row in rows} == set(CLASSES)
    assert len(wrong) <= 0.02 * len(rows), wrong


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            COMMUNICATION,
        ),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", COMMUNICATION),
        ("hcom_allReduce__500_1_1", COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<c10::BFloat16, 2>()", COMMUNICATION),
        ("Memcpy HtoD (Pageable -> Device)", COPY),
        ("CopyDeviceToHost", COPY),
        ("__amd_rocclr_copyBuffer", COPY),
        ("void at::native::reduce_kernel<512, 1>()", COMPUTE),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>()", COMPUTE),
        ("ampere_sgemm_32x32_sliced1x4_tn", COMPUTE),
        ("triton_poi_fused_add_all_reduce_wait_tensor_1", COMPUTE),
        ("void deep_ep::internode_ll::dispatch<true, 7168>(void*)", COMMUNICATION),
    ],
)
def test_the_kind_of_work_follows_from_the_class(name: str, kind: int) -> None:
    assert work_kind(name) == kind


def test_nsight_systems_and_torch_profiler_give_one_name() -> None:
    kineto = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)"
        "::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase&, float)"
        "::{lambda(float)#1}, std::array<char*, 2ul> >(int, float)"
    )
    nsight = (
        "void at::native::vectorized_elementwise_kernel<(int)4, void at::native::<unnamed>"
        "::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase &, T2)"
        "::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2, T3)"
    )
    assert kernel_name(kineto) == kernel_name(nsight)
    assert kernel_name(kineto).short == "pow scalar f32 (vec4)"


def test_different_kernels_that_would_look_alike_carry_a_hash_that_no_order_changes() -> None:
    alike = [f"void lib::gather_rows<float, true, {flag}>(float*)" for flag in ("true", "false")]
    assert len({kernel_name(name) for name in alike}) == 1
    both = kernel_names(alike)
    assert len({each.short for each in both}) == 2
    assert both == kernel_names(alike[::-1])[::-1]
    assert all(each.short[:-3].endswith(" ~") for each in both)


@pytest.mark.parametrize(
    "names",
    [
        ("Conv2D1", "Conv2D4"),
        ("trans_TransData_1", "trans_TransData_12"),
        ("hcom_allReduce__586_0_1", "hcom_allReduce__586_3_1"),
    ],
)
def test_nodes_of_a_graph_and_calls_of_a_collective_are_one_kernel(names: tuple[str, str]) -> None:
    assert len({*kernel_names(names)}) == 1


def test_numbers_tell_kernels_of_other_libraries_apart() -> None:
    assert len({*kernel_names(["Foo1", "Foo2", "phase_1", "phase_2"])}) == 4


@pytest.mark.parametrize("name", ["", "_Z", "_ZN5", "<>>", "void f<", "a::b::", "_ZN3fooILi", "(("])
def test_broken_names_have_a_name(name: str) -> None:
    assert kernel_name(name).kind in CLASSES


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no real traces in ../shared/data")
@pytest.mark.parametrize("trace", TRACES)
def test_no_two_of_the_longest_kernels_of_a_real_trace_look_alike(trace: str) -> None:
    """Names that an instance's number alone tells apart are one kernel."""
    spans = load(SHARED_DATA / trace)
    found = kernels(spans)
    shown = found.column("short name")
    assert len(shown) == len(set(shown))
    codes, names = device_work(spans).named
    own = {names[code] for code in codes.tolist()}
    # Collectives that share a kernel have a row each.
    assert own == {*found.column("kernel")} or trace.startswith("ascend")
