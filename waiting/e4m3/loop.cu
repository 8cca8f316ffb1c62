// A main loop of e4m3 with promotion, as the library's: a producer fills a ring of 128-wide k tiles by bulk copies, warpgroups multiply 64 x 256 in two portions.
// TURNS: 0 none, 1 given when issued, 2..5 when TURNS - 1 of four products are done. SKEW: clocks that group 1 waits first. FILL: 0 no copies. AREG: A by ldmatrix. WGS consumers.
#include <cstdint>
#ifndef TURNS
#define TURNS 0
#endif
#ifndef SKEW
#define SKEW 0
#endif
#ifndef FILL
#define FILL 1
#endif
#ifndef AREG
#define AREG 0
#endif
#ifndef TWO
#define TWO 0
#endif
#ifndef WGS
#define WGS 2
#endif
#ifndef COLS
#define COLS 256
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef TILE
#define TILE 0
#endif
#define NP (COLS / 128)
#define A_BYTES (WGS * 64 * 128)
#define B_BYTES (COLS * 128)
#define STAGE (A_BYTES + B_BYTES)
typedef unsigned u32; typedef unsigned long long u64;
__device__ __forceinline__ void touch(float *s, int n) {
#pragma unroll
  for (int i = 0; i < 64; i++) if (i < n) asm volatile("" : "+f"(s[i]) :: "memory"); }
#define D64(d) "+f"(d[0]),"+f"(d[1]),"+f"(d[2]),"+f"(d[3]),"+f"(d[4]),"+f"(d[5]),"+f"(d[6]),"+f"(d[7]),"+f"(d[8]),"+f"(d[9]),"+f"(d[10]),"+f"(d[11]),"+f"(d[12]),"+f"(d[13]),"+f"(d[14]),"+f"(d[15]),"+f"(d[16]),"+f"(d[17]),"+f"(d[18]),"+f"(d[19]),"+f"(d[20]),"+f"(d[21]),"+f"(d[22]),"+f"(d[23]),"+f"(d[24]),"+f"(d[25]),"+f"(d[26]),"+f"(d[27]),"+f"(d[28]),"+f"(d[29]),"+f"(d[30]),"+f"(d[31])
#define D64B(d) "+f"(d[32]),"+f"(d[33]),"+f"(d[34]),"+f"(d[35]),"+f"(d[36]),"+f"(d[37]),"+f"(d[38]),"+f"(d[39]),"+f"(d[40]),"+f"(d[41]),"+f"(d[42]),"+f"(d[43]),"+f"(d[44]),"+f"(d[45]),"+f"(d[46]),"+f"(d[47]),"+f"(d[48]),"+f"(d[49]),"+f"(d[50]),"+f"(d[51]),"+f"(d[52]),"+f"(d[53]),"+f"(d[54]),"+f"(d[55]),"+f"(d[56]),"+f"(d[57]),"+f"(d[58]),"+f"(d[59]),"+f"(d[60]),"+f"(d[61]),"+f"(d[62]),"+f"(d[63])
#define L32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define L64 L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
__device__ __forceinline__ void product(float *d, u64 a, u64 b, int scale) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" L64 "}, %64, %65, p, 1, 1; }\n" : D64(d), D64B(d) : "l"(a), "l"(b), "r"(scale)); }
__device__ __forceinline__ void product_r(float *d, u32 (&a)[4], u64 b, int scale) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" L64 "}, {%64, %65, %66, %67}, %68, p, 1, 1; }\n" : D64(d), D64B(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale)); }
__device__ __forceinline__ void product_r64(float *d, u32 (&a)[4], u64 b, int scale) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" L32 "}, {%32, %33, %34, %35}, %36, p, 1, 1; }\n" : D64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale)); }
__device__ __forceinline__ void product_64(float *d, u64 a, u64 b, int scale) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" L32 "}, %32, %33, p, 1, 1; }\n" : D64(d) : "l"(a), "l"(b), "r"(scale)); }
__device__ __forceinline__ u64 desc(u32 address) { return ((u64)1 << 62) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 16) | ((address & 0x3ffff) >> 4); }
__device__ __forceinline__ void mb_wait(u32 bar, u32 phase) {
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" :: "r"(bar), "r"(phase) : "memory"); }
__device__ __forceinline__ void mb_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ __forceinline__ void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wg_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void take(int g) { if (TURNS) asm volatile("bar.sync %0, 256;" :: "r"(1 + g) : "memory"); }
__device__ __forceinline__ void give(int g) { if (TURNS) asm volatile("bar.arrive %0, 256;" :: "r"(2 - g) : "memory"); }
__device__ __forceinline__ void ldm(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address)); }
template <int N> __device__ __forceinline__ void add(float *acc, float *sums, float f, float g) {
#pragma unroll
  for (int i = 0; i < N; i++) acc[i] = fmaf(sums[i], (i / 2) % 2 ? g : f, acc[i]); }
