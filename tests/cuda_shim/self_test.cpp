// What the emulated machine itself must do, and must notice: small kernels, right ones and wrong ones.
#include "machine.h"

#include "cuda/self_test.cu"

namespace {

using shim::Device;
using shim::World;
using shim::wrong;

template <class T>
T* words(Device& d, std::size_t at = 0) {
  return reinterpret_cast<T*>(d.window + at);
}

void expect(const char* what, std::uint64_t got, std::uint64_t wanted) {
  if (got != wanted)
    wrong(shim::kWrong, "%s is %llu, not %llu", what, (unsigned long long)got, (unsigned long long)wanted);
}

void warps(std::uint64_t seed) {
  World world(seed, 2);
  world.run([](Device& d) {
    auto* out = words<std::uint32_t>(d);
    d.launch(warp_functions, {3, 64}, out);
    d.synchronize();
    for (std::uint32_t i = 0; i < 3 * 64; i++) {
      const std::uint32_t lane = i % 32, *o = out + i * 10, block = i / 64;
      expect("shfl", o[0], (lane + 5) % 32 * 3);
      expect("shfl_up", o[1], lane % 8 < 2 ? lane : lane - 2);
      expect("shfl_xor", o[2], lane ^ 16);
      expect("ballot", o[3], 0x49249249);
      expect("match_any", o[4], 0x11111111u << lane % 4);
      expect("reduce_add", o[5], lane % 2 ? 16 * 16 : 15 * 16);
      expect("reduce_max", o[6], lane % 2 ? 31 : 30);
      expect("all", o[7], lane % 2);
      expect("syncthreads_count", o[8], block == 0 ? 22 : 21);
      expect("syncthreads_or, and", o[9], block == 0 ? 0 : block == 1 ? 3 : 2);
    }
  });
}

void histogram(std::uint64_t seed) {
  World world(seed, 2);
  world.run([](Device& d) {
    auto* values = words<std::uint32_t>(d);
    auto* bins = values + 1024;
    std::uint32_t wanted[16] = {};
    for (std::uint32_t i = 0; i < 1024; i++) wanted[values[i] = d.own.below(16)]++;
    d.launch(shared_histogram, {2, {32, 2}, 16 * sizeof(std::uint32_t)}, values, 1024u, bins);
    d.launch(shared_histogram, {3, 96, 16 * sizeof(std::uint32_t)}, values, 1024u, bins);  // in order, without a wait
    d.synchronize();
    for (int b = 0; b < 16; b++) expect("a bin", bins[b], 2 * wanted[b]);
  });
}

// A message from rank 0 to rank 1: data, then a word, in several ways.
void message(std::uint64_t seed, Message how) {
  World world(seed, 2);
  world.run([how](Device& d) {
    auto* data = reinterpret_cast<std::uint32_t*>(d.world.base + World::kWindow);
    d.launch(d.rank ? receive_message : send_message, {1, 32}, data, how);
    d.synchronize();
    if (d.rank)
      for (std::uint32_t i = 0; i < 32; i++) expect("what came", words<std::uint32_t>(d)[128 + i], 100 + i);
  });
}

template <Message how>
void message(std::uint64_t seed) {
  message(seed, how);
}

// Two relaxed stores: they may arrive in any order.
void out_of_order(std::uint64_t seed) {
  World world(seed, 2);
  world.run([](Device& d) {
    auto* to = reinterpret_cast<std::uint32_t*>(d.world.base + World::kWindow);
    d.launch(d.rank ? second_first : two_stores, {1, 32}, to);
    d.synchronize();
    if (d.rank) expect("the first word, after the second has come", to[64], 1);
  });
}

void launches(std::uint64_t seed, bool waits) {
  World world(seed, 1);
  world.run([waits](Device& d) {
    auto* p = words<std::uint32_t>(d);
    d.launch(fill, {2, 64}, p, 7u);
    shim::Shape early{2, 64};
    early.programmatic = true;
    d.launch(waits ? add_after_wait : add_without_wait, early, p);
    d.synchronize();
    for (std::uint32_t i = 0; i < 128; i++) expect("a sum", p[i], 8);
  });
}

void bulk(std::uint64_t seed, Bulk how) {
  World world(seed, 1);
  world.run([how](Device& d) {
    d.launch(bulk_rows, {1, 32}, words<std::uint32_t>(d), how);
    d.synchronize();
    for (std::uint32_t i = 0; i < 5 * 32; i++) expect("a bulk copy", words<std::uint32_t>(d)[i], i % 32 + i / 32);
  });
}

void conversions(std::uint64_t) {
  using namespace a2a::ptx;
  expect("bf16 of ties", to_bf16x2(1.00390625f, 1.01171875f), 0x3f823f80);
  expect("bf16 of infinity and the largest float", to_bf16x2(INFINITY, 3.4028235e38f), 0x7f807f80);
  expect("f16 of -1/3 and its least", to_f16x2(-1.0f / 3, 5.9604645e-8f), 0x0001b555);
  expect("f16 of 65520 and 65519", to_f16x2(65520, 65519), 0x7bff7c00);
  expect("e4m3 of 1000 and its least", to_e4m3x2(1000, 0.001953125f), 0x017e);
  expect("e4m3 of ties", to_e4m3x2(17, -19), 0xda58);
  for (std::uint32_t h = 0; h < 0x7c00; h++) expect("f16 and back", to_f16x2(from_f16(std::uint16_t(h)), 0), h);
  for (std::uint32_t q = 0; q < 0x7f; q++)
    expect("e4m3, f16, and back", to_e4m3x2(from_f16(std::uint16_t(e4m3x2_to_f16x2(std::uint16_t(q)))), 0), q);
}

template <class Kernel>
void alone(std::uint64_t seed, Kernel kernel, std::uint32_t threads = 64) {
  World world(seed, 1);
  world.run([=](Device& d) { d.launch(kernel, {2, threads}, words<std::uint32_t>(d)); });
}

const std::vector<shim::Scenario> kScenarios = {
    {"warps", warps},
    {"histogram", histogram},
    {"message", message<kReleased>},
    {"fence", message<kFenced>},
    {"launches", [](std::uint64_t seed) { launches(seed, true); }},
    {"exchange", [](std::uint64_t seed) { alone(seed, exchange_rows); }},
    {"bulk", [](std::uint64_t seed) { bulk(seed, kRight); }},
    {"conversions", conversions},
    // and what must be noticed
    {"bulk_no_await", [](std::uint64_t seed) { bulk(seed, kNoAwait); }},
    {"bulk_no_wait_read", [](std::uint64_t seed) { bulk(seed, kNoWaitRead); }},
    {"bulk_no_wait", [](std::uint64_t seed) { bulk(seed, kNoWait); }},
    {"not_released", message<kRelaxed>},
    {"not_acquired", message<kNotAcquired>},
    {"device_scope", message<kDeviceScope>},
    {"volatile_word", message<kVolatile>},
    {"plain_word", message<kPlain>},
    {"out_of_order", out_of_order},
    {"early_launch", [](std::uint64_t seed) { launches(seed, false); }},
    {"no_syncthreads", [](std::uint64_t seed) { alone(seed, exchange_rows_too_early); }},
    {"no_syncwarp", [](std::uint64_t seed) { alone(seed, shuffle_is_no_barrier); }},
    {"block_scope", [](std::uint64_t seed) { alone(seed, count_in_block_scope); }},
    {"blocks", [](std::uint64_t seed) { alone(seed, blocks_share_a_word); }},
    {"divergent", [](std::uint64_t seed) { alone(seed, divergent_barrier); }},
    {"unlike", [](std::uint64_t seed) { alone(seed, unlike_exchanges); }},
    {"nobody_comes", [](std::uint64_t seed) { alone(seed, spin_for_ever); }},
    {"half_a_warp", [](std::uint64_t seed) { alone(seed, half_a_warp); }},
};

}  // namespace

int main(int argc, char** argv) { return shim::run_scenarios(argc, argv, kScenarios); }
