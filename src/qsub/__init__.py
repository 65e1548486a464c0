"""qsub: int8 weights as a tensor subclass and 8-bit Adam for PyTorch."""

from typing import TYPE_CHECKING, Any

from qsub import optim
from qsub.interop import hook
from qsub.linear import flops
from qsub.quantize import dequantize_, quantize_
from qsub.serialization import load_file, save_file
from qsub.tensors import Blockwise8bitTensor, Int8RowwiseTensor

__version__ = "0.1.0"
__all__ = [
    "Blockwise8bitTensor",
    "Int8RowwiseTensor",
    "dequantize_",
    "load_file",
    "optim",
    "quantize_",
    "save_file",
]

if TYPE_CHECKING:
    from qsub.interop.transformers import QsubConfig as QsubConfig

hook.register_with_transformers()
hook.when_imported("torch.utils.flop_counter", flops.register)


def __getattr__(name: str) -> Any:
    """`qsub.QsubConfig`, which needs transformers: imported when it is first asked for."""
    if name == "QsubConfig":
        try:
            from qsub.interop.transformers import QsubConfig
        except ImportError as error:
            raise ImportError("qsub.QsubConfig needs transformers 5.6: pip install 'transformers>=5.6'") from error
        return QsubConfig
    raise AttributeError(f"module 'qsub' has no attribute {name!r}")
