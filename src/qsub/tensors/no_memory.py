"""What would read the memory of a tensor that consists of others, and has none itself: each is refused, by name.

torch's wrapper subclasses have a storage without data. A method of torch.Tensor that hands out its address gives a null
pointer, which other packages read: garbage, or the end of the process. `seal` makes torch itself refuse such pointers,
and the methods of `NoMemory` say what to do instead.
"""

import sys
from typing import Any

import torch

_NO_DATA = "has no memory of its own: it consists of two tensors"


def seal(tensor: torch.Tensor) -> None:
    """Have torch raise RuntimeError where C++ code asks for the address of `tensor`, as it does for a FakeTensor."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)  # seen in torch 2.11 to 2.13


def _refused(tensor: Any, what: str) -> NotImplementedError:
    parts = " and ".join(f".{name}" for name in tensor.__tensor_flatten__()[0])
    return NotImplementedError(
        f"{what} of {type(tensor).__name__}, which {_NO_DATA}. Call .dequantize() for a plain float tensor (then "
        f".numpy(), DLPack and the like work), or use {parts}."
    )


def _caller() -> str:
    """Name of the module that called a method of `NoMemory`."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("qsub.tensors."):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


class NoMemory:
    """Mixin of the two tensor subclasses: the doors to raw memory, in Python."""

    _no_address_for: str = "torch."  # beginning of the names of modules that `data_ptr` says 0 to

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as all that follow."""
        raise _refused(self, "numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _refused(self, "conversion to a NumPy array")

    @property
    def __cuda_array_interface__(self) -> Any:
        """AttributeError, by which readers of this protocol (CuPy, Numba) know that it isn't there."""
        raise AttributeError(str(_refused(self, "__cuda_array_interface__")))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise _refused(self, "DLPack export")

    def __dlpack_device__(self) -> Any:
        raise _refused(self, "DLPack export")

    def untyped_storage(self) -> Any:
        """Refused, but to torch itself: torch.compile and FSDP2 compare storages, and read nothing."""
        if _caller().startswith("torch."):
            with torch._C.DisableTorchFunctionSubclass():
                return torch.Tensor.untyped_storage(self)  # type: ignore[arg-type]
        raise _refused(self, "untyped_storage()")

    def _typed_storage(self) -> Any:
        raise _refused(self, "the storage")

    def storage(self) -> Any:
        """Refused; by this one other writers of safetensors files look for shared memory."""
        raise RuntimeError(
            f"{type(self).__name__} consists of two tensors and has no storage of its own, so other writers of "
            "safetensors files can't take it: use qsub.save_file or torch.save (with accelerate and PEFT "
            "safe_serialization=False), or call .dequantize() first"
        )

    def storage_type(self) -> Any:
        """Refused."""
        raise _refused(self, "storage_type()")

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise NotImplementedError(
            f"set_ of {type(self).__name__}, which {_NO_DATA}. Use copy_, or assign to .data, or to the module."
        )

    def resize_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as resize_as_ and resize: the scales belong to the shape."""
        raise NotImplementedError(
            f"resize_ of {type(self).__name__}, whose scales belong to its shape. Make a new one, from floats of that "
            "shape, with from_float."
        )

    resize_as_ = resize = resize_as = resize_

    def apply_(self, *args: Any) -> Any:
        """Refused, as map_ and map2_: torch would run them on memory that isn't there."""
        raise NotImplementedError(
            f"apply_ and map_ of {type(self).__name__}, which {_NO_DATA}. Use x.copy_(x.dequantize().apply_(f))."
        )

    map_ = map2_ = apply_

    def data_ptr(self) -> int:
        """Address of the codes. accelerate tells tied weights by it: torch would say 0 for all, as if they were one.

        But torch's deepcopy, and torch.distributed.checkpoint.async_save, copy the parts of a tensor only if they are
        told 0, and else a storage, which this one doesn't have.
        """
        if _caller().startswith(self._no_address_for):
            return 0
        return getattr(self, self.__tensor_flatten__()[0][0]).data_ptr()  # type: ignore[attr-defined]

    const_data_ptr = data_ptr

    def share_memory_(self) -> Any:
        """Move both inner tensors to shared memory, in place; torch's own (2.13) ends the process."""
        for name in self.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether both inner tensors are in shared memory."""
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        """The values as numbers in lists."""
        return self.dequantize().detach().tolist()  # type: ignore[attr-defined]
