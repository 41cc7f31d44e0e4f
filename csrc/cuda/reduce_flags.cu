// reduce_flags: small all-reduces, reduce-scatters and all-gathers, by packets that mark their own arrival.
//   one-shot        every rank sends its input to all and reduces all inputs   out[i] = in_0[i] op in_1[i] op ...
//   reduce-scatter  every rank sends share p to rank p and reduces the shares that come
//   all-gather      every rank sends its input to all
//   two-shot        an all-reduce as the second and then the third of these
// Sums are reduce.cuh's, in rank order, whoever takes them: the same bits on every rank, with any number of blocks.
//
// A packet is 12 bytes and the epoch, in one 16-byte access; a thread has four of them (48 bytes) of each share, at the same
// place in all of them, from its own loads to the result.
//
// Cost     one crossing of the link, two-shot two, and no fence; scale-up bytes sent per rank: 4/3 of, one-shot: all but 1 of
//          world_size inputs; two-shot: 2 (world_size - 1) shares; else: world_size - 1 shares
// Launch   blocks of at most 512 threads, at most kBlocks of them; ranks may come with different grids
// Buffers  staging symmetric, zero at first; in and out any, out may be in, or the smaller of them the own share of the other
// VISIBLE  the epoch is in the same 16-byte access as the data.
// REUSE    slabs are two by the epoch's parity, as headers are (signal.cuh), and those of inputs others than those of results.
//          In place: a thread has sent its bytes of the input before it stores there, and nobody else touches them.
// PROGRESS every thread sends its packets of the input before it waits; it waits for packets of inputs, which need nothing, and
//          then for packets of results, which need only those. All blocks fit on the device at once.
// FAILURE  a thread whose deadline passes stores the missing rank in every rank's record and waits for nothing any more; so
//          does everybody who sees a record. Out is undefined then; the host raises. A header with another digest is a failure.
#include "reduce.cuh"

namespace a2a {

constexpr bool kTwoShot = TWO_SHOT;  // of an all-reduce
constexpr bool kSendsWhole = COLLECTIVE == kAllReduce && !kTwoShot;
constexpr bool kSendsResults = COLLECTIVE == kAllGather || kTwoShot;
constexpr std::uint32_t kLooks = kWorld < 3 ? kWorld : 3;  // ranks whose packets a thread looks for at a time

// A thread's bytes of a share, as vectors and as packets.
struct Payload {
  uint4 v[3];

  __device__ void load(const std::uint8_t* from, std::uint64_t left) {
#pragma unroll
    for (std::uint32_t k = 0; k < 3; k++) v[k] = load_vector(from + 16 * k, left > 16 * k ? left - 16 * k : 0);
  }
  __device__ void store(std::uint8_t* to, std::uint64_t left) const {
#pragma unroll
    for (std::uint32_t k = 0; k < 3; k++) store_vector(to + 16 * k, v[k], left > 16 * k ? left - 16 * k : 0);
  }
};

struct Packets {
  uint4 w[4];

  // Side by side lie packets of threads side by side.
  __device__ void look(const uint4* slab, std::uint32_t units, std::uint32_t u) {
#pragma unroll
    for (std::uint32_t k = 0; k < 4; k++) w[k] = ptx::load_relaxed_sys(slab + k * units + u);
  }
  __device__ bool arrived(std::uint32_t epoch) const {
    return w[0].w == epoch && w[1].w == epoch && w[2].w == epoch && w[3].w == epoch;
  }
  __device__ Payload payload() const {
    return {{{w[0].x, w[0].y, w[0].z, w[1].x}, {w[1].y, w[1].z, w[2].x, w[2].y}, {w[2].z, w[3].x, w[3].y, w[3].z}}};
  }
  __device__ static void send(uint4* slab, std::uint32_t units, std::uint32_t u, const Payload& unit,
                              std::uint32_t epoch) {
    const uint4(&v)[3] = unit.v;
    ptx::store_relaxed_sys(slab + u, uint4{v[0].x, v[0].y, v[0].z, epoch});
    ptx::store_relaxed_sys(slab + units + u, uint4{v[0].w, v[1].x, v[1].y, epoch});
    ptx::store_relaxed_sys(slab + 2 * units + u, uint4{v[1].z, v[1].w, v[2].x, epoch});
    ptx::store_relaxed_sys(slab + 3 * units + u, uint4{v[2].y, v[2].z, v[2].w, epoch});
  }
};

struct Flags {
  const Params& a;
  Wait wait;
  const std::uint32_t rank, epoch, thread, threads;  // of all blocks
  const std::uint8_t* const in;
  std::uint8_t* const out;
  Payload ready;  // its unit of what is sent first, loaded while the epoch is

