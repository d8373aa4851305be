"""Each function of the table against its ATen operator, on the shapes and types that models use."""

import mindspore as ms
import numpy as np
import pytest
import torch

from hyper_parallel.backends.mindspore import kernels
from hyper_parallel.backends.mindspore.operators import OPERATORS
from hyper_parallel.backends.mindspore.runner import MindSporeRunner
from hyper_parallel.backends.program_runner import join_ranks
from hyper_parallel.backends.torch.program_capture import capture_update

ms.set_device("CPU")
TOLERANCE = 1e-5  # relative; the exponential function of MindSpore on the CPU is off by 3e-6
draw = np.random.default_rng(0)
X = draw.standard_normal((2, 3, 4)).astype(np.float32)
Y = draw.standard_normal((2, 3, 4)).astype(np.float32)
POSITIVE = np.abs(X) + 0.1
FLAGS = X > 0
IDS = draw.integers(0, 5, (2, 3))
TABLE = draw.standard_normal((5, 4)).astype(np.float32)
BIAS = draw.standard_normal(4).astype(np.float32)
LONG = draw.integers(0, 7, (2, 6))
INT = LONG.astype(np.int32)
REPEATED = draw.integers(-2, 3, 100)
PERMUTATIONS = np.stack([draw.permutation(3) for _ in range(8)]).reshape(2, 4, 3)
CHANNELS = draw.standard_normal((3, 1, 3)).astype(np.float32)  # a filter per channel
MIXED = draw.standard_normal((5, 3, 2)).astype(np.float32)
FURTHER = draw.standard_normal((2, 3, 6)).astype(np.float32)
SQUARE = draw.standard_normal((2, 3, 3)).astype(np.float32) + 2 * np.eye(3, dtype=np.float32)
GROUPED = draw.standard_normal((6, 2, 2)).astype(np.float32)
FOUR = draw.standard_normal((2, 4, 5)).astype(np.float32)
SIX = draw.standard_normal((2, 6, 6)).astype(np.float32)
WIDE = draw.standard_normal((2, 5, 5)).astype(np.float32)
ORDER = PERMUTATIONS.transpose(0, 2, 1).copy()

