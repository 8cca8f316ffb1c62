"""What a grouped GEMM with a gated activation, a Hadamard transform and quantizers to four bits computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudnn.errors import make_error
from cudnn.fused.grouped import BIAS, PROB, ExpertsGemm, operands, output
from cudnn.fused.layouts import BlockScales, Contiguous, OneMatrix, Sizes, TensorSpec
from cudnn.gemm.formats import FLOAT4, SCALES, name_of
from cudnn.lazy import torch
from cudnn_kernels import epilogue

E4M3 = (SCALES[1],)
TYPES = ("bfloat16", FLOAT4)
VECTOR = 16  # elements that share a factor, and that are transformed together


class TransformedExperts(ExpertsGemm):
    """A grouped GEMM and a gated activation, which is rounded or quantized, and so is its transform."""

    tensors = (
        *operands(),
        output("c", "n"),
        TensorSpec("d", OneMatrix("m", "columns", "mn"), TYPES, written=True),
        TensorSpec("sfd", BlockScales("m", "columns"), SCALES, optional=True, same_dtype="sfa", written=True),
        TensorSpec("rht_rowwise", OneMatrix("m", "columns", "mn"), TYPES, optional=True, written=True),
        TensorSpec("sfrht_rowwise", BlockScales("m", "columns"), E4M3, optional=True, written=True),
        TensorSpec("rht_colwise", Contiguous("elements of d"), TYPES[1:], optional=True, written=True),
        TensorSpec("sfrht_colwise", Contiguous("scales of d"), E4M3, optional=True, written=True),
        PROB,
        BIAS,
    )
    returns = ("c", "d", "sfd", "rht_rowwise", "sfrht_rowwise", "rht_colwise", "sfrht_colwise")
    scalars = ("norm_const", "rht_norm_const")
    result = ("d", "")
    group_rows, tile_m, roundings = 256, (256,), 2
    aot_dtypes = ("bf16", "nvfp4")
    example = (("m", "n", "k", "experts"), (512, 256, 64, 2))

    norm_const: float = 1.0
    rht_norm_const: float = 1.0
    act_func: str
    glu_alpha: float | None
    glu_limit: float | None

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        step = 32 if self.act_func == "srelu" else 64
        self.columns_in = step, str(step)

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        sizes = super().sizes_of(shapes, options)
        columns = sizes["n"] // (1 if options["act_func"] == "srelu" else 2)
        count = sizes["m"] * columns
        return {**sizes, "columns": columns, "elements of d": count, "scales of d": count // VECTOR}

    @property
    def constants(self) -> dict[str, Any]:
        return {**super().constants, **({} if self.glu_alpha is None else {"glu_alpha": float(self.glu_alpha)})}

    def operations(self) -> tuple[Any, ...]:
        rounded = (*self.activation(), *self.multiplied_by("prob"), epilogue.Round("bfloat16"))
        result = self.quantized("sfd", "norm_const") if self.has("sfd") else ()
        before = (*self.scaled_product(), *self.biased(), self.store("c"))
        return (*before, *rounded, *self.transformed(), *result, self.store("d"))

    def activation(self) -> tuple[Any, ...]:
        """y of c, and its factor."""
        if self.act_func == "srelu":
            return (epilogue.SquaredRelu(),)
        slope, offset = (1.702, 1.0) if self.act_func == "geglu" else (1.0, 0.0)
        limit = None if self.glu_limit is None else float(self.glu_limit)
        least = None if limit is None else -limit
        gated = epilogue.Gated(epilogue.Gate("swish", slope, limit, least, offset, gate_min=least), gate_first=True)
        return (gated,) if self.glu_alpha is None else (gated, epilogue.Scale("glu_alpha"))

    def transformed(self) -> tuple[Any, ...]:
        """A transform of v, rounded and stored."""
        value, constant = "rotated", "rht_norm_const"
        along = {"rht_rowwise": "n", "rht_colwise": "m"}
        operations: list[Any] = []
        for name in filter(self.has, along):
            operations = [epilogue.Hadamard(along[name], value, factor=0.25), epilogue.Round("bfloat16", value)]
            if name == "rht_colwise":
                operations.append(epilogue.StoreColumns(name, f"sf{name}", constant, value))
                continue
            operations += self.quantized(f"sf{name}", constant, value) if self.has(f"sf{name}") else ()
            operations.append(self.store(name, value))
        return tuple(operations)

    def quantized(self, scales: str, norm: str, value: str = "x") -> tuple[Any, ...]:
        """A value divided by its scale factors."""
        dtype = self.dtype_name(scales)
        return (epilogue.QuantizeRows(scales, FLOAT4, dtype, VECTOR, norm, value=value, by_value=True),)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        packed = ("d", "rht_rowwise", "rht_colwise")
        bytes_ = {name: tensors[name].view(torch.uint8) for name in packed if self.dtype_name(name) == FLOAT4}
        super().reference({**tensors, **bytes_, **self.constants})

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        d_dtype, rows, columns = (arguments[f"{name}_dtype"] for name in ("d", "rht_rowwise", "rht_colwise"))
        types = {"c": (cls.dtype_or_default(arguments["c_dtype"]), "n"), "d": (cls.dtype_or_default(d_dtype), "n")}
        if name_of(types["d"][0]) == FLOAT4:
            types["sfd"] = (torch.float8_e4m3fn if arguments["sfa"] is None else arguments["sfa"].dtype, "")
        for name, dtype in (("rht_rowwise", rows), ("rht_colwise", columns)):
            if dtype is not None:
                types[name] = (dtype, "n")
                types |= {f"sf{name}": (torch.float8_e4m3fn, "")} if name_of(dtype) == FLOAT4 else {}
        return types

    @classmethod
    def normalize_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        rows, columns = arguments["rht_rowwise_dtype"], arguments["rht_colwise_dtype"]
        cls.check_transforms(rows is not None, None if columns is None else name_of(columns))
        return super().normalize_arguments(arguments)

    @classmethod
    def check_transforms(cls, rows: bool, columns: str | None) -> None:
        """Raises for transforms of rows and of columns, or for columns of another type."""
        if columns is not None and (rows or columns != FLOAT4):
            got = f"{columns}{', with one of rows' * rows}"
            allowed = f"{FLOAT4}, without one of rows"
            raise make_error(NotImplementedError, cls._title(), "a transform of columns", got, allowed)

    def check_options(self) -> None:
        super().check_options()
        if self.act_func not in ("swiglu", "geglu", "srelu"):
            raise self.error("act_func", repr(self.act_func), "'swiglu', 'geglu' or 'srelu'")
        if self.sf_vec_size != VECTOR:
            raise self.error("sf_vec_size", self.sf_vec_size, str(VECTOR))
        for name in ("glu_alpha", "glu_limit"):
            value = getattr(self, name)
            if value is not None and self.checked_number(name, value) <= 0 and name == "glu_limit":
                raise self.error(name, value, "None, or a finite number; limits are positive")

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        fp4_results = self._fp4_results()
        if fp4_results and (self.act_func == "srelu" or sizes["columns"] % 128):
            got = f"{sizes['columns']} columns of {self.act_func}"
            raise self.error(
                f"{fp4_results[0]} tensor of four bits", got, "multiples of 128 columns of swiglu or geglu"
            )

    def _fp4_results(self) -> list[str]:
        """The results of four bits."""
        return [name for name in ("d", "rht_rowwise", "rht_colwise") if self.dtype_name(name) == FLOAT4]

    def check_own_rules(self, sizes: Sizes) -> None:
        if not self.has("prob"):
            raise self.error("prob_tensor is required", "None", "a tensor (m, 1, 1)")
        if self.dtype("a") == torch.uint8:
            raise self.error("a tensor dtype", torch.uint8, f"{FLOAT4} for bytes", f"pass a.view(torch.{FLOAT4})")
        self.check_transforms(self.has("rht_rowwise"), self.dtype_name("rht_colwise") or None)
        fp4_results = self._fp4_results()
        for name, scales in (("d", "sfd"), ("rht_rowwise", "sfrht_rowwise"), ("rht_colwise", "sfrht_colwise")):
            if self.has(scales) != (name in fp4_results):
                got = "a tensor" if self.has(scales) else "None"
                raise self.error(f"{scales} tensor", got, f"a tensor with {name} of four bits, else None")
