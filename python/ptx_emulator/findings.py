"""The rules that kernels are held to: each has a stable code, an explanation and a fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ptx_emulator import errors


@dataclass(frozen=True)
class Rule:
    """What a kernel must not do.

    Attributes:
        code: Its code, which never changes its meaning.
        exception: The class of the exception; None for what is only ever a warning.
        title: A few words.
        explanation: What the kernel did, and the rule of PTX.
        fix: What to change in the kernel.
        continues: Whether the launch goes on behind it. Only then can findings be ignored or downgraded.
    """

    code: str
    exception: type[errors.Fault] | None
    title: str
    explanation: str
    fix: str
    continues: bool = False


_ALL = (
    Rule(
        "PE101",
        errors.RaceError,
        "data race",
        "Two warps, or a warp and an asynchronous operation, access the same memory, at least one of them writes, and "
        "no synchronization orders the two accesses.",
        "Put a barrier, an mbarrier wait, or a release and an acquire of a flag between the accesses that the message "
        "names.",
        True,
    ),
    Rule(
        "PE102",
        errors.RaceError,
        "missing proxy fence",
        "The async proxy (TMA, `wgmma`, `tcgen05.mma`) accesses memory that ordinary instructions wrote. The accesses "
        "are ordered, but no fence between the proxies makes the write visible.",
        "The writing threads execute `fence.proxy.async` (`cute.arch.fence_proxy`) after the write and before the "
        "barrier.",
        True,
    ),
    Rule(
        "PE103",
        errors.RaceError,
        "race within a warp",
        "Two lanes of one warp access the same memory, at least one of them writes, and the warp does not synchronize "
        "between them. Lanes of a warp do not run in lockstep.",
        "Put `bar.warp.sync` (`cute.arch.sync_warp`) between the two accesses.",
        True,
    ),
    Rule(
        "PE104",
        errors.RaceError,
        "register of a `wgmma` in flight",
        "An accumulator or A register of a `wgmma` is accessed before the wait that covers it. Without race detection, "
        "a warning that this can happen.",
        "Execute `wgmma.commit_group`, and a `wgmma.wait_group` that covers this group, before the access.",
        True,
    ),
    Rule(
        "PE105",
        errors.RaceError,
        "register of a `tcgen05.ld` in flight",
        "The target of a `tcgen05.ld` is used before `tcgen05.wait::ld`. Without race detection, "
        "a warning that this can happen.",
        "Execute `tcgen05.wait::ld` (`cute.arch.fence_view_async_tmem_load`) before the first use.",
        True,
    ),
    Rule(
        "PE106",
        errors.RaceError,
        "tensor map without release or acquire",
        "A tensor map that was edited on the device is used without a release by the editing warp or an acquire by the "
        "using one.",
        "Release with `fence.proxy.tensormap::generic.release` (or `tensormap.cp_fenceproxy`), synchronize, then "
        "acquire with `fence.proxy.tensormap::generic.acquire` in the using warp.",
        True,
    ),
    Rule(
        "PE107",
        errors.RaceError,
        "mbarrier used before its init is visible",
        "An arrival or a wait on an mbarrier is not ordered after its `mbarrier.init` by another thread.",
        "Put a barrier of the block (of the cluster, if another block uses it) between init and use.",
        True,
    ),
    Rule(
        "PE108",
        None,
        "unordered stores of the same value",
        "Two threads store the same value to the same memory, and no synchronization orders the stores. With these "
        "values the result does not depend on their order. Later accesses are compared with the second store only. A "
        "frequent cause is a missing bound: threads beyond the problem repeat the work of others.",
        "Let one thread store, or add the bound. If it is meant to be so, ignore the code.",
        True,
    ),
    Rule(
        "PE201",
        errors.OutOfBounds,
        "access out of bounds",
        "An address that belongs to no argument, or lies outside the memory of the block or the thread.",
        "Predicate the access, correct the address, or name the array in `memory=` if the kernel gets its address by "
        "another way.",
    ),
    Rule(
        "PE202",
        errors.Misaligned,
        "misaligned access",
        "An address, size or coordinate that is not a multiple of what the instruction requires.",
        "Align the buffer, or use a narrower instruction.",
    ),
    Rule(
        "PE203",
        errors.UninitializedRead,
        "uninitialized read",
        "A read of shared or tensor memory that no instruction of the launch wrote. Found with race detection.",
        "Write the memory first, or wait for the copy that fills it.",
        True,
    ),
    Rule(
        "PE204",
        errors.Fault,
        "access to a block that has ended",
        "Shared memory or an mbarrier of another block of the cluster is accessed after that block ended.",
        "Put a cluster barrier before the exit of the block whose memory is accessed.",
    ),
    Rule(
        "PE205",
        errors.Fault,
        "exit under a bulk copy",
        "A thread ends while its bulk copy may still read shared memory.",
        "Execute `cp.async.bulk.commit_group` and `cp.async.bulk.wait_group.read 0` before the exit.",
        True,
    ),
    Rule(
        "PE301",
        errors.Deadlock,
        "deadlock",
        "No thread can make progress. The message lists every waiting group and every barrier with its counts.",
        "Compare the arrivals and bytes of the listed barriers with what was expected, and the parity of the waits.",
    ),
    Rule(
        "PE302",
        errors.BarrierError,
        "mbarrier without init",
        "An mbarrier is used before `mbarrier.init` or after `mbarrier.inval`.",
        "Initialize the mbarrier in one thread, then synchronize the block.",
    ),
    Rule(
        "PE303",
        errors.BarrierError,
        "wrong count of an mbarrier",
        "`mbarrier.init` has an invalid count, or a phase gets more arrivals than its count.",
        "Initialize with the number of arrivals that one phase gets.",
    ),
    Rule(
        "PE304",
        errors.BarrierError,
        "mbarrier init not visible to the async proxy",
        "An asynchronous operation completes on an mbarrier whose init the async proxy cannot see yet.",
        "Execute `fence.mbarrier_init` (`cute.arch.mbarrier_init_fence`) after the init, then a barrier.",
        True,
    ),
    Rule(
        "PE305",
        errors.BarrierError,
        "misuse of a named barrier",
        "The number is not in 0..15, the thread count is not a positive multiple of 32, participants give different "
        "counts, or more threads arrive than expected.",
        "Give the same number and the same thread count in all participating warps.",
    ),
    Rule(
        "PE306",
        errors.BarrierError,
        "misuse of the cluster barrier",
        "A thread arrives twice without a wait, or waits without an arrival.",
        "Alternate `barrier.cluster.arrive` and `barrier.cluster.wait` in each thread.",
    ),
    Rule(
        "PE307",
        None,
        "arrival without a waiting thread",
        "The kernel ended with arrivals at a named barrier that did not fill. No thread waits there.",
        "Remove the last `bar.arrive`, or let the other warps wait for it.",
        True,
    ),
    Rule(
        "PE401",
        errors.CollectiveError,
        "incomplete collective",
        "An instruction of a warp, a warpgroup or a pair of blocks is executed by part of it, or with operands that "
        "differ where they must not.",
        "Move the instruction out of the divergent branch, or name only the executing lanes in the member mask.",
    ),
    Rule(
        "PE402",
        errors.Fault,
        "missing `wgmma.fence`",
        "An ordinary instruction wrote accumulator or A registers of a `wgmma` since the last `wgmma.fence`. Found "
        "with race detection.",
        "Execute `wgmma.fence` (`cute.nvgpu.warpgroup.fence`) between the write and the `wgmma`.",
        True,
    ),
    Rule(
        "PE403",
        errors.TensorMemoryError,
        "tensor memory out of reach",
        "An access to tensor memory lanes of another warp, or to columns that are not allocated.",
        "A warp reaches the 32 lanes of its index modulo 4. Compare the columns with those allocated.",
    ),
    Rule(
        "PE404",
        errors.TensorMemoryError,
        "misuse of tensor memory allocation",
        "An allocation of a wrong size, after the permit was relinquished, or of more columns than are free; or a "
        "deallocation that matches no allocation.",
        "Allocate a power of two from 32 to 512 columns, and free what was allocated.",
    ),
    Rule(
        "PE405",
        errors.TensorMemoryError,
        "tensor memory leak",
        "A block ended with tensor memory columns allocated.",
        "Execute `tcgen05.dealloc` before the end, on every path.",
        True,
    ),
    Rule(
        "PE406",
        None,
        "constant behind `wgmma.fence`",
        "Registers of a `wgmma` got constants between the last `wgmma.fence` and this first `wgmma` behind it. PTX "
        "requires a fence after the write. Compilers move the zeroing of accumulators there, and ptxas orders it.",
        "None is needed if the source has it before the fence. To write PTX by hand, zero the registers before "
        "`wgmma.fence`, or let the first `wgmma` not accumulate.",
        True,
    ),
    Rule(
        "PE501",
        errors.Fault,
        "trap",
        "The kernel executed `trap`, which device assertions also do.",
        "Look at the condition before the source line that the message names.",
    ),
    Rule(
        "PE502",
        errors.Fault,
        "`try_cancel` after a failure",
        "A thread asks for another cluster after it has seen a `clusterlaunchcontrol.try_cancel` fail.",
        "Leave the loop at the first response that is not a success.",
    ),
    Rule(
        "PE503",
        errors.Fault,
        "wrong operand of a tensor copy",
        "The number of coordinates is not the rank of the tensor map, or the multicast mask names a block outside the "
        "cluster.",
        "Use a tensor map of this rank, and a mask of blocks of the cluster.",
    ),
)
RULES = {rule.code: rule for rule in _ALL}
CONTINUES = tuple(rule.code for rule in _ALL if rule.continues)


def check_codes(codes: Iterable[str], option: str) -> frozenset[str]:
    """The codes of an option, `ignore` or `warn`.

    Raises:
        TypeError: They are one string.
        ValueError: There is no such code, or the launch cannot go on behind it.
    """
    if isinstance(codes, str):
        raise TypeError(f"{option} must be a list of codes, such as [{codes!r}]; got the string {codes!r}")
    known = frozenset(codes)
    for code in sorted(known.difference(CONTINUES), key=str):
        why = "a launch cannot go on behind it" if code in RULES else "there is no such code"
        raise ValueError(f"{option} got {code!r}: {why}. Codes that it takes: {', '.join(CONTINUES)}")
    return known


def markdown_table() -> str:
    """One row for each code."""
    rows = [
        "| code | finding | exception | what the kernel did | fix | `ignore`, `warn` |",
        "|---|---|---|---|---|---|",
    ]
    for rule in _ALL:
        exception = f"`{rule.exception.__name__}`" if rule.exception else "warning"
        continues = "yes" if rule.continues else "no"
        rows.append(f"| {rule.code} | {rule.title} | {exception} | {rule.explanation} | {rule.fix} | {continues} |")
    return "\n".join(rows)
