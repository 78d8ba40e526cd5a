from __future__ import annotations

import sys
import types

import pytest
from servebook.common.errors import ServebookError
from servebook.config.params import HardwareFigures, HardwareParams
from servebook.engines.process import gpu_gib_in_use
from servebook.hardware import catalog as hardware
from servebook.hardware.catalog import GIB, catalog, cpu, match, resolve
from servebook.hardware.processor import flop_per_cycle
from servebook.load.metrics import GpuSampler
from servebook.predictor.roofline import ridge_flop_per_byte


def test_every_asked_card_has_a_dense_rate_and_a_source():
    asked = "A40 A100-40GB-PCIe A100-40GB-SXM A100-80GB-PCIe A100-80GB-SXM A10 L4 L40S T4 RTX-4090 RTX-5090"
    asked += " H100-PCIe H100-SXM H200 B200 H100-NVL H200-NVL GH200 H20 H800-SXM A800-SXM B300 GB200 GB300 GB10"
    asked += " RTX-PRO-6000 RTX-PRO-5000 RTX-6000-Ada RTX-A6000 RTX-A5000 RTX-3090 L40 A30 A10G V100-32GB-SXM"
    asked += " MI300X MI325X MI355X"
    assert set(catalog()) >= set(asked.split())
    for gpu in catalog().values():
        assert gpu.source and gpu.url and gpu.url.startswith("https://")
        assert gpu.memory_gib < gpu.memory_sold_gb, f"{gpu.name}: memory_gib is what CUDA reports, less than is sold"
        # a datasheet's sparsity figure taken for the dense one would show as more than 4 × the 8-bit rate's half
        for eight_bit in filter(None, (gpu.fp8_tflops, gpu.int8_tflops)):
            assert 1.9 <= eight_bit / gpu.fp16_tflops <= 4.1


@pytest.mark.parametrize(
    ("name", "tflops", "gb_per_s"),
    [
        ("A40", 149.7, 696),
        ("A100-80GB-SXM", 312, 2039),
        ("A100-80GB-PCIe", 312, 1935),
        ("L4", 121, 300),
        ("RTX-4090", 165.2, 1008),
        ("RTX-5090", 209.5, 1792),
        ("H200", 989.5, 4800),
        ("B200", 2250, 7700),
    ],
)
def test_dense_figures(name: str, tflops: float, gb_per_s: float):
    gpu = catalog()[name]
    assert (gpu.flops_per_s(), gpu.bytes_per_s) == (tflops * 1e12, gb_per_s * 1e9)


def test_ridge_of_the_a40_is_the_posts():
    a40 = catalog()["A40"]
    assert round(ridge_flop_per_byte(a40.flops_per_s(), a40.bytes_per_s)) == 215


def test_t4_has_no_bfloat16():
    t4 = catalog()["T4"]
    assert t4.flops_per_s("float16") == 65e12 and t4.bytes_per_s == 320e9
    with pytest.raises(ServebookError, match=r"no bfloat16.*float16"):
        t4.flops_per_s()


def test_eight_bit_weights_without_such_units_run_at_the_sixteen_bit_rate():
    a100, h100 = catalog()["A100-80GB-SXM"], catalog()["H100-SXM"]
    assert a100.flops_per_s("fp8") == a100.flops_per_s() and h100.flops_per_s("fp8") == 2 * h100.flops_per_s()
    assert a100.flops_per_s("int8") == 2 * a100.flops_per_s()
    with pytest.raises(ServebookError, match="unknown dtype"):
        a100.flops_per_s("fp3")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("a40", "A40"),
        ("A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("L40S-48GB", "L40S"),
        ("A6000", "RTX-A6000"),
        ("V100-32GB", "V100-32GB-SXM"),
        ("h100 80gb sxm5", "H100-SXM"),
        ("H200 141GB", "H200"),  # the one without a further word
        ("h200-sxm", "H200"),
        ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
        ("DGX Spark", "GB10"),
        ("GB200 NVL72", "GB200"),
    ],
)
def test_names_people_and_drivers_use(given: str, name: str):
    assert resolve(HardwareParams(gpu=given)).name == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("A4O", "A40"),
        ("H100", "H100-PCIe or H100-SXM or H100-NVL"),
        ("H1000", "H100-PCIe or H100-SXM or H100-NVL"),
        ("A100 80GB", "A100-80GB-PCIe or A100-80GB-SXM"),
        ("RTX 4090 D", "RTX-4090 or RTX-5090"),
        ("RTX-4091", "RTX-4090 or RTX-5090"),
    ],
)
def test_unknown_name_gets_the_nearest(given: str, meant: str):
    with pytest.raises(ServebookError) as e:
        resolve(HardwareParams(gpu=given))
    assert f"Did you mean {meant}?" in str(e.value) and "hardware.figures" in str(e.value)


