"""Control bits of FFMA in a cubin: patch.py IN OUT "stall=2 yield=0 every=1"; without OUT: prints them."""
import struct, sys
def text_sections(d):
    shoff, = struct.unpack_from("<Q", d, 40); n, strx = struct.unpack_from("<HH", d, 60); size, = struct.unpack_from("<H", d, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", d, shoff + i * size) for i in range(n)]
    names = heads[strx][4]
    for h in heads:
        name = d[names + h[0]:d.index(b"\0", names + h[0])].decode()
        if name.startswith(".text."): yield name, h[4], h[5]
FFMA = (0x223,)
def instructions(d):
    for name, off, size in text_sections(d):
        for i in range(off, off + size, 16):
            lo, hi = struct.unpack_from("<QQ", d, i)
            yield name, i, lo, hi
def fields(hi): return dict(stall=hi >> 41 & 15, yields=hi >> 45 & 1, wb=hi >> 46 & 7, rb=hi >> 49 & 7, wait=hi >> 52 & 63, reuse=hi >> 58 & 15)
def patch(d, stall=None, yields=None, every=1, reuse=None, only=None):
    d, n = bytearray(d), 0
    for name, i, lo, hi in instructions(bytes(d)):
        if lo & 0xfff in FFMA and (only is None or only(i)):
            f = fields(hi); n += 1
            if (n - 1) % every == 0:
                if stall is not None: f["stall"] = max(f["stall"], stall)
                if yields is not None: f["yields"] = yields
                if reuse is not None: f["reuse"] = reuse
            hi = hi & ~(0x1fffff << 41) | f["stall"] << 41 | f["yields"] << 45 | f["wb"] << 46 | f["rb"] << 49 | f["wait"] << 52 | f["reuse"] << 58
            struct.pack_into("<Q", d, i + 8, hi)
    return bytes(d), n
if __name__ == "__main__":
    d = open(sys.argv[1], "rb").read()
    if len(sys.argv) == 2:
        import collections
        c = collections.Counter(); seq = []
        for name, i, lo, hi in instructions(d):
            if lo & 0xfff in FFMA:
                f = fields(hi); c[f["stall"], f["yields"], f["reuse"]] += 1; seq.append(f'{f["stall"]}{"y" if f["yields"] else "-"}{f["reuse"]}')
        print(c.most_common(12)); print(" ".join(seq[:70]))
    else:
        out, n = patch(d, **eval(f"dict({sys.argv[3]})")); open(sys.argv[2], "wb").write(out); print(sys.argv[2], n)
