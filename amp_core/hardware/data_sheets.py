"""Dense peak rates and bandwidths of GPUs, from their data sheets."""

import re
from dataclasses import dataclass

from amp_core.schema import RunError


@dataclass(frozen=True)
class Rates:
    """Dense peaks of one part in TFLOP/s; None where there is no such unit."""

    fp32: float
    """On CUDA cores; of AMD's parts on matrix cores."""
    tf32: float | None
    half: float
    """FP16, and BF16 where the tensor cores take it."""
    fp8: float | None
    """With FP32 accumulation; MXFP8 has the same."""
    gb_per_s: float
    """Memory bandwidth, 10^9 bytes per second."""
    memory_gb: int
    """Memory as advertised."""
    source: str
    """The document that gives these figures."""
    fp4: float | None = None
    """NVFP4 and MXFP4, with FP32 accumulation; half of what the data sheets give for sparse matrices."""

    @property
    def bf16(self) -> bool:
        """Whether its tensor cores take BF16: those that take TF32 do, from Ampere (8.0) on, and AMD's since MI100."""
        return self.tf32 is not None or self.source.startswith("AMD")

    def peak(self, precision: str) -> float | None:
        """Peak for inputs of this precision, TFLOP/s; None if it is not listed."""
        return {
            "fp32": self.fp32, "tf32": self.tf32, "fp16": self.half, "bf16": self.half,
            "fp8": self.fp8, "nvfp4": self.fp4,
        }.get(precision)  # fmt: skip


_AMPERE_RTX = "NVIDIA Ampere GA102 GPU Architecture white paper, appendix A"


_ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"


_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU Architecture white paper, appendix A"


_V100, _A100, _H100 = "NVIDIA V100 data sheet", "NVIDIA A100 data sheet", "NVIDIA H100 data sheet"


_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet"


_CDNA3 = "AMD CDNA 3 white paper and AMD Instinct MI300 series data sheets"


_MI250 = "AMD Instinct MI200 series data sheet; a half of the module, which is what a program sees as one GPU"


_TURING = "NVIDIA Turing GPU Architecture white paper, appendix A"


