"""An independent trial of the grouped APIs, as existing programs call them, against plain float64 PyTorch.
trial.py cpu|sm_90a|sm_100a|cuda [filter] [limit]"""
import sys, math, os, itertools, random, traceback, contextlib
import torch, cudnn
mode = sys.argv[1]; only = sys.argv[2] if len(sys.argv) > 2 else ""; limit = int(sys.argv[3]) if len(sys.argv) > 3 else 10**9
DEV = "cuda" if mode == "cuda" else "cpu"
F32, BF, F16, E4, E5, E8, FP4, I32, I64 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int32, torch.int64
VALUES = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
G = torch.Generator().manual_seed(7)
rnd = lambda *s: torch.rand(*s, generator=G, dtype=torch.float64) * 4 - 2
def cdiv(a, b): return -(-a // b)
def dec(x):  # any narrow tensor to float64 on cpu
    x = x.detach(); kind = x.dtype
    x = x.view(torch.uint8).cpu().view(kind) if x.element_size() == 1 and kind != torch.uint8 and x.dim() else x.cpu()
    if x.dtype == E8: return torch.pow(2.0, x.view(torch.uint8).double() - 127)
    return x.float().double()
# ---- operands ------------------------------------------------------------
def sf_view(buf, L, rm, rk): return buf.view(L, rm, rk, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
def sf_make(mn, k, L, v, dtype):
    """A scale tensor as programs build it, and the factors (mn, k, L) in float64."""
    rm, rk = cdiv(mn, 128), cdiv(cdiv(k, v), 4)
    if dtype == E8: raw = torch.randint(125, 130, (L * rm * rk * 512,), generator=G, dtype=torch.uint8)
    else: raw = (torch.randint(1, 9, (L * rm * rk * 512,), generator=G).float() / 4).to(dtype).view(torch.uint8)
    buf = raw.view(dtype)
    got = dec(sf_view(buf, L, rm, rk))
    r = torch.arange(mn); j = torch.arange(cdiv(k, v))
    f = got[r % 32][:, :, :, :, :, :]
    f = got[(r % 32)[:, None], ((r // 32) % 4)[:, None], (r // 128)[:, None], (j % 4)[None], (j // 4)[None]]  # (mn, nblocks, L)
    f = f.repeat_interleave(v, 1)[:, :k]
    return sf_view(buf.to(DEV), L, rm, rk), f
def plain(mn, k, L, kind, major="k"):
    """Element tensor (mn, k, L) and its values."""
    if kind == FP4:
        codes = torch.randint(0, 16, (L, mn, k), generator=G, dtype=torch.uint8)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()
        return packed.to(DEV).view(FP4).permute(1, 2, 0), VALUES[codes.long()].permute(1, 2, 0)
    x = (rnd(L, mn, k) if major == "k" else rnd(L, k, mn)).float().to(kind)
    val = dec(x)
    x = x.to(DEV)
    return (x.permute(1, 2, 0), val.permute(1, 2, 0)) if major == "k" else (x.permute(2, 1, 0), val.permute(2, 1, 0))
KINDS = {"bf16": (BF, None, 16), "f16": (F16, None, 16), "e4m3": (E4, None, 16), "mxfp8": (E4, E8, 32), "mxfp8e5": (E5, E8, 32), "mxfp4": (FP4, E8, 32), "fp4e8v16": (FP4, E8, 16), "nvfp4": (FP4, E4, 16)}
def operand(mn, k, L, kind, major="k"):
    e, s, v = KINDS[kind]
    x, val = plain(mn, k, L, e, major)
    if s is None: return x, None, val
    sf, f = sf_make(mn, k, L, v, s)
    return x, sf, val * f
def strided(x, L=1):  # batch stride M*K, as programs have it
    return x
class Case: pass
def setup(kind, ends, n, k, b_major="k", capacity=0, discrete=False, experts=None):
    c = Case(); c.kind, c.ends, c.n, c.k, c.E = kind, list(ends), n, k, len(ends)
    c.m = ends[-1] + capacity; c.discrete, c.b_major = discrete, b_major
    c.e, c.s, c.v = KINDS[kind]
    if c.m: c.a, c.sfa, av = operand(c.m, k, 1, kind)
    else:
        width = k // 2 if c.e == FP4 else k
        c.a = torch.empty(0, width, 1, dtype=torch.uint8, device=DEV).view(c.e) if c.e == FP4 else torch.empty(0, k, 1, dtype=c.e, device=DEV)
        c.sfa = torch.empty(0, dtype=torch.uint8, device=DEV).view(c.s).view(1, 0, cdiv(cdiv(k, c.v), 4), 32, 4, 4).permute(3, 4, 1, 5, 2, 0) if c.s else None
        av = torch.zeros(0, k, 1, dtype=torch.float64)
    c.b, c.sfb, bv = operand(n, k, c.E, kind, b_major)
    c.off = torch.tensor(ends, dtype=I32, device=DEV)
    c.alpha = torch.randint(-2, 3, (c.E,), generator=G).float(); c.alpha[c.alpha == 0] = 1.5
    c.beta = torch.randint(-2, 2, (c.E,), generator=G).float(); c.beta[c.beta == 0] = .5
    c.prob = torch.randint(-2, 3, (c.m, 1, 1), generator=G).float() / 2
    c.bias = rnd(c.E, n).float().to(BF)
    c.acc = torch.zeros(c.m, n, dtype=torch.float64); c.who = torch.full((c.m,), -1)
    lo = 0
    for e, hi in enumerate(ends):
        c.acc[lo:hi] = av[lo:hi, :, 0] @ bv[:, :, e].T; c.who[lo:hi] = e; lo = hi
    c.rows = c.who >= 0; c.w = c.who.clamp(min=0)
    c.mag = torch.zeros(c.m, n, dtype=torch.float64); lo = 0
    for e, hi in enumerate(ends):
        c.mag[lo:hi] = av[lo:hi, :, 0].abs() @ bv[:, :, e].abs().T; lo = hi
    c.z = c.alpha.double()[c.w][:, None] * c.acc
    c.keep = []
    if discrete:
        bs, sfs = [], []
        for e in range(c.E):
            one = c.b[:, :, e].clone(memory_format=torch.preserve_format) if c.e != FP4 else c.b[:, :, e].view(torch.uint8).contiguous()
            if c.e != FP4: one = (c.b[:, :, e].T.contiguous() if b_major == "n" else c.b[:, :, e].contiguous())
            bs.append(one)
            if c.s: sfs.append(c.sfb.view(torch.uint8)[..., e].permute(2, 4, 0, 1, 3).contiguous())
        perm = list(range(c.E))
        c.keep = [bs, sfs]
        c.bp = torch.tensor([x.data_ptr() for x in bs], dtype=I64, device=DEV)
        c.sp = torch.tensor([x.data_ptr() for x in sfs], dtype=I64, device=DEV) if c.s else None
    return c
def weights(c, b="b_tensor", sfb="sfb_tensor"):
    if c.discrete: return dict(b_ptrs=c.bp, sfb_ptrs=c.sp, n=c.n, b_dtype=c.e, b_major=c.b_major)
    return {b: c.b, sfb: c.sfb}
# ---- judging ---------------------------------------------------------------
FAULTS = []
def fail(what): raise AssertionError(what)
EPS = {BF: 2**-7, F16: 2**-10, F32: 2**-18, E4: 2**-3, E5: 2**-2}
def close(name, got, want, mag=None, dtype=None, rows=None, extra=1e-5):
    dtype = dtype or got.dtype
    got = dec(got).reshape(want.shape)
    if rows is not None: got, want = got[rows], want[rows]; mag = mag[rows] if torch.is_tensor(mag) and mag.ndim else mag
    tol = EPS[dtype] * want.abs() * .51 + extra * ((mag if mag is not None else want.abs()) + want.abs()) + 1e-6
    if dtype in (F16,): want = want  # large values may overflow: keep problems small
    bad = ~((got - want).abs() <= tol)
    if bad.any(): fail(f"{name}: {int(bad.sum())} of {bad.numel()} wrong, e.g. got {got[bad][:3].tolist()} want {want[bad][:3].tolist()}")
def sfd_of(x, mn, L=1):  # 6-D view -> (mn, blocks)
    got = dec(x); rk = got.shape[4]
    r = torch.arange(mn); j = torch.arange(4 * rk)
    return got[(r % 32)[:, None], ((r // 32) % 4)[:, None], (r // 128)[:, None], (j % 4)[None], (j // 4)[None]][..., 0]
def e8(s): return torch.where(s > 0, torch.pow(2.0, torch.ceil(torch.log2(s.clamp(min=2.0**-127))).clamp(-127, 127)), torch.tensor(2.0**-127, dtype=torch.float64))
LIMIT = {E4: 448.0, E5: 128.0}
def quantised(name, d, scale, want, nc, dim, sdtype, rows, dt, discrete_col=None, ends=None, err=1e-5):
    """d (m, n) in codes, scale 6-D; blocks of 32 along dim."""
    m, n = want.shape
    codes = dec(d).reshape(m, n)
    w = want.clone(); w[~rows] = 0
    if dim == 1:
        amax = torch.nn.functional.pad(w.abs(), (0, -n % 32)).view(m, -1, 32).amax(2)
        got = sfd_of(scale, m)[:, : cdiv(n, 32)]; got_full = got.repeat_interleave(32, 1)[:, :n]
    else:
        amax = torch.nn.functional.pad(w.abs(), (0, 0, 0, -m % 32)).view(-1, 32, n).amax(1).T.contiguous()  # (n, m/32)
        if discrete_col:
            raw = scale.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).contiguous().flatten().cpu()
            got = torch.full((n, cdiv(m, 32)), float("nan"), dtype=torch.float64); lo = 0
            for hi in ends:
                for t in range(lo // 32, hi // 32):
                    tt = t - lo // 32; te = hi - lo
                    nn = torch.arange(n)
                    atom = (lo // 128) * cdiv(n, 128) + (nn // 128) * (te // 128) + tt // 4
                    got[:, t] = torch.pow(2.0, raw[atom * 512 + (nn % 32) * 16 + (nn // 32 % 4) * 4 + tt % 4].double() - 127)
                lo = hi
        else: got = sfd_of(scale, n)[:, : cdiv(m, 32)]
        got_full = got.repeat_interleave(32, 1)[:, :m].T
    s = amax * (1 / LIMIT[dt]) * nc
    use = rows if dim == 1 else None
    live = (rows[:, None].expand(m, n)) if dim == 1 else rows[:, None].expand(m, n)
    lo_, hi_ = e8(s * (1 - err)), e8(s * (1 + err))
    if dim == 1: ok = ((got == lo_) | (got == hi_))[rows]
    else:
        blocks = rows.view(-1, 32).any(1) if m % 32 == 0 else torch.tensor([bool(rows[i:i + 32].any()) for i in range(0, m, 32)])
        ok = ((got == lo_) | (got == hi_))[:, blocks]
    if not ok.all(): fail(f"{name} scales: {int((~ok).sum())} of {ok.numel()} wrong")
    exact = w * torch.clamp(nc / got_full, max=3.4028234663852886e38)
    lim = 448.0 if dt == E4 else 57344.0
    exact = exact.clamp(-lim, lim)
    tol = EPS[dt] * exact.abs() * .51 + (2.0**-10 if dt == E4 else 2.0**-17) * 1.01 + err * exact.abs().amax()
    bad = ~((codes - exact).abs() <= tol) & live
    if bad.any(): fail(f"{name} codes: {int(bad.sum())} wrong, {codes[bad][:3].tolist()} want {exact[bad][:3].tolist()}")
def amax_ok(name, got, x, c, fill=-math.inf, roles=None):
    x = x.abs().clone(); want = []
    for e in range(c.E):
        sel = x[c.who == e]
        if roles is None: want.append(float(sel.max()) if sel.numel() else fill)
        else: want.append([float(sel[:, r].max()) if sel.numel() else fill for r in roles])
    want = torch.tensor(want, dtype=torch.float64); got = dec(got)
    shape = (c.E, 1) if roles is None else (c.E, 2, 1)
    if tuple(got.shape) != shape: fail(f"{name} shape {tuple(got.shape)} want {shape}")
    got = got.view(want.shape); same = (got == want) | ((got - want).abs() <= 3e-5 * (want.abs() + c.mag.max() * 1e-1))
    if not same.all(): fail(f"{name}: got {got.tolist()} want {want.tolist()}")
sg = torch.sigmoid
def gates(n): 
    i = torch.arange(n); g = i[(i // 32) % 2 == 0]; return g, g + 32
def act(z, name, off=1.0, ga=1.702, cmax=7.0, cmin=-7.0, b1=4.0, b2=25.0):
    g, u = gates(z.shape[1]); g, u = z[:, g], z[:, u]
    if name == "swiglu": return u * g * sg(g)
    if name == "geglu": g = g.clamp(max=cmax); u = u.clamp(max=cmax).clamp(min=cmin); return (u + off) * g * sg(ga * g)
    return (b1 * torch.tanh(g / b1)) * sg(g) * (b2 * torch.tanh(u / b2))
def H16():
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < 16: h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h
def keys(name, got, want):
    if list(got.keys()) != want: fail(f"{name} keys {list(got.keys())} want {want}")
    got_values = list(got)
    for i, key in enumerate(want):
        if got_values[i] is not got[key] or got[i] is not got[key]: fail(f"{name} order of {key}")
    for bad in (-1, len(want)):
        try: got[bad]; fail("index")
        except IndexError: pass
S16 = "SwiGLU"
def shape_ok(name, x, shape, stride=None):
    if tuple(x.shape) != tuple(shape): fail(f"{name} shape {tuple(x.shape)} want {shape}")
    if stride and 0 not in shape and tuple(x.stride()) != tuple(stride): fail(f"{name} strides {tuple(x.stride())} want {stride}")
TESTS = []
def test(f): TESTS.append(f); return f
def D(x): return x.to(DEV)
# ---- the APIs -----------------------------------------------------------
def forward_rest(c, r, y, dt, names=("d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"), nc=None, dcs=False):
    d, dcol, am, sr, sc = (r[x] for x in names)
    nd = y.shape[1]
    shape_ok("d", d, (c.m, nd, 1), (nd, 1, c.m * nd))
    mag = y.abs().amax() if c.m else 0
    if sr is None: close("d", d, y, mag, dt, c.rows, extra=2e-5)
    else:
        shape_ok("sfd_row", sr, (32, 4, cdiv(c.m, 128), 4, cdiv(cdiv(nd, 32), 4), 1)); shape_ok("sfd_col", sc, (32, 4, cdiv(nd, 128), 4, cdiv(cdiv(c.m, 32), 4), 1))
        quantised("d", d, sr, y, nc, 1, E8, c.rows, dt)
        quantised("d_col", dcol, sc, y, nc, 0, E8, c.rows, dt, dcs, c.ends)
    if am is not None: amax_ok("amax", am, y, c)
def bias_of(c): return c.bias.double()[c.w]
@test
def glu():
    for kind, ends, n, k, dt, a, disc, bias, prob, more in (
        ("nvfp4", (256, 256, 768), 256, 128, BF, "swiglu", 0, 1, 1, {}), ("mxfp4", (256,), 128, 256, F32, "geglu", 0, 0, 0, {}),
        ("mxfp8", (256, 512), 192, 160, E4, "swiglu", 0, 0, 1, dict(discrete_col_sfd=True)), ("mxfp8e5", (0, 256), 128, 128, E5, "geglu", 1, 0, 1, dict(linear_offset=.25, geglu_alpha=1.5, glu_clamp_max=3.0, glu_clamp_min=-2.0)),
        ("mxfp8", (512, 512, 768), 256, 128, E4, "situglu", 1, 1, 1, dict(situ_beta1=2.0, situ_beta2=9.0, use_dynamic_sched=True)), ("nvfp4", (256, 512), 128, 64, BF, "swiglu", 1, 0, 0, dict(mma_tiler_mn=(128, 256))),
        ("fp4e8v16", (256,), 64, 64, F16, "swiglu", 0, 1, 0, dict(vector_f32=True))):
        c = setup(kind, ends, n, k, discrete=bool(disc), capacity=128 if kind == "mxfp4" else 0)
        if kind == "fp4e8v16": c.alpha *= .01
        z = c.z * (.01 if kind == "fp4e8v16" else 1) + (bias_of(c) if bias else 0)
        y = act(z, a, more.get("linear_offset", 1.0), more.get("geglu_alpha", 1.702), more.get("glu_clamp_max", 7.0), more.get("glu_clamp_min", -7.0), more.get("situ_beta1", 4.0), more.get("situ_beta2", 25.0))
        if prob: y = y * c.prob.double()[:, 0]
        fp8 = kind.startswith("mxfp8"); nc = torch.tensor([.01]) if fp8 else None
        r = cudnn.grouped_gemm_glu_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), **weights(c), bias_tensor=D(c.bias.T.contiguous().T if 0 else c.bias).T if bias else None, norm_const_tensor=D(nc) if fp8 else None,
            prob_tensor=D(c.prob) if prob else None, c_dtype=F32 if kind != "fp4e8v16" else BF, d_dtype=dt, sf_vec_size=c.v, act_func=a, **more)
        keys("glu", r, ["c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        close("c", r["c_tensor"], z, c.mag, None, c.rows)
        if r["d_col_tensor"] is None: fail("d_col always there")
        if (r["amax_tensor"] is not None) != (dt in (BF, F16)): fail("amax presence")
        if r["sfd_row_tensor"] is not None and dt not in (E4, E5): forward_rest(c, {**r, "sfd_row_tensor": None}, y, dt); continue
        forward_rest(c, r, y, dt, nc=.01, dcs=more.get("discrete_col_sfd"))
@test
def glu_plain():
    for kind, ends, n, k, a, disc, more in (("bf16", (37, 37, 300), 128, 64, "swiglu", 0, {}), ("bf16", (256, 512), 256, 96, "geglu", 1, dict(generate_c=True, linear_offset=.5)), ("f16", (1, 2, 3, 64), 64, 32, "swiglu", 0, {}), ("e4m3", (130, 400), 128, 64, "swiglu", 0, {})):
        c = setup(kind, ends, n, k, discrete=bool(disc)); y = act(c.z, a, more.get("linear_offset", 1.0)) * c.prob.double()[:, 0]
        w = weights(c); w.pop("sfb_tensor", 0), w.pop("sfb_ptrs", 0)
        r = cudnn.grouped_gemm_glu_wrapper_sm100(c.a, None, c.off, D(c.alpha), prob_tensor=D(c.prob), act_func=a, d_dtype=F32, **w, **more)
        keys("glu", r, ["c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        if (r[0] is None) == bool(more.get("generate_c")): fail("c presence")
        if any(r[i] is not None for i in (2, 3, 4, 5)): fail("other outputs must be None")
        if r[0] is not None: close("c", r[0], c.z, c.mag, None, c.rows)
        close("d", r[1], y, y.abs().amax(), F32, c.rows, extra=1e-3 if kind == "e4m3" else 3e-5)
@test
def canonical():
    c = setup("bf16", (100, 256), 128, 64)
    b3 = c.b.permute(2, 0, 1).contiguous()
    r = cudnn.grouped_gemm_glu_wrapper_sm100(c.a[..., 0].contiguous(), None, c.off, D(c.alpha), b3, prob_tensor=D(c.prob.flatten()), generate_c=True)
    shape_ok("d", r[1], (c.m, 64), (64, 1)); close("d", r[1], act(c.z, "swiglu") * c.prob.double()[:, 0], c.mag.amax(), BF, c.rows)
    shape_ok("c", r[0], (c.m, 128), (128, 1))
    c = setup("mxfp8", (256,), 128, 128)
    r = cudnn.grouped_gemm_glu_wrapper_sm100(c.a[..., 0], c.sfa.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).contiguous().flatten().view(E8), c.off, D(c.alpha), c.b.permute(2, 0, 1), c.sfb.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).contiguous().view(E8), norm_const_tensor=D(torch.ones(1)), prob_tensor=D(c.prob), d_dtype=E4, sf_vec_size=32)
    shape_ok("sfd_row", r[4], (1, 2, 1, 32, 4, 4)); 
@test
def hadamard():
    for sem in ("1.32", "1.23"):
        for a, disc, bias in (("swiglu", 0, 0), ("geglu", 0, 1), ("srelu", 1, 0), ("situglu", 1, 0)):
            if sem == "1.23" and (disc or a not in ("swiglu", "geglu")): continue
            c = setup("nvfp4", (256, 256, 512), 128, 128, discrete=bool(disc)); c.alpha = c.alpha / 50
            z = c.z / 50 + (bias_of(c) if bias else 0)
            y = (torch.relu(z) ** 2 if a == "srelu" else act(z, a)) * c.prob.double()[:, 0]
            kw = dict(bias_tensor=D(c.bias).T if bias else None, sf_vec_size=16, act_func=a)
            if sem == "1.23":
                r = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(c.a, c.b, c.sfa, c.sfb, c.off, D(c.alpha), D(c.prob), semantics="1.23", **kw)
                keys("had", r, ["c_tensor", "d_tensor", "amax_tensor"])
                t = y.float().to(BF).double().view(c.m, -1, 16) @ H16(); t = t.view(c.m, -1)
                close("d", r[1], t, t.abs().amax() * 200, BF, c.rows)
                am = torch.stack([t[c.who == e].abs().max() if (c.who == e).any() else torch.tensor(-math.inf) for e in range(c.E)]); got = dec(r[2]).flatten()
                if not torch.allclose(got, am, rtol=1e-2): fail(f"amax {got} {am}")
                continue
            r = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), D(c.prob), **(weights(c)), **kw)
            keys("had", r, ["c_tensor", "d_tensor", "amax_tensor", "post_rht_amax_tensor"])
            close("c", r[0], z, c.mag, None, c.rows); close("d", r[1], y, y.abs().amax(), BF, c.rows)
            amax_ok("amax", r[2], y, c, fill=0.0)
            v = dec(r[1])[..., 0]; post = []
            for e in range(c.E):
                x = v[c.who == e]; post.append(0.25 * float((H16() @ x.view(-1, 16, x.shape[1])).abs().max()) if x.numel() else 0.0)
            if not torch.allclose(dec(r[3]).flatten(), torch.tensor(post, dtype=torch.float64), rtol=1e-5): fail(f"post {dec(r[3]).flatten().tolist()} want {post}")
def dgate(c, C, name, alpha, beta, prob, acc, off=1.0, ga=1.702, cmax=7.0, cmin=-7.0, b1=4.0, b2=25.0, square=True, plainbeta=False):
    g_, u_ = gates(C.shape[1]); ce, co = C[:, g_], C[:, u_]; a = alpha[:, None]; p = prob
    g = (a * a if square else 1) * acc
    if name == "dswiglu":
        x, up = beta[:, None] * ce, beta[:, None] * co; s = sg(x)
        de, do, dp = g * p * up * s * (1 + x * (1 - s)), g * p * x * s, g * x * s * up
    elif name == "dgeglu":
        if plainbeta: ce, co = beta[:, None] * ce, beta[:, None] * co
        y1, y2 = ce.clamp(max=cmax), co.clamp(max=cmax).clamp(min=cmin); q = sg(ga * y1)
        de = (ce <= cmax) * g * p * (y2 + off) * q * (1 + ga * y1 * (1 - q)); do = ((co >= cmin) & (co <= cmax)) * g * p * y1 * q; dp = g * y1 * q * (y2 + off)
    else:
        x, up = beta[:, None] * ce, beta[:, None] * co; t, u, s = torch.tanh(x / b1), torch.tanh(up / b2), sg(x)
        de = g * p * (b2 * u) * ((1 - t * t) * s + b1 * t * s * (1 - s)); do = g * p * (b1 * t * s) * (1 - u * u); dp = g * (b1 * t * s) * (b2 * u)
    d = torch.empty_like(C); d[:, g_], d[:, u_] = de, do
    return d, dp.sum(1)
def dbias_ok(got, d, c):
    want = torch.stack([d[c.who == e].sum(0) for e in range(c.E)])
    shape_ok("dbias", got, (c.E, d.shape[1], 1)); x = dec(got)[..., 0]
    tol = 0.008 * want.abs().max() * 2 + .1
    if ((x - want).abs() > tol).any(): fail("dbias")
    tight = (x - want).abs().max() / (want.abs().max() + 1e-9)
    if tight > .02: fail(f"dbias off by {tight}")
@test
def dglu():
    for kind, ends, n, k, dt, a, disc, dbias, more in (
        ("nvfp4", (256, 256, 512), 64, 128, BF, "dswiglu", 0, 1, {}), ("mxfp8", (256, 512), 96, 128, E4, "dgeglu", 0, 0, dict(discrete_col_sfd=True, linear_offset=.5, glu_clamp_max=1.5)),
        ("mxfp8", (0, 256), 64, 128, E4, "dsituglu", 1, 1, {}), ("nvfp4", (256,), 32, 64, F32, "dgeglu", 1, 0, dict(semantics="1.23")), ("mxfp8e5", (256,), 64, 64, E5, "dswiglu", 1, 0, dict(b_major="n")), ("nvfp4", (256, 512), 64, 64, BF, "dswiglu", 0, 0, dict(deterministic=True, epilogue_op="identity"))):
        bm = more.get("b_major", "k")
        c = setup(kind, ends, n, k, discrete=bool(disc), b_major=bm); c.alpha = c.alpha / 4
        C = rnd(c.m, 2 * n).float().to(BF); al, be = c.alpha.double()[c.w], c.beta.double()[c.w]
        old = more.get("semantics") == "1.23"
        want, dp = dgate(c, C.double(), a, al, be, c.prob.double()[:, 0], c.acc, off=more.get("linear_offset", 1.0), cmax=more.get("glu_clamp_max", 7.0), square=not (old and a == "dgeglu"))
        fp8 = kind.startswith("mxfp8"); dprob = D(torch.ones(c.m, 1, 1)); w = weights(c)
        if disc: w["b_major"] = bm
        rest = {x: y for x, y in more.items() if x != "b_major"}
        r = cudnn.grouped_gemm_dglu_wrapper_sm100(c.a, D(C)[..., None], c.sfa, c.off, D(c.alpha), D(c.beta), D(c.prob), dprob, generate_dbias=bool(dbias), d_dtype=dt, sf_vec_size=c.v, act_func=a, norm_const_tensor=D(torch.tensor([.01])) if fp8 else None, **w, **rest)
        keys("dglu", r, ["d_row_tensor", "d_col_tensor", "dprob_tensor", "dbias_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        if r["dprob_tensor"] is not dprob: fail("dprob is not the same object")
        mag = want.abs().amax()
        if fp8:
            quantised("d_row", r[0], r[5], want, .01, 1, E8, c.rows, dt); quantised("d_col", r[1], r[6], want, .01, 0, E8, c.rows, dt, more.get("discrete_col_sfd"), c.ends)
        else: close("d", r[0], want, mag, dt, c.rows, extra=3e-5)
        close("dprob", dprob, dp + 1, dp.abs().amax() * 3, F32, c.rows, extra=1e-4)
        if (r[3] is not None) != bool(dbias): fail("dbias presence")
        if dbias: dbias_ok(r[3], want, c)
        if (r[4] is not None) != (dt == BF): fail("amax presence")
        if r[4] is not None: amax_ok("amax", r[4], want, c, roles=list(gates(2 * n)))
    # no prob, no dprob
    c = setup("nvfp4", (256,), 64, 64); C = rnd(c.m, 128).float().to(BF)
    r = cudnn.grouped_gemm_dglu_wrapper_sm100(c.a, D(C)[..., None], c.sfa, c.off, D(c.alpha), D(c.beta), None, None, c.b, c.sfb)
    if r["dprob_tensor"] is not None: fail("dprob")
    close("d", r[0], dgate(c, C.double(), "dswiglu", c.alpha.double()[c.w], c.beta.double()[c.w], 1.0, c.acc)[0], None, BF, c.rows)
    # plain bf16: alpha squared and beta for both, activation recomputed
    c = setup("bf16", (37, 256), 64, 64); C = rnd(c.m, 128).float().to(BF); dprob = D(torch.zeros(c.m, 1, 1)); out = D(torch.zeros(c.m, 64, 1, dtype=BF))
    r = cudnn.grouped_gemm_dglu_wrapper_sm100(c.a, D(C)[..., None], None, c.off, D(c.alpha), D(c.beta), D(c.prob), dprob, c.b, act_func="dgeglu", activation_tensor=out)
    want, dp = dgate(c, C.double(), "dgeglu", c.alpha.double()[c.w], c.beta.double()[c.w], c.prob.double()[:, 0], c.acc, plainbeta=True)
    keys("dglu", r, ["d_row_tensor", "d_col_tensor", "dprob_tensor", "dbias_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor", "activation_tensor"])
    close("d", r[0], want, want.abs().amax(), BF, c.rows); close("dprob", dprob, dp, dp.abs().amax(), F32, c.rows, extra=1e-4)
    close("activation", out, act(c.beta.double()[c.w][:, None] * C.double(), "geglu") * c.prob.double()[:, 0], 1.0, BF, c.rows)
@test
def legacy():
    for kind, dt in (("nvfp4", BF), ("mxfp8", E4)):
        c = setup(kind, (256, 256, 512), 128, 128); y = act(c.z, "swiglu") * c.prob.double()[:, 0]; nc = D(torch.tensor([.01])) if kind == "mxfp8" else None
        r = cudnn.grouped_gemm_swiglu_wrapper_sm100(c.a, c.b, c.sfa, c.sfb, c.off, D(c.alpha), nc, D(c.prob), d_dtype=dt, sf_vec_size=c.v)
        keys("swiglu", r, ["c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        close("c", r[0], c.z, c.mag, BF, c.rows); forward_rest(c, r, y, dt, nc=.01)
        C = rnd(c.m, 256).float().to(BF)
        r = cudnn.grouped_gemm_dswiglu_wrapper_sm100(c.a, c.b, D(C)[..., None], c.sfa, c.sfb, c.off, D(c.alpha), None, D(c.prob), nc, d_dtype=dt, sf_vec_size=c.v)
        keys("dswiglu", r, ["d_row_tensor", "d_col_tensor", "dprob_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        want, dp = dgate(c, C.double(), "dswiglu", c.alpha.double()[c.w], torch.ones(c.m, dtype=torch.float64), c.prob.double()[:, 0], c.acc)
        if dt == BF: close("d", r[0], want, want.abs().amax(), BF, c.rows); amax_ok("amax", r[3], want, c, roles=list(gates(256)))
        else: quantised("d_row", r[0], r[4], want, .01, 1, E8, c.rows, dt); quantised("d_col", r[1], r[5], want, .01, 0, E8, c.rows, dt)
        close("dprob", r[2], dp, dp.abs().amax(), F32, c.rows, extra=1e-4)
        buf, ab = D(torch.ones(c.m, 1, 1)), D(torch.full((c.E, 2, 1), -math.inf))
        r = cudnn.grouped_gemm_dswiglu_wrapper_sm100(c.a, c.b, D(C)[..., None], c.sfa, c.sfb, c.off, D(c.alpha), D(c.beta), D(c.prob), nc, d_dtype=dt, sf_vec_size=c.v, dprob_tensor_buf=buf, amax_tensor_buf=ab)
        if r[2] is not buf: fail("dprob buffer")
@test
def srelu():
    for kind, ends, n, dt, disc, bias, more in (("nvfp4", (256, 512), 128, BF, 0, 1, {}), ("mxfp8", (0, 256, 512), 160, E4, 0, 0, dict(discrete_col_sfd=True)), ("mxfp8", (256,), 128, E4, 1, 0, dict(b_major="n")), ("nvfp4", (256,), 128, F32, 1, 0, dict(tanh_clamp_scale=3.0)), ("bf16", (5, 77), 128, BF, 0, 0, {})):
        bm = more.pop("b_major", "k"); c = setup(kind, ends, n, 128, discrete=bool(disc), b_major=bm); s = more.get("tanh_clamp_scale")
        z = c.z + (bias_of(c) if bias else 0); y = torch.relu(z); y = (s * torch.tanh(y / s)) if s else y; y = y * y * c.prob.double()[:, 0]
        nc = D(torch.tensor([.01])) if kind == "mxfp8" else None
        r = cudnn.grouped_gemm_srelu_wrapper_sm100(c.a, sfa_tensor=c.sfa, padded_offsets=c.off, alpha_tensor=D(c.alpha), bias_tensor=D(c.bias).T if bias else None, prob_tensor=D(c.prob), norm_const_tensor=nc, d_dtype=dt, sf_vec_size=c.v, **weights(c), **more)
        keys("srelu", r, ["c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        close("c", r[0], z, c.mag, BF, c.rows); forward_rest(c, r, y, dt, nc=.01, dcs=more.get("discrete_col_sfd"))
    # raw uint8
    c = setup("nvfp4", (256, 512), 128, 128); n, k = 128, 128
    def raw(x): 
        out = torch.zeros(x.shape[0] * x.shape[1] * 2 * x.shape[2], dtype=torch.uint8, device=DEV); p = x.view(torch.uint8).permute(2, 0, 1).contiguous().flatten(); out[: p.numel()] = p
        return out.view(x.shape[2], x.shape[0], x.shape[1] * 2).permute(1, 2, 0)
    r = cudnn.grouped_gemm_srelu_wrapper_sm100(raw(c.a), raw(c.b), c.sfa, c.sfb, c.off, D(c.alpha), prob_tensor=D(c.prob), sf_vec_size=16)
    forward_rest(c, r, torch.relu(c.z) ** 2 * c.prob.double()[:, 0], BF)
@test
def dsrelu():
    for kind, ends, dt, disc, more in (("nvfp4", (256, 512), BF, 0, {}), ("mxfp8", (256, 256, 512), E4, 0, dict(discrete_col_sfd=True)), ("mxfp8", (256,), E4, 1, {}), ("nvfp4", (256,), F32, 0, dict(tanh_clamp_scale=2.0)), ("nvfp4", (256, 512), BF, 0, dict(semantics="1.23")), ("bf16", (3, 99), BF, 0, dict(deterministic=True, use_dsrelu_reuse=True))):
        c = setup(kind, ends, 128, 128, discrete=bool(disc)); c.alpha = c.alpha / 4; z = c.z / 4
        C = rnd(c.m, 128).float().to(BF); p = c.prob.double()[:, 0]; s = more.get("tanh_clamp_scale"); old = more.get("semantics") == "1.23"
        rr = torch.relu(C.double())
        if old: want, dp = 2 * torch.relu(z) * C.double() * p, (torch.relu(z) ** 2 * C.double()).sum(1)
        elif s: t = torch.tanh(rr / s); cc = s * t; want, dp, act_ = 2 * z * cc * (1 - t * t) * p, (cc * cc * z).sum(1), cc * cc * p
        else: want, dp, act_ = 2 * z * rr * p, (rr * rr * z).sum(1), rr * rr * p
        nc = D(torch.tensor([.01])) if kind == "mxfp8" else None; given = D(torch.ones(c.m, 1, 1))
        r = cudnn.grouped_gemm_dsrelu_wrapper_sm100(c.a, c_tensor=D(C)[..., None], sfa_tensor=c.sfa, padded_offsets=c.off, alpha_tensor=D(c.alpha), prob_tensor=D(c.prob), dprob_tensor=given, generate_dbias=True, norm_const_tensor=nc, d_dtype=dt, sf_vec_size=c.v, **weights(c), **more)
        ks = ["d_row_tensor", "d_col_tensor", "d_srelu_tensor", "dprob_tensor", "dbias_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor", "sfd_col_d_srelu_tensor"]
        keys("dsrelu", r, [x for x in ks if "d_srelu" not in x] if old else ks)
        if kind == "mxfp8":
            quantised("d_row", r["d_row_tensor"], r["sfd_row_tensor"], want, .01, 1, E8, c.rows, dt); quantised("d_col", r["d_col_tensor"], r["sfd_col_tensor"], want, .01, 0, E8, c.rows, dt, more.get("discrete_col_sfd"), c.ends)
            quantised("d_srelu", r["d_srelu_tensor"], r["sfd_col_d_srelu_tensor"], act_, .01, 0, E8, c.rows, dt, more.get("discrete_col_sfd"), c.ends)
        else:
            close("d", r[0], want, want.abs().amax(), dt, c.rows, extra=3e-5)
            if not old: close("d_srelu", r["d_srelu_tensor"], act_, 1.0, dt, c.rows)
        close("dprob", given, dp + 1, dp.abs().amax() * 3, F32, c.rows, extra=1e-4); dbias_ok(r["dbias_tensor"], want, c)
        if r["dprob_tensor"] is not given: fail("dprob object")
@test
def quant():
    for kind, ends, n, dt, disc, bias, prob, more in (("nvfp4", (256, 512), 128, BF, 0, 0, 1, {}), ("mxfp8", (256, 512), 160, E4, 0, 0, 1, dict(discrete_col_sfd=True)), ("nvfp4", (256, 256), 128, F32, 0, 1, 1, {}), ("mxfp8", (256,), 128, E4, 1, 1, 0, {}), ("mxfp8", (512,), 128, BF, 1, 0, 0, dict(b_major="n", use_single_group_runtime_offsets=True)), ("bf16", (1, 1, 130), 128, F16, 0, 0, 0, dict(generate_amax=False)), ("mxfp8", (256,), 128, BF, 0, 1, 1, dict(row=1))):
        bm = more.pop("b_major", "k"); row = more.pop("row", 0); c = setup(kind, ends, n, 128, discrete=bool(disc), b_major=bm)
        if dt == F16: c.alpha /= 8; c.z /= 8
        rs = torch.rand(c.m, generator=G) if row else None; p = c.prob.double()[:, 0] if prob else 1.0; z = c.z * (rs.double()[:, None] if row else 1)
        y = z + p * bias_of(c) if bias else z * p
        low = dt in (E4, E5)
        r = cudnn.grouped_gemm_quant_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), bias_tensor=D(c.bias).T if bias else None, norm_const_tensor=D(torch.tensor([.01])) if low else None, prob_tensor=D(c.prob) if prob else None, row_scale_tensor=D(rs) if row else None, d_dtype=dt, sf_vec_size=c.v, **weights(c), **more)
        keys("quant", r, ["d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        if (r[1] is not None) != low: fail("d_col")
        if (r[2] is not None) != (dt in (BF, F16) and more.get("generate_amax", True)): fail("amax presence")
        forward_rest(c, r, y, dt, nc=.01, dcs=more.get("discrete_col_sfd"))
    c = setup("mxfp8", (256,), 128, 128); buf = D(torch.empty(c.m, 128, 1, dtype=BF))
    r = cudnn.grouped_gemm_quant_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), c.b, c.sfb, d_tensor=buf, sf_vec_size=32)
    if r[0] is not buf: fail("d buffer")
    for what, kw, text in (("norm", dict(d_dtype=E4), "norm_const_tensor is required when FP8 inputs are used"),):
        try: cudnn.grouped_gemm_quant_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), c.b, c.sfb, prob_tensor=D(c.prob), sf_vec_size=32, **kw); fail("no error")
        except ValueError as e:
            if text not in str(e): fail(f"text {e}")
    try: cudnn.grouped_gemm_quant_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), c.b, c.sfb, d_dtype=BF, sf_vec_size=32, semantics="1.23"); fail("1.23 needs prob")
    except ValueError as e:
        if "prob_tensor is required" not in str(e): fail(str(e))
@test
def wgrad():
    for kind, counts, majors, more in (("mxfp8", (256, 0, 128), "kk", {}), ("nvfp4", (64, 128), "kk", dict(scale=1)), ("bf16", (7, 0, 33, 100), "mn", {}), ("bf16", (256, 256), "kk", dict(accumulate_on_output=True, wgrad_dtype=F32)), ("bf16", (64, 64), "kn", dict(disc=1)), ("mxfp8", (128, 256), "mn", dict(accumulate_on_output=True)), ("mxfp8", (256, 128), "kk", dict(input_order="tensor_ragged")), ("bf16", (256, 0), "mn", dict(tail=64))):
        m, n = 192, 128; more = dict(more); scale, disc, tail = more.pop("scale", 0), more.pop("disc", 0), more.pop("tail", 0); E = len(counts); T = sum(counts) + tail
        e, s, v = KINDS[kind]; ends = list(itertools.accumulate(counts)); ragged = more.get("input_order") == "tensor_ragged"
        def side(rows, k_contig):
            segs, vals, sfs = [], [], []
            for t in counts:
                x, val = plain(rows, t, 1, e) if t else (None, torch.zeros(rows, 0, 1, dtype=torch.float64))
                if s and t:
                    rm, rk = cdiv(rows, 128), cdiv(cdiv(t, v), 4)
                    sf, f = sf_make(rows, t, 1, v, s); sfs.append(sf.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).contiguous().flatten()); val = val * f
                segs.append(x); vals.append(val[..., 0])
            if e == FP4: parts = [x[..., 0].view(torch.uint8).contiguous() for x in segs if x is not None]
            else: parts = [(x[..., 0].view(torch.uint8) if x.element_size() == 1 else x[..., 0]) for x in segs if x is not None]
            if ragged: flat = torch.cat([p.contiguous().flatten() for p in parts]); whole = flat.view(rows, -1)
            else: whole = torch.cat(parts, 1)
            if tail: whole = torch.cat([whole, torch.full((rows, tail), float("nan"), dtype=whole.dtype, device=DEV)], 1)
            whole = whole.contiguous() if k_contig else whole.T.contiguous().T
            if e in (FP4, E4, E5): whole = whole.view(e)
            return whole, vals, (torch.cat(sfs).view(s).view(cdiv(rows, 128) * 128, -1) if s else None)
        A, av, sfa = side(m, majors[0] == "k"); B, bv, sfb = side(n, majors[1] == "k")
        ga, gb = (torch.rand(E, generator=G) + .5, torch.rand(E, generator=G) + .5) if scale else (None, None)
        want = torch.stack([(float(ga[i] * gb[i]) if scale else 1.0) * av[i] @ bv[i].T for i in range(E)])
        wd = more.get("wgrad_dtype", BF); acc = more.get("accumulate_on_output")
        out = None; base = 0.0
        if acc: out = D(rnd(E, m, n).float().to(wd)); base = dec(out).clone()
        kw = dict(more)
        if disc:
            outs = [D(torch.zeros(m, n, dtype=BF)) for _ in range(E)]
            r = cudnn.grouped_gemm_wgrad_wrapper_sm100(A, B.T, sfa, sfb, torch.tensor(ends, dtype=I32, device=DEV), "discrete", wgrad_ptrs=torch.tensor([o.data_ptr() for o in outs], dtype=I64, device=DEV), sf_vec_size=v, wgrad_dtype=BF)
            got = torch.stack(outs)
        else:
            r = cudnn.grouped_gemm_wgrad_wrapper_sm100(A, B.T, sfa, sfb, torch.tensor(ends, dtype=I32, device=DEV), wgrad_tensor=out, global_scale_a=D(ga) if scale else None, global_scale_b=D(gb) if scale else None, sf_vec_size=v, **kw)
            keys("wgrad", r, ["wgrad_tensor"]); got = r[0]
            if out is not None and got is not out: fail("wgrad tensor is another")
        shape_ok("wgrad", got, (E, m, n)); tot = want + base
        x = dec(got); tol = EPS[wd] * (tot.abs() + want.abs()) + 1e-4 * want.abs().amax()
        if ((x - tot).abs() > tol).any(): fail(f"wgrad {kind} {counts} {majors} {more}: off by {(x - tot).abs().max()}")
@test
def discrete():
    for kind, a, dt, sem, bm in (("nvfp4", "swiglu", BF, None, "k"), ("mxfp8", "geglu", E4, None, "n"), ("nvfp4", "geglu", BF, "1.23", "k"), ("mxfp8", "swiglu", E4, None, "k")):
        c = setup(kind, (256, 256, 512), 128, 128, discrete=True, b_major=bm); nc = D(torch.tensor([.01])) if kind == "mxfp8" else None
        old = dict(semantics=sem) if sem else {}
        y = act(c.z, a, 0.0 if sem == "1.23" else 1.0) * c.prob.double()[:, 0]
        r = cudnn.discrete_grouped_gemm_swiglu_wrapper_sm100(c.a, c.bp, c.sfa, c.sp, c.off, D(c.alpha), c.n, c.e, None, nc, D(c.prob), d_dtype=dt, sf_vec_size=c.v, act_func=a, b_major=bm, **old)
        keys("dis", r, ["c_tensor", "d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"]); close("c", r[0], c.z, c.mag, BF, c.rows); forward_rest(c, r, y, dt, nc=.01)
        C = rnd(c.m, 256).float().to(BF); dprob = D(torch.zeros(c.m, 1, 1))
        r = cudnn.discrete_grouped_gemm_dswiglu_wrapper_sm100(c.a, c.bp, D(C)[..., None], c.sfa, c.sp, c.off, D(c.alpha), D(c.beta), D(c.prob), dprob, c.n, c.e, True, nc, d_dtype=dt, sf_vec_size=c.v, act_func="d" + a, b_major=bm, **old)
        keys("ddis", r, ["d_row_tensor", "d_col_tensor", "dprob_tensor", "dbias_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor"])
        want, dp = dgate(c, C.double(), "d" + a, c.alpha.double()[c.w], c.beta.double()[c.w], c.prob.double()[:, 0], c.acc, off=0.0 if sem == "1.23" else 1.0, square=not (sem == "1.23" and a == "geglu"))
        if dt == BF: close("d", r[0], want, want.abs().amax(), BF, c.rows)
        else: quantised("d_row", r[0], r[5], want, .01, 1, E8, c.rows, dt)
        close("dprob", dprob, dp, dp.abs().amax(), F32, c.rows, extra=1e-4); dbias_ok(r[3], want, c)
    for what, kw, text in (("int32", dict(b=c.bp.int()), "b_ptrs must be int64"), ("short", dict(s=c.sp[:-1]), "sfb_ptrs length mismatch")):
        try: cudnn.discrete_grouped_gemm_swiglu_wrapper_sm100(c.a, kw.get("b", c.bp), c.sfa, kw.get("s", c.sp), c.off, D(c.alpha), c.n, c.e, None, nc, D(c.prob), d_dtype=dt, sf_vec_size=c.v); fail("no error " + what)
        except ValueError as e:
            if text not in str(e): fail(f"{what}: {e}")
@test
def unfused():
    for ends, n, k, disc, bias, gen in (((100, 100, 256), 128, 64, 0, 0, False), ((256, 512), 192, 96, 1, 1, True), ((256,), 64, 64, 0, 1, True)):
        c = setup("bf16", ends, n, k, discrete=bool(disc)); p = c.prob.double()[:, 0]
        pre = c.z + (p * bias_of(c) if bias else 0); y = pre if bias else c.z * p
        w = weights(c); w.pop("sfb_tensor", 0), w.pop("sfb_ptrs", 0)
        r = cudnn.grouped_gemm_wrapper_sm100(c.a, c.off, D(c.alpha), bias_tensor=D(c.bias).T if bias else None, prob_tensor=D(c.prob), generate_c=gen, d_dtype=F32, **w)
        if list(r.keys()) != ["d_tensor", "c_tensor"]: fail(str(list(r.keys())))
        close("d", r["d_tensor"], y, c.mag, F32, c.rows)
        if gen: close("c", r["c_tensor"], pre, c.mag, BF, c.rows)
        elif r["c_tensor"] is not None: fail("c")
@test
def had_quant():
    for a, dt, rw, cw, gl, disc in (("swiglu", BF, BF, None, None, 0), ("geglu", FP4, None, None, .9, 0), ("swiglu", BF, FP4, None, None, 1), ("swiglu", None, None, FP4, None, 0), ("srelu", BF, None, None, None, 0)):
        c = setup("nvfp4", (256, 256, 512), 256, 128, discrete=bool(disc)); c.alpha /= 30; z = c.z / 30; kw = {}
        g, u = gates(256); G_, U_ = z[:, g], z[:, u]
        if gl: G_, U_ = G_.clamp(-gl, gl), U_.clamp(-gl, gl); kw["glu_limit"] = gl
        y = {"swiglu": lambda: U_ * G_ * sg(G_), "geglu": lambda: (U_ + 1) * G_ * sg(1.702 * G_), "srelu": lambda: torch.relu(z) ** 2}[a]() * c.prob.double()[:, 0]
        r = cudnn.grouped_gemm_glu_hadamard_quant_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), D(c.prob), d_dtype=dt, rht_rowwise_dtype=rw, rht_colwise_dtype=cw, act_func=a, sf_vec_size=16, **weights(c), **kw)
        keys("hq", r, [x + "_tensor" for x in ("c", "d", "sfd", "rht_rowwise", "sfrht_rowwise", "rht_colwise", "sfrht_colwise")])
        close("c", r[0], z, c.mag, BF, c.rows)
        if dt != FP4: close("d", r[1], y, y.abs().amax(), BF, c.rows); v = dec(r[1])[..., 0]
        else:
            s = sfd_of(r[2], c.m)[:, : y.shape[1] // 16]; b = r[1].view(torch.uint8).cpu()[..., 0]; q = torch.stack([VALUES[(b & 15).long()], VALUES[(b >> 4).long()]], 2).view(c.m, -1)
            v = y.float().to(BF).double(); want_s = (v.view(c.m, -1, 16).abs().amax(2) / 6)
            if ((s - want_s).abs() > .07 * want_s + 2**-9).any(): fail("sfd")
            if ((q * s.repeat_interleave(16, 1) - v).abs() > .26 * v.abs() + s.repeat_interleave(16, 1) * .3)[c.rows].any(): fail("fp4 d")
        if rw is not None and dt != FP4:
            want = (v.view(c.m, -1, 16) @ H16() * .25).view(c.m, -1)
            if rw == BF: close("rht", r[3], want, want.abs().amax(), BF, c.rows)
            else:
                s = sfd_of(r[4], c.m)[:, : want.shape[1] // 16]; b = r[3].view(torch.uint8).cpu()[..., 0]; q = torch.stack([VALUES[(b & 15).long()], VALUES[(b >> 4).long()]], 2).view(c.m, -1)
                if ((q * s.repeat_interleave(16, 1) - want).abs() > .26 * want.abs() + s.repeat_interleave(16, 1) * .3)[c.rows].any(): fail("fp4 rht")
        if cw is not None:
            N = y.shape[1]; raw = r[5].view(torch.uint8).cpu().flatten(); sraw = dec(r[6].flatten()); lo = 0
            for hi in c.ends:
                t = hi - lo
                if t:
                    x = v[lo:hi].view(-1, 16, N); want = .25 * torch.einsum("ij,bjn->bin", H16(), x).reshape(t, N).T  # (N, t)
                    seg = raw[N * lo // 2 : N * hi // 2]; q = torch.stack([VALUES[(seg & 15).long()], VALUES[(seg >> 4).long()]], 1).view(N, t)
                    R, Q = cdiv(N, 128), t // 64; nn = torch.arange(N)[:, None]; cc = torch.arange(t // 16)[None]
                    at = N // 16 * lo + ((nn % 32) * 4 + (nn // 32) % 4) * R * 4 * Q + (nn // 128) * 4 * Q + (cc % 4) * Q + cc // 4
                    s = sraw[at].repeat_interleave(16, 1)
                    if ((q * s - want).abs() > .26 * want.abs() + s * .3).any(): fail("colwise rht")
                lo = hi
@test
def many_experts():
    ends = sorted(random.Random(3).sample(range(0, 3000), 1023)) + [3000]
    c = setup("bf16", ends, 64, 32); c.alpha = torch.rand(1024, generator=G)
    r = cudnn.grouped_gemm_wrapper_sm100(c.a, c.off, D(c.alpha), c.b, prob_tensor=D(c.prob), d_dtype=F32)
    close("d", r[0], c.alpha.double()[c.w][:, None] * c.acc * c.prob.double()[:, 0], c.mag, F32, c.rows)
    try: 
        b = c.b[:, :, :1].expand(64, 32, 1025).permute(2, 0, 1).contiguous().permute(1, 2, 0)
        cudnn.grouped_gemm_wrapper_sm100(c.a, torch.zeros(1025, dtype=I32, device=DEV), D(torch.ones(1025)), b, prob_tensor=D(c.prob)); fail("1025 experts")
    except ValueError: pass
@test
def zero_tokens():
    for kind, f in (("nvfp4", "glu"), ("mxfp8", "quant"), ("bf16", "plain"), ("nvfp4", "dglu"), ("nvfp4", "srelu"), ("nvfp4", "dsrelu"), ("nvfp4", "discrete"), ("nvfp4", "hadamard"), ("mxfp8", "dswiglu")):
        c = setup(kind, (0, 0), 128, 128, discrete=f == "discrete"); nc = D(torch.ones(1)); C = torch.empty(0, 256 if "glu" in f else 128, 1, dtype=BF, device=DEV)
        if f == "glu": r = cudnn.grouped_gemm_glu_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), c.b, c.sfb, sf_vec_size=16); shape_ok("d", r[1], (0, 64, 1))
        if f == "quant": r = cudnn.grouped_gemm_quant_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), c.b, c.sfb, norm_const_tensor=nc, prob_tensor=D(c.prob), d_dtype=E4, sf_vec_size=32); shape_ok("d", r[0], (0, 128, 1))
        if f == "plain": r = cudnn.grouped_gemm_wrapper_sm100(c.a, c.off, D(c.alpha), c.b, prob_tensor=D(c.prob)); shape_ok("d", r[0], (0, 128, 1))
        if f == "dglu": r = cudnn.grouped_gemm_dglu_wrapper_sm100(c.a, C, c.sfa, c.off, D(c.alpha), D(c.beta), D(c.prob), torch.zeros(0, 1, 1, device=DEV), c.b, c.sfb); shape_ok("d", r[0], (0, 256, 1))
        if f == "srelu": r = cudnn.grouped_gemm_srelu_wrapper_sm100(c.a, c.b, c.sfa, c.sfb, c.off, D(c.alpha), prob_tensor=D(c.prob)); shape_ok("d", r[1], (0, 128, 1))
        if f == "dsrelu": r = cudnn.grouped_gemm_dsrelu_wrapper_sm100(c.a, c.b, C, c.sfa, c.sfb, c.off, D(c.alpha), D(c.prob)); shape_ok("d", r[0], (0, 128, 1))
        if f == "discrete": r = cudnn.discrete_grouped_gemm_swiglu_wrapper_sm100(c.a, c.bp, c.sfa, c.sp, c.off, D(c.alpha), 128, c.e); shape_ok("d", r[1], (0, 64, 1))
        if f == "hadamard": r = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(c.a, c.sfa, c.off, D(c.alpha), D(c.prob), c.b, c.sfb); shape_ok("d", r[1], (0, 64, 1))
        if f == "dswiglu":
            r = cudnn.grouped_gemm_dswiglu_wrapper_sm100(c.a, c.b, C, c.sfa, c.sfb, c.off, D(c.alpha), None, D(c.prob), nc, d_dtype=E4, sf_vec_size=32)
            shape_ok("d", r[0], (0, 256, 1))
            if r["sfd_row_tensor"] is not None or r["sfd_col_tensor"] is not None: fail("sfd outputs of no tokens are None")
@test
def errors():
    c = setup("nvfp4", (256,), 128, 128); base = dict(a_tensor=c.a, sfa_tensor=c.sfa, padded_offsets=c.off, alpha_tensor=D(c.alpha), b_tensor=c.b, sfb_tensor=c.sfb)
    def refused(kw, kinds=(ValueError, NotImplementedError), f=cudnn.grouped_gemm_glu_wrapper_sm100, base=base):
        try: f(**{**base, **kw})
        except kinds: return
        except Exception as e: fail(f"{list(kw)} raised {type(e).__name__} {e}")
        fail(f"{kw.keys()} {[x for x in kw.values() if not torch.is_tensor(x)]} was taken")
    refused(dict(act_func="gelu")); refused(dict(cd_major="m")); refused(dict(m_aligned=128)); refused(dict(mma_tiler_mn=(256, 256), cluster_shape_mn=(1, 1))); refused(dict(sf_vec_size=32, sfa_tensor=None))
    refused(dict(b_tensor=None)); refused(dict(b_ptrs=torch.zeros(1, dtype=I64, device=DEV))); refused(dict(b_tensor=None, sfb_tensor=None, b_ptrs=torch.zeros(1, dtype=I64, device=DEV), sfb_ptrs=torch.zeros(1, dtype=I64, device=DEV)))
    refused(dict(n=128)); refused(dict(b_dtype=FP4)); refused(dict(bias_tensor=D(torch.zeros(64, 1, dtype=BF)))); refused(dict(use_single_group_runtime_offsets=True, padded_offsets=torch.tensor([256, 256], dtype=I32, device=DEV), alpha_tensor=D(torch.ones(2)), b_tensor=setup("nvfp4", (0, 256), 128, 128).b))
    refused(dict(sf_fp8_dtype_override="e5m3")); refused(dict(sf_fp8_dtype_override="e4m3")); refused(dict(cluster_shape_mn=(3, 1))); refused(dict(situ_beta1=-1.0, act_func="situglu")); refused(dict(padded_offsets=c.off.long()))
    refused(dict(acc_dtype=BF)); refused(dict(a_tensor=c.a.view(torch.uint8).clone().float()))
    c2 = setup("bf16", (256,), 128, 64); plainbase = dict(a_tensor=c2.a, sfa_tensor=None, padded_offsets=c2.off, alpha_tensor=D(c2.alpha), b_tensor=c2.b, prob_tensor=D(c2.prob))
    for kw in (dict(sfa_tensor=c.sfa), dict(norm_const_tensor=D(torch.ones(1))), dict(sf_vec_size=32), dict(discrete_col_sfd=True), dict(b_tensor=c2.b.half())): refused(kw, base=plainbase)
    q = dict(a_tensor=c.a, sfa_tensor=c.sfa, padded_offsets=c.off, alpha_tensor=D(c.alpha), b_tensor=c.b, sfb_tensor=c.sfb, prob_tensor=D(c.prob))
    for kw in (dict(d_tensor=D(torch.empty(256, 64, 1, dtype=BF))), dict(d_tensor=D(torch.empty(256, 128, 1, dtype=F32))), dict(row_scale_tensor=D(torch.ones(255))), dict(row_scale_tensor=D(torch.ones(256, dtype=BF)))): refused(kw, f=cudnn.grouped_gemm_quant_wrapper_sm100, base=q)
    try: cudnn.grouped_gemm_wgrad_wrapper_sm100(torch.zeros(64, 256, dtype=BF, device=DEV), torch.zeros(256, 64, dtype=BF, device=DEV), None, None, c2.off, output_mode="sparse"); fail("mode")
    except ValueError: pass
@test
def classes():
    c = setup("bf16", (100, 256), 128, 64); d = D(torch.zeros(c.m, 64, 1, dtype=BF)); cc = D(torch.zeros(c.m, 128, 1, dtype=BF))
    o = cudnn.GroupedGemmGluSm100(c.a, cc, d, None, c.off, D(c.alpha), None, c.b, sample_prob=D(c.prob))
    try: o.execute(c.a, cc, d, None, c.off, D(c.alpha), c.b, prob_tensor=D(c.prob)); fail("not compiled")
    except RuntimeError: pass
    if o.check_support() is not True: fail("check_support")
    o.compile(); o.compile(); o.execute(c.a, cc, d, None, c.off, D(c.alpha), c.b, prob_tensor=D(c.prob))
    close("d", d, act(c.z, "swiglu") * c.prob.double()[:, 0], c.mag.amax(), BF, c.rows); close("c", cc, c.z, c.mag, BF, c.rows)
    d2, c2 = torch.zeros_like(d), torch.zeros_like(cc)
    cudnn.GroupedGemmGluSm100(c.a, cc, d, None, c.off, D(c.alpha), None, c.b, sample_prob=D(c.prob))(c.a, c2, d2, None, c.off, D(c.alpha), c.b, prob_tensor=D(c.prob))
    if not torch.equal(d, d2): fail("__call__")
    # 1.23's positional order where types tell: GLU ctor, quant wrapper
    q = setup("nvfp4", (256,), 128, 128)
    r = cudnn.grouped_gemm_quant_wrapper_sm100(q.a, q.sfa, q.off, D(q.alpha), q.b, q.sfb, None, None, None, None, None, "k", None, D(q.prob), F32, BF, "n", (256, 256), (2, 1), 16, False, 256, False)
    forward_rest(q, r, q.z * q.prob.double()[:, 0], BF)
    # offsets and pointers change between calls of one object
    x = setup("bf16", (10, 250), 128, 64, discrete=True); d = D(torch.zeros(x.m, 128, 1, dtype=BF))
    o = cudnn.GroupedGemmSm100(x.a, None, d, x.off, D(x.alpha), None, None, D(x.prob), 2, (128, 64), BF); o.compile()
    o.execute(x.a, None, d, x.off, D(x.alpha), b_ptrs=x.bp, prob_tensor=D(x.prob)); close("d", d, x.z * x.prob.double()[:, 0], x.mag, BF, x.rows)
    o.execute(x.a, None, d, x.off, D(x.alpha), b_ptrs=x.bp.flip(0).contiguous(), prob_tensor=D(x.prob))
    flipped = torch.zeros_like(x.z); bv = dec(x.b); av = dec(x.a)[..., 0]; lo = 0
    for e, hi in enumerate(x.ends): flipped[lo:hi] = float(x.alpha[e]) * av[lo:hi] @ bv[:, :, 1 - e].T; lo = hi
    close("d flipped", d, flipped * x.prob.double()[:, 0], x.mag * 2, BF, x.rows)
count = 0
with (cudnn.emulation(mode) if mode.startswith("sm_") else contextlib.nullcontext()):
    for f in TESTS:
        if only and f.__name__ not in only.split(","): continue
        try: f(); print("ok  ", f.__name__, flush=True)
        except Exception as e:
            tb = traceback.extract_tb(e.__traceback__); line = [x for x in tb if x.filename == __file__]
            torch.cuda.synchronize() if mode == 'cuda' else None; print("FAIL", f.__name__, "line", [x.lineno for x in line], type(e).__name__, str(e)[:600], flush=True)
