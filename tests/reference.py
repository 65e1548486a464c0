"""What the tests of the codes and of the optimizers measure against: bounds, rival codes and a plain Adam.

Nothing here imports qsub.
"""

import torch
from hypothesis import strategies as st

# ---- Steps of the codes of optimizer state, from the definition in qsub.tensors.state_codes, in fp64 ----

SIGNED_CODES, UNSIGNED_CODES = 127, 254  # codes above the one that a block's range starts from
SIGNED_OCTAVES, UNSIGNED_OCTAVES = 20, 40  # widest range of a block
DECODE_ERROR = 2.0**-16  # relative: a code's step is a whole number of fp32 bit patterns, 127 halves of one in all


def exponent(value):
    """The whole part of log2, exactly."""
    return torch.frexp(value).exponent - 1


def power(exponents):
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents)


def second_moment_step(second):
    """Distance between the codes next to each element of fp64 blocks (n, block_size), and the smallest code, (n, 1)."""
    smallest = torch.where(second > 0, second, torch.inf).amin(1, keepdim=True)
    high = exponent(second.amax(1, keepdim=True))
    low = torch.maximum(exponent(smallest), high - UNSIGNED_OCTAVES)
    per_octave = UNSIGNED_CODES // (high - low + 1)
    return power(torch.maximum(exponent(second), low)) / per_octave, power(low)


def first_moment_step(first, second):
    """Distance between the codes next to each element of fp64 blocks of exp_avg, given exp_avg_sq."""
    magnitude = first.abs()
    largest = magnitude.amax(1, keepdim=True)
    low = exponent(torch.where(second > 0, second, torch.inf).amin(1, keepdim=True))
    top = exponent(largest)
    knee = torch.maximum(torch.minimum(torch.div(low, 2, rounding_mode="floor") - 1, top + 1), top - SIGNED_OCTAVES)
    offset = power(knee)

    def patterns(value):  # fp32 bit patterns above `offset`, in octaves
        above = exponent(value)
        return above - knee + value / power(above) - 1

    quarters = torch.floor(4 * patterns(largest + offset)) + 1
    per_octave = torch.floor(4 * SIGNED_CODES / quarters + 1e-9).clamp(max=255)
    return power(exponent(magnitude + offset)) / per_octave


class TableCode:
    """A code given by a table of values in [-1, 1] under an fp32 scale per block, rounded to the nearest entry."""

    def __init__(self, table, block_size):
        self.table = torch.as_tensor(table, dtype=torch.float32)
        self.edges = (self.table[1:] + self.table[:-1]) / 2
        self.block_size = block_size

    def fake(self, value):
        """The value after a round trip through the code. The size must be a multiple of the block's."""
        blocks = value.reshape(-1, self.block_size)
        scale = blocks.abs().amax(1, keepdim=True)
        index = torch.bucketize(blocks / torch.where(scale > 0, scale, 1.0), self.edges)
        return (self.table[index] * scale).reshape(value.shape)


def dynamic_map(signed=True):
    """The dynamic tree code of arXiv 2110.02861, as create_dynamic_map of bitsandbytes.functional: 256 values.

    Bits after the sign: a run of zeros (a power of ten), a one, and a linear fraction in what is left.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    return sorted(values)


def linear_map(signed=True):
    """256 equally spaced values."""
    return [i / 127 for i in range(-127, 128)] if signed else [i / 255 for i in range(256)]


class ReferenceAdam:
    """Updates (for lr = 1, eps = 1e-8, no decay) of Adam whose moments go through a code at the end of each step.

    Args:
        first: code of exp_avg with a method `fake`, or None for plain fp32.
        second: code of exp_avg_sq.
    """

    def __init__(self, first=None, second=None, betas=(0.9, 0.999), eps=1e-8):
        self.first, self.second, self.betas, self.eps = first, second, betas, eps
        self.m = self.v = None
        self.steps = 0

    def update(self, grad):
        """What the step subtracts from the parameter."""
        beta1, beta2 = self.betas
        self.steps += 1
        if self.m is None:
            self.m, self.v = torch.zeros_like(grad), torch.zeros_like(grad)
        m = torch.lerp(self.m, grad, 1 - beta1)
        v = self.v * beta2 + grad * grad * (1 - beta2)
        self.m = self.first.fake(m) if self.first else m
        self.v = self.second.fake(v) if self.second else v
        if self.second:  # as in gpu-findings.md: v is never coded 0 beside a v that is not
            blocks = v.reshape(-1, self.second.block_size)
            least = blocks.abs().amax(1, keepdim=True) * self.second.table[self.second.table > 0].min()
            self.v = torch.where((self.v == 0) & (v > 0), least.expand_as(blocks).reshape(v.shape), self.v)
        return m / (1 - beta1**self.steps) / ((v / (1 - beta2**self.steps)).sqrt() + self.eps)


def heavy_tailed(sigma, size=16384, steps=300, seed=0):
    """Gradients s * (.3 + N(0, 1)), log-normal s: neighbours differ by orders of magnitude (embeddings, outliers)."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(sigma * torch.randn(size, generator=generator))
    for _ in range(steps):
        yield spread * (0.3 + torch.randn(size, generator=generator))


@st.composite
def rows(draw, low, high, size=33):
    """(1, size) fp32 whose largest magnitude is between 2**low and 2**high: heavy tails, ties and zeros too."""
    peak = 2.0 ** draw(st.floats(low, high))
    seed = draw(st.integers(0, 2**31))
    sigma = draw(st.sampled_from([0.0, 1.0, 4.0]))
    picked = draw(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=size - 1))
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, generator=generator) * torch.exp(sigma * torch.randn(size, generator=generator))
    row = noise / noise.abs().max()
    row[: len(picked)] = torch.tensor(picked)
    row[row.abs() < 2.0**-60] = 0
    row[-1] = draw(st.sampled_from([-1.0, 1.0]))
    return (row.double() * peak).float().clamp(-(2.0**high), 2.0**high).unsqueeze(0)