_RATES = (  # the first matching pattern counts: fp32, tf32, fp16 and bf16, fp8, GB/s, GB
    (r"V100.*PCI", Rates(14.0, None, 112.0, None, 900, 32, _V100)),
    (r"V100", Rates(15.7, None, 125.0, None, 900, 32, _V100)),
    (r"TITAN RTX", Rates(16.3, None, 130.5, None, 672, 24, _TURING)),
    (r"Quadro RTX 6000", Rates(16.3, None, 130.5, None, 672, 24, _TURING)),
    (r"Quadro RTX 8000", Rates(16.3, None, 130.5, None, 672, 48, _TURING)),
    (r"(Tesla|NVIDIA) T4\b", Rates(8.1, None, 65.0, None, 320, 16, "NVIDIA T4 data sheet and Turing white paper")),
    (r"RTX 2080 Ti", Rates(13.4, None, 53.8, None, 616, 11, _TURING)),
    (r"A100.*40GB", Rates(19.5, 156.0, 312.0, None, 1555, 40, _A100)),
    (r"A100.*PCI", Rates(19.5, 156.0, 312.0, None, 1935, 80, _A100)),
    (r"A100", Rates(19.5, 156.0, 312.0, None, 2039, 80, _A100)),
    (r"\bA30\b", Rates(10.3, 82.0, 165.0, None, 933, 24, "NVIDIA A30 data sheet")),
    (r"\bA10\b", Rates(31.2, 62.5, 125.0, None, 600, 24, "NVIDIA A10 data sheet")),
    (r"\bA40\b", Rates(37.4, 74.8, 149.7, None, 696, 48, "NVIDIA A40 data sheet")),
    (r"RTX A6000", Rates(38.7, 77.4, 154.8, None, 768, 48, _AMPERE_RTX)),
    (r"RTX 3090(?! Ti)", Rates(35.6, 35.6, 71.0, None, 936, 24, _AMPERE_RTX)),
    (r"RTX 4090(?! D)", Rates(82.6, 82.6, 165.2, 330.3, 1008, 24, _ADA)),
    (r"RTX 6000 Ada", Rates(91.1, 182.1, 364.2, 728.5, 960, 48, _ADA)),
    (
        r"RTX 5090(?! D)",
        Rates(104.8, 104.8, 209.5, 419.0, 1792, 32, _BLACKWELL_RTX, 1676.0),
    ),
    (
        r"RTX PRO 6000 Blackwell Workstation",
        Rates(126.0, 251.9, 503.8, 1007.6, 1792, 96, "NVIDIA RTX Blackwell PRO GPU Architecture white paper", 2015.2),
    ),
    (r"RTX 5080", Rates(56.3, 56.3, 112.6, 225.1, 960, 16, _BLACKWELL_RTX, 900.4)),
    (r"RTX 5070 Ti", Rates(43.9, 43.9, 87.9, 175.8, 896, 16, _BLACKWELL_RTX, 703.0)),
    (r"RTX 4080(?! SUPER)", Rates(48.7, 48.7, 97.5, 194.9, 717, 16, _ADA)),
    (r"RTX 4070 Ti(?! SUPER)", Rates(40.1, 40.1, 80.2, 160.4, 504, 12, _ADA)),
    (r"RTX 3080(?! Ti)", Rates(29.8, 29.8, 59.5, None, 760, 10, _AMPERE_RTX)),
    (r"RTX 3070(?! Ti)", Rates(20.3, 20.3, 40.6, None, 448, 8, _AMPERE_RTX)),
    (r"RTX A5000", Rates(27.8, 55.6, 111.1, None, 768, 24, "NVIDIA RTX A5000 data sheet")),
    (r"RTX A4000", Rates(19.2, 38.3, 76.7, None, 448, 16, "NVIDIA RTX A4000 data sheet")),
    (r"\bL4\b", Rates(30.3, 60.0, 121.0, 242.5, 300, 24, "NVIDIA L4 data sheet")),
    (r"\bL20\b", Rates(59.8, 59.8, 119.5, 239.0, 864, 48, "NVIDIA L20 data sheet")),
    (r"\bL40S\b", Rates(91.6, 183.0, 362.0, 733.0, 864, 48, "NVIDIA L40S data sheet")),
    (r"\bL40\b", Rates(90.5, 90.5, 181.0, 362.0, 864, 48, "NVIDIA L40 data sheet")),
    (r"A800.*40GB", Rates(19.5, 156.0, 312.0, None, 1555, 40, "NVIDIA A800 data sheet")),
    (r"A800", Rates(19.5, 156.0, 312.0, None, 2039, 80, "NVIDIA A800 data sheet")),
    (r"H800 PCIe", Rates(51.2, 378.0, 756.0, 1513.0, 2039, 80, "NVIDIA H800 data sheet")),
    (r"H800", Rates(66.9, 494.7, 989.4, 1978.9, 3352, 80, "NVIDIA H800 data sheet")),
    (r"GH200.*144G", Rates(67.0, 494.0, 990.0, 1979.0, 4900, 144, _GH200)),
    (r"GH200", Rates(67.0, 494.0, 990.0, 1979.0, 4000, 96, _GH200)),
    (r"H100 PCIe", Rates(51.2, 378.0, 756.0, 1513.0, 2039, 80, _H100)),
    (r"H100 NVL", Rates(60.0, 417.5, 835.0, 1671.0, 3938, 94, _H100)),
    (r"H100", Rates(66.9, 494.7, 989.4, 1978.9, 3352, 80, _H100)),
    (r"\bH200 NVL", Rates(60.0, 417.5, 835.5, 1671.0, 4800, 141, "NVIDIA H200 data sheet")),
    (r"\bH200\b", Rates(66.9, 494.7, 989.4, 1978.9, 4800, 141, "NVIDIA H200 data sheet")),
    (r"\bH20\b", Rates(44.0, 74.0, 148.0, 296.0, 4000, 96, "NVIDIA H20 data sheet")),
    (r"\bGB200\b", Rates(80.0, 1250.0, 2500.0, 5000.0, 8000, 186, "NVIDIA GB200 NVL72 data sheet", 10000.0)),
    (r"\bB200\b", Rates(75.0, 1125.0, 2250.0, 4500.0, 8000, 180, "NVIDIA HGX B200 data sheet", 9000.0)),
    (r"\bB300\b", Rates(75.0, 1125.0, 2250.0, 4500.0, 8000, 288, "NVIDIA HGX B300 data sheet", 13125.0)),
    (r"\bGB300\b", Rates(80.0, 1250.0, 2500.0, 5000.0, 8000, 288, "NVIDIA GB300 NVL72 data sheet", 15000.0)),
    (r"\bMI100\b", Rates(46.1, None, 184.6, None, 1229, 32, "AMD Instinct MI100 data sheet")),
    (r"\bMI210\b", Rates(45.3, None, 181.0, None, 1638, 64, "AMD Instinct MI210 data sheet")),
    (r"\bMI250X", Rates(47.9, None, 191.5, None, 1638, 64, _MI250)),
    (r"\bMI250\b", Rates(45.3, None, 181.0, None, 1638, 64, _MI250)),
    (r"\bMI300A", Rates(122.6, 490.3, 980.6, 1961.2, 5300, 128, _CDNA3)),
    (r"\bMI300X", Rates(163.4, 653.7, 1307.4, 2614.9, 5300, 192, _CDNA3)),
    (r"\bMI325X", Rates(163.4, 653.7, 1307.4, 2614.9, 6000, 256, _CDNA3)),
    (r"\bMI350X", Rates(144.2, None, 2306.9, 4613.7, 8000, 288, "AMD Instinct MI350X data sheet")),
    (r"\bMI355X", Rates(157.3, None, 2516.6, 5033.2, 8000, 288, "AMD Instinct MI355X data sheet")),
)


