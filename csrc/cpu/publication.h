// Units that a rank publishes for all others, in the slots of its publication ring.
#pragma once
#include "signal.h"

namespace a2a {

// The publication ring of one rank, read by all: what both halves of an exchange do with it.
class Publication {
 public:
  Publication(Context& c, std::uint8_t* state) : c_(c), taken_(reinterpret_cast<std::uint32_t*>(state)) {
    for (std::uint32_t p = 0; p < c.world; p++)
      taken_[p] = c.word(Geometry::kTaken, p, c.rank).load(std::memory_order_relaxed);
    mine_ = c.published(c.rank).load(std::memory_order_relaxed);
  }
  bool has_space() const {
    if (mutant(kIgnoreReaders)) return true;
    for (std::uint32_t p = 0; p < c_.world; p++)
      if (p != c_.rank && full_for(p)) return false;
    return true;
  }
  // Whether the next slot still holds what `reader` has not taken.
  bool full_for(std::uint32_t reader) const {
    return reached(mine_,
                   c_.word(Geometry::kTaken, c_.rank, reader).load(std::memory_order_acquire) + c_.geo.publish_slots);
  }
  std::uint8_t* slot() { return c_.publication(c_.rank, mine_); }
  void publish() {
    c_.published(c_.rank).store(++mine_,
                                mutant(kRelaxedSignal) ? std::memory_order_relaxed : std::memory_order_seq_cst);
    for (std::uint32_t i = 1; i < c_.world; i++) {
      const std::uint32_t p = (c_.rank + i) % c_.world;
      if (!mutant(kNoPublishBell) && c_.bell(p).sleeping.load(std::memory_order_seq_cst)) wake(c_.bell(p));
    }
  }
  // The next unit of `source`, or null if it is not there yet.
  const std::uint8_t* next(std::uint32_t source) {
    if (reached(taken_[source], c_.published(source).load(std::memory_order_acquire))) return nullptr;
    return c_.publication(source, taken_[source]);
  }
  void take(std::uint32_t source, std::uint32_t units = 1) {
    signal(c_, source, c_.word(Geometry::kTaken, source, c_.rank), taken_[source] += units);
  }

 private:
  Context& c_;
  std::uint32_t* taken_;
  std::uint32_t mine_;
};

}  // namespace a2a