  __device__ Staging& staging(std::uint32_t r) const { return *a.place.at<Staging>(r, a.staging); }
  __device__ uint4* input_slab(std::uint32_t at, std::uint32_t from) const {
    return staging(at).input_slabs[from][epoch % 2];
  }
  __device__ uint4* result_slab(std::uint32_t at, std::uint32_t from) const {
    return staging(at).result_slabs[from][epoch % 2];
  }
  __device__ static std::uint32_t units(std::uint64_t bytes) { return std::uint32_t(ceil_div(bytes, kUnit)); }

  // ---- inputs

  // Unit u of the share that is sent first, or of all that is sent.
  __device__ Payload first_unit(const std::uint8_t* share, std::uint64_t bytes, std::uint32_t u) const {
    if (u == thread) return ready;
    Payload unit;
    unit.load(share + u * kUnit, bytes - u * kUnit);
    return unit;
  }

  // Before anything is sent.
  __device__ void prepare() {
    const std::uint32_t next = (rank + 1) % kWorld;
    const std::uint64_t bytes = kSendsWhole ? a.shares.total : a.shares.bytes(kReduces ? next : rank);
    if (thread < units(bytes))
      ready.load(in + (kReduces && !kSendsWhole ? a.shares.at(next) : 0) + thread * kUnit, bytes - thread * kUnit);
  }

  __device__ void send_inputs() const {
    if constexpr (kSendsWhole) {
      const std::uint32_t all = units(a.shares.total);
      for (std::uint32_t u = thread; u < all; u += 2 * threads) {  // two at a time hide each other's loads
        const std::uint32_t v = u + threads;
        const Payload one = first_unit(in, a.shares.total, u);
        Payload other;
        if (v < all) other.load(in + v * kUnit, a.shares.total - v * kUnit);
        for (std::uint32_t k = 1; k < kWorld; k++) {
          uint4* slab = input_slab((rank + k) % kWorld, rank);
          Packets::send(slab, all, u, one, epoch);
          if (v < all) Packets::send(slab, all, v, other, epoch);
        }
      }
    } else {
      for (std::uint32_t k = 1; k < kWorld; k++) {
        const std::uint32_t p = (rank + k) % kWorld;
        const std::uint64_t bytes = a.shares.bytes(p);
        const std::uint8_t* share = in + a.shares.at(p);
        for (std::uint32_t u = thread; u < units(bytes); u += threads) {
          Payload unit;
          if (k == 1)
            unit = first_unit(share, bytes, u);
          else
            unit.load(share + u * kUnit, bytes - u * kUnit);
          Packets::send(input_slab(p, rank), units(bytes), u, unit, epoch);
        }
      }
    }
  }

  // Unit u of every rank's input, reduced; false: a rank's has not come.
  __device__ bool reduce(Payload& result, const Payload& own, std::uint32_t all, std::uint32_t u) {
    Sum sums[3];
#pragma unroll 1
    for (std::uint32_t first = 0; first < kWorld; first += kLooks) {
      Packets packets[kLooks];
#pragma unroll
      for (std::uint32_t j = 0; j < kLooks; j++)
        if (first + j < kWorld && first + j != rank) packets[j].look(input_slab(rank, first + j), all, u);
#pragma unroll
      for (std::uint32_t j = 0; j < kLooks; j++) add(sums, first + j, packets[j], own, all, u);
    }
#pragma unroll
    for (std::uint32_t k = 0; k < 3; k++) result.v[k] = sums[k].result();
    return !wait.broken;
  }