NAMES = {
    "T4": "Tesla T4",
    "RTX 2080 Ti": "NVIDIA GeForce RTX 2080 Ti",
    "TITAN RTX": "NVIDIA TITAN RTX",
    "Quadro RTX 6000": "Quadro RTX 6000",
    "Quadro RTX 8000": "Quadro RTX 8000",
    "V100": "Tesla V100-SXM2-32GB",
    "V100 PCIe": "Tesla V100-PCIE-32GB",
    "RTX 3070": "NVIDIA GeForce RTX 3070",
    "RTX 3080": "NVIDIA GeForce RTX 3080",
    "RTX 3090": "NVIDIA GeForce RTX 3090",
    "A10": "NVIDIA A10",
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100 40GB": "NVIDIA A100-SXM4-40GB",
    "A100 PCIe": "NVIDIA A100 80GB PCIe",
    "A100 40GB PCIe": "NVIDIA A100-PCIE-40GB",
    "A40": "NVIDIA A40",
    "RTX A4000": "NVIDIA RTX A4000",
    "RTX A5000": "NVIDIA RTX A5000",
    "RTX A6000": "NVIDIA RTX A6000",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
    "H100": "NVIDIA H100 80GB HBM3",
    "H100 PCIe": "NVIDIA H100 PCIe",
    "GH200": "NVIDIA GH200 96GB",
    "H200": "NVIDIA H200",
    "RTX 5090": "NVIDIA GeForce RTX 5090",
    "RTX 5080": "NVIDIA GeForce RTX 5080",
    "RTX 5070 Ti": "NVIDIA GeForce RTX 5070 Ti",
    "B200": "NVIDIA B200",
}
"""Device names by the short names that users may give, oldest first."""


def named_part(name: str) -> tuple[str, Rates]:
    """Short name and rates of the part called `name`, in any case and with or without `RTX`.

    Raises `RunError` for one that is not in `NAMES`.
    """
    wanted = re.sub(r"[\s_-]|rtx|nvidia|geforce|tesla", "", name.lower())
    for short, device in NAMES.items():
        if wanted == re.sub(r"\s|rtx", "", short.lower()):
            rates = dense_rates(device)
            assert rates is not None
            return short, rates
    raise RunError(f"gpu={name!r} is not in the table; choose from {', '.join(NAMES)}")


def dense_rates(name: str) -> Rates | None:
    """Dense peaks of a part by its device name; None for a part that is not listed, for a MIG instance, and for parts
    of laptops, which have the name of a larger chip."""
    if re.search(r"MIG|Laptop|Mobile|Max-Q", name):
        return None
    return next((rates for pattern, rates in _RATES if re.search(pattern, name)), None)
