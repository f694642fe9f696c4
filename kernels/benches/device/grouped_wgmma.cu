// Products of experts' rows by wgmma for sm_90a, a prototype for measurements: grouped.py compiles, checks and times it.
//
// rows:    out[r][n] = sum over k of a[r][k] * b[e][n][k]          bf16   (PAIR 0, 1, 2)
// back:    out[r][n] = sum over k of a[r][k] * b[e][k][n]          bf16   (PAIR 0, 2)
// weights: out[e][m][n] = sum over rows r of e: a[r][m] * b[r][n]  f32
//
// Tiles of 128 x 256: one thread asks for 64 of K by TMA into a ring of four stages, two groups of 128 threads multiply,
// one product of theirs still in flight while the next is asked for. With PAIR, two blocks of a cluster take neighbouring
// tiles and each loads half of what both need: 1: the rows (tiles side by side), 2: the weights (tiles one below the other).
// An element is one chain over ascending K. Limits: rows: n a multiple of 256 (PAIR 1: 512), k of 64; weights: m of 128,
// n of 256; rows of the next expert in a last step must be finite, since they are multiplied by zeros; no gathered rows.
// A wait that lasts too long traps, so that a fault in the ring ends as an error and not as a hang.
#ifndef EMULATED
#include <cuda.h>
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
#define D static __device__ __forceinline__
D u32 smem(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
D void bar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
D void bar_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
D void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// At the same barrier of block `rank` of the cluster.
D void bar_arrive_at(u32 bar, u32 rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(rank) : "memory");
}
D bool bar_try(u32 bar, u32 phase) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(phase) : "memory");
  return done;
}
D void bar_wait(u32 bar, u32 phase) {
  for (u32 tries = 0; !bar_try(bar, phase);)
    if (++tries > 1u << 18) __trap();
}
D void load(u32 to, const void* map, u32 bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
// To the same place of both blocks of the cluster; each block's own barrier counts what arrives there.
D void load_both(u32 to, const void* map, u32 bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "h"(static_cast<unsigned short>(3)) : "memory");
}
template <int TRANS_A, int TRANS_B> D void multiply(float (&d)[128], u64 a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p, 1, 1, %131, %132;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]),
        "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
        "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]),
        "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]),
        "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),
        "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
        "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));
}
D void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
D void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> D void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
D u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
D void cluster_meet() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
D void block_meet() { __syncthreads(); }
D void warp_meet() { __syncwarp(); }
D void group_meet(u32 group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
D void bars_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
D void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
D void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }
D void zero16(u32 at) { asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory"); }
// Of ordinary stores, for the tensor core.
D void show_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
D u32 exchange(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
#endif
constexpr u32 STAGES = 4, A_BYTES = 128 * 128, B_BYTES = 256 * 128, STAGE = A_BYTES + B_BYTES;

// Rows of 128 bytes, swizzled: `eight` bytes from eight rows to the next eight, `across` from 64 columns to the next (transposed only).
D u64 describe(u32 at, u32 eight, u32 across) {
  return static_cast<u64>((at & 0x3ffff) >> 4) | static_cast<u64>(across >> 4) << 16 | static_cast<u64>(eight >> 4) << 32 | static_cast<u64>(1) << 62;
}

enum Kind { ROWS, BACK, WEIGHTS };

struct Args {
  const int* ends;
  void* out;
  int experts, m, n, k;
};

// What producer and consumers walk over alike: tile number `t` of the launch, and the place in the ring.
template <int PAIR, Kind KIND> struct Walk {
  int t, stride, e, first, end, before, row, col, steps;
  u32 rank, stage, phase;
  __device__ __forceinline__ void start(const Args& g) {
    rank = PAIR ? blockIdx.x % 2 : 0, t = PAIR ? blockIdx.x / 2 : blockIdx.x, stride = PAIR ? gridDim.x / 2 : gridDim.x;
    e = 0, first = 0, end = g.ends[0], before = 0, stage = 0, phase = 0;
  }
  __device__ __forceinline__ bool find(const Args& g) {
    constexpr int HIGH = PAIR == 2 ? 256 : 128, WIDE = PAIR == 1 ? 512 : 256;
    const int across = g.n / WIDE;
    while (e < g.experts) {
      const int rows = end - first, count = (KIND == WEIGHTS ? g.m / HIGH : (rows + HIGH - 1) / HIGH) * across;
      if (t - before < count) {
        const int at = t - before;
        row = at / across * HIGH + (PAIR == 2 ? rank * 128 : 0), col = at % across * WIDE + (PAIR == 1 ? rank * 256 : 0);
        steps = KIND == WEIGHTS ? (rows + 63) / 64 : g.k / 64;
        return true;
      }
      before += count, first = end;
      if (++e < g.experts) end = g.ends[e];
    }
    return false;
  }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

template <int PAIR, Kind KIND> D void run(const CUtensorMap* a, const CUtensorMap* b, const Args& g, unsigned char* pool) {
  const u32 base = (smem(pool) + 1023) / 1024 * 1024, full = base + STAGES * STAGE, empty = full + 8 * STAGES;
  const u32 group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; ++i) bar_init(full + 8 * i, 1), bar_init(empty + 8 * i, PAIR ? 16 : 8);
    bars_are_made();
  }
  block_meet();
  if (PAIR) cluster_meet();
  Walk<PAIR, KIND> w;
  w.start(g);
  if (group == 2) {
    fewer_registers();
    if (threadIdx.x == 256)
      for (; w.find(g); w.t += w.stride)
        for (int step = 0; step < w.steps; ++step, w.next()) {
          const u32 bar = full + 8 * w.stage, to = base + w.stage * STAGE;
          const int k = step * 64;
          bar_wait(empty + 8 * w.stage, w.phase ^ 1);
          bar_expect(bar, STAGE);
          if (KIND == WEIGHTS) {
            for (u32 i = 0; i < 2; ++i) load(to + i * 8192, a, bar, w.row + i * 64, w.first + k);
            for (u32 i = 0; i < 4; ++i) load(to + A_BYTES + i * 8192, b, bar, w.col + i * 64, w.first + k);
          } else {
            if (PAIR == 1) load_both(to + w.rank * (A_BYTES / 2), a, bar, k, w.first + w.row + w.rank * 64);
            else load(to, a, bar, k, w.first + w.row);
            if (KIND == BACK) {
              for (u32 i = 0; i < 4; ++i) {
                const u32 there = to + A_BYTES + i * 8192;
                if (PAIR != 2) load(there, b, bar, w.col + i * 64, w.e * g.k + k);
                else if (i / 2 == w.rank) load_both(there, b, bar, w.col + i * 64, w.e * g.k + k);
              }
            } else if (PAIR == 2) load_both(to + A_BYTES + w.rank * (B_BYTES / 2), b, bar, k, w.e * g.n + w.col + w.rank * 128);
            else load(to + A_BYTES, b, bar, k, w.e * g.n + w.col);
          }
        }
  } else {
    more_registers();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float d[128];
    auto release = [&](u32 stage) {
      if (lane == 0) {
        if (PAIR) bar_arrive_at(empty + 8 * stage, 0), bar_arrive_at(empty + 8 * stage, 1);
        else bar_arrive(empty + 8 * stage);
      }
    };
    for (; w.find(g); w.t += w.stride) {
      u32 last = 0;
      if (w.steps == 0)
#pragma unroll
        for (int i = 0; i < 128; ++i) d[i] = 0.0f;
      for (int step = 0; step < w.steps; ++step, w.next()) {
        bar_wait(full + 8 * w.stage, w.phase);
        const u32 at = base + w.stage * STAGE, left = w.end - w.first - step * 64, mine = at + group * 8192;
        if (KIND == WEIGHTS && left < 64) {
          // Rows of the next expert are made zeros, by generic stores that the tensor core must see.
          for (u32 i = left * 8 + threadIdx.x % 128; i < 512; i += 128) zero16(mine + i * 16);
          show_stores();
          group_meet(group);
        }
        begin();
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
          if (KIND == BACK) multiply<0, 1>(d, describe(mine + j * 32, 1024, 16), describe(at + A_BYTES + j * 2048, 1024, 8192), step + j);
          else if (KIND == WEIGHTS) multiply<1, 1>(d, describe(mine + j * 2048, 1024, 8192), describe(at + A_BYTES + j * 2048, 1024, 8192), step + j);
          else multiply<0, 0>(d, describe(mine + j * 32, 1024, 16), describe(at + A_BYTES + j * 32, 1024, 16), step + j);
        commit();
        if (step) {
          finish<1>();
          release(last);
        }
        last = w.stage;
      }
      finish<0>();
      if (w.steps) release(last);
      const int r = w.row + group * 64 + warp * 16 + lane / 4;
      if (KIND == WEIGHTS) {
        float* to = static_cast<float*>(g.out) + (static_cast<u64>(w.e) * g.m + r) * g.n + w.col + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          *reinterpret_cast<float2*>(to + i * 8) = float2{d[4 * i], d[4 * i + 1]};
          *reinterpret_cast<float2*>(to + static_cast<u64>(8) * g.n + i * 8) = float2{d[4 * i + 2], d[4 * i + 3]};
        }
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          bf16* to = static_cast<bf16*>(g.out) + static_cast<u64>(w.first + r + h * 8) * g.n + w.col + lane % 4 * 8;
          const bool in = w.first + r + h * 8 < w.end;
#pragma unroll
          for (int i = 0; i < 32; i += 4) {
            u32 v[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) v[t] = pack(d[4 * (i + t) + 2 * h], d[4 * (i + t) + 2 * h + 1]);
#pragma unroll
            for (int s = 1; s < 3; ++s) {
              const bool odd = lane & s;
#pragma unroll
              for (int t = 0; t < 4; ++t)
                if (!(t & s)) {
                  const u32 other = exchange(odd ? v[t] : v[t | s], s);
                  (odd ? v[t] : v[t | s]) = other;
                }
            }
            if (in) *reinterpret_cast<uint4*>(to + i * 8) = uint4{v[0], v[1], v[2], v[3]};
          }
        }
      }
    }
  }
  if (PAIR) {
    warp_meet();
    cluster_meet();  // nobody leaves while the other may still write or arrive here
  }
}

#define KERNEL(name, pair, kind, cluster)                                                                                         \
  extern "C" __global__ void cluster __launch_bounds__(384, 1)                                                                    \
      name(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Args g) {                           \
    extern __shared__ __align__(1024) unsigned char pool[];                                                                         \
    run<pair, kind>(&a, &b, g, pool);                                                                                               \
  }
KERNEL(wgmma_rows, 0, ROWS, )
KERNEL(wgmma_rows_pair_1, 1, ROWS, __cluster_dims__(2, 1, 1))
KERNEL(wgmma_rows_pair_2, 2, ROWS, __cluster_dims__(2, 1, 1))
KERNEL(wgmma_back, 0, BACK, )
KERNEL(wgmma_back_pair_2, 2, BACK, __cluster_dims__(2, 1, 1))
KERNEL(wgmma_weights, 0, WEIGHTS, )
