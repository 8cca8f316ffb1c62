"""Compiles a fixed sample of kernels of every family to PTX, without a GPU, and compares two samples.

    python test/kernels/ptx_snapshot.py FOLDER [--only TEXT] [--jobs N]    compiles the sample of the tree on PYTHONPATH
    python test/kernels/ptx_snapshot.py --compare FOLDER FOLDER            lists the kernels that differ

A change that only renames or moves code leaves every kernel as it is. FOLDER gets the PTX of each kernel and
``snapshot.json``, which has its SHA-256. Names of functions, variables and labels, comments and debug lines are
normalized first. A kernel is named by the public API, its arguments and the architecture, so that two commits can be
compared. A run continues an interrupted one in the same folder.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

ARCHS = ("sm_90a", "sm_100a")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Case = Callable[[str], Any]
SYMBOL = re.compile(r"\b(?:\w*cutlass\w*|cudnn_\w+|kernel_\w+|__\w*(?:constant|shared|global|dynamic)\w*)")
LABEL = re.compile(r"\$L\w+|\bL__\w+")


def normalized(ptx: str) -> str:
    """PTX without what names and debug information decide: symbols and labels are numbered in order of appearance."""
    lines = []
    for line in ptx.splitlines():
        line = line.split("//")[0].rstrip()
        if line.strip() and not line.lstrip().startswith((".loc", ".file", ".section", '.pragma "nounroll')):
            lines.append(line)
    text, names = "\n".join(lines), dict[str, str]()
    for pattern in (SYMBOL, LABEL):
        text = pattern.sub(lambda match: names.setdefault(match[0], f"$symbol_{len(names)}"), text)
    return text + "\n"


# Kernels that an API's object compiles.


FULL = ("gemm_swiglu", "grouped_gemm", "grouped_gemm_glu", "grouped_gemm_dglu", "discrete_grouped_gemm_swiglu")
"""APIs whose kernels are compiled for all types of operands."""


def api_registry() -> Any:
    """The registry of fused APIs of the tree on PYTHONPATH; commits before 2026-11-29 have it in ``cudnn.registry``."""
    name = "cudnn.fused.registry"
    return importlib.import_module(name if importlib.util.find_spec(name) else "cudnn.registry")


def presets() -> Iterator[tuple[str, Case]]:
    """A part of what ``cudnn cache warm`` compiles."""
    registry = api_registry()
    for name in registry.compiled():
        api, gemm = registry.aot_preset(name), "gemm" in name
        shapes = {  # one that fills its tiles; each of the others chooses another tile, or another kernel
            "gemm_amax": api.shapes,
            "sdpa_forward": api.shapes,
            "sdpa_backward": [
                x for x in api.shapes if 96 not in x and 2048 not in x and (x[1] == 1 or x[3:] == (192, 128))
            ],
            "rmsnorm_rht_amax": api.shapes[1::3],
        }.get(name, api.shapes[1:2] if name.startswith("gemm_") and api.shapes[1:] else api.shapes)
        for dtype in api.dtypes:
            if dtype == "fp16" or (gemm and name not in FULL and dtype not in ("bf16", "fp8_128", "mxfp8")):
                continue
            for shape in shapes:
                yield f"{name} {dtype} {'x'.join(map(str, shape))}", preset(name, dtype, shape)


def preset(name: str, dtype: str, shape: tuple[int, ...]) -> Case:
    def objects(arch: str) -> list[Any]:
        return list(api_registry().aot_preset(name).objects(dtype, shape, arch))

    return objects


def attention(options: dict[str, Any], rows: int, width: tuple[int, int], dtype: torch.dtype) -> Case:
    """``cudnn.sdpa.SdpaForward``; a boolean stands for a sample tensor."""

    def objects(arch: str) -> list[Any]:
        from cudnn.sdpa import SdpaForward

        made, (batch, hq, hk, keys) = dict(options), (2, 8, 2, 512)
        page = made.pop("page", 0)
        result = BF16 if dtype.itemsize == 1 else dtype
        varlen = made.pop("varlen", False)

        def matrix(heads: int, n: int, d: int, kind: torch.dtype) -> torch.Tensor:
            return (
                torch.empty(batch * n, heads, d, dtype=kind)
                if varlen
                else torch.empty(batch, n, heads, d, dtype=kind).transpose(1, 2)
            )

        q, o = matrix(hq, rows, width[0], dtype), matrix(hq, rows, width[1], result)
        k, v = (matrix(hk, keys, d, dtype) for d in width)
        if page:
            k, v = (torch.empty(64, page, hk, d, dtype=dtype).transpose(1, 2) for d in width)
            made["sample_page_table"] = torch.zeros(batch, keys // page, dtype=torch.int32)
        lse = torch.empty(batch * rows, hq) if varlen else torch.empty(batch, hq, rows)
        ends = torch.arange(batch + 1, dtype=torch.int32)
        if varlen:
            made |= {"sample_cum_seqlen_q": ends * rows, "sample_cum_seqlen_k": ends * keys}
            made |= {"max_s_q": rows, "max_s_k": keys}
        if made.pop("cached", False) or page:
            made["sample_seqlen_k"] = torch.full((batch,), keys, dtype=torch.int32)
        if made.pop("sink", False):
            made["sample_sink"] = torch.zeros(hq)
        if dtype.itemsize == 1:
            made |= {f"sample_descale_{name}": torch.ones(batch, hk) for name in "qkv"}
        return [SdpaForward(q, k, v, o, lse, arch=arch, **made)]

    return objects


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True, "window_size": (-1, 0)},
    "window": {"is_causal": True, "window_size": (100, 0)},
    "band": {"window_size": (100, 50), "top_left": True},
    "softcap and sink": {"is_causal": True, "softcap": 5.0, "sink": True},
    "varlen": {"varlen": True, "is_causal": True},
    "varlen, sink": {"varlen": True, "sink": True, "window_size": (100, 0)},
}
DECODE: dict[str, dict[str, Any]] = {
    "rows": {},
    "split": {"num_splits": 3, "is_causal": True},
    "cache": {"cached": True, "is_causal": True},
    "pages of 16": {"page": 16, "num_splits": 2},
    "pages of 128": {"page": 128, "is_causal": True, "window_size": (40, 0), "sink": True},
}


def attentions() -> Iterator[tuple[str, Case]]:
    for name, options in MASKS.items():
        for width in ((64, 64), (128, 128), (192, 128), (256, 256)) if name == "causal" else ((128, 128),):
            yield f"SdpaForward {name} {width}", attention(options, 512, width, BF16)
        for width in ((64, 64), (128, 128), (192, 128)) if name == "causal" else ((128, 128),):
            yield f"SdpaForward {name} {width} e4m3", attention(options, 512, width, E4M3)
    yield "SdpaForward full (128, 128) e5m2", attention({}, 512, (128, 128), E5M2)
    for name, options in DECODE.items():
        for width in ((64, 64), (128, 128), (256, 256)) if name == "split" else ((128, 128),):
            for rows in (1, 24) if name == "pages of 16" else (1,):
                yield f"SdpaForward {name} {width} {rows} rows", attention(options, rows, width, BF16)


# Kernels that operators launch: they run under emulation, with an executor that records the PTX and does nothing else.


def moe_mlp(dtype: torch.dtype, lists: bool = False, main: bool = False, fp8: bool = False, **options: Any) -> Case:
    def call(arch: str) -> None:
        import cudnn
        from cudnn.ops import moe_mlp as operator

        tokens, hidden, inner, experts, top_k = 512, 256, 256, 8, 2
        wide = inner if options.get("activation") == "srelu" else 2 * inner
        x = torch.zeros(tokens, hidden, dtype=dtype, requires_grad=True)
        routing = cudnn.moe.route(torch.randn(tokens, experts, requires_grad=True), top_k)  # by the reference
        inputs = dict(options)
        bias = inputs.pop("bias", False)
        shapes = ((experts, wide, hidden), (experts, hidden, inner))
        up, down = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        both = [list(t.unbind()) if lists else [t] for t in (up, down)]
        for t in (*both[0], *both[1]):
            t.requires_grad_()
        if bias:
            inputs["up_bias"] = torch.zeros(experts, wide, dtype=dtype, requires_grad=True)
            inputs["down_bias"] = torch.zeros(experts, hidden, dtype=dtype, requires_grad=True)
        if main:
            grads = [[torch.zeros(t.shape) for t in each] for each in both]
            inputs["main_grads"] = tuple(each if lists else each[0] for each in grads)
        first, second = (each if lists else each[0] for each in both)
        with cudnn.emulation(arch):
            y = operator(x, routing, first, second, fp8=fp8, **inputs)
            y.backward(torch.zeros_like(y))

    return call


def route(dtype: torch.dtype, tokens: int, experts: int, top_k: int, bias: bool = False, **options: Any) -> Case:
    def call(arch: str) -> None:
        import cudnn
        from cudnn import moe

        logits = torch.zeros(tokens, experts, dtype=dtype, requires_grad=True)
        with cudnn.emulation(arch):
            routing = moe.route(logits, top_k, bias=torch.zeros(experts) if bias else None, **options)
            routing.weights.sum().backward()
            moe.sort(routing.indices, experts)

    return call


def combine(dtype: torch.dtype, hidden: int, weighted: bool) -> Case:
    def call(arch: str) -> None:
        import cudnn
        from cudnn import moe

        _, _, row = moe.sort((torch.arange(128) % 8).int().view(64, 2), 8)
        weights = torch.ones(64, 2, requires_grad=True) if weighted else None
        with cudnn.emulation(arch):
            y = moe.combine(torch.zeros(128, hidden, dtype=dtype, requires_grad=True), row, weights)
            y.backward(torch.zeros_like(y))

    return call


def exchange(arch: str) -> None:
    """Dispatch and combine of two ranks on shared memory, with their gradients."""
    import pytest

    import cudnn
    from cudnn.moe import Exchange

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.ranks import Threads

    def rank(group: Any) -> None:
        with cudnn.emulation(arch):
            parallel = Exchange(group, 8, 2, 64, max_tokens=16, dtype=BF16, device="cpu", symmetric=True)
            x, weights = torch.zeros(16, 64, dtype=BF16, requires_grad=True), torch.ones(16, 2, requires_grad=True)
            received = parallel.dispatch(x, (torch.arange(32) % 8).int().view(16, 2), weights)
            rows = torch.zeros(64, 64, dtype=BF16, requires_grad=True)
            y = parallel.combine(rows, torch.zeros(received.indices.shape, dtype=torch.int32), received)
            y.backward(torch.zeros_like(y))

    with pytest.MonkeyPatch.context() as patch:
        Threads(2, patch).run(rank)


def nsa(heads: tuple[int, int], width: int, lengths: tuple[int, ...], stride: int, decode: bool = False) -> Case:
    def call(arch: str) -> None:
        import cudnn
        from cudnn.ops import nsa_attention, nsa_decode

        rows, options = sum(lengths), {"block_size": 64, "compress_stride": stride, "selected_blocks": 6}
        shapes = [(rows, heads[0]), (rows, heads[1]), (rows, heads[1])]
        shapes += [(sum(n // stride for n in lengths), heads[1])] * 2
        inputs = [torch.zeros(*shape, width, dtype=BF16) for shape in shapes]
        gates = torch.ones(rows, heads[0], 3, dtype=BF16)
        if decode:
            caches = [x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in inputs[1:]]
            counts = [torch.full((len(lengths),), x.shape[2], dtype=torch.int32) for x in (caches[0], caches[2])]
            query = inputs[0][: len(lengths)]
            with cudnn.emulation(arch):
                nsa_decode(query, *caches, gates[: len(lengths)], *counts, **options)
            return
        ends = [torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, [n // stride for n in lengths])]
        for x in (*inputs, gates):
            x.requires_grad_()
        with cudnn.emulation(arch):
            y = nsa_attention(*inputs, gates, *ends, **options)
            y.backward(torch.zeros_like(y))

    return call


def operators() -> Iterator[tuple[str, Case]]:
    for name, options in {
        "swiglu": {},
        "geglu, bias, concatenated": {"activation": "geglu", "bias": True, "glu_layout": "concatenated"},
        "srelu, main_grads": {"activation": "srelu", "main": True},
        "fp8, lists, bias": {"fp8": True, "lists": True, "bias": True},
    }.items():
        yield f"moe_mlp {name}", moe_mlp(BF16, **options)
    yield "route float32 64 of 8", route(F32, 64, 8, 2)
    yield "route bfloat16 4096 of 128", route(BF16, 4096, 128, 8, renormalize=True)
    yield "route sigmoid", route(F32, 300, 256, 8, True, score="sigmoid", n_group=8, topk_group=4, scaling_factor=2.5)
    yield "route after the choice", route(F32, 300, 64, 6, pre_softmax=False)
    yield "route 1024", route(F32, 300, 1024, 16)
    for dtype in (BF16, F32):
        for weighted in (False, True):
            yield f"combine {dtype} weighted={weighted}", combine(dtype, 256, weighted)
    yield "Exchange", exchange
    yield "nsa_attention 64", nsa((64, 4), 128, (512, 768), 32)
    yield "nsa_attention of few heads", nsa((4, 2), 64, (256, 320), 32)
    yield "nsa_attention of stride 16", nsa((16, 1), 128, (2048,), 16)
    yield "nsa_decode 128", nsa((16, 2), 128, (512, 512), 32, decode=True)
    yield "nsa_decode 64", nsa((4, 1), 64, (256, 256), 32, decode=True)


OPERATORS = ("moe_mlp", "route", "combine", "Exchange", "nsa_attention", "nsa_decode")


def cases() -> dict[str, tuple[str, Case]]:
    """By name: the architecture, and what compiles."""
    known = [*presets(), *attentions(), *operators()]
    return {f"{name} {arch}": (arch, case) for name, case in known for arch in ARCHS}


def run(name: str) -> list[str]:
    """The PTX of a case's kernels, in the order of compilation or launch."""
    arch, case = cases()[name]
    if name.split()[0] in OPERATORS:
        return launched(arch, case)
    made = case(arch)
    keys = []
    for each in made:
        each.check_support()
        keys += [key for key in each.kernels() if key[2] == arch]
    return [compiled(*key) for key in keys]


