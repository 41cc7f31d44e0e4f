// What the kernels behind moe_push's gates share: the parameters, a piece of a token, and who works on which. `kDeep`, the
// vectors of a lane in a piece, is the including kernel's.
#pragma once
#include "moe_push.cuh"
#include "moe_push_ready.cuh"

namespace a2a {

using P = Piece<kDeep>;

struct Expand {
  Moe m;
  std::uint8_t *rows, *scales;
  float* weights;  // [row]; dispatch writes it, the gradient reads it
  std::int32_t *rank, *token, *k, *index;
  const std::uint8_t *x, *x_scales;  // own tokens
  const std::int32_t* ids;           // [token][k], a dispatch's
  const float* topk_weights;         // the same, or null
  const std::uint8_t* out_rows;      // the gradient: rows of the dot product, or null
  float* grad_weights;               // its results
  std::uint32_t capacity, compact_capacity;
  std::uint32_t first_chunk, end_chunk;  // of the peers' tokens
  std::uint32_t own_first, own_end;      // of own tokens; the first ones bring the padding along
  std::uint32_t credits, last;           // not 0: senders wait for what is consumed; the call's last kernel
};

// A piece of a token, as it came or as it goes into rows. kKeep: it stays in the wire format.
template <bool kKeep>
struct Got {
  uint4 v[kDeep];
  Quantised q[kDeep];
  float scale[kDeep];
  std::uint32_t code[kDeep];

  // e4m3 and scales
  __device__ void load_wire(const P& piece, const std::uint8_t* values, const std::uint8_t* scales) {
#pragma unroll
    for (std::uint32_t k = 0; k < kDeep; k++) {
      if (!piece.has(k)) continue;
      q[k].load(values, piece.at(k));
      const std::uint32_t block = piece.at(k) * kColumns / wire_block(kWire);
      scale[k] = scale_value(kWire, scales, block);
      if constexpr (kWire == kMxfp8) code[k] = scales[block];
    }
    finish(piece);
  }
  // rows of the dtype, which arrive as others would from here
  __device__ void load_rows(const P& piece, const std::uint8_t* row) {
    piece.load(v, row);
    if constexpr (kWire != kNoWire) {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) {
        const Scale s = Quantise<kDtype, kWire>::run(q[k].q, v[k]);
        scale[k] = s.value, code[k] = s.code;
      }
      finish(piece);
    }
  }
  __device__ void finish(const P& piece) {
    if constexpr (!kKeep) {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) v[k] = dequantise<kDtype>(q[k].q, scale[k]);
    }
  }
  __device__ void store(const P& piece, const Expand& a, std::uint64_t row) const {
    if constexpr (!kKeep) {
      piece.store(a.rows + row * kRowBytes, v);
    } else {
#pragma unroll
      for (std::uint32_t k = 0; k < kDeep; k++) {
        if (!piece.has(k)) continue;
        q[k].store(a.rows + row * kHidden, piece.at(k));
        store_scale<kDtype, kWire>(a.scales + row * kScales * scale_bytes(kWire), piece.at(k), scale[k], code[k]);
      }
    }
  }
};

struct Expander {
  const Expand& a;
  const Moe& m;
  const std::uint32_t epoch, lane, warp, warps;  // among all of the grid

  __device__ explicit Expander(const Expand& args)
      : a(args),
        m(args.m),
        epoch(args.m.epoch()),
        lane(threadIdx.x % 32),
        warp(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32),
        warps(gridDim.x * (blockDim.x / 32)) {}

  template <bool kReady, bool kKeep>
  __device__ void load(Got<kKeep>& got, const P& piece, std::uint32_t token) const {
    if constexpr (kReady)
      got.load_wire(piece, a.x + std::uint64_t(token) * kHidden,
                    a.x_scales + std::uint64_t(token) * kScales * scale_bytes(kWire));
    else
      got.load_rows(piece, a.x + std::uint64_t(token) * kRowBytes);
  }
  template <bool kKeep>
  __device__ void load_slot(Got<kKeep>& got, const P& piece, std::uint64_t number) const {
    const std::uint8_t* slot = m.slot(m.rank(), number, epoch);
    if constexpr (kWire != kNoWire)
      got.load_wire(piece, slot, slot + kScalesAt);
    else
      piece.load(got.v, slot);
  }

