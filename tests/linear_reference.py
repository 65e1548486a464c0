"""Float64 definitions that the linear tests compare with, written apart from the package."""

import torch

# SQNR in dB that a result in each dtype must reach against the float64 value of the same definition. fp32: sums of a
# few thousand products lose a few bits of 24 (6.02 dB each). bf16 and fp16: rounding to 8 or 11 bits is an error of
# 2**-9 or 2**-12 / sqrt(3) at most, 59 and 77 dB; a rounded weight or sum and a rounded result measure 50 and 68 dB,
# less 6 for a few dozen results.
LEAST_SQNR = {torch.float64: 200.0, torch.float32: 115.0, torch.bfloat16: 44.0, torch.float16: 62.0}

# Against the same definition in float64, codes of x may fall on the other side of a tie: one step in a few thousand.
LEAST_SQNR_CODES = {torch.float64: 60.0, torch.float32: 60.0, torch.bfloat16: 44.0, torch.float16: 55.0}


def make_weight(n: int, k: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (N, K) and row magnitudes (N,) of a normal weight."""
    weight = torch.randn(n, k, device=device)
    scale = weight.abs().amax(dim=1).half() if k else torch.zeros(n, device=device).half()
    codes = (weight * 127 / scale.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


def float_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * scale.double().unsqueeze(1) / 127


def fake_quantize_rows(x: torch.Tensor, levels: int = 127) -> torch.Tensor:
    """Rows of x rounded to `levels` steps of their largest magnitude, in float64."""
    step = x.double().abs().amax(dim=1, keepdim=True) / levels
    step[step == 0] = 1
    return (x.double() / step).round() * step


def llm_int8(x, codes, scale, threshold, limit=None):
    """LLM.int8() (arXiv 2208.07339, section 3.2) in float64: columns over the threshold in float, the rest in int8."""
    magnitude = x.double().abs().amax(dim=0)
    columns = (magnitude > threshold).nonzero().flatten().tolist()
    if limit is not None:
        columns = sorted(columns, key=lambda column: -float(magnitude[column]))[:limit]
    outlier = torch.zeros_like(x, dtype=torch.bool)
    outlier[:, columns] = True
    inside = fake_quantize_rows(x.masked_fill(outlier, 0))
    return (inside + x.double().masked_fill(~outlier, 0)) @ float_weight(codes, scale).t()


def sqnr(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to quantization noise in dB; infinite for equal tensors."""
    noise = (result.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise)) if noise > 0 else float("inf")