def compiled(source: str, configuration: Any, arch: str) -> str:
    from cudnn_kernels import compiler, fakes

    module, _, function = source.partition(":")
    kernel = getattr(importlib.import_module(module), function)(configuration)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        return compiler.compile_for(arch, kernel, *fakes.arguments(configuration), options=options).artifacts.PTX


def launched(arch: str, case: Case) -> list[str]:
    from ptx_emulator.runtime import hook

    texts: dict[str, None] = {}
    original, hook.execute = hook.execute, lambda ptx, *_, **__: texts.setdefault(ptx)  # pyright: ignore
    try:
        case(arch)
    finally:
        hook.execute = original
    return list(texts)


def record(name: str, folder: Path) -> dict[str, str]:
    """Compiles a case and keeps its PTX. A case that the API refuses is recorded by its error's class."""
    torch.set_num_threads(1)
    try:
        texts = [normalized(text) for text in run(name)]
    except (NotImplementedError, ValueError) as error:
        return {name: f"refused: {type(error).__name__}: {str(error)[:300]}"}
    except Exception as error:  # some cannot be pickled
        raise RuntimeError(f"{type(error).__name__}: {str(error)[:1000]}") from None
    actual = {}
    for index, text in enumerate(sorted(texts) if "Exchange" in name else texts):
        key = f"{name} #{index}"
        (folder / f"{re.sub(r'[^a-zA-Z0-9_.#=]+', '_', key)}.ptx").write_text(text)
        actual[key] = hashlib.sha256(text.encode()).hexdigest()
    return actual