extern "C" __global__ void __launch_bounds__(128 * (WGS + 1), 1) mb(long long *out, float *sink, const char *from, int k_tiles, int outer) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ __align__(8) u64 bars[2 * STAGES];
  __shared__ float factors[512];
  u32 base = (u32)__cvta_generic_to_shared(smem), full = (u32)__cvta_generic_to_shared(bars), empty = full + 8 * STAGES;
  int group = threadIdx.x / 128 - 1, t = threadIdx.x % 128;
  for (int i = threadIdx.x; i < STAGES * STAGE / 4; i += blockDim.x) ((int*)smem)[i] = ((const int*)from)[i];
  for (int i = threadIdx.x; i < 512; i += blockDim.x) factors[i] = 1e-6f * i;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * i)); asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * i), "r"(WGS)); }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  long long start = clock64();
  if (group < 0) {
    if (WGS == 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;"); else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0, phase = 1; u32 place = blockIdx.x * 40 % 128;
      for (int k = 0; k < k_tiles * outer; k++) {
        mb_wait(empty + 8 * stage, phase);
        if (FILL) {
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(full + 8 * stage), "r"(STAGE) : "memory");
          for (int i = 0; i < STAGE / 8192; i++) { asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 8192, [%2];" :: "r"(base + stage * STAGE + i * 8192), "l"(from + place * 8192), "r"(full + 8 * stage) : "memory"); place = (place + 1) % 512; }
        } else mb_arrive(full + 8 * stage);
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
      }
    }
  } else {
    if (WGS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;"); else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float acc[64 * NP];
    float sums[64];
    for (int i = 0; i < 64; i++) sums[i] = 0;
    long long first = clock64(); while (group == 1 && clock64() - first < SKEW) {}
    if (TURNS && group == 1) give(1);
    int stage = 0, phase = 0; float total = 0;
    for (int o = 0; o < outer; o++) {
#pragma unroll
    for (int i = 0; i < 64 * NP; i++) acc[i] = 0;
#if TWO
    // 64 columns at a time, in two sets of sums; one is added while the other is multiplied
    u32 a[4][4];
    float f0 = 0, f1 = 0, f[2 * NP];
    int last = 0;
#pragma unroll 1
    for (int k = 0; k < k_tiles; k++) {
      mb_wait(full + 8 * stage, phase);
      u32 sa = base + stage * STAGE + group * 8192, sb = base + stage * STAGE + A_BYTES;
      if (AREG) {
#pragma unroll
      for (int b = 0; b < 4; b++) ldm(a[b], sa + (t / 32 * 16 + t % 16) * 128 + ((b * 2 + t % 32 / 16) ^ (t % 8)) * 16);
      }
      float p0 = f0, p1 = f1;
      f0 = factors[(k % 2 * 128 + t / 4) & 511]; f1 = factors[(k % 2 * 128 + 8 + t / 4) & 511];
#pragma unroll
      for (int q = 0; q < 2 * NP; q++) {
        float *mine = sums + q % 2 * 32, *other = sums + (q + 1) % 2 * 32;
        wg_fence();
#pragma unroll
        for (int b = 0; b < 4; b++) { if (AREG) product_r64(mine, a[b], desc(sb + q * 8192) + b * 2, b > 0); else product_64(mine, desc(sa) + b * 2, desc(sb + q * 8192) + b * 2, b > 0); }
        wg_commit();
        wg_wait<1>(); touch(other, 32);
        if (q == 0 && k > 0) { if (t == 0) mb_arrive(empty + 8 * last); }
        if (q > 0) add<32>(acc + (q - 1) * 32, other, f0, f1); else add<32>(acc + (2 * NP - 1) * 32, other, p0, p1);
      }
      last = stage;
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
    wg_wait<0>(); touch(sums, 64); add<32>(acc + (2 * NP - 1) * 32, sums + 32, f0, f1);
    if (t == 0) mb_arrive(empty + 8 * last);
#else
#pragma unroll 1
    for (int k = 0; k < k_tiles; k++) {
      mb_wait(full + 8 * stage, phase);
      u32 sa = base + stage * STAGE + group * 8192, sb = base + stage * STAGE + A_BYTES;
      u32 a[4][4];
      if (AREG) {
#pragma unroll
        for (int b = 0; b < 4; b++) ldm(a[b], sa + (t / 32 * 16 + t % 16) * 128 + ((b * 2 + t % 32 / 16) ^ (t % 8)) * 16);
      }
      float f0, f1;
#pragma unroll
      for (int q = 0; q < NP; q++) {
        take(group);
        wg_fence(); touch(sums, 64);
#pragma unroll
        for (int b = 0; b < 4; b++) {
          if (AREG) product_r(sums, a[b], desc(sb + q * 16384) + b * 2, b > 0); else product(sums, desc(sa) + b * 2, desc(sb + q * 16384) + b * 2, b > 0);
          if (TURNS > 1) wg_commit();
        }
        if (TURNS <= 1) wg_commit();
        if (TURNS == 1) give(group);
        if (q == 0) { f0 = factors[(k % 2 * 128 + t / 4) & 511]; f1 = factors[(k % 2 * 128 + 8 + t / 4) & 511]; }
        float c = factors[(k % 4 * 16 + q) & 511];
        if (TURNS == 2) { wg_wait<3>(); give(group); } if (TURNS == 3) { wg_wait<2>(); give(group); } if (TURNS == 4) { wg_wait<1>(); give(group); }
        wg_wait<0>(); touch(sums, 64);
        if (TURNS == 5) give(group);
        if (q == NP - 1 && t == 0) mb_arrive(empty + 8 * stage);
        add<64>(acc + q * 64, sums, f0 * c, f1 * c);
      }
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
#endif
#pragma unroll
    for (int i = 0; i < 64 * NP; i++) total += acc[i];
    if (TILE) { long long now = clock64(); while (clock64() - now < TILE) {} }
    }
    if (TURNS && group == 0) take(0);
    long long end = clock64();
    if (total == 12345.678f) sink[threadIdx.x] = total;
    if (t == 0) { out[(blockIdx.x * WGS + group)] = end - start; }
  }
}