@pytest.mark.parametrize("given", ["Gaudi3", "TPU-v5e", "Ascend910"])
def test_a_card_that_is_none_of_the_catalogs_gets_no_guess(given: str):
    with pytest.raises(ServebookError) as e:
        resolve(HardwareParams(gpu=given))
    assert "Did you mean" not in str(e.value) and "hardware.figures" in str(e.value)


def test_an_h200_by_its_own_figures_is_the_catalogs():
    own = HardwareFigures(
        name="H200", tensor_tflops=989.5, memory_bandwidth_gb_per_s=4800, memory_gib=139.81, link_gb_per_s=450,
        generation="hopper", fp8_tflops=1979, int8_tflops=1979, fp32_tflops=67,
    )  # fmt: skip
    gpu, card = resolve(HardwareParams(figures=own)), catalog()["H200"]
    assert (gpu.generation, gpu.attention_backend) == (card.generation, card.attention_backend)
    for dtype in ("bfloat16", "float16", "float32", "fp8", "int8", "fp4"):
        assert gpu.flops_per_s(dtype) == card.flops_per_s(dtype)
    assert (
        "generation"
        not in HardwareFigures(name="x", tensor_tflops=1.0, memory_bandwidth_gb_per_s=1.0, memory_gib=1.0).model_dump()
    )  # what a run stored before it existed stays valid


def test_given_figures():
    figures = HardwareFigures(name="x", tensor_tflops=100.0, memory_bandwidth_gb_per_s=500.0, memory_gib=20.0)
    gpu = resolve(HardwareParams(figures=figures))
    assert (gpu.flops_per_s(), gpu.bytes_per_s, gpu.memory_bytes) == (1e14, 5e11, 20 * GIB)


def test_driver_names_that_are_not_the_card():
    assert match("NVIDIA H200", 143_771 * 2**20).name == "H200"
    for name, total in [("NVIDIA X800", 80 * GIB), ("NVIDIA A16", 15 * GIB), ("NVIDIA A40", 11 * GIB)]:
        with pytest.raises(ServebookError, match=r"hardware\.figures"):
            match(name, total)