def snapshot(folder: Path, only: str, jobs: int) -> int:
    """Compiles the sample into a folder; returns how many cases failed."""
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "snapshot.json"
    known: dict[str, dict[str, str]] = json.loads(index.read_text()) if index.exists() else {}
    wanted = [name for name in cases() if re.search(only, name) and name not in known]
    failed, start = 0, time.monotonic()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(record, name, folder): name for name in wanted}
        for done, task in enumerate(as_completed(tasks), 1):
            if error := task.exception():
                failed += 1
                print(f"failed: {tasks[task]}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                continue
            known[tasks[task]] = task.result()
            if not done % 20 or done == len(wanted):
                index.write_text(json.dumps(dict(sorted(known.items())), indent=1))
                print(f"{done} of {len(wanted)} cases, {time.monotonic() - start:.0f} s", flush=True)
    index.write_text(json.dumps(dict(sorted(known.items())), indent=1))
    flat = entries(folder)
    print(f"{len(flat)} kernels, {len(set(flat.values()))} of them distinct, in {len(known)} cases; {failed} failed")
    return failed


def entries(folder: Path) -> dict[str, str]:
    """Hashes by kernel."""
    stored = json.loads((folder / "snapshot.json").read_text())
    return {key: value for case in stored.values() for key, value in case.items() if not value.startswith("refused")}


def compare(before: Path, after: Path, lines: int = 12) -> int:
    """Lists the kernels that differ, those of a case that one folder lacks aside; returns how many do."""
    stored = [json.loads((folder / "snapshot.json").read_text()) for folder in (before, after)]
    both = [case for case in stored[0] if case in stored[1]]
    one, two = ({k: v for case in both for k, v in each[case].items()} for each in stored)
    differing = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    for key in differing:
        print(f"differs: {key}: {'only in one' if key not in one or key not in two else ''}")
        paths = [folder / f"{re.sub(r'[^a-zA-Z0-9_.#=]+', '_', key)}.ptx" for folder in (before, after)]
        if all(path.exists() for path in paths):
            texts = [path.read_text().splitlines() for path in paths]
            print("\n".join(list(difflib.unified_diff(*texts, "before", "after", lineterm="", n=1))[:lines]))
    print(f"{len(one)} kernels in {len(both)} cases compared: {len(differing)} differ")
    return len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true", help="compare two folders")
    parser.add_argument("--only", default="", help="a regular expression that cases' names must match")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(cases()))
        return 0
    if options.compare:
        return compare(*options.folders) > 0
    return snapshot(options.folders[0], options.only, options.jobs) > 0


if __name__ == "__main__":
    sys.exit(main())
