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
      const std::uint32_t lane = i % 32, *o = out + i * 8;
      expect("shfl", o[0], (lane + 5) % 32 * 3);
      expect("shfl_up", o[1], lane % 8 < 2 ? lane : lane - 2);
      expect("shfl_xor", o[2], lane ^ 16);
      expect("ballot", o[3], 0x49249249);
      expect("match_any", o[4], 0x11111111u << lane % 4);
      expect("reduce_add", o[5], lane % 2 ? 16 * 16 : 15 * 16);
      expect("reduce_max", o[6], lane % 2 ? 31 : 30);
      expect("all", o[7], lane % 2);
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
    // and what must be noticed
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
