"""torchao's own test cases for tensor subclasses, on Int8RowwiseTensor: all of them pass."""

import unittest
import warnings

import pytest
import torch

from qsub import Int8RowwiseTensor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the warnings are torchao's and its imports'

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils

    utils = pytest.importorskip("torchao.testing.utils")  # the module: pytest would collect its classes


class RowwiseBasic(common_utils.TestCase):
    TENSOR_SUBCLASS = Int8RowwiseTensor
    FACTORY_FN = staticmethod(Int8RowwiseTensor.from_float)
    kwargs = {}
    LINEAR_MIN_SQNR = 40


class RowwiseCompile(common_utils.TestCase):
    TENSOR_SUBCLASS = Int8RowwiseTensor
    FACTORY_FN = staticmethod(Int8RowwiseTensor.from_float)
    kwargs = {}
    LINEAR_MIN_SQNR = 40
    COMPILE_MIN_SQNR = 50


utils.copy_tests(utils.TorchAOBasicTestCase, RowwiseBasic, "rowwise")
utils.copy_tests(utils.TorchAOCompileTestCase, RowwiseCompile, "rowwise")

if not torch.cuda.is_available():  # the one test that moves to a GPU whatever its parameters
    for name in [name for name in dir(RowwiseBasic) if name.startswith("test_device1_to_device2")]:
        setattr(RowwiseBasic, name, unittest.skip("moves to a GPU")(getattr(RowwiseBasic, name)))