UNARY = (
    "neg",
    "abs",
    "sign",
    "sgn",
    "exp",
    "expm1",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "relu",
    "silu",
    "gelu",
    "floor",
    "ceil",
    "trunc",
    "hardtanh",
    "softplus",
    "elu",
    "leaky_relu",
    "round",
    "isnan",
    "isinf",
)
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"]
CASES = {
    **{f"aten.{name}.default": [((X,), {})] for name in UNARY},
    **{f"aten.{name}.default": [((POSITIVE,), {})] for name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal")},
    **{
        f"aten.{name}.{'default' if name in ('maximum', 'minimum') else 'Tensor'}": [((X, Y), {}), ((X, BIAS), {})]
        for name in BINARY
    },
    **{
        f"aten.{name}.Scalar": [((X, 0.5), {}), ((LONG, 3), {})]
        for name in BINARY
        if name not in ("maximum", "minimum")
    },
    "aten.rsub.Scalar": [((X, 2.0), {})],
    "aten.rsub.Tensor": [((X, Y), {})],
    "aten.div.Tensor_mode": [((LONG, LONG + 1), {"rounding_mode": "floor"})],
    "aten.div.Scalar_mode": [((LONG, 2), {"rounding_mode": "floor"})],
    "aten.floor_divide.default": [((LONG, 2), {})],
    "aten.remainder.Scalar": [((LONG - 3, 2), {})],
    "aten.remainder.Tensor": [((LONG - 3, LONG + 1), {})],
    "aten.fmod.Scalar": [((X, 0.7), {})],
    "aten.fmod.Tensor": [((X, POSITIVE), {})],
    "aten.pow.Tensor_Scalar": [((X, 2), {}), ((X, 3), {}), ((POSITIVE, -0.5), {})],
    "aten.pow.Tensor_Tensor": [((POSITIVE, Y), {})],
    "aten.pow.Scalar": [((2.0, X), {})],
    "aten.clamp.default": [((X, -0.5, 0.5), {}), ((X, None, 0.5), {}), ((X, -0.5), {})],
    "aten.clamp_min.default": [((X, 0.0), {})],
    "aten.clamp_max.default": [((X, 0.5), {})],
    "aten.where.self": [((FLAGS, X, Y), {}), ((FLAGS, X, np.float32(-1.0)), {}), ((FLAGS, LONG[0, 0], LONG[0, 1]), {})],
    "aten.bitwise_and.Tensor": [((FLAGS, Y > 0), {}), ((FLAGS, np.array(True)), {}), ((LONG, LONG + 1), {})],
    "aten.bitwise_or.Tensor": [((FLAGS, Y > 0), {}), ((LONG, LONG + 1), {})],
    "aten.logical_and.default": [((FLAGS, Y > 0), {}), ((LONG, LONG - 1), {})],
    "aten.logical_or.default": [((FLAGS, Y > 0), {}), ((LONG, LONG - 1), {})],
    "aten.logical_xor.default": [((FLAGS, Y > 0), {}), ((LONG, LONG - 1), {})],
    "aten.bitwise_not.default": [((FLAGS,), {}), ((LONG,), {})],
    "aten.logical_not.default": [((FLAGS,), {}), ((LONG,), {})],
    "aten.mm.default": [((X[0], Y[0].T.copy()), {})],
    "aten.bmm.default": [((X, Y.transpose(0, 2, 1).copy()), {})],
    "aten.addmm.default": [
        ((BIAS[:3], X[0], Y[0].T.copy()), {}),
        ((BIAS[:3], X[0], Y[0].T.copy()), {"beta": 2, "alpha": 3}),
    ],
    "aten.baddbmm.default": [((np.ones((2, 3, 3), np.float32), X, Y.transpose(0, 2, 1).copy()), {"alpha": 0.5})],
    "aten.sum.dim_IntList": [
        ((X, [0, 2]), {}), ((X, [-1], True), {}), ((FLAGS, [1]), {}), ((LONG, [0]), {}), ((INT, [0]), {}),
    ],
    "aten.sum.default": [((X,), {})],
    "aten.mean.dim": [((X, [-1], True), {}), ((X, [0, 1]), {})],
    "aten.mean.default": [((X,), {})],
    "aten.var.correction": [((X, [-1]), {"correction": 0, "keepdim": True}), ((X, [1]), {"correction": 1})],
    "aten.linalg_solve_triangular.default": [
        ((SQUARE, Y), {"upper": False, "unitriangular": True}), ((SQUARE, Y), {"upper": True}),
        ((SQUARE[:1], Y), {"upper": True, "unitriangular": True}), ((SQUARE[0], Y[0]), {"upper": False}),
    ],
    "aten.linalg_vector_norm.default": [((X,), {}), ((X, 2, [-1], True), {}), ((X, 2.0, [0, 1]), {})],
    "aten.amax.default": [((X, [-1], True), {})],
    "aten.amin.default": [((X, [0]), {})],
    "aten.max.dim": [((X, 1), {})],
    "aten.min.dim": [((X, 1), {}), ((X, -1, True), {})],
    "aten.argmax.default": [((X, -1), {})],
    "aten.any.dim": [((FLAGS, 1), {}), ((LONG, 1), {})],
    "aten.any.default": [((FLAGS,), {}), ((LONG * 0,), {})],
    "aten.prod.dim_int": [((X, 1), {}), ((X, -1, True), {})],
    "aten.cumsum.default": [((LONG, -1), {}), ((INT, -1), {}), ((X, 1), {}), ((FLAGS, -1), {})],
    "aten._softmax.default": [((X, -1, False), {})],
    "aten._log_softmax.default": [((X, -1, False), {}), ((X, 1, False), {})],
    "aten.native_layer_norm.default": [((X, [4], BIAS, BIAS, 1e-5), {}), ((X, [4], None, None, 1e-5), {})],
    "aten.topk.default": [((X, 2, -1), {}), ((X, 1, 1), {})],
    "aten.sort.default": [((X, -1), {}), ((X, 1, True), {})],
    "aten.sort.stable": [((LONG.reshape(-1),), {"stable": True}), ((REPEATED,), {"stable": True, "dim": 0})],
    "aten.view.default": [((X, [6, 4]), {}), ((X, [-1]), {})],
    "aten._unsafe_view.default": [((X, [2, 12]), {})],
    "aten.reshape.default": [((X, [3, 8]), {})],
    "aten.permute.default": [((X, [0, 2, 1]), {}), ((X, [-1, 0, 1]), {})],
    "aten.expand.default": [((X[:, :1], [2, 5, 4]), {}), ((BIAS, [2, 3, -1]), {})],
    "aten.unsqueeze.default": [((X, 1), {}), ((X, -1), {})],
    "aten.squeeze.dims": [((X[:, :1], [1]), {}), ((X[:, :1], [0, -2]), {})],
    "aten.squeeze.dim": [((X[:1], 0), {})],
    "aten.cat.default": [(([X, Y], 1), {}), (([LONG, LONG], -1), {})],
    "aten.split_with_sizes.default": [((X, [1, 2], 1), {}), ((X, [3, 1], -1), {})],
    "aten.slice.Tensor": [
        ((X, 1, 1, 3), {}), ((X, -1, 0, 9223372036854775807), {}), ((X, 2, -2, 9223372036854775807), {}),
        ((X, 2, 0, 4, 2), {}), ((X,), {}),
    ],
    "aten.slice_scatter.default": [
        ((X, Y[:, 1:3], 1, 1, 3), {}),
        ((X, Y, 1), {}),
        ((X, Y[..., :2].copy(), 2, 0, 4, 2), {}),
    ],
    "aten.select.int": [((X, 1, 2), {}), ((X, -1, -1), {})],
    "aten.select_scatter.default": [((X, Y[:, 1].copy(), 1, 1), {})],
    "aten.flip.default": [((X, [1]), {})],
    "aten.constant_pad_nd.default": [
        ((X, [1, 2]), {}), ((X, [0, 0, 1, 0], 3.0), {}), ((X, [-1, 2]), {}), ((X, [0, -1, -1, 0]), {}),
    ],
    "aten.repeat.default": [((X, [1, 2, 3]), {}), ((BIAS, [2, 3, 1]), {})],
    "aten.copy.default": [((X, Y[:, :1].copy()), {}), ((X, LONG[:, :4].reshape(2, 1, 4)), {})],
    "aten.convolution.default": [
        ((X, CHANNELS, BIAS[:3], [1], [1], [1], False, [0], 3), {}),
        ((X, CHANNELS, None, [1], [2], [2], False, [0], 3), {}),
        ((X, MIXED, None, [1], [0], [1], False, [0], 1), {}),
        ((FOUR, GROUPED, None, [1], [1], [1], False, [0], 2), {}),
        ((X, GROUPED[:, :1].copy(), None, [1], [0], [1], False, [0], 3), {}),
    ],
    "aten.convolution_backward.default": [
        ((X, X, CHANNELS[..., :1], [3], [1], [0], [1], False, [0], 3, [True] * 3), {}),
        ((FURTHER, X, CHANNELS, [3], [1], [2], [1], False, [0], 3, [True] * 3), {}),
        ((WIDE, X, MIXED, [5], [1], [1], [1], False, [0], 1, [True] * 3), {}),
        ((SIX, FOUR, GROUPED, [6], [1], [1], [1], False, [0], 2, [True] * 3), {}),
    ],
    "aten.full.default": [(([2, 3], 4.0), {"dtype": torch.float32}), (([2], 1), {"dtype": torch.int64})],
    "aten.full_like.default": [((X, 0), {}), ((LONG, 2), {"dtype": torch.float32})],
    "aten.new_empty_strided.default": [((X, [2, 3], [3, 1]), {}), ((X, [4], [1]), {"dtype": torch.int64})],
    "aten.scalar_tensor.default": [((3.0,), {"dtype": torch.float32})],
    "aten._to_copy.default": [
        ((X,), {"dtype": torch.int64}),
        ((LONG,), {"dtype": torch.float32}),
        ((FLAGS,), {"dtype": torch.float32}),
    ],
    "aten.embedding.default": [((TABLE, IDS), {}), ((TABLE, IDS, 0), {})],
    "aten.index_select.default": [((TABLE, 0, IDS[0]), {}), ((X, 1, IDS[0] % 3), {})],
    "aten.gather.default": [((X, 1, ORDER), {}), ((X, -1, IDS[:, :, None] % 4), {})],
    "aten.scatter.src": [((X, 1, ORDER, Y), {})],
    "aten.scatter.value": [((X, 2, IDS[:, :, None] % 4, -1.0), {})],
    "aten.scatter_add.default": [((X, 2, IDS[:, :, None] % 4, Y[:, :, :1].copy()), {})],
    "aten.index.Tensor": [
        ((TABLE, [IDS]), {}), ((X, [None, IDS % 3]), {}), ((X, [np.array([[0], [1]]), IDS % 3]), {}),
        ((X, [None, np.array([[0], [2]]), np.array([[1, 3]])]), {}), ((X, [None, IDS % 3 - 3]), {}),
        ((X, [np.array([0, 1]), None, np.array([3, -1])]), {}),
    ],
    "aten.index_put.default": [
        ((TABLE, [IDS], X, True), {}), ((TABLE, [np.array([3, 1])], X[0, :2].copy()), {}),
        ((X, [None, np.array([0, 0, 2])], Y, True), {}),
        ((X, [np.array([0, 1]), np.array([2, 2])], Y[0, :2].copy(), True), {}),
        ((X, [np.array([0, 1]), None, np.array([3, -1])], Y[:, :, 0].copy()), {}),
    ],
}  # fmt: skip


def test_each_operator_of_the_table_has_a_case():
    collectives = {name for name in OPERATORS if name.startswith("_c10d_functional.")}  # test_layouts.py
    assert OPERATORS.keys() - collectives == CASES.keys()


def _torch(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.asarray(value))
    return [_torch(part) for part in value] if isinstance(value, list) else value


def _mindspore(value):
    if isinstance(value, (np.ndarray, np.generic)):
        return ms.Tensor(np.asarray(value))
    if isinstance(value, torch.dtype):
        return kernels.dtype(str(value).removeprefix("torch."))
    return tuple(_mindspore(part) for part in value) if isinstance(value, list) else value


@pytest.mark.parametrize("name", CASES)
def test_a_function_computes_its_operator(name):
    _, operator, overload = name.split(".")
    for args, kwargs in CASES[name]:
        wanted = getattr(getattr(torch.ops.aten, operator), overload)(*map(_torch, args), **kwargs)
        result = getattr(kernels, OPERATORS[name])(
            *map(_mindspore, args), **{k: _mindspore(v) for k, v in kwargs.items()}
        )
        wanted, result = (x if isinstance(x, (list, tuple)) else [x] for x in (wanted, result))
        if operator == "native_layer_norm":
            wanted, result = wanted[:1], result[:1]
        assert len(wanted) == len(result)
        for theirs, ours in zip(wanted, result, strict=True):
            assert ours.asnumpy().dtype == theirs.numpy().dtype
            if operator == "new_empty_strided":  # values that no operator reads
                assert ours.shape == theirs.shape
                continue
            np.testing.assert_allclose(ours.asnumpy(), theirs.numpy(), rtol=TOLERANCE, atol=5e-6)


def test_programs_have_infinities_where_torch_has_them(tmp_path):
    values = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.1, 0.2], [-1.0, 2.0, 0.0]])
    allowed = torch.tensor([[True, False, True], [False] * 3, [True] * 3])  # one row is masked in full

    def masked(given):
        scores = given["values"].masked_fill(~given["allowed"], float("-inf"))
        return {
            "scores": scores,
            "raised": torch.where(given["allowed"], given["values"], float("inf")),
            "softmax": scores.softmax(-1),
            "log_softmax": scores.log_softmax(-1),
            "softmax of columns": scores.softmax(0),
            "amax": scores.amax(-1),
            "amin": scores.amin(-1),
            "maximum": scores.max(-1).values,
            "index": scores.max(-1).indices,
            "minimum": scores.min(-1).values,
            "padded": torch.nn.functional.pad(scores, [1, 0], value=float("-inf")),
            "clamped": scores.clamp(min=float("-inf"), max=0.25),
            "infinite": scores == float("-inf"),
            "exponential": scores.exp(),
        }

    given = {"values": values, "allowed": allowed}
    runner = MindSporeRunner({})
    step = runner.compile(capture_update(masked, given), tmp_path / "masked.py")
    results = step({name: runner.value(tensor.numpy()) for name, tensor in given.items()})
    for name, wanted in masked(given).items():
        np.testing.assert_allclose(runner.array(results[name]), wanted.numpy(), rtol=TOLERANCE, atol=1e-7, err_msg=name)