class FakeNvml(types.ModuleType):
    """Stands for pynvml on a machine with one GPU (or `count`) that answers little."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = 0
    mig, count = 0, 1

    def __getattr__(self, name: str):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def unsupported(*_):
            raise self.NVMLError(name)

        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetName": lambda h: "NVIDIA A40",
            "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(total=46_068 * 2**20, used=(3 + h) * 2**20),
            "nvmlDeviceGetMigMode": lambda h: (self.mig, self.mig),
            "nvmlDeviceGetPowerUsage": lambda h: 71_500 + 1000 * h,
        }
        return answers.get(name, unsupported)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_detection_through_the_driver(nvml: FakeNvml):
    assert hardware.detect() == catalog()["A40"]
    nvml.mig = 1
    with pytest.raises(ServebookError, match="MIG"):
        hardware.detect()


def test_snapshot_says_what_the_driver_does_not(nvml: FakeNvml):
    s = hardware.snapshot()
    assert (s["gpu"], s["power_w"], s["memory_used_bytes"]) == ("NVIDIA A40", 71.5, 3 * 2**20)
    assert s["ecc"] == s["driver"] == s["processes"] == s["cuda_driver"] == "not available"


def test_hidden_gpus_leave_the_cpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.detect().is_cpu


@pytest.mark.parametrize(
    ("visible", "power_w", "mib"),
    [
        (None, 71.5, [3, 4, 5]),
        ("1", 72.5, [4]),
        ("2,0", 73.5, [5, 3]),
        ("1,-1,0", 72.5, [4]),
        ("-1", None, []),
        ("0,0", 71.5, [3]),
        ("2,nobody,0", 73.5, [5]),
        ("NoDevFiles", None, []),
    ],
)
def test_on_a_shared_machine_only_the_gpus_of_this_process_count(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, power_w: float | None, mib: list[int]
):
    nvml.count = 3
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    snapshot, sampler = hardware.snapshot(), GpuSampler()
    assert (snapshot.get("power_w"), snapshot.get("gpus", 0)) == (power_w, len(mib))
    assert sampler.available == bool(mib)
    assert sampler.sample().get("gpu_power_w") == power_w
    assert gpu_gib_in_use() == (pytest.approx(sum(mib) / 2**10) if mib else None)


@pytest.mark.parametrize(
    ("flags", "vendor", "family", "expected"),
    [
        ({"avx512f", "avx512_bf16"}, "AuthenticAMD", 25, (32, 64)),
        ({"avx512f", "avx512_bf16"}, "AuthenticAMD", 26, (64, 128)),
        ({"avx512f", "avx512_bf16", "amx_bf16"}, "GenuineIntel", 6, (64, 1024)),
        ({"avx512f"}, "GenuineIntel", 6, (64, 64)),
        ({"avx2", "fma"}, "AuthenticAMD", 23, (32, 32)),
    ],
)
def test_flop_per_cycle(flags: set[str], vendor: str, family: int, expected: tuple[int, int]):
    assert flop_per_cycle(flags, vendor, family)[:2] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_cpu_figures_are_plausible_and_stay_the_same():
    gpu = cpu()
    assert gpu.is_cpu and gpu is cpu()
    assert 0.005 < gpu.flops_per_s() / 1e12 < 1000 and 0.5 < gpu.memory_bandwidth_gb_per_s < 3000
    assert "cores" in gpu.source and "GHz" in gpu.source


ENTRY = """X1:
  nvml: [NVIDIA X1]
  fp16_tflops: 500
  bf16_tflops: 500
  fp32_tflops: 60
  memory_bandwidth_gb_per_s: 2000
  memory_sold_gb: 64
  memory_gib: 63.1
  generation: hopper
  attention_backend: FLASH_ATTN_3
  source: its datasheet
  url: https://example.com/x1.pdf
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  fp32_tflops: 60\n", "", "key X1.fp32_tflops is missing. Add it"),
        ("fp32_tflops", "fp32_tflop", "unknown key X1.fp32_tflop (and 1 more). Did you mean fp32_tflops?"),
        ("bf16_tflops: 500", "bf16_tflops: fast", "X1.bf16_tflops is the text 'fast', not a number"),
        ("bf16_tflops: 500", "bf16_tflops: -500", "X1.bf16_tflops: input should be greater than 0"),
        ("bf16_tflops: 500", "bf16_tflops: .nan", "X1.bf16_tflops: input should be a finite number"),
        ("hopper", "hoper", "X1.generation is 'hoper': input should be 'volta'"),
        ("FLASH_ATTN_3", "FLASH", "X1.attention_backend is 'FLASH': input should be"),
        ("[NVIDIA X1]", "NVIDIA X1", "X1.nvml is 'NVIDIA X1', not a list. Write [NVIDIA X1]"),
        ("memory_gib: 63.1", "memory_gib: 64", "X1: memory_gib (64) is not below memory_sold_gb (64)"),
        ("X1:\n", f"{ENTRY}X1:\n", "key 'X1' is given twice"),
        ("X1:\n", f"{ENTRY.replace('X1:', 'X2:', 1)}X1:\n", "X2 and X1 both have the nvml name 'NVIDIA X1'"),
    ],
)
def test_a_faulty_entry_of_the_catalog_is_one_line(old: str, new: str, said: str):
    assert hardware.read_catalog(ENTRY, "gpus.yaml")["X1"][0].pcie_gb_per_s == 32
    with pytest.raises(ServebookError) as fault:
        hardware.read_catalog(ENTRY.replace(old, new, 1), "gpus.yaml")
    assert said in str(fault.value) and str(fault.value).startswith("gpus.yaml, line ")
    assert "\n" not in str(fault.value)
