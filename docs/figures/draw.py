"""Draws the figures of the pages on how things are computed: `python docs/figures/draw.py`, in the root.

Each figure is an SVG with colors for light and dark pages. Colors: memory (gray), loads (blue), MMAs (green), epilogue
and softmax (amber), barriers (red).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

_FOLDER = Path(__file__).parent
_STYLE = """
    text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
           font-size: 14px; fill: #1f2328; }
    .head { font-size: 15px; font-weight: 700; }
    .small { font-size: 12.5px; fill: #59636e; }
    .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
    .memory { fill: #f0f2f4; stroke: #8c959f; }
    .load { fill: #dbe9fb; stroke: #4a7fc4; }
    .mma { fill: #d3f0e4; stroke: #2f9e78; }
    .math { fill: #fdf0cf; stroke: #cf9f2f; }
    .barrier { fill: #fbe0de; stroke: #c9564c; }
    .frame { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; }
    .line { fill: none; stroke: #6e7781; stroke-width: 1.6; }
    .back { stroke: #c9564c; stroke-dasharray: 4 3; }
    .tip { fill: #6e7781; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .small { fill: #9aa4af; }
      .memory { fill: #262c34; stroke: #7d8590; } .load { fill: #1c3353; stroke: #5b8fd6; }
      .mma { fill: #143d31; stroke: #3fb68b; } .math { fill: #453612; stroke: #d3a740; }
      .barrier { fill: #4a2320; stroke: #e0776d; } .line { stroke: #9aa4af; } .tip { fill: #9aa4af; }
      .back { stroke: #e0776d; } .frame { stroke: #7d8590; }
    }
"""


class Figure:
    """An SVG; coordinates are in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            ' aria-labelledby="title">',
            f'  <title id="title">{escape(title)}</title>',
            f"  <style>{_STYLE}  </style>",
            '  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        ]

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        self.parts.append(f'  <text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, w: float, h: float, style: str, *lines: str, head: bool = False) -> None:
        """A rectangle with centered lines of text; with ``head``, the first one is bold."""
        self.parts.append(
            f'  <rect class="{style}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5" stroke-width="1.3"/>'
        )
        first = y + h / 2 + 5 - 8.5 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + 17 * i, line, "head" if head and i == 0 else "small" if i else "", "middle")

    def arrow(self, *points: tuple[float, float], label: str = "", back: bool = False) -> None:
        """A line through the points with a tip at the last one; ``back``: dashed, for a release or a gradient."""
        path = " L".join(f"{x} {y}" for x, y in points)
        style = "line back" if back else "line"
        self.parts.append(f'  <path class="{style}" d="M{path}" marker-end="url(#tip)"/>')
        if label:
            (x0, y0), (x1, y1) = points[0], points[1]
            vertical = abs(x1 - x0) < abs(y1 - y0)
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            self.text(
                x + 6 if vertical else x,
                y + 4 if vertical else y - 6,
                label,
                "small",
                "start" if vertical else "middle",
            )

    def save(self, name: str) -> None:
        (_FOLDER / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>", ""]))


def row(f: Figure, y: float, h: float, boxes: Sequence[tuple[float, float, str, str]]) -> None:
    """Boxes of a timeline: (start, width, style, text)."""
    for x, w, style, text in boxes:
        f.box(x, y, w, h, style, *text.split("\n"))


def moe_layer() -> None:
    f = Figure(1000, 470, "Kernels of the MoE layer: forward and backward, with the tensors between them")
    f.text(10, 26, "Forward", "head")
    f.box(10, 44, 118, 64, "math", "route", "top-k, sort")
    f.box(196, 44, 150, 64, "load", "permute / gather", "a[r] = x[t]")
    f.box(414, 44, 160, 64, "mma", "up GEMM + GLU", "h = up a, act = glu(h)")
    f.box(642, 44, 140, 64, "mma", "down GEMM", "o = down act")
    f.box(850, 44, 140, 64, "math", "combine", "y = Σ w[t,k] o[r]")
    for x0, x1, label in ((128, 196, "rows"), (346, 414, "(R, H)"), (574, 642, "act"), (782, 850, "(R, H)")):
        f.arrow((x0, 76), (x1, 76), label=label)
    f.text(10, 146, "Saved", "head")
    f.box(10, 160, 150, 44, "memory", "routing", "indices, weights")
    f.box(196, 160, 150, 44, "memory", "x", "(T, H)")
    f.box(414, 160, 160, 44, "memory", "h, pre-activation", "(R, N)")
    f.box(642, 160, 348, 44, "memory", "not saved:", "a, act, o: no (R, H) tensor")
    f.arrow((100, 108), (100, 160))
    f.arrow((271, 108), (271, 160))
    f.arrow((494, 108), (494, 160))
    f.text(10, 244, "Backward", "head")
    f.box(850, 262, 140, 64, "load", "permute / gather", "g[r] = dy[t]")
    f.box(600, 262, 190, 64, "mma", "down GEMMᵀ + dGLU", "dh, act, dprob")
    f.box(360, 262, 180, 64, "mma", "up GEMMᵀ", "dx_row = upᵀ dh")
    f.box(190, 262, 110, 64, "math", "combine", "dx = Σ dx_row")
    f.box(10, 262, 120, 64, "math", "router", "dlogits")
    f.arrow((850, 294), (790, 294))
    f.arrow((600, 294), (540, 294), label="dh")
    f.arrow((360, 294), (300, 294))
    f.box(600, 386, 190, 56, "mma", "down wgrad", "ddown[e] = gᵀ act")
    f.box(360, 386, 180, 56, "mma", "up wgrad", "dup[e] = dhᵀ x")
    f.arrow((695, 326), (695, 386), label="act")
    f.arrow((570, 294), (570, 414), (540, 414))
    f.arrow((640, 326), (640, 350), (70, 350), (70, 326), back=True)
    f.text(110, 368, "dprob: gradient of the router's weights, from the epilogue", "small")
    f.arrow((494, 204), (494, 232), (660, 232), (660, 262), back=True)
    f.save("moe_layer")


def fp8_training() -> None:
    f = Figure(1000, 560, "Operands of the fp8 GEMMs of an MoE layer: what is quantized where, in both passes")
    f.text(10, 26, "Forward", "head")
    f.box(10, 44, 150, 64, "load", "quantize", "x by rows")
    f.box(260, 44, 190, 64, "mma", "up GEMM + GLU", "epilogue quantizes h, act")
    f.box(560, 44, 170, 64, "mma", "down GEMM", "result: 16 bits")
    f.box(850, 44, 140, 64, "math", "combine", "float32 sums")
    f.arrow((160, 76), (260, 76), label="x by rows")
    f.arrow((450, 76), (560, 76), label="act by rows")
    f.arrow((730, 76), (850, 76), label="16 bits")
    f.text(10, 146, "Saved", "head")
    f.box(10, 160, 150, 44, "memory", "x", "(T, H), 16 bits")
    f.box(260, 160, 190, 44, "memory", "h, pre-activation", "e4m3, by rows")
    f.box(560, 160, 430, 44, "memory", "weights: e4m3 and transposed", "128 x 128, once per optimizer step")
    f.arrow((355, 108), (355, 160))
    f.arrow((645, 160), (645, 108))
    f.text(10, 244, "Backward", "head")
    f.box(830, 262, 160, 64, "load", "quantize", "dy, in one read")
    f.box(540, 262, 200, 64, "mma", "down GEMM\u1d40 + dGLU", "epilogue quantizes dh, act")
    f.box(250, 262, 190, 64, "mma", "up GEMM\u1d40", "result: 16 bits")
    f.box(10, 262, 140, 64, "math", "combine", "float32 sums")
    f.arrow((830, 294), (740, 294), label="dy by rows")
    f.arrow((540, 294), (440, 294), label="dh by rows")
    f.arrow((250, 294), (150, 294), label="16 bits")
    f.box(640, 386, 200, 56, "mma", "down wgrad", "float32 sums")
    f.box(250, 386, 190, 56, "mma", "up wgrad", "float32 sums")
    f.box(10, 386, 140, 56, "load", "quantize", "x by tokens")
    f.arrow((700, 326), (700, 386), label="act by tokens")
    f.arrow((910, 326), (910, 414), (840, 414), label="dy by tokens")
    f.arrow((580, 326), (580, 414), (440, 414), label="dh by tokens")
    f.arrow((150, 414), (250, 414), label="x by tokens")
    f.box(10, 478, 300, 62, "frame", "by rows: 1 x 128", "128 features of a token share a scale")
    f.box(350, 478, 300, 62, "frame", "by tokens: 128 x 1", "128 tokens of a feature share a scale")
    f.box(690, 478, 300, 62, "frame", "weights: 128 x 128", "transposed without rounding")
    f.save("fp8_training")


def gemm_pipeline() -> None:
    f = Figure(1000, 520, "The Hopper GEMM: warp roles, pipeline stages and barriers; ping-pong over time")
    f.text(10, 24, "Roles of one CTA (384 threads)", "head")
    f.box(10, 40, 130, 74, "memory", "global memory", "A (m, k), B (n, k)")
    f.box(200, 40, 210, 74, "load", "warpgroup 0: producer", "load warp, scheduler warp,", "gather / scale warps")
    f.box(560, 34, 190, 40, "mma", "MMA warpgroup 1")
    f.box(560, 82, 190, 40, "mma", "MMA warpgroup 2")
    f.box(840, 40, 150, 74, "memory", "global memory", "D, amax, scales")
    f.arrow((140, 77), (200, 77), label="TMA")
    f.arrow((750, 54), (795, 54), (795, 77), (840, 77))
    f.arrow((750, 102), (795, 102), (795, 77), (840, 77))
    f.text(797, 132, "epilogue, TMA store", "small", "middle")
    f.text(10, 172, "Shared memory", "head")
    f.text(716, 208, "a ring of up to eight stages,", "small")
    f.text(716, 226, "each with two mbarriers", "small")
    f.text(716, 260, "multicast: consumers of all CTAs arrive", "small")
    for i in range(5):
        x = 200 + 100 * i
        f.box(x, 190, 90, 46, "memory", f"stage {i}", "A | B tile")
        f.box(x, 244, 36, 24, "barrier", "full")
        f.box(x + 40, 244, 50, 24, "barrier", "empty")
    f.arrow((260, 114), (260, 190))
    f.text(268, 150, "1. wait empty, 2. arm full with bytes, 3. TMA load", "small")
    f.arrow((655, 122), (655, 190), back=False)
    f.text(663, 150, "4. wait full, wgmma, 5. arrive empty", "small")
    f.text(10, 312, "Ping-pong: each MMA warpgroup has its own tile; a named barrier orders the main loops", "head")
    f.text(10, 352, "warpgroup 1", "small")
    f.text(10, 402, "warpgroup 2", "small")
    f.text(10, 452, "load warp", "small")
    mma, epi = 170, 120
    for i in range(3):
        x = 110 + 2 * mma * i
        if x + mma < 1000:
            f.box(x, 330, mma - 4, 36, "mma", f"MMAs, tile {2 * i}")
        if x + mma + epi < 1000:
            f.box(x + mma, 330, epi, 36, "math", f"epilogue {2 * i}")
        x += mma
        if x + mma < 1000:
            f.box(x, 380, mma - 4, 36, "mma", f"MMAs, tile {2 * i + 1}")
        if x + mma + epi < 1000:
            f.box(x + mma, 380, epi, 36, "math", f"epilogue {2 * i + 1}")
        f.arrow((x - 3, 366), (x - 3, 380), back=True)
    for i in range(5):
        f.box(96 + 172 * i, 430, 166, 32, "load", f"loads, tile {i}")
    f.arrow((110, 494), (985, 494), label="time")
    f.save("gemm_pipeline")


def attention_forward() -> None:
    f = Figure(1000, 500, "Attention forward on Hopper: roles of a CTA, and the overlap of GEMMs and softmax over time")
    f.text(10, 24, "Roles of one CTA (128 query rows: two MMA warpgroups)", "head")
    f.box(10, 42, 120, 70, "memory", "global memory", "Q, K, V")
    f.box(190, 42, 150, 70, "load", "producer warp", "TMA: K(n), V(n+1)")
    f.box(400, 36, 240, 36, "memory", "K: stages, full / empty")
    f.box(400, 80, 240, 36, "memory", "V: stages, full / empty")
    f.box(700, 36, 160, 36, "mma", "MMA warpgroup 0")
    f.box(700, 80, 160, 36, "mma", "MMA warpgroup 1")
    f.arrow((640, 60), (700, 92))
    f.arrow((640, 92), (700, 60))
    f.arrow((130, 77), (190, 77))
    f.arrow((340, 70), (400, 54))
    f.arrow((340, 84), (400, 98))
    f.arrow((640, 54), (700, 54))
    f.arrow((640, 98), (700, 98))
    f.text(868, 58, "64 rows each; S, P", "small")
    f.text(868, 76, "and O in registers;", "small")
    f.text(868, 94, "Q in shared memory", "small")
    f.text(10, 160, "One step of an MMA warpgroup: the softmax of block n runs while P V of block n + 1 does", "head")
    f.text(10, 200, "tensor cores", "small")
    f.text(10, 248, "registers, SFU", "small")
    blocks = ("n+1", "n", "n-1", "n-2")
    x = 120
    for i, name in enumerate(blocks[1:]):
        f.box(x, 178, 116, 36, "mma", f"S = Q K({name})ᵀ")
        f.box(x + 118, 178, 150, 36, "mma", f"O += P V({blocks[i]})")
        f.box(x + 118, 226, 150, 36, "math", f"softmax of {name}")
        x += 286
    f.arrow(
        (120, 286), (985, 286), label="time; blocks run from the last key to the first, so masked blocks come first"
    )
    f.text(10, 330, "Ping-pong: named barriers let one warpgroup's softmax overlap the other's GEMMs", "head")
    f.text(10, 370, "warpgroup 0", "small")
    f.text(10, 418, "warpgroup 1", "small")
    for i in range(3):
        x = 120 + 288 * i
        f.box(x, 348, 140, 36, "mma", "QKᵀ, PV")
        f.box(x + 144, 348, 140, 36, "math", "softmax")
        if i:
            f.box(x - 144, 396, 140, 36, "mma", "QKᵀ, PV")
            f.box(x, 396, 140, 36, "math", "softmax")
            f.arrow((x - 146, 384), (x - 146, 396), back=True)
            f.arrow((x - 2, 396), (x - 2, 384), back=True)
    f.arrow((120, 470), (985, 470), label="time")
    f.save("attention_forward")


def attention_backward() -> None:
    f = Figure(1000, 400, "Attention backward on Hopper: one CTA owns a block of keys and loops over query blocks")
    f.text(
        10, 24, "A CTA owns a block of keys (K and V stay in shared memory) and loops over blocks of queries", "head"
    )
    f.box(10, 50, 150, 60, "load", "producer warp", "Q, dO, LSE, dPsum")
    f.box(220, 44, 170, 36, "mma", "Sᵀ = K Qᵀ")
    f.box(220, 92, 170, 36, "mma", "dPᵀ = V dOᵀ")
    f.box(450, 44, 190, 36, "math", "Pᵀ = exp(scale Sᵀ - LSE)")
    f.box(450, 92, 190, 36, "math", "dSᵀ = Pᵀ (dPᵀ - dPsum)")
    f.box(700, 44, 170, 36, "mma", "dV += Pᵀ dO")
    f.box(700, 92, 170, 36, "mma", "dK += dSᵀ Q")
    f.arrow((160, 72), (220, 62))
    f.arrow((160, 88), (220, 110))
    f.arrow((390, 62), (450, 62))
    f.arrow((390, 110), (450, 110))
    f.arrow((640, 62), (700, 62))
    f.arrow((640, 110), (700, 110))
    f.arrow((545, 80), (545, 92))
    f.text(880, 66, "accumulate in", "small")
    f.text(880, 82, "registers over", "small")
    f.text(880, 98, "all query blocks", "small")
    f.arrow((545, 128), (545, 172), label="dS to shared memory, both warpgroups synchronize (named barrier)")
    f.box(450, 172, 190, 40, "mma", "dQ = dS K")
    f.arrow((545, 212), (545, 246), label="float32, full / empty barrier")
    f.box(410, 246, 270, 40, "load", "dQ-store warps: bulk reduce-add")
    f.arrow((680, 266), (760, 266))
    f.box(760, 240, 220, 52, "memory", "dq_accum, float32", "global memory")
    f.arrow((870, 292), (870, 326))
    f.box(760, 326, 220, 44, "math", "postprocess kernel", "dQ in 16 bits")
    f.box(10, 240, 240, 52, "math", "preprocess kernel", "dPsum = rowsum(dO O), LSE log2(e)")
    f.arrow((85, 240), (85, 110))
    f.box(
        10, 326, 640, 44, "barrier", "deterministic: a semaphore for each query block orders the additions to dq_accum"
    )
    f.arrow((545, 326), (545, 286), back=True)
    f.save("attention_backward")


def emulator() -> None:
    f = Figure(1000, 430, "The emulator: host code runs as compiled, PTX becomes Python functions on NumPy arrays")
    f.text(10, 24, "Compile", "head")
    f.box(10, 40, 150, 56, "memory", "CuTe DSL kernel", "Python source")
    f.box(230, 40, 170, 56, "load", "the DSL's compiler", "as for a GPU")
    f.box(480, 10, 200, 46, "memory", "host function", "LLVM, machine code")
    f.box(480, 76, 200, 46, "memory", "PTX", "sm_90a or sm_100a")
    f.arrow((160, 68), (230, 68))
    f.arrow((400, 60), (480, 34))
    f.arrow((400, 76), (480, 98))
    f.box(760, 10, 230, 46, "math", "runs unmodified", "encodes tensor maps, sets the grid")
    f.box(760, 76, 230, 46, "math", "translated", "one Python function a basic block")
    f.arrow((680, 33), (760, 33))
    f.arrow((680, 99), (760, 99))
    f.text(10, 172, "Run", "head")
    f.box(
        10,
        190,
        290,
        120,
        "load",
        "scheduler",
        "of the ready basic blocks, the first",
        "in program order (or random, or lazy)",
        head=True,
    )
    f.box(
        360,
        190,
        290,
        120,
        "mma",
        "registers",
        "one NumPy array a register,",
        "one element for every thread",
        "of up to 256 thread blocks",
        head=True,
    )
    f.box(
        710,
        190,
        280,
        120,
        "memory",
        "memory and units",
        "global, shared, tensor memory,",
        "TMA, wgmma, tcgen05,",
        "mbarriers with counts and phases",
        head=True,
    )
    f.arrow((300, 250), (360, 250), label="mask")
    f.arrow((650, 240), (710, 240))
    f.arrow((710, 262), (650, 262))
    f.arrow((875, 122), (875, 150), (155, 150), (155, 190))
    f.box(
        10,
        350,
        640,
        60,
        "barrier",
        "race detection: vector clocks of warps and asynchronous operations",
        "barriers, mbarriers, commit groups, fences and atomics order accesses",
    )
    f.box(710, 350, 280, 60, "math", "report", "faults with source lines, counts, results")
    f.arrow((650, 380), (710, 380))
    f.arrow((850, 310), (850, 350))
    f.arrow((505, 310), (505, 350))
    f.save("emulator")


FIGURES: tuple[Callable[[], None], ...] = (
    moe_layer,
    fp8_training,
    gemm_pipeline,
    attention_forward,
    attention_backward,
    emulator,
)

if __name__ == "__main__":
    for figure in FIGURES:
        figure()