  // Rank p's term, of which `packets` was a first look.
  __device__ __forceinline__ void add(Sum (&sums)[3], std::uint32_t p, Packets& packets, const Payload& own,
                                      std::uint32_t all, std::uint32_t u) {
    if (p >= kWorld) return;
    if (p != rank)
      while (!packets.arrived(epoch) && wait.again(p)) packets.look(input_slab(rank, p), all, u);
    const Payload term = p == rank ? own : packets.payload();
#pragma unroll
    for (std::uint32_t k = 0; k < 3; k++) p == 0 ? sums[k].first(term.v[k]) : sums[k].next(term.v[k]);
  }

  // ---- results

  __device__ void send_result(const Payload& unit, std::uint32_t all, std::uint32_t u) const {
    for (std::uint32_t k = 1; k < kWorld; k++) {
      const std::uint32_t p = (rank + k) % kWorld;
      Packets::send(result_slab(p, rank), all, u, unit, epoch);
    }
  }

  // This rank's share, or all of a one-shot.
  __device__ bool results() {
    const std::uint64_t bytes = kSendsWhole ? a.shares.total : a.shares.bytes(rank);
    const std::uint8_t* from = in + (kReduces && !kSendsWhole ? a.shares.at(rank) : 0);
    std::uint8_t* to = out + (kSendsResults ? a.shares.at(rank) : 0);
    const std::uint32_t all = units(bytes);
    for (std::uint32_t u = thread; u < all; u += threads) {
      Payload unit;
      if constexpr (kSendsWhole || !kReduces)
        unit = first_unit(from, bytes, u);
      else
        unit.load(from + u * kUnit, bytes - u * kUnit);
      if constexpr (kReduces)
        if (!reduce(unit, unit, all, u)) return false;
      if constexpr (kSendsResults) send_result(unit, all, u);
      if (kReduces || from != to) unit.store(to + u * kUnit, bytes - u * kUnit);
    }
    return true;
  }

  __device__ void receive_results() {
    for (std::uint32_t k = 1; k < kWorld; k++) {
      const std::uint32_t p = (rank + kWorld - k) % kWorld;
      const std::uint64_t bytes = a.shares.bytes(p);
      const uint4* slab = result_slab(rank, p);
      std::uint8_t* to = out + a.shares.at(p);
      for (std::uint32_t u = thread; u < units(bytes); u += threads) {
        Packets packets;
        do packets.look(slab, units(bytes), u);
        while (!packets.arrived(epoch) && wait.again_behind(p, epoch));
        if (wait.broken) return;
        packets.payload().store(to + u * kUnit, bytes - u * kUnit);
      }
    }
  }

  __device__ void run() {
    if (a.digest != kRefusal) prepare();
    if (blockIdx.x == 0)
      for (std::uint32_t p = threadIdx.x; p < kWorld; p += blockDim.x)
        send_header(a, p, epoch, kOrdinary, kOrdinary);  // also to itself: for messages
    if (a.digest != kRefusal) {
      if constexpr (kReduces)
        send_inputs();
      else
        results();
    }
    if (blockIdx.x == 0)  // the last threads, which have no packets where there are few
      for (std::uint32_t p = blockDim.x - 1 - threadIdx.x; p < kWorld; p += blockDim.x)
        if (p != rank) wait.await_header(p, epoch, a.digest, true);
    if (a.digest == kRefusal) return;
    if constexpr (kReduces)
      if (!results()) return;
    if constexpr (kSendsResults) receive_results();
  }
};

}  // namespace a2a

extern "C" __global__ void __launch_bounds__(512) reduce_flags(const __grid_constant__ a2a::Params a) {
  using namespace a2a;
  const std::uint32_t rank = a.place.rank;
  const std::uint32_t epoch = next_epoch(a.place.control(rank)->epoch[blockIdx.x]);
  Flags flags{a,
              Wait(a.place, kWorld),
              rank,
              epoch,
              blockIdx.x * blockDim.x + threadIdx.x,
              gridDim.x * blockDim.x,
              reinterpret_cast<const std::uint8_t*>(a.in),
              reinterpret_cast<std::uint8_t*>(a.out),
              {}};
  flags.run();
  leave(a.place, epoch);
}