  // Call f(j, source, u, number of its slot) for all tokens of the peers, in this launch's chunks, a unit of them a warp.
  template <typename F>
  __device__ void peers(std::uint32_t units, F f) const {
    // A small launch has a warp for every item: those of own tokens leave the first peers' to others.
    const std::uint32_t busy = a.own_end ? kRanges * Moe::chunk_tokens(m.tokens) * units : 0;
    const std::uint32_t first = (warp + warps - busy % warps) % warps;
    for (std::uint32_t c = a.first_chunk; c < a.end_chunk; c++)
      for (std::uint32_t step = 1; step < kWorld; step++) {
        const std::uint32_t s = (m.rank() + step) % kWorld;
        const Chunk chunk(m.starts_from(s), c, lane);
        for (std::uint32_t item = first; item < chunk.total * units; item += warps) {
          std::uint32_t u, range, i;
          chunk.find(item / units, u, range, i);
          f(item % units, s, u, m.slot_number(m.rank(), s, range, i));
        }
      }
  }

  // Call f(token, unit of it, u where rows are compact) for the own tokens of this launch's chunks that stay here.
  template <typename F>
  __device__ void own(std::uint32_t units, F f) const {
    for (std::uint32_t c = a.own_first; c < a.own_end; c++) {
      const std::uint32_t each = Moe::chunk_tokens(m.tokens);
      for (std::uint32_t item = warp; item < kRanges * each * units; item += warps) {
        const std::uint32_t j = item / units, token = m.token_at(j / each, c) + j % each;
        if (token >= m.token_at(j / each, c + 1)) continue;
        const std::int32_t i = m.numbers()[std::uint64_t(token) * kWorld + m.rank()];
        if (i >= 0) f(token, item % units, kCompact ? m.u_of(token, m.rank(), std::uint32_t(i)) : 0);
      }
    }
  }

  // Rows that no token fills: zero. kPieces: of a row, where arrivals are counted.
  template <bool kDispatch, std::uint32_t kPieces = 1>
  __device__ void padding() const {
    if (a.own_first || !a.own_end) return;
    const std::uint32_t most = m.alignment - 1;
    for (std::uint32_t item = warp; item < m.local_experts * most; item += warps) {
      const std::int32_t* of_expert = m.plan + PlanAt::kPadding + 2 * (item / most);
      const std::uint32_t row = of_expert[0] + item % most;
      if (row >= std::uint32_t(of_expert[1]) || row >= a.capacity) continue;
      if (!(kDispatch && kCompact)) zero<kDispatch && kWireRows>(row);
      if (kDispatch && lane == 0) {
        a.weights[row] = 0;
        a.rank[row] = a.token[row] = a.k[row] = -1;
        if (kCompact) a.index[row] = 0;
      } else if (lane == 0 && a.grad_weights) {
        a.grad_weights[row] = 0;
      }
      if (kDispatch) count_arrivals<kPieces>(m, lane == 0 ? std::int32_t(row) : -1, kPieces);
    }
    if (kDispatch && kReadyFlags) arrive_beyond(m);
  }
  template <bool kKeep>
  __device__ void zero(std::uint32_t row) const {
    if constexpr (kKeep) {
      for (std::uint32_t i = lane; i < kHidden / 4; i += 32)
        reinterpret_cast<std::uint32_t*>(a.rows + std::uint64_t(row) * kHidden)[i] = 0;
      std::uint8_t* scales = a.scales + std::uint64_t(row) * kScales * scale_bytes(kWire);
      for (std::uint32_t b = lane; b < kScales; b += 32) {  // 1, as for any block of zeros
        if constexpr (kWire == kFp8)
          reinterpret_cast<float*>(scales)[b] = 1.0f;
        else
          scales[b] = 127;
      }
    } else {
      for (std::uint32_t i = lane; i < kVectors; i += 32)
        reinterpret_cast<uint4*>(a.rows + std::uint64_t(row) * kRowBytes)[i] = uint4{0, 0, 0, 0};
    }
  }

  __device__ void end() const { end_chunks(m, epoch, a.end_chunk, a.credits, a.last); }
};

}  // namespace a2a
