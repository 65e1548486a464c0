"""The operators of Int8RowwiseTensor: one table, for the tests and for docs/tensors.md.

Names in an expression: w is a (6, 10) weight, x (3, 10), y (3, 6), v (10,) and f (6, 10) are plain float tensors, i is
a 1-D index and mask a mask of rows. The kinds of result:

    plain     a plain tensor, computed from the int8 data or from the dequantized weight
    view      an Int8RowwiseTensor that shares memory with w
    copy      an Int8RowwiseTensor with memory of its own
    in place  w itself, changed through the row code
    value     a Python number or bool
    refused   NotImplementedError that says what to do instead
"""

from typing import NamedTuple


class Row(NamedTuple):
    """An expression, the kind of its result, and what else there is to know."""

    expression: str
    kind: str
    note: str = ""


MATMUL = "from the int8 data; the dtype of the input"
TABLE = [
    Row("F.linear(x, w)", "plain", MATMUL),
    Row("x @ w.t()", "plain", MATMUL),
    Row("y @ w", "plain", MATMUL),
    Row("w @ v", "plain", MATMUL),
    Row("w @ x.t()", "plain", MATMUL),
    Row("torch.mm(x, w.t())", "plain", MATMUL),
    Row("torch.addmm(torch.ones(6), x, w.t())", "plain", MATMUL),
    Row("torch.matmul(x.expand(2, 3, 10), w.t())", "plain", MATMUL),
    Row("torch.bmm(x.expand(2, 3, 10), w.t().expand(2, 10, 6))", "plain", MATMUL),
    Row("torch.einsum('bk,nk->bn', x, w)", "plain", MATMUL),
    Row("torch.einsum('bn,nk->bk', y, w)", "plain", MATMUL),
    Row("w.mv(v)", "plain", MATMUL),
    Row("w[0].dot(v)", "plain"),
    Row("F.embedding(i, w)", "plain", "only the rows asked for are dequantized"),
    Row("w.dequantize()", "plain", "differentiable"),
    Row("w + f", "plain", "in the dtype that w shows"),
    Row("w - 1", "plain"),
    Row("2 * w", "plain"),
    Row("w / f", "plain"),
    Row("w ** 2", "plain"),
    Row("-w", "plain"),
    Row("w.abs()", "plain"),
    Row("w.sum()", "plain"),
    Row("w.sum(1)", "plain"),
    Row("w.mean(0)", "plain"),
    Row("w.std()", "plain"),
    Row("w.norm()", "plain"),
    Row("torch.linalg.norm(w)", "plain"),
    Row("w.amax()", "plain"),
    Row("w.max()", "plain"),
    Row("w.clamp(-1, 1)", "plain"),
    Row("w.isfinite()", "plain"),
    Row("w.isnan()", "plain"),
    Row("w == w", "plain"),
    Row("w > 0", "plain"),
    Row("torch.where(w > 0, w, 0.0)", "plain"),
    Row("torch.equal(w, w)", "value"),
    Row("torch.allclose(w, w)", "value"),
    Row("w[1, 2].item()", "value"),
    Row("w.tolist()", "value"),
    Row("torch.zeros_like(w)", "plain", "what optimizers keep their state in"),
    Row("torch.ones_like(w)", "plain"),
    Row("torch.full_like(w, 2.0)", "plain"),
    Row("w.new_zeros(3)", "plain", "of another size than rows of the weight"),
    Row("w.new_ones(3, 2)", "plain"),
    Row("w.new_full((3,), 2.0)", "plain"),
    Row("w.t()", "view", "the scales run along the other dimension"),
    Row("w.T", "view"),
    Row("w.mT", "view"),
    Row("w.transpose(0, 1)", "view"),
    Row("w.permute(1, 0)", "view"),
    Row("w[1:4]", "view", "rows with their scales"),
    Row("w[::2]", "view"),
    Row("w.narrow(0, 1, 3)", "view"),
    Row("w.split(4)[1]", "view"),
    Row("w.split([2, 4])[0]", "view"),
    Row("w.chunk(3)[2]", "view"),
    Row("w[2]", "view", "a row with its scale"),
    Row("w.unbind()[1]", "view"),
    Row("w[:, 2:5]", "view", "columns, with the scales of the rows; can't be updated in place"),
    Row("w[:, 3]", "view", "a column; can't be updated in place"),
    Row("w.unsqueeze(0)", "view"),
    Row("w.unsqueeze(0).squeeze(0)", "view"),
    Row("w.view(1, 6, 10)", "view", "dimensions of size 1 come and go"),
    Row("w.reshape(6, 10)", "view"),
    Row("w.expand(2, 6, 10)", "view"),
    Row("w.as_strided((4, 10), w.stride())", "view", "the first rows"),
    Row("w.detach()", "view"),
    Row("w.data", "view"),
    Row("w.clone()", "copy"),
    Row("copy.deepcopy(w)", "copy"),
    Row("w.t().contiguous()", "copy"),
    Row("w.bfloat16()", "copy", "the dtype changes in appearance only"),
    Row("w.double()", "copy"),
    Row("w.to('cpu', copy=True)", "copy"),
    Row("w[i]", "copy", "rows by a 1-D index"),
    Row("w[mask]", "copy", "rows by a mask"),
    Row("w.index_select(0, i)", "copy"),
    Row("torch.cat([w, w])", "copy", "of rows"),
    Row("w.new_zeros(3, 10)", "copy", "rows of the length of the weight's, as FSDP2 asks for"),
    Row("F.pad(w, (0, 0, 0, 2))", "copy", "rows of zeros at the end"),
    Row("torch.cat([w[:2], w[4:]])", "copy"),
    Row("torch.cat([w[:, :2], w[:, 4:]], 1)", "copy", "of columns of one weight"),
    Row("torch.cat([w, w.clone()], 1)", "copy", "of columns with equal scales"),
    Row("w.add_(f)", "in place", "dequantize, update in fp32, encode again"),
    Row("w.add_(f, alpha=-0.5)", "in place"),
    Row("w.sub_(f)", "in place"),
    Row("w.mul_(0.5)", "in place"),
    Row("w.div_(3)", "in place"),
    Row("w.neg_()", "in place"),
    Row("w.clamp_(-1, 1)", "in place"),
    Row("w.lerp_(f, 0.25)", "in place"),
    Row("w.addcdiv_(f, f.abs() + 1, value=-0.1)", "in place"),
    Row("w.addcmul_(f, f, value=0.1)", "in place"),
    Row("w.masked_fill_(f > 0, 0.0)", "in place"),
    Row("w.zero_()", "in place"),
    Row("w.fill_(0.5)", "in place"),
    Row("w.copy_(f)", "in place", "always to nearest; from another Int8RowwiseTensor exactly"),
    Row("w.copy_(w.clone())", "in place"),
    Row("torch._foreach_add_([w], [f])[0]", "in place", "torch.optim with foreach=True"),
    Row("torch._foreach_mul_([w], 0.5)[0]", "in place"),
    Row("w.flatten()", "refused", "rows would be lost"),
    Row("w.view(10, 6)", "refused"),
    Row("torch.cat([w[:3], w[3:]], 1)", "refused", "columns of different scales"),
    Row("torch.cat([w, f])", "refused"),
    Row("w[:, 2:5].add_(1)", "refused", "the scales belong to whole rows"),
    Row("w[i, i]", "refused"),
    Row("w.as_strided((2, 2), (4, 1))", "refused"),
    Row("torch.linalg.svdvals(w)", "refused"),
    Row("w.cumsum(0)", "refused"),
    Row("w @ w.t()", "refused", "a product of two int8 weights"),
    Row("w.numpy()", "refused"),
]


def markdown() -> str:
    """The table as docs/tensors.md shows it."""
    lines = ["| expression | result | |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| `{row.expression}` | {row.kind} | {row.note} |" for row in TABLE])


if __name__ == "__main__":
    print(markdown())
