"""What the warps of one thread block did over logical time, as a drawing.

An instruction of a warp takes one unit. A wait lasts until what it waits for: barriers open when the last thread has
arrived, and asynchronous operations take the nominal durations below. Nothing of this is measured: the drawing shows
what overlaps, who waits for whom and how deep the pipelines are, and no times of a chip.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptx_emulator.numerics import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

COPY, COPY_BYTES = 400, 64  # units of a copy, and bytes that it adds a unit for
MULTIPLY_ADDS = {"wgmma": 4096, "tcgen05.mma": 8192}  # of the tensor cores in a unit

_LABEL, _WIDTH, _ROW, _BAR = 86, 900, 22, 14
_STYLE = """
    text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
           font-size: 12px; fill: #1f2328; }
    .small { font-size: 11px; fill: #59636e; }
    .run { fill: #8c959f; } .wait { fill: #fbe0de; stroke: #c9564c; stroke-width: .7; }
    .copy { fill: #4a7fc4; } .mma { fill: #2f9e78; } .grid { stroke: #d8dee4; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .small { fill: #9aa4af; }
      .run { fill: #7d8590; } .wait { fill: #4a2320; stroke: #e0776d; }
      .copy { fill: #5b8fd6; } .mma { fill: #3fb68b; } .grid { stroke: #3d444d; }
    }
"""
_LEGEND = (("run", "instructions"), ("wait", "waits"), ("copy", "copy in flight"), ("mma", "MMA in flight"))


class Span(NamedTuple):
    """From `start` to `end`, in units; `what` for the tooltip."""

    start: int
    end: int
    what: str


@dataclass
class Timeline:
    """One thread block of a launch; `_repr_svg_` shows it in notebooks.

    Attributes:
        block: Its coordinates.
        runs, waits: By warp: instructions in a row, and waits at barriers or for asynchronous work.
        copies, mmas: Asynchronous copies and MMAs from their issue to their end.
    """

    block: tuple[int, int, int]
    runs: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))
    copies: list[Span] = field(default_factory=list)
    mmas: list[Span] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The units from the first instruction to the last end."""
        groups = [*self.runs.values(), *self.waits.values(), self.copies, self.mmas]
        return max((span.end for spans in groups for span in spans), default=1)

    def svg(self) -> str:
        """The drawing, for light and dark pages."""
        rows: list[tuple[str, list[tuple[str, Span]]]] = []
        for warp in sorted({*self.runs, *self.waits}):
            spans = [("run", span) for span in self.runs[warp]] + [("wait", span) for span in self.waits[warp]]
            rows.append((f"warp {warp}", spans))
        for kind, name, spans in (("copy", "copies", self.copies), ("mma", "MMA", self.mmas)):
            for number, lane in enumerate(_lanes(spans)):
                rows.append((name if number == 0 else "", [(kind, span) for span in lane]))
        scale, body = _WIDTH / self.end, []
        for number, (label, spans) in enumerate(rows):
            y = 40 + number * _ROW
            body.append(f'<text x="{_LABEL - 8}" y="{y + 11}" text-anchor="end">{label}</text>')
            body.append(f'<path class="grid" d="M{_LABEL} {y + _BAR + 3.5}h{_WIDTH}"/>')
            for kind, span in spans:
                x, width = _LABEL + span.start * scale, max((span.end - span.start) * scale, 0.4)
                title = escape(f"{span.what}: {span.start} to {span.end}")
                body.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}">'
                    f"<title>{title}</title></rect>"
                )
        height = 40 + len(rows) * _ROW + 24
        legend = ""
        for number, (kind, name) in enumerate(_LEGEND):
            x = _LABEL + number * 130
            legend += (
                f'<rect class="{kind}" x="{x}" y="12" width="12" height="12"/><text x="{x + 17}" y="22">{name}</text>'
            )
        x, y, z = self.block
        foot = (
            f"block ({x}, {y}, {z}); {self.end} units of logical time, one for an instruction of a warp; not measured"
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LABEL + _WIDTH + 14} {height}" role="img">\n'
            f"<title>Timeline of block ({x}, {y}, {z})</title>\n<style>{_STYLE}</style>\n{legend}\n"
            + "\n".join(body)
            + f'\n<text class="small" x="{_LABEL}" y="{height - 8}">{foot}</text>\n</svg>\n'
        )

    _repr_svg_ = svg


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """The spans in as few rows as hold them without overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans):
        lane = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return lanes


class NoRecorder:
    """Stands in for the recorder when no timeline is wanted."""

    on = False

    def __getattr__(self, name: str) -> Any:
        return self._nothing

    @staticmethod
    def _nothing(*_: Any, **__: Any) -> int:
        return 0


class Recorder:
    """Clocks of all warps, of which those of one block are kept."""

    on = True

    def __init__(self, machine: Machine, block: int, timeline: Timeline) -> None:
        self.machine, self.timeline = machine, timeline
        self.first, self.warps = block * machine.lane_stride // 32, machine.lane_stride // 32
        self.block = block
        self.clock = np.zeros(machine.count // 32, np.int64)
        code = machine.program.kernel.instructions
        # A block of code that waits takes no time: it runs again until the wait is over.
        self.costs = [0 if code[b.first].opcode == "wait_loop" else b.last - b.first for b in machine.program.blocks]
        self.now = 0  # when the asynchronous operation ends that completes now
        self.pending: dict[Any, int] = defaultdict(int)  # of barriers: the last arrival of the phase so far
        self.over: dict[Any, int] = {}  # when a phase was over
        self.groups: dict[Any, list[int]] = defaultdict(list)  # ends of committed groups, in order
        self.open: dict[Any, int] = defaultdict(int)  # the end of the group that is not committed
        self.free: dict[int, int] = defaultdict(int)  # when a block's tensor cores are free

    def _mine(self, warp: int) -> bool:
        return self.first <= warp < self.first + self.warps

    def step(self, number: int, mask: Array) -> None:
        cost = self.costs[number]
        warps = np.flatnonzero(mask.reshape(-1, 32).any(1))
        before = self.clock[warps]
        self.clock[warps] += cost
        if cost:
            for warp, start in zip(warps.tolist(), before.tolist(), strict=True):
                if self._mine(warp):
                    spans = self.timeline.runs[warp - self.first]
                    if spans and spans[-1].end == start:
                        start = spans.pop().start
                    spans.append(Span(start, int(self.clock[warp]), "instructions"))

    # -- barriers, by a key for each
    def arrive(self, key: Any, warps: Any) -> None:
        for warp in warps:
            self.pending[key] = max(self.pending[key], int(self.clock[warp]))

    def complete(self, key: Any) -> None:
        self.pending[key] = max(self.pending[key], self.now)

    def flip(self, key: Any, phase: Any) -> None:
        self.over[key, phase] = self.pending.pop(key, 0)

    def passed(self, key: Any, phase: Any, warps: Any, what: str) -> None:
        """Warps go on: the phase is over."""
        self.wait(warps, self.over.get((key, phase), 0), what)

    def wait(self, warps: Any, end: int, what: str) -> None:
        for warp in {int(each) for each in warps}:
            start = int(self.clock[warp])
            if end > start:
                self.clock[warp] = end
                if self._mine(warp):
                    self.timeline.waits[warp - self.first].append(Span(start, end, what))

    # -- asynchronous operations
    def copy(self, lane: int, bytes_: int, what: str) -> int:
        start = int(self.clock[lane >> 5])
        return self._add(lane, self.timeline.copies, Span(start, start + COPY + bytes_ // COPY_BYTES, what))

    def multiply(self, lane: int, multiply_adds: int, what: str) -> int:
        """The tensor cores of a block do one after the other."""
        block = int(self.machine.block_of[lane])
        start = max(int(self.clock[lane >> 5]), self.free[block])
        self.free[block] = start + max(1, multiply_adds // MULTIPLY_ADDS[what])
        return self._add(lane, self.timeline.mmas, Span(start, self.free[block], what))

    def _add(self, lane: int, spans: list[Span], span: Span) -> int:
        if self._mine(lane >> 5):
            spans.append(span)
        return span.end

    # -- groups of a thread or a warpgroup
    def hold(self, key: Any, end: int) -> None:
        self.open[key] = max(self.open[key], end)

    def commit(self, key: Any) -> None:
        self.groups[key].append(self.open.pop(key, 0))

    def wait_group(self, key: Any, warps: Any, left: int, what: str) -> None:
        ends = self.groups[key]
        done = ends[: len(ends) - left]
        self.wait(warps, max(done, default=0), what)