def test_fused_programs_compute_functions_as_unfused_ones(tmp_path):
    """The compiler of kernels computes some functions inexactly, and broadcasts in its own way."""
    points = [*torch.linspace(-30, 30, 997), -200.0, 88.0, 200.0, float("inf"), -float("inf")]
    given = {"x": torch.tensor(points), "row": torch.linspace(-2, 2, 4)}

    def functions(given):
        x, row = given["x"], given["row"]
        size = x.abs() + 1e-3
        wide = (row[:, None].expand(4, len(points)) / 3).expand(4, len(points))
        named = {
            "exp": x.exp(), "tanh": x.tanh(), "sigmoid": x.sigmoid(), "log": size.log(),
            "sqrt": size.sqrt(), "rsqrt": size.rsqrt(), "quotient": x.clamp(-9, 9) / size, "cube": size**3,
        }  # fmt: skip
        return {k: v * 1.5 for k, v in named.items()} | {"wide": size.rsqrt() * wide}

    program = capture_update(functions, given)
    results = []
    for fuse in (True, False):
        runner = join_ranks("mindspore", 0, 1, str, {}, fuse=fuse)
        step = runner.compile(program, tmp_path / f"fuse_{fuse}.py")
        values = step({name: runner.value(tensor.numpy()) for name, tensor in given.items()})
        results.append({name: runner.array(value) for name, value in values.items()})
        if fuse:
            kernels = [k["operators"] for k in runner.facts()["fused_kernels"]]
            assert any("RealDiv" in kernel for kernel in kernels)
    for name, wanted in functions(given).items():
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-6, atol=1e-30, err_msg=name)
        np.testing.assert_allclose(results[0][name], wanted.numpy(), rtol=2e-4, atol=1e-30, err_msg=name)


def test_programs_scale_a_summand(tmp_path):
    def combined(given):
        a, b = given["a"], given["b"]
        return {
            "sum": torch.add(a, b, alpha=3),
            "difference": torch.sub(a, b, alpha=0.5),
            "reverse": torch.rsub(a, b, alpha=2),
        }

    given = {"a": torch.from_numpy(X), "b": torch.from_numpy(Y)}
    program = capture_update(combined, given)
    assert sum("alpha" in node.kwargs for node in program.nodes) == 3
    runner = MindSporeRunner({})
    step = runner.compile(program, tmp_path / "combined.py")
    results = step({name: runner.value(tensor.numpy()) for name, tensor in given.items()})
    for name, wanted in combined(given).items():
        np.testing.assert_allclose(runner.array(results[name]), wanted.numpy(), rtol=TOLERANCE, atol=1e-6, err_msg=name)
