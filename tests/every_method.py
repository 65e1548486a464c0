"""Try methods of torch.Tensor and functions of torch.utils on a quantized tensor, for tests/test_every_method.py.

python tests/every_method.py int8|state NAME...     # one line of JSON for each name; the process may die on a bad one

A name is an attribute of torch.Tensor, or `function:NAME` of FUNCTIONS here. It is called with arguments that fit a
(6, 8) float tensor on the quantized tensor and on its dequantized copy, and the two are compared.
"""

import json
import sys
import warnings

import torch

import qsub

SHAPE = (6, 8)
OTHER = torch.linspace(0.5, 2, 48).view(SHAPE)
INDEX = torch.zeros(SHAPE, dtype=torch.int64)
MASK = torch.arange(48).view(SHAPE) % 3 == 0
CANDIDATES = (  # arguments, the first that the plain tensor takes is used
    (),
    (2,),
    (0.5,),
    (OTHER,),
    (OTHER.t(),),
    (torch.ones(8),),
    (0, 1),
    (0,),
    (1, 0),
    (SHAPE,),
    ((8, 6),),
    (MASK,),
    (INDEX.to(torch.bool),),
    (torch.float32,),
    (torch.float16,),
    (torch.int32,),
    (0, torch.tensor([1, 0])),
    (0, 0, 2),
    (0, INDEX),
    (0, INDEX, OTHER),
    (0, INDEX, 2.0),
    (MASK, 2.0),
    (MASK, OTHER),
    (OTHER, OTHER),
    (0, torch.tensor([1, 0]), OTHER[:2]),
    (0, torch.tensor([1, 0]), 3.0),
    ((torch.tensor([1, 0]),), OTHER[:2]),
    (1, 2, 3),
    (0, [2, 4]),
    ([0, 1],),
    (2.0, 3),
    ((2, 3), (0, 1)),
    (lambda v: v + 1,),
    (OTHER, lambda a, b: a + b),
    (OTHER, OTHER, lambda a, b, c: a),
    ("cpu",),
    ("sum",),
    (1, 6, 8),
    ((6, 8), (8, 1)),
    (torch.ones(6), torch.ones(8)),
    (torch.ones(3, 6), OTHER),
    (8, 0.1),
    ((2, 4),),
    (1, (2, 4)),
    (0, 0, 0, 6),
    (torch.ones(6, 8).double(),),
    ([SHAPE[0], SHAPE[1]],),
    (torch.ones(6, 8, dtype=torch.int64),),
    (2, 2),
    (0, 1, 2),
    (torch.tensor(1.0),),
    (0, 1.0, 2.0),
    (torch.ones(6, 8), 0.5),
    (2, 0, 1.0),
    (None,),
    (torch.preserve_format,),
    (8,),
    ("a",),
)
ROWS, DOWN, IDS = torch.ones(2, 8), torch.tensor([1, 0]), torch.tensor([3, 40])
SPECIAL = {  # what a (6, 8) tensor is cut to first, and the arguments
    "item": (lambda t: t.sum(), ()),
    "is_nonzero": (lambda t: t[:1, :4].sum(), ()),
    "__float__": (lambda t: t.sum(), ()),
    "__bool__": (lambda t: t.sum(), ()),
    "__int__": (lambda t: t.sum(), ()),
    "__complex__": (lambda t: t.sum(), ()),
    "dot": (lambda t: t[0], (torch.ones(8),)),
    "vdot": (lambda t: t[0], (torch.ones(8),)),
    "outer": (lambda t: t[0], (torch.ones(3),)),
    "ger": (lambda t: t[0], (torch.ones(3),)),
    "addmm": (lambda t: t, (OTHER[:, :6], OTHER)),
    "addmm_": (lambda t: t, (OTHER[:, :6], OTHER)),
    "addmv": (lambda t: t[0], (torch.ones(8, 3), torch.ones(3))),
    "addmv_": (lambda t: t[0], (torch.ones(8, 3), torch.ones(3))),
    "addbmm": (lambda t: t, (torch.ones(2, 6, 3), torch.ones(2, 3, 8))),
    "addbmm_": (lambda t: t, (torch.ones(2, 6, 3), torch.ones(2, 3, 8))),
    "baddbmm": (lambda t: t.unsqueeze(0), (torch.ones(1, 6, 3), torch.ones(1, 3, 8))),
    "bmm": (lambda t: t.unsqueeze(0), (torch.ones(1, 8, 3),)),
    "det": (lambda t: t[:, 1:7], ()),
    "logdet": (lambda t: t[:, 1:7], ()),
    "inverse": (lambda t: t[:, 1:7], ()),
    "matrix_exp": (lambda t: t[:, 1:7], ()),
    "matrix_power": (lambda t: t[:, 1:7], (2,)),
    "slogdet": (lambda t: t[:, 1:7], ()),
    "cross": (lambda t: t[:3], (torch.ones(3, 8), 0)),
    "put": (lambda t: t, (IDS, torch.ones(2))),
    "put_": (lambda t: t, (IDS, torch.ones(2))),
    "index_reduce": (lambda t: t, (0, DOWN, ROWS, "amax")),
    "index_reduce_": (lambda t: t, (0, DOWN, ROWS, "amax")),
    "scatter_reduce": (lambda t: t, (0, INDEX, OTHER, "sum")),
    "scatter_reduce_": (lambda t: t, (0, INDEX, OTHER, "sum")),
    "select_scatter": (lambda t: t, (torch.ones(8), 0, 1)),
    "diagonal_scatter": (lambda t: t, (torch.ones(6),)),
    "as_strided_scatter": (lambda t: t, (ROWS, (2, 8), (8, 1))),
    "new_full": (lambda t: t, ((2, 3), 1.5)),
    "dsplit": (lambda t: t.unsqueeze(2), (1,)),
    "float_power_": (lambda t: t.double(), (2,)),
    "multinomial": (lambda t: t.abs(), (2,)),
    "__setitem__": (lambda t: t, (1, torch.ones(8))),
    "__format__": (lambda t: t.sum(), (".2f",)),
    "__deepcopy__": (lambda t: t, ({},)),
    "stft": (lambda t: t, (4,)),
    "as_subclass": (lambda t: t, (torch.Tensor,)),
    "__array__": (lambda t: t, ()),
    "__invert__": (lambda t: t > 0, ()),
}


