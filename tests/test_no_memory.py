"""Doors to memory that isn't there, torch.jit, joins of columns: right values, or a refusal that says what to do."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.utils as utils
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import qsub
from qsub import Blockwise8bitTensor, Int8RowwiseTensor

TENSORS = {
    "int8": lambda: Int8RowwiseTensor.from_float(torch.randn(12, 8)),
    "parameter": lambda: nn.Parameter(Int8RowwiseTensor.from_float(torch.randn(12, 8))),
    "rows": lambda: Int8RowwiseTensor.from_float(torch.randn(12, 8))[2:5],
    "detached": lambda: Int8RowwiseTensor.from_float(torch.randn(12, 8)).detach(),
    "state": lambda: Blockwise8bitTensor.from_float(torch.randn(12, 8), 4, "float8_signed"),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_readers_of_memory_are_refused_with_the_remedy(make):
    x = make()
    for read in (
        np.asarray,
        np.from_dlpack,
        torch.from_dlpack,
        lambda t: t.__dlpack__(),
        lambda t: t.__dlpack_device__(),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
    ):
        with pytest.raises(NotImplementedError, match=r"has no memory of its own.*\.dequantize\(\)"):
            read(x)
    for read in (torch.utils.dlpack.to_dlpack, torch._C._to_dlpack_versioned):  # of C: they ask for the address
        with pytest.raises(RuntimeError):
            read(x.detach())
    with pytest.raises(RuntimeError, match=r"qsub\.save_file"):
        x.storage()
    with pytest.raises(AttributeError, match="has no memory of its own"):
        _ = x.__cuda_array_interface__
    assert not hasattr(x, "__cuda_array_interface__") and not hasattr(x, "__array_interface__")
    value = x.dequantize().detach()
    assert np.array_equal(np.from_dlpack(value), value.numpy())  # the remedy works


def test_what_the_address_is():
    w = Int8RowwiseTensor.from_float(torch.randn(12, 8))
    assert w.data_ptr() == w.int_data.data_ptr() and w[3:].data_ptr() == w.int_data[3:].data_ptr()
    state = TENSORS["state"]()
    assert state.data_ptr() == state.codes.data_ptr()
    assert torch.equal(copy.deepcopy(state).codes, state.codes)


def model(**options):
    return qsub.quantize_(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), **options).eval()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("to_jit", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 8))])
@pytest.mark.parametrize("part", [lambda m: m, lambda m: m[0], lambda m: nn.Sequential(m)])
def test_torch_jit_is_refused(to_jit, part):
    m = model()
    with pytest.raises(NotImplementedError, match=r"torch\.export\.export.*qsub\.dequantize_"):
        to_jit(part(m))
    x = torch.randn(2, 8)
    exported = torch.export.export(m, (x,)).module()  # the remedies work
    assert torch.equal(exported(x), m(x))
    assert torch.equal(to_jit(qsub.dequantize_(m))(x[:1]), m(x[:1]))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.complex64, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_dtypes_that_files_cannot_say_are_refused(make, dtype):
    with pytest.raises(TypeError, match=r"fp32, bf16, fp16 and fp64.*dequantize\(\)"):
        make().to(dtype)
    m = nn.Linear(4, 4)
    qsub.quantize_(m)
    if dtype.is_floating_point:
        with pytest.raises(TypeError, match="fp32, bf16"):
            m.to(dtype)
        assert m.weight.dtype == m.bias.dtype == torch.float32


def test_dtypes_of_the_classes():
    codes, scale = torch.zeros(2, 3, dtype=torch.int8), torch.ones(2).half()
    with pytest.raises(TypeError, match="fp32, bf16"):
        Int8RowwiseTensor(codes, scale, dtype=torch.float8_e5m2)
    state = TENSORS["state"]()
    with pytest.raises(TypeError, match="fp32, bf16"):
        Blockwise8bitTensor(state.codes, state.scale, 4, state.code, dtype=torch.float8_e5m2)


# ---- Columns side by side ----


def test_columns_side_by_side_are_right_or_refused():
    value = torch.cat([torch.randn(4, 6), torch.randn(4, 6) * 1e-3])
    w = Int8RowwiseTensor.from_float(value)
    other = Int8RowwiseTensor(
        torch.randint(-127, 128, (8, 6), dtype=torch.int8), w.scale
    )  # another weight, these scales
    upper, lower = w.chunk(2)
    right = {
        "columns": ([w[:, :2], w[:, 2:]], 1),
        "in the other order": ([w[:, 4:], w[:, 0:4]], 1),
        "twice": ([w, w], 1),
        "a copy": ([w, w.clone()], 1),
        "another weight": ([w, other], 1),
        "transposed": ([w.t(), other.t()], 0),
        "one": ([upper], 1),
        "equal rows": ([upper[[0, 1]], upper[:2]], 1),
    }
    for name, (pieces, dim) in right.items():
        joined = torch.cat(pieces, dim)
        assert isinstance(joined, Int8RowwiseTensor), name
        assert torch.equal(joined.dequantize(), torch.cat([p.dequantize() for p in pieces], dim)), name
    refused = {
        "two halves": ([upper, lower], 1),
        "rows in another order": ([w, w[[1, 0, 2, 3, 4, 5, 6, 7]]], 1),
        "flipped": ([lower[:2], lower[2:]], 1),
        "transposed halves": ([upper.t(), lower.t()], 0),
        "another weight": ([w, Int8RowwiseTensor.from_float(value * 2)], 1),
    }
    for name, (pieces, dim) in refused.items():
        with pytest.raises(NotImplementedError, match=r"different scales: call \.dequantize\(\)"):
            torch.cat(pieces, dim)
            pytest.fail(name)
    with pytest.raises(NotImplementedError, match="dequantize"):
        torch.stack([upper, lower])


# ---- Nothing to multiply ----


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("shape", [(4, 0), (0, 5), (0, 0), (4, 5)])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("activations", [None, "int8"])
def test_products_of_nothing_are_those_of_floats(rows, shape, batch, activations):
    w = Int8RowwiseTensor.from_float(torch.randn(shape), activations=activations)
    x = torch.randn(batch, rows, shape[1])
    for product in (
        lambda x, w: torch.einsum("abk,nk->abn", x, w),
        lambda x, w: torch.einsum("bk,nk->bn", x.flatten(0, 1), w),
        lambda x, w: torch.einsum("nk,abk->nab", w, x),
        lambda x, w: torch.bmm(x, w.t().expand(batch, -1, -1)),
        lambda x, w: torch.bmm(w.expand(batch, -1, -1), x.transpose(1, 2)),
        lambda x, w: x @ w.t(),
        lambda x, w: w @ x.transpose(1, 2),
        lambda x, w: torch.matmul(x.flatten(0, 1), w.t()),
        lambda x, w: torch.nn.functional.linear(x, w),
        lambda x, w: w.mv(torch.ones(shape[1])),
    ):
        expected = product(x, w.dequantize())
        result = product(x, w)
        assert result.shape == expected.shape and result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=0.03, atol=0.2 if activations else 1e-5)


# ---- Parametrizations, pruning ----


class Double(nn.Module):
    def forward(self, x):
        return x * 2


class Halved(Double):
    def right_inverse(self, x):
        return x / 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        utils.weight_norm,
        utils.spectral_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.3),
        lambda m: prune.ln_structured(m, "weight", 0.3, 2, 0),
        lambda m: prune.identity(m, "weight"),
        lambda m: parametrize.register_parametrization(m, "weight", Double()),
        lambda m: parametrize.register_parametrization(m, "weight", Halved()),
    ],
)
def test_parametrized_weights_are_those_of_floats(change, trainable):
    m = qsub.quantize_(nn.Linear(8, 6), trainable=trainable)
    plain = qsub.dequantize_(copy.deepcopy(m))
    x = torch.randn(3, 8)
    results = []
    for each in (m, plain):
        torch.manual_seed(0)
        change(each)
        results.append(each(x))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_orthogonal_parametrization_is_refused_when_it_is_registered():
    m = qsub.quantize_(nn.Linear(8, 8))
    weight = m.weight
    with pytest.raises(RuntimeError, match=r"filter_fn\), or call qsub\.dequantize_"):
        parametrizations.orthogonal(m)
    assert m.weight is weight and not parametrize.is_parametrized(m)


# ---- Modules of other packages ----


class OwnParameter(nn.Parameter):
    """As bitsandbytes has them."""


def test_weights_of_a_parameter_class_of_their_own_are_left():
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    m[0].weight = weight = OwnParameter(torch.randn(8, 8))
    qsub.quantize_(m)
    assert m[0].weight is weight and isinstance(m[1].weight, Int8RowwiseTensor)


@pytest.mark.filterwarnings("ignore")
def test_modules_of_bitsandbytes_are_left():
    bnb = pytest.importorskip("bitsandbytes")
    m = nn.Sequential(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False), bnb.nn.Linear4bit(8, 8), nn.Linear(8, 8))
    before = m[0].weight, m[1].weight
    qsub.quantize_(m)
    assert (m[0].weight, m[1].weight) == before or (m[0].weight is before[0] and m[1].weight is before[1])
    assert isinstance(m[2].weight, Int8RowwiseTensor)


# ---- torch's operators for whole modules ----


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("masked", [(), ("src_key_padding_mask",), ("mask",), ("mask", "src_key_padding_mask")])
def test_encoders_in_eval_mode_compile_as_one_graph(norm_first, activation, masked):
    options = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, **options)
    encoder = qsub.quantize_(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval())
    x, masks = torch.randn(2, 5, 16), {}
    if "mask" in masked:
        masks["mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if "src_key_padding_mask" in masked:
        masks["src_key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")(x, **masks)
        torch.testing.assert_close(compiled, encoder(x, **masks), rtol=1e-5, atol=1e-6)
        expected = qsub.dequantize_(copy.deepcopy(encoder))(x, **masks)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"need_weights": False}, {}, {"average_attn_weights": False}])
@pytest.mark.parametrize("mask", [None, "attn_mask", "key_padding_mask"])
def test_attention_in_eval_mode_compiles_as_one_graph(options, mask):
    attention = qsub.quantize_(nn.MultiheadAttention(16, 4, batch_first=True).eval())
    x = torch.randn(2, 5, 16)
    masks = {
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(10).view(2, 5) > 7,
    }
    options = {**options, **({mask: masks[mask]} if mask else {})}
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")(x, x, x, **options)
        for left, right in zip(compiled, attention(x, x, x, **options), strict=True):
            if right is not None:
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
