// Products of experts' rows by mma.sync, a prototype for measurements: grouped.py compiles, checks and times it.
//
// MODE 0: out[r][n] = sum over k of a[r][k] * b[e][n][k]      rows r of expert e, b as it is stored ("up", "down")
// MODE 1: out[r][n] = sum over k of a[r][k] * b[e][k][n]      gradients of the rows
// MODE 2: out[e][m][n] = sum over rows r of e: a[r][m] * b[r][n], f32     gradients of the weights
//
// A persistent block takes tile after tile, in an order that follows from `ends` alone. An element is one chain of
// m16n8k16 from the expert's first row or k = 0 upwards: no split, no atomics, and rows behind an expert's last are read
// as zeros. So its bits do not depend on other experts, on the grid, or on where the expert's rows lie. Operands come by
// cp.async in STAGES stages, each with 64 of K, and go on loading across tiles; fragments come by ldmatrix, a step ahead.
// Limits: widths are multiples of the tile's, K a multiple of 64, offsets below 2^31 elements.
#ifndef EMULATED
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
#define D static __device__ __forceinline__
D u32 smem(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
// 16 bytes, or zeros where there is nothing.
D void copy16(u32 to, const bf16* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
D void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> D void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
template <bool TRANS> D void load4(u32 (&v)[4], u32 at) {
  if (TRANS)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
D void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
D u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
D u32 exchange(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
D void together() { __syncthreads(); }
#endif
#define MEMBER __device__ __forceinline__

struct Args {
  const bf16 *a, *b;
  void* out;
  const int *ends, *order;  // order: rows of `a` are taken by it (null: as they lie)
  int experts, m, n, k;     // m: width of `a` in MODE 2
};

// The tiles of a block: number `t` of the whole launch, found by walking over the experts.
template <int MODE, int BM, int BN> struct Walk {
  int t, e, begin, end, before, row, col, steps;
  MEMBER int tiles(const Args& g, int rows) { return (MODE == 2 ? g.m / BM : (rows + BM - 1) / BM) * (g.n / BN); }
  MEMBER void start(const Args& g, int block) { t = block, e = 0, begin = 0, end = g.ends[0], before = 0; }
  MEMBER bool find(const Args& g) {
    while (e < g.experts) {
      const int rows = end - begin, count = tiles(g, rows);
      if (t - before < count) {
        const int at = t - before, across = g.n / BN;
        row = at / across * BM, col = at % across * BN;
        steps = MODE == 2 ? (rows + 63) / 64 : g.k / 64;
        return true;
      }
      before += count, begin = end;
      if (++e < g.experts) end = g.ends[e];
    }
    return false;
  }
};

// Where 16 bytes stand in a tile of rows of PITCH bytes: neighbours of a column lie in different banks.
template <int PITCH> D u32 place(u32 row, u32 chunk) { return row * PITCH + ((chunk ^ (row & 7)) << 4); }

template <int MODE, int BM, int BN, int WM, int WN, int STAGES> struct Tile {
  static constexpr bool TA = MODE == 2, TB = MODE != 0;
  static constexpr int T = (BM / WM) * (BN / WN) * 32, MI = WM / 16, NI = WN / 8;
  static constexpr int A_BYTES = BM * 128, STAGE = (BM + BN) * 128;
  static constexpr int A_LOADS = BM * 8 / T, B_LOADS = BN * 8 / T;
  static constexpr int PA = TA ? BM * 2 : 128, PB = TB ? BN * 2 : 128;

  struct Loader {
    Walk<MODE, BM, BN> walk;
    int step, left;                 // of the tile's K; rows of the expert that are still to come
    bool more;
    const bf16 *a, *b;              // what this thread takes first of a step
    u32 rows[TA ? 1 : A_LOADS], there;  // of `a`, in elements; a bit for each that exists
    MEMBER void settle(const Args& g, u32 tid) {
      more = walk.find(g);
      while (more && walk.steps == 0) walk.t += gridDim.x, more = walk.find(g);
      step = 0;
      if (!more) return;
      left = walk.end - walk.begin;
      if (MODE == 0) b = g.b + static_cast<u64>(walk.e * g.n + walk.col + tid / 8) * g.k + tid % 8 * 8;
      else b = g.b + static_cast<u64>((MODE == 1 ? walk.e * g.k : walk.begin) + tid / (BN / 8)) * g.n + walk.col + tid % (BN / 8) * 8;
      if (TA) {
        a = g.a + static_cast<u64>(walk.begin + tid / (BM / 8)) * g.m + walk.row + tid % (BM / 8) * 8;
        return;
      }
      a = g.a;
      there = 0;
#pragma unroll
      for (int i = 0; i < A_LOADS; ++i) {
        const int r = walk.begin + walk.row + static_cast<int>(tid / 8 + i * (T / 8));
        const bool in = r < walk.end;
        const int from = in ? r : walk.begin;
        rows[i] = static_cast<u32>(g.order ? g.order[from] : from) * g.k + tid % 8 * 8;
        there |= (in ? 1u : 0u) << i;
      }
    }
    // Where there is nothing, nothing is read, wherever the address lies.
    MEMBER void fetch(const Args& g, u32 to, u32 tid) {
      if (more) {
        constexpr int A_ROWS = TA ? T / (BM / 8) : T / 8, B_ROWS = TB ? T / (BN / 8) : T / 8;  // of one load of all threads
        const u32 ra = tid / (TA ? BM / 8 : 8), rb = tid / (TB ? BN / 8 : 8);
        const u32 to_a = to + place<PA>(ra, tid % (TA ? BM / 8 : 8)), to_b = to + A_BYTES + place<PB>(rb, tid % (TB ? BN / 8 : 8));
#pragma unroll
        for (int i = 0; i < A_LOADS; ++i)
          copy16(to_a + i * A_ROWS * PA, TA ? a + static_cast<u32>(i * A_ROWS * g.m) : a + rows[i], TA ? static_cast<int>(ra + i * A_ROWS) < left : there >> i & 1);
        const int across = MODE == 0 ? g.k : g.n;
#pragma unroll
        for (int i = 0; i < B_LOADS; ++i)
          copy16(to_b + i * B_ROWS * PB, b + static_cast<u32>(i * B_ROWS * across), MODE != 2 || static_cast<int>(rb + i * B_ROWS) < left);
        a += TA ? 64 * g.m : 64;
        b += TB ? 64 * g.n : 64;
        left -= 64;
        if (++step == walk.steps) walk.t += gridDim.x, settle(g, tid);
      }
      commit();
    }
  };

  static MEMBER void fragments(u32 (&a)[MI][4], u32 (&b)[NI / 2][4], u32 at, int kk, u32 wm, u32 wn, u32 lane) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
      load4<TA>(a[i], at + (TA ? place<PA>(kk * 16 + lane / 16 * 8 + lane % 8, (wm + i * 16) / 8 + lane / 8 % 2)
                               : place<PA>(wm + i * 16 + lane % 16, kk * 2 + lane / 16)));
#pragma unroll
    for (int j = 0; j < NI / 2; ++j)
      load4<TB>(b[j], at + A_BYTES + (TB ? place<PB>(kk * 16 + lane / 8 % 2 * 8 + lane % 8, (wn + j * 16) / 8 + lane / 16)
                                         : place<PB>(wn + j * 16 + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2)));
  }

  static MEMBER void store(const Args& g, const Walk<MODE, BM, BN>& w, float (&acc)[MI][NI][4], u32 wm, u32 wn, u32 lane) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = w.row + static_cast<int>(wm + i * 16 + h * 8 + lane / 4);
        if (MODE == 2) {
          float* to = static_cast<float*>(g.out) + (static_cast<u64>(w.e) * g.m + r) * g.n + w.col + wn + lane % 4 * 2;
#pragma unroll
          for (int j = 0; j < NI; ++j) *reinterpret_cast<float2*>(to + j * 8) = float2{acc[i][j][2 * h], acc[i][j][2 * h + 1]};
        } else {
          bf16* to = static_cast<bf16*>(g.out) + static_cast<u64>(w.begin + r) * g.n + w.col + wn + lane % 4 * 8;
          const bool in = w.begin + r < w.end;
#pragma unroll
          for (int j = 0; j < NI; j += 4) {
            u32 v[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) v[t] = pack(acc[i][j + t][2 * h], acc[i][j + t][2 * h + 1]);
            // Four lanes change four by four: each then has 16 bytes that belong together.
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
            if (in) *reinterpret_cast<uint4*>(to + j * 8) = uint4{v[0], v[1], v[2], v[3]};
          }
        }
      }
  }

  static MEMBER void run(const Args& g, char* pool) {
    const u32 base = smem(pool), tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const u32 wm = warp / (BN / WN) * WM, wn = warp % (BN / WN) * WN;
    Loader load;
    load.walk.start(g, blockIdx.x);
    load.settle(g, tid);
    Walk<MODE, BM, BN> work;
    work.start(g, blockIdx.x);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load.fetch(g, base + s * STAGE, tid);
    wait_copies<STAGES - 2>();
    together();
    u32 a[2][MI][4], b[2][NI / 2][4];
    float acc[MI][NI][4];
    int stage = 0;
    fragments(a[0], b[0], base, 0, wm, wn, lane);
    while (work.find(g)) {
#pragma unroll
      for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int j = 0; j < NI; ++j)
#pragma unroll
          for (int t = 0; t < 4; ++t) acc[i][j][t] = 0.0f;
      for (int step = 0; step < work.steps; ++step) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          if (kk == 3) {
            wait_copies<STAGES - 2>();
            together();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
          }
          fragments(a[(kk + 1) % 2], b[(kk + 1) % 2], base + stage * STAGE, (kk + 1) % 4, wm, wn, lane);
#pragma unroll
          for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int j = 0; j < NI; ++j) mma(acc[i][j], a[kk % 2][i], b[kk % 2][j / 2][j % 2 * 2], b[kk % 2][j / 2][j % 2 * 2 + 1]);
            // Between products, so that the tensor cores have work while addresses are made.
            if (kk == 0 && i == MI / 2 - 1) load.fetch(g, base + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE, tid);
          }
        }
      }
      store(g, work, acc, wm, wn, lane);
      work.t += gridDim.x;
    }
  }
};

#define KERNEL(name, mode, bm, bn, wm, wn, stages, blocks)                                                            \
  extern "C" __global__ void __launch_bounds__(bm / wm * (bn / wn) * 32, blocks) name(const Args g) {                 \
    extern __shared__ __align__(128) char pool[];                                                                      \
    Tile<mode, bm, bn, wm, wn, stages>::run(g, pool);                                                                  \
  }
// Name_mode_bm_bn_threads_stages_blocks: grouped.py reads the numbers from it.
KERNEL(mma_0_128_128_128_3_2, 0, 128, 128, 64, 64, 3, 2)
KERNEL(mma_0_128_256_256_4_1, 0, 128, 256, 64, 64, 4, 1)
KERNEL(mma_0_128_128_256_3_2, 0, 128, 128, 64, 32, 3, 2)
KERNEL(mma_1_128_128_128_3_2, 1, 128, 128, 64, 64, 3, 2)
KERNEL(mma_1_128_256_256_4_1, 1, 128, 256, 64, 64, 4, 1)
KERNEL(mma_2_128_128_128_3_2, 2, 128, 128, 64, 64, 3, 2)
KERNEL(mma_2_128_256_256_4_1, 2, 128, 256, 64, 64, 4, 1)