def make(kind):
    torch.manual_seed(0)
    value = torch.randn(SHAPE)
    if kind == "int8":
        return qsub.Int8RowwiseTensor.from_float(value)
    return qsub.Blockwise8bitTensor.from_float(value, 4, "float8_signed")


def plain(value):
    if isinstance(value, (qsub.Int8RowwiseTensor, qsub.Blockwise8bitTensor)):
        return value.dequantize()
    if type(value).__name__ == "FlatRows":
        return "flat"
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, torch.Size):
        return list(value)
    return value


def _swap(x):
    y = torch.zeros(SHAPE)
    torch.utils.swap_tensors(x, y)
    return [x, y]


def _numpy(x):
    import numpy

    return torch.from_numpy(numpy.asarray(x))


def _flops(x):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.linear(torch.ones(2, 8), x)
    return counter.get_total_flops()


def _traced(x):
    m = torch.nn.Linear(8, 6, bias=False)
    m._parameters["weight"] = torch.nn.Parameter(x, requires_grad=False)
    return torch.jit.trace(m, torch.ones(2, 8))(torch.ones(2, 8))


def _mobile(x):
    from torch.utils.mobile_optimizer import optimize_for_mobile

    return optimize_for_mobile(
        torch.jit.script(
            qsub.quantize_(torch.nn.Linear(8, 6)) if type(x) is not torch.Tensor else torch.nn.Linear(8, 6)
        )
    )


def _checkpoint(x):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(
        lambda a: torch.nn.functional.linear(torch.ones(2, 8, requires_grad=True), a), x, use_reentrant=False
    )


def _module_of(call):
    def run(x):
        m = torch.nn.Linear(8, 6, bias=False)
        m._parameters["weight"] = torch.nn.Parameter(x, requires_grad=False)
        return call(m)

    return run


def _through_file(x):
    import io

    saved = io.BytesIO()
    torch.save(x, saved)
    saved.seek(0)
    return torch.load(saved)


def _through_queue(x):
    import pickle
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401

    return pickle.loads(ForkingPickler.dumps(x))


FUNCTIONS = {
    "np.asarray": _numpy,
    "np.from_dlpack": lambda x: torch.from_numpy(__import__("numpy").from_dlpack(x)),
    "torch.from_dlpack": lambda x: torch.from_dlpack(x),
    "from_dlpack copy": lambda x: torch.from_dlpack(x, copy=True),
    "to_dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "from_dlpack detach": lambda x: torch.from_dlpack(x.detach()),
    "from_dlpack Parameter": lambda x: torch.from_dlpack(torch.nn.Parameter(x, requires_grad=False)),
    "from_dlpack row": lambda x: torch.from_dlpack(x[1:3]),
    "_to_dlpack_versioned": lambda x: torch.from_dlpack(torch._C._to_dlpack_versioned(x)),
    "Tensor.numpy": lambda x: torch.from_numpy(torch.Tensor.numpy(x)),
    "as_tensor": torch.as_tensor,
    "torch.tensor": torch.tensor,
    "asarray": torch.asarray,
    "frombuffer": lambda x: torch.frombuffer(x, dtype=torch.float32),
    "memoryview": lambda x: torch.frombuffer(memoryview(x), dtype=torch.float32),
    "bytes": lambda x: len(bytes(x)),
    "swap_tensors": _swap,
    "linear flops": _flops,
    "checkpoint": _checkpoint,
    "jit.trace": _traced,
    "mobile": _mobile,
    "save": _through_file,
    "queue": _through_queue,
    "deepcopy": lambda x: __import__("copy").deepcopy(x),
    "copy": lambda x: __import__("copy").copy(x),
    "mkldnn": lambda x: x.to_mkldnn().to_dense(),
    "data loader": lambda x: torch.utils.data.default_collate([x, x]),
    "tensor data set": lambda x: torch.utils.data.TensorDataset(x)[1],
    "default_convert": lambda x: torch.utils.data.default_convert(x),
    "parameters_to_vector": lambda x: torch.nn.utils.parameters_to_vector([x]),
    "clip_grad_norm": lambda x: torch.nn.utils.get_total_norm([x]),
    "fuse linear bn": lambda x: torch.nn.utils.fuse_linear_bn_weights(
        x, None, torch.zeros(6), torch.ones(6), 1e-5, torch.ones(6), torch.zeros(6)
    )[0],
    "convert memory format": _module_of(lambda m: m.to(memory_format=torch.channels_last).weight),
    "module double": _module_of(lambda m: m.double().weight),
    "module float8": _module_of(lambda m: m.to(torch.float8_e4m3fn).weight.float()),
    "module share_memory": _module_of(lambda m: m.share_memory().weight),
    "tied storage": lambda x: x.untyped_storage().data_ptr() != 0,
    "Tensor.set_": lambda x: torch.empty(0).set_(x),
    "pad": lambda x: torch.nn.functional.pad(x, (0, 1)),
    "softmax": lambda x: torch.softmax(x, 0),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, x]),
    "hstack": lambda x: torch.hstack([x, x]),
    "hstack of row ranges": lambda x: torch.hstack([x[:3], x[3:]]),
    "hstack of columns": lambda x: torch.hstack([x[:, 4:], x[:, :4]]),
    "hstack of flipped": lambda x: torch.hstack([x, x.flip(0)]),
    "dstack": lambda x: torch.dstack([x, x]),
    "block_diag": lambda x: torch.block_diag(x, x),
    "kron": lambda x: torch.kron(x, torch.ones(2, 2)),
    "cdist": lambda x: torch.cdist(x, OTHER),
    "einsum": lambda x: torch.einsum("bk,nk->bn", OTHER, x),
    "tensordot": lambda x: torch.tensordot(OTHER, x, dims=([1], [1])),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "linalg.svdvals": lambda x: torch.linalg.svdvals(x),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "functional_call": lambda x: torch.func.functional_call(
        torch.nn.Linear(8, 6, bias=False), {"weight": x}, torch.ones(2, 8)
    ),
}


def arguments(name):
    """Arguments that a plain tensor takes, or None."""
    if name in SPECIAL:
        return SPECIAL[name][1]
    for args in CANDIDATES:
        torch.manual_seed(1)
        x = make("int8").dequantize()
        try:
            getattr(x, name)(*args)
        except Exception:
            continue
        return args
    return None


def close(left, right):
    """Whether two results are equal, but for the rounding of a code where they were encoded anew."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.shape == right.shape and left.layout == right.layout
        if not same or left.is_complex() != right.is_complex():
            return False
        a, b = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (left, right))
        if not (a.is_floating_point() and b.is_floating_point()):
            return torch.equal(a, b)
        largest = b.abs().nan_to_num().amax() if b.numel() else 0
        return torch.allclose(a.double(), b.double(), rtol=0.02, atol=float(largest) / 100, equal_nan=True)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(close(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= 0.02 * abs(right) + 1e-3
    return type(left) is type(right) and (left is right or left == right)


def attempt(kind, name):
    """[outcome, detail]: right, refused, not callable, no arguments, wrong."""
    if name.startswith("function:"):
        function, args = FUNCTIONS[name.removeprefix("function:")], ()
        expected_x, x = make(kind).dequantize().clone(), make(kind)
        run = lambda t: function(t)  # noqa: E731
    else:
        member = getattr(torch.Tensor, name)
        expected_x, x = make(kind).dequantize().clone(), make(kind)
        if not callable(member):
            run, args = (lambda t: getattr(t, name)), ()
        else:
            args = arguments(name)
            if args is None:
                return ["no arguments", ""]
            cut = SPECIAL[name][0] if name in SPECIAL else lambda t: t
            run = lambda t: getattr(cut(t), name)(*args)  # noqa: E731
    torch.manual_seed(1)
    try:
        expected, failed = plain(run(expected_x)), None
    except Exception as error:
        expected, failed = None, error
    torch.manual_seed(1)
    before = plain(x)
    try:
        result = plain(run(x))
        after = plain(x)
    except (NotImplementedError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        if not close(plain(x), before):
            return ["wrong", f"refused, but changed: {error}"]
        return ["refused", f"{type(error).__name__}: {str(error)[:500]}"]
    except Exception as error:
        return ["wrong", f"{type(error).__name__}: {error}"]
    if failed is not None:
        return ["wrong", f"plain tensors refuse: {failed}; got {str(result)[:100]}"]
    if isinstance(result, str) and result == "flat":
        return ["right", "a flat view, which refuses further use"]
    if not close(result, expected):
        return ["wrong", f"got {str(result)[:200]} instead of {str(expected)[:200]}"]
    if not close(after, expected_x):
        return ["wrong", f"the tensor became {str(after)[:200]} instead of {str(expected_x)[:200]}"]
    return ["right", ""]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        print(json.dumps([each, "started", ""]), flush=True)
        print(json.dumps([each, *attempt(sys.argv[1], each)]), flush=True)
